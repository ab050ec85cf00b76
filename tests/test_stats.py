"""Statistics equal a count by hand on scripted drafters."""

import json

import pytest
import torch
from scripted import ScriptedDrafter
from tiny import prompts, tiny_target

from hf_specdec import AutoDrafter, SpecStats
from hf_specdec.metrics import RowStats

PLAIN = {"do_sample": False, "eos_token_id": None}


def scripted_run(lengths, new_tokens, k, right, **options):
    """(stats, drafter) of a run in which row b's round r drafts right(b, r) tokens rightly."""
    model, inputs = tiny_target("llama"), prompts(lengths)
    width = max(lengths)
    texts = model.generate(**inputs, **PLAIN, max_new_tokens=new_tokens)[:, width:].tolist()
    drafter = ScriptedDrafter(texts, right=right, num_draft_tokens=k).bind(model)
    model.generate(**inputs, **{**PLAIN, **options}, max_new_tokens=new_tokens, assistant_model=drafter)
    return drafter.last_stats, drafter


def test_counts_of_one_row():
    # 12 tokens, 3 drafted a round: prefill 1, then 2 + 1, 0 + 1, 3 + 1 -> 9 so far, 2 left to draft (12 - 9 - 1),
    # both right and one more: 12.
    stats, drafter = scripted_run([5], 12, 3, lambda row, round: {1: 2, 2: 0, 3: 3}.get(round, 9))
    assert drafter.budgets == [[3], [3], [3], [2]]
    assert stats.num_verifications == stats.num_forwards == 5
    assert stats.num_emitted == 12
    assert stats.num_drafted == 3 + 3 + 3 + 2
    assert stats.num_accepted == 2 + 0 + 3 + 2
    assert stats.accepted_per_position == [3, 3, 1]
    assert stats.num_plain_steps == 1  # the prefill
    assert stats.acceptance_rate == 7 / 11
    assert stats.mean_accepted_length == 12 / 5


def test_counts_of_each_row_of_a_batch():
    # Row 0: all right, 4 a round: prefill 1, 5, 5 -> 11 of 12: no draft fits, 1 plain step.
    # Row 1: all wrong: prefill 1, then 1 a round; drafts of 4 while 12 - emitted - 1 allows, then 3, 2, 1, 0.
    stats, _ = scripted_run([6, 3], 12, 4, lambda row, round: 9 if row == 0 else 0)
    first, second = stats.rows
    assert (first.num_verifications, first.num_emitted, first.num_drafted, first.num_accepted) == (4, 12, 8, 8)
    assert first.accepted_per_position == [2, 2, 2, 2]
    assert first.num_plain_steps == 2
    assert (second.num_verifications, second.num_emitted, second.num_accepted) == (12, 12, 0)
    assert second.num_drafted == 4 * 7 + 3 + 2 + 1
    assert second.num_plain_steps == 2
    assert second.accepted_per_position == []
    assert stats.num_forwards == 12  # the slowest row
    assert stats.num_verifications == 16
    assert stats.num_emitted == 24


def test_what_is_drafted_past_a_stop_is_not_counted():
    model, inputs = tiny_target("llama"), prompts([5])
    text = model.generate(**inputs, **PLAIN, max_new_tokens=12)[0, 5:].tolist()
    stop = text[3]
    assert stop not in text[:3]
    drafter = ScriptedDrafter([text], num_draft_tokens=8).bind(model)
    model.generate(**inputs, do_sample=False, eos_token_id=stop, max_new_tokens=12, assistant_model=drafter)
    stats = drafter.last_stats
    # The prefill emits token 0, the block tokens 1, 2 and 3, the stop: three of the eight drafted ones.
    assert (stats.num_emitted, stats.num_drafted, stats.num_accepted) == (4, 3, 3)
    assert stats.accepted_per_position == [1, 1, 1]


def test_num_assistant_tokens_is_honoured_and_wins():
    model, inputs = tiny_target("llama"), prompts([5])
    text = model.generate(**inputs, **PLAIN, max_new_tokens=40)[0, 5:].tolist()
    for k in (0, 1, 2, 6):
        drafter = ScriptedDrafter([text], num_draft_tokens=3).bind(model)
        model.generate(**inputs, **PLAIN, max_new_tokens=40, num_assistant_tokens=k, assistant_model=drafter)
        assert max((max(budget) for budget in drafter.budgets), default=0) == k
        assert drafter.last_stats.num_forwards == 1 + -(-39 // (k + 1))


def test_statistics_are_on_the_output_and_on_the_drafter():
    model, inputs = tiny_target("llama"), prompts([5])
    drafter = AutoDrafter.for_target(model, "lookup")
    output = model.generate(**inputs, do_sample=False, assistant_model=drafter, return_dict_in_generate=True)
    assert output.specdec is drafter.last_stats
    assert output.specdec.lossless and output.specdec.rule == "match" and output.specdec.kernels == "torch"
    assert output.specdec.num_emitted == output.sequences.shape[1] - 5
    assert "specdec" not in output.keys()  # noqa: SIM118 - a ModelOutput iterates over its keys' values


def test_times_add_up_to_the_call():
    import time

    model, inputs = tiny_target("llama"), prompts([5])
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    model.generate(**inputs, **PLAIN, max_new_tokens=4, assistant_model=drafter)
    began = time.perf_counter()
    model.generate(**inputs, **PLAIN, max_new_tokens=60, assistant_model=drafter)
    wall = time.perf_counter() - began
    stats = drafter.last_stats
    spent = stats.draft_time + stats.verify_time + stats.host_time
    assert min(stats.draft_time, stats.verify_time, stats.host_time) > 0
    assert 0.5 * wall < spent <= wall


def test_calls_add_up():
    row = RowStats(4, 8, 5, 9, 1, [3, 2])
    one = SpecStats(rows=[row], verify_time=1.0, num_forwards=4, rule="match", kernels="torch", seed=1)
    other = SpecStats(rows=[RowStats(1, 2, 2, 3, 0, [1, 1]), row], draft_time=0.5, num_forwards=5, rule="coupled")
    total = one + other
    assert total.rows[0] == RowStats(5, 10, 7, 12, 1, [4, 3])
    assert total.rows[1] == row
    assert (total.num_emitted, total.num_forwards, total.verify_time, total.draft_time) == (21, 9, 1.0, 0.5)
    assert total.rule == "match + coupled" and total.seed is None
    assert sum([one, other]) == total
    assert one.rows[0] == row and row.accepted_per_position == [3, 2]  # the summands are left alone
    assert (one + SpecStats(lossless=False)).lossless is False


def test_dictionary_and_summary_hold_the_numbers():
    stats, _ = scripted_run([5], 12, 3, lambda row, round: 2)
    numbers = json.loads(json.dumps(stats.to_dict()))
    assert numbers["num_emitted"] == 12 and numbers["rows"][0]["num_emitted"] == 12
    assert numbers["mean_accepted_length"] == pytest.approx(stats.mean_accepted_length)
    assert f"tau {stats.mean_accepted_length:.2f}" in stats.summary() and "lossless" in stats.summary()


def test_an_empty_statistic_divides_by_nothing():
    assert SpecStats().acceptance_rate == SpecStats().mean_accepted_length == 0.0
    assert torch.isfinite(torch.tensor(SpecStats().to_dict()["mean_accepted_length"]))
