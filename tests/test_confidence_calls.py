"""Lengths by confidence in a call: only the tokens that are kept are verified, and the text keeps its law."""

import pytest
import torch
from dspark_formats import random_drafter, write_drafter
from dspark_reference import Reference
from test_greedy import plain, speculative
from test_sampling import VOCAB, chi_square, joint_law, many_texts, sample
from tiny import prompts, tiny_target
from tiny_hybrids import tiny_own

from hf_specdec import AutoDrafter
from hf_specdec.scheduling import Schedule


def load(tmp_path, target, drafter=None, **options):
    folder = write_drafter(tmp_path / "drafter", drafter or random_drafter(seed=3))
    return AutoDrafter.from_pretrained(folder, target=target, **options)


SCHEDULES = [0.0, 0.4, 0.9, "confidence", "lagged"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lengths", [[11], [11, 4, 7]], ids=["one row", "batch"])
def test_dropped_tokens_are_not_verified(tmp_path, schedule, lengths):
    target, inputs, rows, drafts = tiny_target("llama"), prompts(lengths), [], []
    drafter = load(tmp_path, target, schedule=schedule)
    cut = Schedule.cut

    def watched(self, draft, costs):
        drafts.append((draft, cut(self, draft, costs)))
        return drafts[-1][1]

    expected = plain(target, inputs, max_new_tokens=30, eos_token_id=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "cut", watched)
        speculative(target, inputs, drafter, max_new_tokens=30, eos_token_id=None)
        drafts.clear()
        hook = target.model.layers[0].register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
        found = speculative(target, inputs, drafter, max_new_tokens=30, eos_token_id=None)
        hook.remove()
    assert torch.equal(found, expected)
    verified = [int(after.lengths.max()) + 1 for _, after in drafts]
    last = [1] * (len(rows) - 1 - len(verified))  # with one column left nothing is drafted
    assert rows[1:] == verified + last
    assert drafter.last_stats.num_drafted <= sum(int(after.lengths.sum()) for _, after in drafts)
    if schedule in (0.4, 0.9):
        assert sum(verified) < sum(before.num_slots + 1 for before, _ in drafts)
        for before, after in drafts:
            sure = (before.confidence >= schedule).long().cumprod(dim=1).sum(dim=1)
            assert torch.equal(after.lengths, torch.minimum(sure, before.lengths))


@pytest.mark.parametrize("options", [{}, {"kind": "rnn"}, {"confidence_reads_markov": False}, {"rank": 0}], ids=str)
def test_confidence_is_the_formulas_and_reads_the_token_before(tmp_path, options):
    if options.get("rank") == 0:
        options = {"rank": 0, "confidence_reads_markov": False}
    target, one, drafts = tiny_target("llama"), random_drafter(seed=3, **options), []
    drafter, reference = load(tmp_path, target, one, schedule=0.0), Reference(one, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "cut", lambda self, draft, costs: drafts.append((list(text), draft)) or draft)
        start = drafter.start
        text: list[int] = []

        def watched(request):
            nonlocal text
            text = request.rows.texts[0]
            return start(request)

        drafter.start = watched
        speculative(target, prompts([9]), drafter, max_new_tokens=16, eos_token_id=None)
    for before, draft in drafts:
        tokens = [token for token in draft.tokens[0].tolist() if token >= 0]
        logits = reference.confidences(before, tokens)
        found = draft.confidence[0, : len(tokens)].double()
        torch.testing.assert_close(found, torch.sigmoid(logits), atol=1e-5, rtol=0)
    assert len(drafts) > 3


def test_calibrated_confidence_is_divided_by_its_slots_temperature(tmp_path):
    target, found = tiny_target("llama"), []
    temperatures = [1.0, 2.0, 0.5, 3.0, 1.5]
    for name, config in (("raw", {}), ("calibrated", {"confidence_temperatures": temperatures})):
        folder = write_drafter(tmp_path / name, random_drafter(seed=3), **config)
        drafter = AutoDrafter.from_pretrained(folder, target=target, schedule=0.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Schedule, "cut", lambda self, draft, costs: found.append(draft.confidence) or draft)
            speculative(target, prompts([9]), drafter, max_new_tokens=7, eos_token_id=None)
    raw, calibrated = found[0], found[len(found) // 2]
    torch.testing.assert_close(calibrated, torch.sigmoid(torch.logit(raw) / torch.tensor(temperatures)))


# The law

RULES = ["coupled", "rejection", "block"]


@pytest.mark.parametrize("schedule", [0.55, "confidence", "lagged"])
@pytest.mark.parametrize("rule", RULES)
def test_sampled_text_has_the_targets_law(tmp_path, rule, schedule):
    target, inputs = tiny_target("llama", vocab_size=VOCAB), prompts([4], vocab_size=VOCAB)
    law = joint_law(target, inputs)
    torch.manual_seed(20)
    drafter = load(tmp_path, target, random_drafter(vocab_size=VOCAB), rule=rule, num_draft_tokens=2, schedule=schedule)
    assert chi_square(many_texts(drafter, target), law) > 1e-3


class Peeking(Schedule):
    """Verifies everything if the first token is 0 and nothing otherwise."""

    def cut(self, draft, costs):
        kept = draft.tokens[:, 0] == 0
        return draft.cut(draft.lengths * kept, draft.num_slots)


@pytest.mark.parametrize("rule", RULES)
def test_a_schedule_that_peeks_at_the_token_is_harmless_under_coupled_only(tmp_path, rule, monkeypatch):
    """Negative control under rejection and block."""
    target, inputs = tiny_target("llama", vocab_size=VOCAB), prompts([4], vocab_size=VOCAB)
    law = joint_law(target, inputs)
    monkeypatch.setattr("hf_specdec.integration.options.Schedule", Peeking)
    torch.manual_seed(20)
    drafter = load(tmp_path, target, random_drafter(vocab_size=VOCAB), rule=rule, num_draft_tokens=2, schedule=0.5)
    p_value = chi_square(many_texts(drafter, target), law)
    assert p_value > 1e-3 if rule == "coupled" else p_value < 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_seed_gives_one_text_with_any_schedule(tmp_path, schedule):
    target, inputs = tiny_target("llama"), prompts([9, 4])
    expected = sample(target, inputs, AutoDrafter.for_target(target, "none", seed=11), top_k=0)
    drafter = load(tmp_path, target, seed=11, schedule=schedule)
    assert torch.equal(sample(target, inputs, drafter, top_k=0), expected)


def test_a_drafter_without_confidence_takes_no_schedule(tmp_path):
    target, inputs = tiny_target("llama"), prompts([5])
    drafters = (
        AutoDrafter.for_target(target, "lookup", schedule="confidence"),
        load(tmp_path, target, random_drafter(confidence=False), schedule=0.5),
    )
    for drafter in drafters:
        with pytest.raises(ValueError, match=f"`schedule` is .* this '{drafter.method}' drafter gives no confidence"):
            speculative(target, inputs, drafter)


def test_rows_that_are_run_one_by_one_have_schedules_of_their_own(tmp_path, monkeypatch):
    target, made = tiny_own("qwen3_next"), []
    monkeypatch.setattr("hf_specdec.integration.options.Schedule", lambda kind: made.append(Schedule(kind)) or made[-1])
    folder = write_drafter(tmp_path, random_drafter(target_layers=4))
    drafter = AutoDrafter.from_pretrained(folder, target=target, schedule="confidence")
    inputs = prompts([9, 6])
    assert torch.equal(speculative(target, inputs, drafter), plain(target, inputs))
    assert len(made) == 2 and len(set(map(id, made))) == 2
