"""`SpecConfig(lenience=...)` through the whole of `generate`: what is kept, what is measured, what is refused."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from scripted import RandomDrafter, ScriptedDrafter
from test_bad_input import no_forward, refusal  # noqa: F401 - a fixture
from tiny import VOCAB_SIZE, perturbed, prompts, tiny_target
from tiny_hybrids import tiny_own
from torch.utils._python_dispatch import TorchDispatchMode

import hf_specdec
from hf_specdec import AutoDrafter, SpecConfig, SpecStats, lenient
from hf_specdec.decoding import loop
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.integration.candidates import DrafterCandidates
from hf_specdec.lenient import Ensemble, Lenience, Margin, Mentored, TopK, Typical
from hf_specdec.metrics import RowStats

RULES = [0.5, Mentored(0.2), Ensemble(0.5), Typical(), TopK(5), Margin(0.3)]
GREEDY_RULES = [0.3, Margin(0.3), TopK(3), Typical(0.05, 0.3)]
SAMPLING = {"do_sample": True, "top_k": 0, "max_new_tokens": 30}
GREEDY = {"do_sample": False, "max_new_tokens": 30}


def near_copy(model, **options):
    """A draft model whose law is near the target's."""
    return DraftModelDrafter(perturbed(model, 0.02), seed=7, num_draft_tokens=4, **options).bind(model)


# Sampling


@pytest.mark.parametrize("strict", [1, 1.0, Lenience(1.0), Ensemble(1), Mentored(0)])
def test_the_strict_end_is_rejection(strict):
    model, inputs = tiny_target("llama"), prompts([9, 4, 6])
    expected = model.generate(**inputs, **SAMPLING, assistant_model=near_copy(model, rule="rejection"))
    for rule in ("auto", "rejection"):
        drafter = near_copy(model, lenience=strict, rule=rule)
        assert torch.equal(model.generate(**inputs, **SAMPLING, assistant_model=drafter), expected)
        stats = drafter.last_stats
        assert (stats.rule, stats.lossless, stats.bound, stats.mean_tv) == ("rejection", True, "", 0.0)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_lenient_call_says_what_it_loses(rule):
    model, inputs = tiny_target("llama"), prompts([9, 4, 6])
    drafter = near_copy(model, lenience=rule)
    out = model.generate(**inputs, **SAMPLING, assistant_model=drafter, return_dict_in_generate=True)
    stats = out.specdec
    as_rule = Lenience(rule) if isinstance(rule, float) else rule
    assert (stats.rule, stats.lossless, stats.bound) == (repr(as_rule), False, as_rule.bound(greedy=False))
    assert 0.0 < stats.mean_tv < 1.0 and stats.mean_kl > 0.0
    again = near_copy(model, lenience=rule)
    assert torch.equal(model.generate(**inputs, **SAMPLING, assistant_model=again), out.sequences)


def test_more_leniency_accepts_more_and_loses_more():
    model, inputs = tiny_target("llama"), prompts([9] * 6)
    found = []
    for lenience in (1.0, 0.6, 0.2, 0.01):
        drafter = near_copy(model, lenience=lenience)
        model.generate(**inputs, **{**SAMPLING, "max_new_tokens": 60}, assistant_model=drafter)
        stats = drafter.last_stats
        found.append((stats.acceptance_rate, stats.mean_tv, stats.mean_kl))
        assert stats.mean_kl <= math.log(1.0 / lenience) + 1e-6 and stats.mean_tv <= 1.0 - lenience + 1e-6
    assert found == sorted(found) and found[-1][0] > found[0][0] + 0.05


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_processors_stay_binding(rule):
    """A drafter that knows nothing of them is never followed where they forbid."""
    model, inputs = tiny_target("llama"), prompts([9, 4, 6])
    allowed = [t for t in range(3, VOCAB_SIZE) if t % 4]
    drafter = RandomDrafter(VOCAB_SIZE, seed=1, lenience=rule, num_draft_tokens=3).bind(model)
    out = model.generate(
        **inputs,
        **SAMPLING,
        assistant_model=drafter,
        eos_token_id=None,
        prefix_allowed_tokens_fn=lambda row, text: [t for t in allowed if t != int(text[-1])],
    )[:, 9:]
    assert set(out.flatten().tolist()) <= set(allowed)
    assert not bool((out[:, 1:] == out[:, :-1]).any())
    assert drafter.last_stats.num_accepted > 0


@pytest.mark.parametrize("name", ["lookup", "none"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_computed_drafts_and_none(rule, name):
    model, inputs = tiny_target("llama"), prompts([9, 4])
    options = {"min_ngram": 1} if name == "lookup" else {}
    drafter = AutoDrafter.for_target(model, name, lenience=rule, seed=3, **options)
    out = model.generate(**inputs, **SAMPLING, eos_token_id=None, assistant_model=drafter)
    assert out.shape == (2, 39)
    assert (drafter.last_stats.mean_tv > 0.0) == (name == "lookup")


# Greedy decoding


@pytest.mark.parametrize("strict", [1, Lenience(1.0), Margin(1.0), TopK(1), Mentored(0)], ids=repr)
def test_greedy_strict_ends_are_plain_generate(strict):
    model, inputs = tiny_target("llama"), prompts([9, 4, 6])
    drafter = near_copy(model, lenience=strict)
    found = model.generate(**inputs, **GREEDY, assistant_model=drafter)
    assert torch.equal(found, model.generate(**inputs, **GREEDY))
    assert (drafter.last_stats.rule, drafter.last_stats.lossless) == ("match", True)


@pytest.mark.parametrize("rule", GREEDY_RULES, ids=str)
def test_greedy_tokens_are_near_the_best_and_counted_where_they_are_not_it(rule):
    model, inputs = tiny_target("llama"), prompts([9, 9, 9])
    drafter = DraftModelDrafter(perturbed(model, 0.1), num_draft_tokens=4, lenience=rule).bind(model)
    ids = model.generate(**inputs, **GREEDY, eos_token_id=None, assistant_model=drafter)
    stats = drafter.last_stats
    with torch.no_grad():
        p = model(ids[:, :-1]).logits[:, 8:].softmax(dim=-1)
    taken = p.gather(-1, ids[:, 9:, None])[..., 0]
    best = p.amax(dim=-1)
    as_rule = Lenience(rule) if isinstance(rule, float) else rule
    inside = as_rule.tolerated(p).gather(-1, ids[:, 9:, None])[..., 0]
    assert bool((inside | (taken == best)).all())
    other = taken < best
    assert stats.mean_tv == pytest.approx(float(other.double().mean())) and float(other.double().mean()) > 0.0
    assert stats.mean_kl == pytest.approx(float((best / taken).log().mean()), abs=1e-4)
    assert stats.bound == as_rule.bound(greedy=True) and not stats.lossless


# Statistics


def test_distances_are_summed_over_the_tokens_that_reach_the_text(monkeypatch):
    """With TV 1 and KL 2 at every slot the sums count tokens: past a stop nothing is counted, in any row."""

    def constant(*arguments):
        verdict = hf_specdec.verification.verify(*arguments)
        ones = torch.ones(verdict.tokens.shape)
        return replace(verdict, tv=ones, kl=2.0 * ones)

    monkeypatch.setattr(loop, "verify", constant)
    model, inputs = tiny_target("llama"), prompts([6, 4, 5])
    texts = model.generate(**inputs, do_sample=False, eos_token_id=None, max_new_tokens=20)[:, 6:].tolist()
    drafter = ScriptedDrafter(texts, right=lambda row, round: row + round % 4, num_draft_tokens=4).bind(model)
    model.generate(**inputs, do_sample=False, eos_token_id=texts[1][6], max_new_tokens=20, assistant_model=drafter)
    stats = drafter.last_stats
    assert len({row.num_emitted for row in stats.rows}) > 1
    assert [row.tv for row in stats.rows] == [row.num_emitted for row in stats.rows]
    assert [row.kl for row in stats.rows] == [2.0 * row.num_emitted for row in stats.rows]
    assert (stats.mean_tv, stats.mean_kl) == (1.0, 2.0)


def test_rows_that_run_one_by_one_are_measured_too():
    model, inputs = tiny_own("qwen3_next"), prompts([9, 9])
    drafter = RandomDrafter(VOCAB_SIZE, seed=1, lenience=0.2).bind(model)
    model.generate(**inputs, **SAMPLING, assistant_model=drafter)
    stats = drafter.last_stats
    assert stats.cache == "own" and not stats.lossless and stats.bound
    assert all(row.tv > 0.0 and row.kl > 0.0 for row in stats.rows)


def test_distances_add_up_over_calls():
    one = SpecStats(rows=[RowStats(num_emitted=4, tv=1.0, kl=2.0)], lossless=False, bound="h <= p / 0.5")
    other = SpecStats(rows=[RowStats(num_emitted=6, tv=0.5, kl=0.5), RowStats(num_emitted=10)])
    total = one + other
    assert (total.mean_tv, total.mean_kl) == (1.5 / 20, 2.5 / 20)
    assert (total.lossless, total.bound) == (False, "h <= p / 0.5")
    numbers = json.loads(json.dumps(total.to_dict()))
    assert numbers["mean_tv"] == 1.5 / 20 and numbers["mean_kl"] == 2.5 / 20 and numbers["rows"][0]["tv"] == 1.5
    assert "lossy (h <= p / 0.5; measured: TV 0.0750, KL 0.1250 a token)" in total.summary()
    assert "TV" not in other.summary()


class CopiesToHost(TorchDispatchMode):
    """Counts the operations that wait for the device: on the CPU all of them read one number, or a tensor as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **(kwargs or {}))

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        tolist = torch.Tensor.tolist

        def counted(tensor):
            self.count += 1
            return tolist(tensor)

        self.patch.setattr(torch.Tensor, "tolist", counted)
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        return super().__exit__(*error)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampling"])
def test_measuring_copies_to_the_host_once_at_the_end(options):
    model, inputs = tiny_target("llama"), prompts([6, 4])
    long = model.generate(**inputs, do_sample=False, max_new_tokens=20, eos_token_id=None)
    besides: dict = {}
    markers = {"lenience": 0.5, "lenient_between": (90, [91, 92])}
    for rule in ({"rule": "rejection"}, {"lenience": 0.5}, markers):
        drafter = ScriptedDrafter(long[:, 6:].tolist(), num_draft_tokens=3, seed=0, **rule).bind(model)
        for new_tokens in (8, 20):
            with CopiesToHost() as copies:
                model.generate(
                    **inputs, **options, max_new_tokens=new_tokens, eos_token_id=None, assistant_model=drafter
                )
            besides[(*rule, new_tokens)] = copies.count - drafter.last_stats.num_forwards
    assert besides["rule", 8] == besides["rule", 20]
    assert besides["lenience", 8] == besides["lenience", 20] == besides["rule", 8] + 1
    assert besides[(*markers, 8)] == besides[(*markers, 20)] == besides["rule", 8] + 1


# Options


@pytest.mark.parametrize("rule", [None, 0.5, 1, *RULES], ids=str)
def test_a_rule_goes_through_a_file(rule, tmp_path):
    config = SpecConfig(num_draft_tokens=3, lenience=rule)
    file = tmp_path / "options.json"
    file.write_text(json.dumps(asdict(config)))
    assert SpecConfig.from_file(file) == config


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lenience": 0}, "`lenience` is 0; give a number above 0"),
        ({"lenience": 1.5}, "`lenience` is 1.5"),
        ({"lenience": "typical"}, "`lenience` is 'typical'"),
        ({"lenience": {"name": "typical"}}, "`lenience` is {'name'"),
        ({"lenience": 0.5, "rule": "block"}, "`rule` is 'block' beside `lenience` 0.5"),
        ({"lenience": 0.5, "rule": "coupled"}, "`rule` is 'coupled' beside"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        SpecConfig(**options)


def test_a_file_with_a_bad_rule_is_refused(tmp_path):
    file = tmp_path / "options.json"
    file.write_text('{"lenience": {"name": "margin", "ratio": 3}}')
    with pytest.raises(ValueError, match="`ratio` is 3"):
        SpecConfig.from_file(file)


@pytest.mark.parametrize("rule", [Mentored(0.1), Ensemble(0.5)], ids=repr)
def test_a_rule_for_sampling_is_refused_in_greedy_decoding(no_forward, rule):  # noqa: F811
    drafter = AutoDrafter.for_target(tiny_target("llama"), "lookup", lenience=rule)
    assert f"`lenience` is {rule!r}, a rule for sampling" in refusal(drafter=drafter, do_sample=False)


def test_the_ensemble_weight_of_generate_names_the_rule_to_take(no_forward):  # noqa: F811
    assert "SpecConfig(lenience=hf_specdec.lenient.Ensemble(weight))" in refusal(assistant_ensemble_weight=0.5)
    assert lenient.Ensemble is Ensemble


def test_transformers_own_loop_is_not_lenient():
    model = tiny_target("llama")
    drafter = AutoDrafter.for_target(model, "lookup", lenience=0.5)
    with pytest.raises(ValueError, match=r"`lenience` is 0.5; transformers' own loop is lossless"):
        DrafterCandidates(model, drafter, prompts([5])["input_ids"], model.generation_config, [])
