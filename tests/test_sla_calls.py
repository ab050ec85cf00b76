"""An SLA controller in a call: what it chooses is what runs, the text is what it would be without, and all is counted.

The loop's clock is scripted: all rounds take as long, so that a token takes the longer the fewer a round emits.
"""

import json
import math

import pytest
import torch
from diffusion_rounds import load as load_diffusion
from scripted import RandomDrafter, RowScript
from test_bad_input import no_forward, refusal  # noqa: F401 - a fixture
from test_governor import clock  # noqa: F401 - a fixture
from test_greedy import coin, plain, speculative
from test_sampling import VOCAB, chi_square, joint_law, many_texts, sample
from tiny import perturbed, prompts, tiny_target
from tiny_hybrids import tiny_own

from hf_specdec import AutoDrafter, SLAController, SpecStats
from hf_specdec.decoding.control import Control
from hf_specdec.decoding.rows import Rows
from hf_specdec.drafters.diffusion import session as diffusion_session
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.draft_model.session import DraftModelSession
from hf_specdec.integration.candidates import DrafterCandidates
from hf_specdec.scheduling import sla

SECONDS = 3.0  # of a round: drafting, verification, and what is between


@pytest.fixture(autouse=True)
def windows_of_one_round(monkeypatch):
    monkeypatch.setattr(sla, "_WINDOW", 1)


def lengths_only(limit=1200.0):
    """Moves on where a round emits less than three tokens."""
    return SLAController({(1, 1.0, 4): 600.0, (1, 1.0, 2): 1000.0, (1, 1.0, 0): 1100.0}, max_tpot_ms=limit)


def efforts():
    return SLAController({(1, 1.0, 3): 500.0, (2, 1.0, 3): 600.0, (3, 1.0, 2): 700.0}, max_tpot_ms=1200.0)


def lenient(limit=1200.0):
    settings = {(1, 1.0, 4): 700.0, (1, 0.6, 4): 600.0, (1, 0.2, 4): 500.0}
    return SLAController(settings, max_tpot_ms=limit, allow_lenience=True)


def near_copy(model, **options):
    return DraftModelDrafter(perturbed(model, 0.05), seed=7, **options).bind(model)


def assert_counted(stats, at_least=2):
    assert len(stats.settings) >= at_least
    assert sum(stats.settings.values()) == stats.num_forwards - 1


# The text


@pytest.mark.parametrize("lengths", [[9], [9, 4, 6]], ids=["one row", "batch"])
def test_one_seed_gives_the_text_without_a_controller(lengths, clock):  # noqa: F811
    model, inputs = tiny_target("llama"), prompts(lengths)
    expected = sample(model, inputs, AutoDrafter.for_target(model, "none", seed=7), top_k=0)
    drafter = near_copy(model, controller=lengths_only())
    assert torch.equal(sample(model, inputs, drafter, top_k=0), expected)
    stats = drafter.last_stats
    assert (stats.rule, stats.lossless, stats.bound) == ("coupled", True, "")
    assert_counted(stats)


def test_greedy_text_is_plain_generates(clock):  # noqa: F811
    model, inputs = tiny_target("llama"), prompts([9, 4])
    expected = plain(model, inputs, max_new_tokens=60, eos_token_id=None)
    drafter = RowScript(expected[:, 9:].tolist(), right=coin, controller=lengths_only()).bind(model)
    assert torch.equal(speculative(model, inputs, drafter, max_new_tokens=60, eos_token_id=None), expected)
    assert drafter.last_stats.rule == "match" and drafter.last_stats.lossless
    assert_counted(drafter.last_stats)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_sampled_text_has_the_targets_law(rule, clock):  # noqa: F811
    """Rounds of 2048 rows; the round after the first draft runs with another length for each way the first went."""
    model = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(model, prompts([4], vocab_size=VOCAB))
    torch.manual_seed(20)
    settings = {(1, 1.0, 2): 500.0, (1, 1.0, 1): 600.0}
    ours = SLAController(settings, max_tpot_ms=1000.0)
    drafter = RandomDrafter(VOCAB, seed=1, rule=rule, controller=ours).bind(model)
    assert chi_square(many_texts(drafter, model), law) > 1e-3
    assert_counted(drafter.last_stats, 1)


def test_efforts_of_a_diffusion_drafter_change_and_the_text_does_not(tmp_path, monkeypatch, clock):  # noqa: F811
    model, inputs, passes = tiny_target("llama"), prompts([9]), []
    expected = sample(model, inputs, AutoDrafter.for_target(model, "none", seed=7), top_k=0)
    drafter = load_diffusion(tmp_path, "a2d Qwen3, mdlm", model, seed=7, controller=efforts())
    reveal = diffusion_session.reveal
    monkeypatch.setattr(diffusion_session, "reveal", lambda *a: passes.append(a[2]) or reveal(*a))
    assert torch.equal(sample(model, inputs, drafter, top_k=0), expected)
    assert_counted(drafter.last_stats)
    counts = {int(key.split()[1].rstrip(",")): count for key, count in drafter.last_stats.settings.items()}
    found = {effort: passes.count(effort) for effort in counts}
    assert sum(abs(found[effort] - counts[effort]) for effort in counts) <= 1  # the last round has no room for a draft
    assert set(passes) == set(counts)


def test_rows_that_run_one_by_one_share_the_controller(clock):  # noqa: F811
    model, inputs = tiny_own("qwen3_next"), prompts([9, 6])
    expected = plain(model, inputs)
    drafter = RowScript(expected[:, 9:].tolist(), right=coin, controller=lengths_only()).bind(model)
    assert torch.equal(speculative(model, inputs, drafter), expected)
    stats = drafter.last_stats
    assert stats.cache == "own" and sum(stats.settings.values()) == stats.num_forwards - 2  # a prefill a row


# What runs


def test_drafts_have_the_length_of_the_setting(clock):  # noqa: F811
    model, inputs = tiny_target("llama"), prompts([9])
    texts = plain(model, inputs, max_new_tokens=60, eos_token_id=None)[:, 9:].tolist()
    ours, asked = lengths_only(), []
    drafter = RowScript(texts, right=coin, controller=ours).bind(model)
    observe = ours.observe
    ours.observe = lambda setting, *measured: asked.append((setting, *measured)) or observe(setting, *measured)
    speculative(model, inputs, drafter, max_new_tokens=60, eos_token_id=None)
    budgets = [max(budget) for budget in drafter.budgets]
    lengths = [setting.num_draft_tokens for setting, _, _ in asked if setting.num_draft_tokens]
    assert budgets[: len(lengths) - 2] == lengths[:-2] and len(set(budgets)) > 1  # the last ones draft what fits
    assert {seconds for _, seconds, _ in asked} <= {SECONDS, SECONDS - 1.0, SECONDS + 1.0}
    assert {tokens for _, _, tokens in asked} > {1.0, 2.0}


def test_a_round_is_decided_before_its_draft_is_drawn(monkeypatch, clock):  # noqa: F811
    log = []

    def logged(cls, name, entry):
        original = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda self, *a, **k: log.append(entry) or original(self, *a, **k))

    logged(Control, "next_round", "decide")
    logged(DraftModelSession, "propose", "draft")
    logged(Rows, "commit", "verdict")
    model, inputs = tiny_target("llama"), prompts([9, 5])
    for rule in ("rejection", "block", "coupled"):
        log.clear()
        drafter = near_copy(model, rule=rule, controller=lengths_only())
        speculative(model, inputs, drafter, do_sample=True, eos_token_id=None)
        first, *rounds, last = " ".join(log).split("verdict")
        assert (first, last) == ("", "") and {one.strip() for one in rounds} <= {"decide draft", "decide"}
        assert rounds.count(" decide draft ") > 3


# Lenience


@pytest.mark.parametrize("sampling", [True, False])
def test_lenient_rounds_are_counted_measured_and_said(sampling, clock):  # noqa: F811
    model, inputs = tiny_target("llama"), prompts([9, 9])
    drafter = near_copy(model, controller=lenient())
    model.generate(**inputs, do_sample=sampling, top_k=0, max_new_tokens=60, eos_token_id=None, assistant_model=drafter)
    stats = drafter.last_stats
    assert_counted(stats)
    assert not stats.lossless and 0.0 < stats.mean_kl <= math.log(5.0) + 1e-6
    assert stats.rule == f"{'rejection' if sampling else 'match'} or Lenience(l=0.6) or Lenience(l=0.2)"
    assert stats.bound.startswith("h <= p / 0.2" if sampling else "p(token) >= 0.2 max p")


def test_rounds_that_need_no_lenience_are_rejections_bit_for_bit(clock):  # noqa: F811
    """A limit that is never missed; the statistics still say what might have been."""
    model, inputs = tiny_target("llama"), prompts([9, 4])
    expected = sample(model, inputs, near_copy(model, rule="rejection", num_draft_tokens=4), top_k=0)
    drafter = near_copy(model, controller=lenient(limit=1e6))
    assert torch.equal(sample(model, inputs, drafter, top_k=0), expected)
    assert list(drafter.last_stats.settings) == ["effort 1, lenience 1, 4 tokens"]
    assert drafter.last_stats.mean_tv == 0.0 and not drafter.last_stats.lossless


def test_thinking_only_lenience_goes_with_a_controller(clock):  # noqa: F811
    model, inputs = tiny_target("llama"), prompts([9, 9])
    inputs["input_ids"][:, :-1] %= 80
    inputs["input_ids"][0, -1] = 90
    drafter = near_copy(model, controller=lenient(), lenient_between=(90, 91))
    sample(model, inputs, drafter, top_k=0, suppress_tokens=[90, 91], eos_token_id=None)
    assert [row.tv > 0.0 for row in drafter.last_stats.rows] == [True, False]


# Statistics


def test_settings_add_up_over_calls():
    one, other = SpecStats(settings={"a": 2, "b": 1}), SpecStats(settings={"b": 3})
    total = one + other
    assert total.settings == {"a": 2, "b": 4} and json.loads(json.dumps(total.to_dict()))["settings"]["a"] == 2
    assert total.summary().endswith("\n2 rounds at a\n4 rounds at b") and "rounds at" not in SpecStats().summary()


# What is refused


def test_what_a_drafter_cannot_do_is_refused(no_forward):  # noqa: F811
    model = tiny_target("llama")
    with pytest.raises(ValueError, match="`effort` is 3 and a 'lookup' drafter cannot spend more passes"):
        AutoDrafter.for_target(model, "lookup", controller=efforts())
    drafter = AutoDrafter.for_target(model, "lookup", controller=lengths_only())
    assert "`num_assistant_tokens` is 3 beside a `controller`" in refusal(drafter=drafter, num_assistant_tokens=3)
    drafter.max_num_draft_tokens = 3
    message = refusal(drafter=drafter)
    assert "the longest draft of `controller` is 4; this 'lookup' drafter drafts at most 3 tokens" in message


def test_transformers_own_loop_takes_no_controller():
    model = tiny_target("llama")
    drafter = AutoDrafter.for_target(model, "lookup", controller=lengths_only())
    with pytest.raises(ValueError, match="`controller` has no effect in transformers' own loop"):
        DrafterCandidates(model, drafter, prompts([5])["input_ids"], model.generation_config, [])
