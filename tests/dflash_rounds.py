"""Generate calls whose DFlash sessions are watched, and whose drafts are made right and wrong by turns."""

from collections.abc import Callable

import torch
from dflash_formats import Net, write_net
from test_greedy import coin, plain, speculative
from tiny import VOCAB_SIZE

from hf_specdec import AutoDrafter
from hf_specdec.config import SpecConfig
from hf_specdec.decoding.rows import Rows
from hf_specdec.decoding.stopping import Stops
from hf_specdec.drafters.base import DraftRequest, Signals
from hf_specdec.drafters.dflash.modeling import DFlash2Model
from hf_specdec.drafters.dflash.session import DFlash2Session, DFlashSession
from hf_specdec.verification import Draft, Verdict


class Watched:
    """A session that keeps what it drafted and from which logits; mixed into one of the package.

    Args:
        drafter, request: of the session.
        rounds: filled with (texts, finished, scores [B, n, V], tokens [B, n]) of each round.
        texts, right: make that many of the drafted tokens of (row, round) right and the next one wrong, behind the
            session's back.
    """

    def __init__(self, drafter, request, rounds: list, texts=None, right: Callable = coin) -> None:
        super().__init__(drafter, request)
        self.rounds, self.to_come, self.right = rounds, texts, right
        self.prompt_lengths = [len(text) for text in request.rows.texts]

    def propose(self, budget, verification):
        self.scores: list[torch.Tensor] = []
        draft = super().propose(budget, verification)
        rows = self.rows
        if not self.scores:
            return draft
        kept = ([list(text) for text in rows.texts], list(rows.finished), torch.cat(self.scores, 1), draft.tokens)
        self.rounds.append(kept)
        if self.to_come is None:
            return draft
        tokens = draft.tokens.clone()
        for row, text in enumerate(rows.texts):
            truth = self.to_come[row][len(text) - self.prompt_lengths[row] :]
            for slot in range(min(int(draft.lengths[row]), len(truth), self.right(row, verification) + 1)):
                wrong = slot == self.right(row, verification)
                tokens[row, slot] = (truth[slot] + wrong) % self.request.vocab_size
        return Draft(tokens, draft.lengths, draft.law)

    def guesses(self, states, logits):
        advance = super().guesses(states, logits)

        def kept(token, slot):
            scores = advance(token, slot)
            self.scores.append(scores.clone())
            return scores

        return kept


class WatchedDFlash(Watched, DFlashSession):
    pass


class WatchedDFlash2(Watched, DFlash2Session):
    pass


def load(folder, net: Net, target, format: str = "z-lab", **options):
    return AutoDrafter.from_pretrained(write_net(folder / format, net, format), target=target, **options)


def watch(drafter, rounds: list, texts=None, right: Callable = coin) -> None:
    kind = WatchedDFlash2 if isinstance(drafter.model, DFlash2Model) else WatchedDFlash
    drafter.start = lambda request: kind(drafter, request, rounds, texts, right)


def rounds_of(drafter, target, inputs, alter: bool = True, right: Callable = coin, **options) -> list:
    """The rounds of a greedy call, drafts made right and wrong by turns, whose text must be the target's."""
    rounds: list = []
    drafter.spec_config = drafter.spec_config.with_options(governor="off")  # it goes by time
    expected = plain(target, inputs, **options)
    watch(drafter, rounds, expected[:, inputs["input_ids"].shape[1] :].tolist() if alter else None, right)
    assert torch.equal(speculative(target, inputs, drafter, **options), expected)
    return rounds


def request_of(rows, target, max_columns: int) -> DraftRequest:
    """A greedy call without processors."""
    return DraftRequest(
        rows=rows,
        attention_mask=None,
        embedding=target.get_input_embeddings(),
        head=target.get_output_embeddings(),
        process=lambda scores, slot: scores,
        processors_read_ids=False,
        config=SpecConfig(rule="match", draft_sampling="greedy"),
        vocab_size=VOCAB_SIZE,
        noise=None,
        max_columns=max_columns,
    )


def block_after(drafter, target, text: list[int], states: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """([n, H] states, [n, V] logits) of the rows that guess after a text.

    Args:
        states: index -> [len(text) - 1, H] hidden states of the target, as if it had given them.
    """
    rows, request_columns = Rows(torch.tensor([text[:-1]]), None, 0), len(text) + 64
    session = drafter.start(request_of(rows, target, request_columns))
    verdict = Verdict(torch.tensor([0]), torch.tensor([text[-1:]]))
    rows.commit(Draft.empty(1, rows.ids.device), verdict, Stops(request_columns, eos_token_ids=[]))
    session.observe(Signals({i: one[None] for i, one in states.items()}), verdict)
    with torch.no_grad():
        guessing = session.run_block()
        logits = drafter.scatter(drafter.logits(guessing, session.request), session.request)
    return guessing[0], logits[0]
