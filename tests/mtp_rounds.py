"""Watching what MTP layers draft in a call."""

from collections.abc import Callable

import torch
from test_greedy import coin, plain, speculative

from hf_specdec.drafters.mtp.session import MtpSession
from hf_specdec.verification import Draft


class WatchedSession(MtpSession):
    """Keeps what it drafted and from which logits.

    Args:
        drafter, request: of the session.
        rounds: filled with (texts, finished, scores [B, n, V], tokens [B, n]) of each round.
        texts, right: continuation of each prompt; that many of the drafted tokens of (row, round) are made right and
            the next one wrong, behind the session's back.
    """

    def __init__(self, drafter, request, rounds: list, texts=None, right: Callable = coin) -> None:
        super().__init__(drafter, request)
        self.rounds, self.right = rounds, right
        self.to_come = None if texts is None else [texts[tuple(text)] for text in request.rows.texts]
        self.prompt_lengths = [len(text) for text in request.rows.texts]

    def propose(self, budget, verification):
        self.scores: list[torch.Tensor] = []
        draft = super().propose(budget, verification)
        rows = self.rows
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

    def _scores(self, index, normed):
        scores = super()._scores(index, normed)
        self.scores.append(scores.clone())
        return scores


def continuations(inputs, sequences: torch.Tensor) -> dict[tuple[int, ...], list[int]]:
    """What follows each prompt of a left-padded batch."""
    width = inputs["input_ids"].shape[1]
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), sequences[:, width:], strict=True)
    return {tuple(ids[mask].tolist()): text.tolist() for ids, mask, text in rows}


def rounds_of(drafter, target, inputs, right: Callable = coin, session=WatchedSession, **options) -> list:
    """The rounds of a greedy call, drafts made right and wrong by turns, whose text must be the target's."""
    rounds: list = []
    expected = plain(target, inputs, **options)
    texts = continuations(inputs, expected)
    drafter.start = lambda request: session(drafter, request, rounds, texts, right)
    assert torch.equal(speculative(target, inputs, drafter, **options), expected)
    return rounds
