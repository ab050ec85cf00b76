"""Thousands of rounds of a session alone: its cache holds what the text calls for, and nothing else grows."""

import random

import eagle3_formats
import peagle_formats
import pytest
import torch
from dflash_formats import random_net, write_net
from dflash_rounds import request_of
from dspark_formats import random_drafter, write_drafter
from eagle3_formats import random_head
from tiny import VOCAB_SIZE, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.decoding.rows import Rows
from hf_specdec.decoding.stopping import Stops
from hf_specdec.drafters.base import Signals
from hf_specdec.drafters.common.block_drafter import BlockDrafter
from hf_specdec.drafters.common.features import TargetFeatures
from hf_specdec.drafters.common.rotary import rotate
from hf_specdec.verification import Draft, OneHot, Verdict

WIDTH, PADDING, MOST = 9, (0, 3), 4
ONE = dict(windows=(8,), causal=(True,))
DRAFTERS = {
    "DFlash": lambda folder: write_net(folder, random_net(3, num_layers=1, **ONE)),
    "DFlash 2": lambda folder: write_net(folder, random_net(3, num_layers=1, num_candidates=6, **ONE)),
    "DSpark": lambda folder: write_drafter(folder, random_drafter(3, **ONE)),
    "DSpark, rnn": lambda folder: write_drafter(folder, random_drafter(3, kind="rnn", first_slot=1), "speculators"),
    "EAGLE-3": lambda folder: eagle3_formats.write_head(folder, random_head(3, windows=(8,)), "speculators, new"),
    "P-EAGLE": lambda folder: peagle_formats.write_head(folder, random_head(3, windows=(8,), mask_token_id=0)),
}


def soak(folder, kind: str, sessions: int, steps: int) -> None:
    target, generator, chance = tiny_target("llama"), torch.Generator().manual_seed(0), random.Random(0)
    drafter = AutoDrafter.from_pretrained(DRAFTERS[kind](folder), target=target)
    max_columns = WIDTH + steps * (MOST + 1)
    for _ in range(sessions):
        mask = torch.stack([(torch.arange(WIDTH) >= padding).long() for padding in PADDING])
        rows = Rows(torch.randint(5, VOCAB_SIZE, (2, WIDTH), generator=generator), mask, 0)
        stops = Stops(max_columns, eos_token_ids=[])
        session = drafter.start(request_of(rows, target, max_columns))
        states = torch.randn(2, max_columns, 64, generator=generator)  # what the target would have in each column
        no_draft = Draft.empty(2, rows.ids.device)
        emit(rows, session, no_draft, [0, 0], states, first=WIDTH, stops=stops, chance=chance)
        with torch.no_grad():
            for step in range(steps):
                budget = [chance.randint(0, MOST) for _ in PADDING]
                draft = session.propose(budget, step)
                assert draft.lengths.tolist() == budget
                if max(budget):
                    assert session.cache.view == max(rows.widths) - 1 + rows_behind(drafter, max(budget))
                accepted = [chance.randint(0, count) for count in budget]
                emit(rows, session, draft, accepted, states, first=0, stops=stops, chance=chance)
            session.propose([1, 1], steps)
        assert len(session.slots) <= session.cache.capacity <= max_columns + 5
        assert session.features.values.shape[1] <= 2 * max_columns + 256
        assert_holds_text(session, rows, states)
        session.close()


def rows_behind(drafter, count: int) -> int:
    """Slots of the cache behind the text's own, for that many drafts: a block, or each draft but the last."""
    return drafter.model.config.block_size if isinstance(drafter, BlockDrafter) else count - 1


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


def assert_holds_text(session, rows, states) -> None:
    """The first layer's cached keys of every column of the text, against the formulas."""
    layer, model = session.model.layers[0], session.model
    for row, padding in enumerate(PADDING):
        columns = torch.arange(padding, rows.widths[row] - 1)
        entries = model.fuse([states[row : row + 1, columns]] * len(session.config.aux_layers))
        if not hasattr(model, "hidden_norm"):  # EAGLE-3 reads the next token beside the states
            embedded = session.embedding(rows.ids[row : row + 1, columns + 1])
            entries = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(entries)], dim=-1)
        keys = layer.self_attn.k_proj(entries).view(1, len(columns), 2, 16)
        keys = layer.self_attn.k_norm(keys) if hasattr(layer.self_attn, "k_norm") else keys
        cos, sin = model.rotary(entries, columns[None] - padding)
        expected = rotate(keys.transpose(1, 2), cos[:, None], sin[:, None])[0]
        torch.testing.assert_close(session.cache.layers[0].keys[row][:, columns], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_hundreds_of_rounds_leave_the_text_in_the_cache(tmp_path, kind):
    soak(tmp_path, kind, sessions=1, steps=200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
def test_20_000_rounds_leave_the_text_in_the_cache(tmp_path, kind):
    soak(tmp_path, kind, sessions=10, steps=2000)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_context_that_is_off_by_one_would_show(tmp_path, monkeypatch, kind):
    """Negative control: the features of a row are taken one column late."""
    add = TargetFeatures.add
    monkeypatch.setattr(TargetFeatures, "add", lambda self, features: add(self, features.roll(1, dims=1)))
    with pytest.raises(AssertionError, match="not close"):
        soak(tmp_path, kind, sessions=1, steps=20)
