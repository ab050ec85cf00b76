"""Watching what a drafter drafts and from which logits, whatever its method."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from test_greedy import coin, plain, speculative
from tiny import prompts

from hf_specdec.drafters import DraftSession


class Watched(DraftSession):
    """A session behind a window.

    Args:
        drafter, request: of the session.
        rounds: filled with (texts, finished, scores [B, n, V], tokens [B, n]) of each round.
        texts, right: make that many of the drafted tokens of (row, round) right and the next one wrong, behind the
            session's back.
    """

    def __init__(self, drafter, request, rounds: list, texts=None, right: Callable = coin) -> None:
        process = request.process

        def watched(scores: torch.Tensor, slot: int) -> torch.Tensor:
            self.scores.append(scores.clone())
            return process(scores, slot)

        self.inner = type(drafter).start(drafter, replace(request, process=watched))
        self.rows, self.vocab_size = request.rows, request.vocab_size
        self.rounds, self.to_come, self.right = rounds, texts, right
        self.prompt_lengths = [len(text) for text in request.rows.texts]

    def observe(self, signals, verdict):
        self.inner.observe(signals, verdict)

    def propose(self, budget, verification):
        self.scores: list[torch.Tensor] = []
        draft = self.inner.propose(budget, verification)
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
                tokens[row, slot] = (truth[slot] + wrong) % self.vocab_size
        return replace(draft, tokens=tokens)


def watch(drafter, rounds: list, texts=None, right: Callable = coin) -> None:
    """Start watched sessions from now on."""
    drafter.start = lambda request: Watched(drafter, request, rounds, texts, right)


def rounds_of(drafter, target, inputs, alter: bool = True, right: Callable = coin, **options) -> list:
    """The rounds of a greedy call, drafts made right and wrong by turns, whose text must be the target's."""
    rounds: list = []
    drafter.spec_config = drafter.spec_config.with_options(governor="off")  # it goes by time
    expected = plain(target, inputs, **options)
    texts = expected[:, inputs["input_ids"].shape[1] :].tolist() if alter else None
    watch(drafter, rounds, texts, right)
    try:
        assert torch.equal(speculative(target, inputs, drafter, **options), expected)
    finally:
        del drafter.start
    return rounds


def largest_error(rounds: list, reference: Callable, at_least: int = 5) -> float:
    """Over all finite logits of all unfinished rows; reduced vocabularies must agree about the others."""
    worst, rows_seen = 0.0, 0
    for texts, finished, scores, tokens in rounds:
        for row, text in enumerate(texts):
            drafted = [token for token in tokens[row].tolist() if token >= 0]
            if finished[row] or not drafted:
                continue
            found, expected = scores[row, : len(drafted)].double(), reference(text, drafted)
            assert torch.equal(found.isneginf(), expected.isneginf())
            worst = max(worst, float((found - expected).masked_fill(found.isneginf(), 0.0).abs().max()))
            rows_seen += 1
            assert drafted == found.argmax(dim=-1).tolist()
    assert rows_seen >= at_least
    return worst


def keep_what_was_drafted(monkeypatch, session: type) -> None:
    """For negative controls: sessions take the last column that they have drafted from for one of the text."""
    observe = session.observe

    def keeping(self, signals, verdict):
        observe(self, signals, verdict)
        self.features.taken = [w - 2 if t else t for w, t in zip(self.rows.widths, self.features.taken, strict=True)]

    monkeypatch.setattr(session, "observe", keeping)


def mismatch_warnings(drafter, target, right: int, new_tokens: int) -> list[str]:
    """Those of a call in which that many tokens of every draft are right."""
    inputs = prompts([6, 4])
    texts = plain(target, inputs, max_new_tokens=new_tokens, eos_token_id=None)[:, 6:].tolist()
    watch(drafter, [], texts, lambda row, round: right)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        speculative(target, inputs, drafter, max_new_tokens=new_tokens, eos_token_id=None)
    return [str(w.message) for w in caught if "mismatched" in str(w.message)]
