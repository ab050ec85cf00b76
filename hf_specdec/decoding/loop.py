"""The loop: a drafter guesses, the target judges, the loop commits."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch

from ..drafters.base import DraftSession, Signals
from ..metrics import SpecStats
from ..scheduling import Governor, Schedule
from ..verification import Draft, LenientRule, Noise, RoundNoise, verify
from .control import Control
from .divergence import DivergenceSums
from .markers import Between
from .outputs import Publisher, Recorder, States
from .processors import BlockProcessors
from .rows import Rows
from .stopping import Stops


class Target(Protocol):
    """The model that generates, for the rows of one call.

    Attributes:
        states: what the last forward gave besides, where the call returns it.
    """

    states: States | None

    def prefill(self) -> tuple[torch.Tensor, Signals | None]:
        """Run the prompts; [B, 1, V] fp32 logits of the next token."""
        ...

    def verify(self, rows: Rows, draft: Draft) -> tuple[torch.Tensor, Signals | None]:
        """Run each row's last token and its draft; [B, n + 1, V] fp32 logits.

        Whatever the forward wrote beyond a row's text is forgotten by the time of the next one.
        """
        ...

    def read_again(self, rows: Rows, first: int, end: int) -> torch.Tensor:
        """Run columns `first` to `end` of all rows, padding after their ends included; [B, end - first, V] logits."""
        ...


@dataclass(frozen=True)
class Call:
    """Everything of one generate call but its rows.

    Args:
        target, session: who judges and who guesses.
        processors, stops: what shapes the scores and what ends the rows.
        max_positions: positions that the target has embeddings for, None where there is no limit.
        rule: the verification rule; the text is the target's under all but the lenient ones.
        kernels: what verifies, "torch" or "triton".
        noise: the call's noise; None decodes greedily.
        governor: draft lengths.
        schedule: cuts drafts before they are verified, None where they are verified as they are.
        publisher, recorder: where tokens and scores go.
        completes: whether rows that end before others go on over their padding, as plain decoding does: it shows in
            what is recorded and in the cache.
        between: where a lenient rule holds, None where it does everywhere.
        control: chooses effort, length and rule of each round, None where they are the call's.
    """

    target: Target
    session: DraftSession
    processors: BlockProcessors
    stops: Stops
    max_positions: int | None
    rule: str | LenientRule
    kernels: str
    noise: Noise | None
    governor: Governor
    schedule: Schedule | None
    publisher: Publisher
    recorder: Recorder
    completes: bool
    between: Between | None = None
    control: Control | None = None


def speculate(call: Call, rows: Rows, stats: SpecStats) -> None:
    """Generate until every row has stopped. The prefill is the verification of an empty draft.

    Args:
        call: the call.
        rows: the prompts; holds the texts afterwards.
        stats: filled in.
    """
    draft, draft_time, rule = Draft.empty(len(rows), rows.ids.device), 0.0, call.rule
    divergence = DivergenceSums()
    started = began = ended = perf_counter()
    logits, signals = call.target.prefill()
    while True:
        raw_logits = call.recorder.keep_logits(logits)
        if call.processors.read_ids and draft.num_slots > 0:
            rows.place_draft(draft.tokens)
        scores = call.processors(logits, rows.processor_widths(), rows.ids)
        noise = RoundNoise(call.noise, rows.positions, stats.num_forwards) if call.noise else None
        slots = call.between.slots(draft) if call.between is not None and draft.num_slots > 0 else None
        verdict = verify(draft, scores, rule, noise, call.kernels, slots)
        judged = [b for b, done in enumerate(rows.finished) if not done]
        starts = rows.lengths
        rows.commit(draft, verdict, call.stops, call.recorder.scores_after(scores, rows))
        divergence.add(verdict, starts, rows.lengths)
        before, ended = ended, perf_counter()
        verify_time = ended - began
        for b in judged:
            stats.rows[b].record(rows.drafted[b], rows.accepted[b], len(rows.emitted[b]))
        stats.num_forwards += 1
        stats.verify_time += verify_time
        call.recorder.record(raw_logits, scores, call.target.states, rows)
        call.publisher.publish(rows)
        if all(rows.finished):
            break
        call.session.observe(signals, verdict)
        if stats.num_forwards > 1:  # the prefill's cost says nothing about a step's
            drafted, accepted = [rows.drafted[b] for b in judged], [rows.accepted[b] for b in judged]
            call.governor.observe(drafted, accepted, draft_time, verify_time)
        if call.control is not None:
            emitted = [len(rows.emitted[b]) for b in judged]
            rule = call.control.next_round(call.session, stats, ended - before, emitted)
        if call.between is not None:
            call.between.read(rows)
        budget = row_budgets(rows, call)
        drafting = perf_counter()
        draft = Draft.empty(len(rows), rows.ids.device)
        if any(budget):
            draft = call.session.propose(budget, stats.num_forwards)
            if call.schedule is not None:
                draft = call.schedule.cut(draft, call.governor)
        began = perf_counter()
        draft_time = began - drafting
        stats.draft_time += draft_time
        logits, signals = call.target.verify(rows, draft)
    if call.completes:
        run_padding(call, rows)
    call.publisher.end()
    divergence.write(stats.rows)
    stats.host_time = perf_counter() - started - stats.draft_time - stats.verify_time


def run_padding(call: Call, rows: Rows) -> None:
    """Run the padding of rows that ended before others."""
    first, end = min(rows.widths) - 1, max(rows.widths) - 1
    if first == end:
        return
    logits = call.target.read_again(rows, first, end)
    if not call.recorder.wanted:  # only the cache is
        return
    raw_logits = logits.clone()
    scores = call.processors(logits, [first + 1] * len(rows), rows.ids)
    call.recorder.record_padding(raw_logits, scores, call.target.states, first, rows)


def row_budgets(rows: Rows, call: Call) -> list[int]:
    """Tokens that each row may draft: the verification itself emits one more before the row's last column."""
    length = 0 if call.processors.stateful else call.governor.next_length()
    if call.control is not None:
        length = min(length, call.control.length)
    budgets = []
    for text, earlier, width, done in zip(rows.texts, rows.earlier, rows.widths, rows.finished, strict=True):
        room = 0 if done else call.stops.max_width - width - 1
        if call.max_positions is not None:
            room = min(room, call.max_positions - earlier - len(text))
        budgets.append(max(0, min(length, room)))
    return budgets
