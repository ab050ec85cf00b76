"""Thousands of rounds of a session alone: its cache holds the context of the text, and nothing else grows."""

import random

import pytest
import torch
from dflash_formats import random_net
from dflash_rounds import load, request_of
from tiny import VOCAB_SIZE, tiny_target

from hf_specdec.decoding.rows import Rows
from hf_specdec.decoding.stopping import Stops
from hf_specdec.drafters.base import Signals
from hf_specdec.drafters.common.rotary import rotate
from hf_specdec.verification import Draft, OneHot, Verdict

WIDTH, PADDING, BLOCK = 9, (0, 3), 5


def soak(folder, sessions: int, steps: int, num_candidates: int) -> None:
    target, generator = tiny_target("llama"), torch.Generator().manual_seed(0)
    net = random_net(3, num_layers=1, windows=(8,), causal=(True,), num_candidates=num_candidates)
    drafter, chance = load(folder, net, target), random.Random(0)
    for _ in range(sessions):
        max_columns = WIDTH + steps * BLOCK
        mask = torch.stack([(torch.arange(WIDTH) >= padding).long() for padding in PADDING])
        rows = Rows(torch.randint(5, VOCAB_SIZE, (2, WIDTH), generator=generator), mask, 0)
        stops = Stops(max_columns, eos_token_ids=[])
        session = drafter.start(request_of(rows, target, max_columns))
        states = torch.randn(2, max_columns, 64, generator=generator)  # what the target would have in each column
        no_draft = Draft.empty(2, rows.ids.device)
        emit(rows, session, no_draft, [0, 0], states, first=WIDTH, stops=stops, chance=chance)
        with torch.no_grad():
            for step in range(steps):
                budget = [chance.randint(0, BLOCK - 1) for _ in PADDING]
                draft = session.propose(budget, step)
                assert draft.lengths.tolist() == budget
                if max(budget):
                    assert session.cache.view == max(rows.widths) - 1 + BLOCK
                accepted = [chance.randint(0, count) for count in budget]
                emit(rows, session, draft, accepted, states, first=0, stops=stops, chance=chance)
            session.propose([1, 1], steps)
        assert session.cache.capacity <= max_columns + BLOCK
        assert_holds_context(session, rows, states)
        session.close()


def emit(rows, session, draft, accepted, states, first, stops, chance) -> None:
    """Commit a verification that accepts that many, and show the session the target's states of its rows."""
    num_rows = first or draft.num_slots + 1
    starts = [0 if first else width - 1 for width in rows.widths]
    tokens = torch.full((2, draft.num_slots + 1), -1)
    for row, count in enumerate(accepted):
        tokens[row, :count] = draft.tokens[row, :count]
        tokens[row, count] = chance.randrange(5, VOCAB_SIZE)
    verdict = Verdict(torch.tensor(accepted), tokens)
    rows.commit(Draft(draft.tokens, draft.lengths, OneHot()), verdict, stops)
    seen = torch.stack([states[row, start : start + num_rows] for row, start in enumerate(starts)])
    for row, count in enumerate(accepted):  # rejected rows hold something else
        seen[row, (first or count + 1) :] = torch.nan
    session.observe(Signals(dict.fromkeys(session.config.aux_layers, seen)), verdict)


def assert_holds_context(session, rows, states) -> None:
    """The cached keys of every column of the text, against the formulas."""
    attention = session.model.layers[0].self_attn
    for row, padding in enumerate(PADDING):
        columns = torch.arange(padding, rows.widths[row] - 1)
        context = session.model.fuse([states[row : row + 1, columns]] * len(session.config.aux_layers))
        keys = attention.k_norm(attention.k_proj(context).view(1, len(columns), 2, 16)).transpose(1, 2)
        cos, sin = session.model.rotary(context, columns[None] - padding)
        expected = rotate(keys, cos[:, None], sin[:, None])[0]
        torch.testing.assert_close(session.cache.layers[0].keys[row][:, columns], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_candidates", [0, 6], ids=["DFlash", "DFlash 2"])
def test_hundreds_of_rounds_leave_the_context_of_the_text(tmp_path, num_candidates):
    soak(tmp_path, sessions=1, steps=300, num_candidates=num_candidates)


@pytest.mark.slow
@pytest.mark.parametrize("num_candidates", [0, 6], ids=["DFlash", "DFlash 2"])
def test_thousands_of_rounds_leave_the_context_of_the_text(tmp_path, num_candidates):
    soak(tmp_path, sessions=10, steps=2000, num_candidates=num_candidates)


def test_a_context_that_is_off_by_one_would_show(tmp_path, monkeypatch):
    """Negative control: the features of a row are taken one column late."""
    from hf_specdec.drafters.common.features import TargetFeatures

    add = TargetFeatures.add
    monkeypatch.setattr(TargetFeatures, "add", lambda self, features: add(self, features.roll(1, dims=1)))
    with pytest.raises(AssertionError):
        soak(tmp_path, sessions=1, steps=20, num_candidates=0)
