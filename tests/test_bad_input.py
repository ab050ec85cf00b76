"""Bad input: one clear sentence that names it, before any forward pass, and nothing half-done."""

import copy

import pytest
import torch
from scripted import ScriptedDrafter
from tiny import perturbed, prompts, tiny_target

import hf_specdec
from hf_specdec import AutoDrafter, SpecConfig, SpecGenerate
from hf_specdec.drafters.draft_model import DraftModelDrafter


@pytest.fixture
def no_forward(monkeypatch):
    """Fail where a model runs."""

    def forward(*args, **kwargs):
        raise AssertionError("a forward pass ran before the refusal")

    for model in (tiny_target("llama"), tiny_target("qwen3")):
        monkeypatch.setattr(model, "forward", _with_signature(forward, model.forward))


def _with_signature(function, like):
    import functools

    return functools.wraps(like)(function)


def refusal(model=None, drafter=None, inputs=None, **options) -> str:
    """The sentence; nothing has been left behind."""
    model = model or tiny_target("llama")
    drafter = drafter or AutoDrafter.for_target(model, "lookup")
    inputs = inputs or prompts([6])
    with pytest.raises(ValueError) as error:
        model.generate(**inputs, max_new_tokens=8, assistant_model=drafter, **options)
    assert drafter.last_stats is None
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "`num_beams` is 2"),
        ({"assistant_ensemble_weight": 0.5}, "`assistant_ensemble_weight` is 0.5"),
        ({"prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens` is 3"),
        ({"use_cache": False}, "`use_cache` is False"),
        ({"cache_implementation": "offloaded"}, "`cache_implementation` is 'offloaded'"),
        ({"cache_implementation": "quantized"}, "`cache_implementation` is 'quantized'"),
        ({"cache_implementation": "offloaded_static"}, "`cache_implementation` is 'offloaded_static'"),
        ({"num_assistant_tokens": -1}, "`num_assistant_tokens` is -1"),
        ({"num_assistant_tokens": 2.5}, "`num_assistant_tokens` is 2.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_generate_options_that_are_not_served(no_forward, options, match):
    assert match in refusal(**options)


def test_outputs_of_a_batch_under_a_processor_that_keeps_state(no_forward):
    options = {"guidance_scale": 1.5, "output_scores": True, "return_dict_in_generate": True}
    message = refusal(inputs=prompts([6, 4]), **options)
    assert "`output_scores` with 2 rows" in message and "UnbatchedClassifierFreeGuidance" in message


def test_a_list_of_seeds_of_another_length(no_forward):
    drafter = AutoDrafter.for_target(tiny_target("llama"), "none", seed=[1, 2])
    message = refusal(drafter=drafter, inputs=prompts([6, 4, 4]), do_sample=True)
    assert "`seed` lists 2 seeds for 3 rows" in message


@pytest.mark.parametrize("columns", [5, 8])
def test_a_mask_of_another_length_than_the_prompt(no_forward, columns):
    inputs = {**prompts([6]), "attention_mask": torch.ones(1, columns).long()}
    assert f"`attention_mask` has {columns} columns for `input_ids` of 6" in refusal(inputs=inputs)


@pytest.mark.parametrize("shape", [(1, 0), (0, 4), (1, 1, 4)], ids=str)
def test_ids_that_are_no_batch_of_texts(no_forward, shape):
    assert f"`input_ids` has shape {list(shape)}" in refusal(inputs={"input_ids": torch.full(shape, 7)})


def test_a_drafter_that_was_never_bound(no_forward):
    assert "not bound" in refusal(drafter=ScriptedDrafter([[1]]))


def test_a_drafter_of_another_target(no_forward):
    message = refusal(drafter=AutoDrafter.for_target(tiny_target("qwen3"), "lookup"))
    assert "another target" in message
    assert "Qwen3ForCausalLM" in message and "LlamaForCausalLM" in message


def test_a_draft_model_of_another_vocabulary():
    drafter = DraftModelDrafter(tiny_target("llama", vocab_size=40))
    with pytest.raises(ValueError, match="vocabulary of 40 and the target one of 97"):
        drafter.bind(tiny_target("llama"))
    assert "not bound" in refusal(drafter=drafter)


def test_a_draft_model_with_other_special_tokens():
    model = perturbed(tiny_target("llama"), 0.1)
    model.config = copy.deepcopy(model.config)
    model.config.eos_token_id = 5
    with pytest.raises(ValueError, match="eos_token_id is 5"):
        DraftModelDrafter(model).bind(tiny_target("llama"))


def test_an_assistant_tokenizer(no_forward):
    assert "`assistant_tokenizer`" in refusal(assistant_tokenizer=object(), tokenizer=object())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rule": "best"}, "`rule` is 'best'.*'rejection'"),
        ({"num_draft_tokens": -1}, "`num_draft_tokens` is -1"),
        ({"num_draft_tokens": "many"}, "`num_draft_tokens` is 'many'"),
        ({"num_draft_tokens": True}, "`num_draft_tokens` is True"),
        ({"draft_sampling": "beam"}, "`draft_sampling` is 'beam'"),
        ({"governor": "on"}, "`governor` is 'on'"),
        ({"kernels": "cuda"}, "`kernels` is 'cuda'.*'triton'"),
        ({"effort": 0}, "`effort` is 0; give a positive integer"),
        ({"effort": True}, "`effort` is True"),
        ({"effort": 1.5}, "`effort` is 1.5"),
        ({"schedule": "best"}, "`schedule` is 'best'; give 'confidence', 'lagged', a threshold"),
        ({"schedule": 1.5}, "`schedule` is 1.5"),
        ({"schedule": True}, "`schedule` is True"),
        ({"schedule": float("nan")}, "`schedule` is nan"),
        ({"tree": [1, 2]}, "`tree`"),
        ({"lenience": 1.5}, "`lenience` is 1.5"),
        ({"seed": "x"}, "`seed` is 'x'"),
        ({"seed": []}, "`seed` is \\[\\]"),
        ({"seed": 2**64}, "`seed` is 18446744073709551616"),
        ({"colour": 1}, "unknown option 'colour'"),
    ],
    ids=str,
)
def test_options_of_a_config_and_of_a_drafter(options, match):
    with pytest.raises(ValueError, match=match):
        SpecConfig().with_options(**options)
    with pytest.raises(ValueError, match=match):
        AutoDrafter.for_target(tiny_target("llama"), "lookup", **options)


def test_a_mistyped_option_is_answered_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"unknown option 'max_ngrams' \(did you mean 'max_ngram'\?\)"):
        AutoDrafter.for_target(tiny_target("llama"), "lookup", max_ngrams=8)


def test_options_may_be_given_as_a_whole_and_changed_one_by_one():
    config = SpecConfig(rule="block", seed=3)
    drafter = AutoDrafter.for_target(tiny_target("llama"), "lookup", spec_config=config, seed=4)
    assert drafter.spec_config == SpecConfig(rule="block", seed=4)
    for bad in ({"rule": "block"}, "block"):
        with pytest.raises(ValueError, match=r"`spec_config` is a (dict|str)"):
            AutoDrafter.for_target(tiny_target("llama"), "lookup", spec_config=bad)
        with pytest.raises(ValueError, match=r"`spec_config` is a (dict|str)"):
            drafter.spec_config = bad


@pytest.mark.parametrize(
    "assistant", ["lookup", [1], AutoDrafter, 3, b"x"], ids=["a name", "a list", "a class", "a number", "bytes"]
)
def test_assistants_that_are_no_objects(no_forward, assistant):
    with pytest.raises(ValueError, match=r"`assistant_model` is .*; give a drafter, as AutoDrafter"):
        tiny_target("llama").generate(**prompts([6]), assistant_model=assistant)


def test_a_drafter_in_the_place_of_a_function(no_forward):
    drafter = AutoDrafter.for_target(tiny_target("llama"), "lookup")
    with pytest.raises(TypeError, match="custom_generate=SpecGenerate"):
        tiny_target("llama").generate(**prompts([6]), custom_generate=drafter)


def test_options_of_other_assistants_are_answered_with_a_warning():
    model = tiny_target("llama")
    drafter = AutoDrafter.for_target(model, "lookup")
    inputs, options = prompts([6]), {"max_new_tokens": 2, "do_sample": False}
    expected = model.generate(**inputs, **options)
    with pytest.warns(UserWarning, match="`num_assistant_tokens_schedule` belongs to transformers' own assistants"):
        found = model.generate(**inputs, **options, assistant_model=drafter, num_assistant_tokens_schedule="heuristic")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("options", [{"min_ngram": 0}, {"max_ngram": 1}, {"max_candidates": 0}], ids=str)
def test_options_of_lookup(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AutoDrafter.for_target(tiny_target("llama"), "lookup", **options)


def test_an_unknown_method_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"`method` is 'medusa'.*'lookup', 'mtp', 'none'"):
        AutoDrafter.for_target(tiny_target("llama"), "medusa")


def test_a_target_that_is_no_model():
    with pytest.raises(ValueError, match="`target` is a str"):
        AutoDrafter.for_target("gpt2", "lookup")


def test_a_config_file_that_is_none(tmp_path):
    for content, match in (("{", "not JSON"), ("[1]", "list"), ('{"colour": 1}', "unknown option 'colour'")):
        (tmp_path / "spec.json").write_text(content)
        with pytest.raises(ValueError, match=match):
            SpecConfig.from_file(tmp_path / "spec.json")
    (tmp_path / "spec.json").write_text('{"rule": "block", "num_draft_tokens": 3}')
    assert SpecConfig.from_file(tmp_path / "spec.json") == SpecConfig(rule="block", num_draft_tokens=3)


def test_scores_that_leave_nothing_to_choose_raise_and_leave_no_statistics():
    model, inputs = tiny_target("llama"), prompts([6])

    def forbid_everything(ids, scores):
        return scores.fill_(-torch.inf) if ids.shape[1] == 9 else scores

    for sampling in (False, True):
        drafter = AutoDrafter.for_target(model, "lookup", seed=1)
        with pytest.raises(ValueError, match="row 0 at column 9 are NaN or forbid every token"):
            model.generate(
                **inputs,
                max_new_tokens=8,
                do_sample=sampling,
                assistant_model=drafter,
                logits_processor=[forbid_everything],
            )
        assert drafter.last_stats is None


def test_spec_generate_refuses_what_generate_refuses(no_forward):
    model, inputs = tiny_target("llama"), prompts([6])
    with pytest.raises(ValueError, match="`drafter` is a int"):
        SpecGenerate(3)
    with pytest.raises(ValueError, match="`assistant_ensemble_weight`"):
        model.generate(
            **inputs,
            custom_generate=SpecGenerate(AutoDrafter.for_target(model, "lookup")),
            assistant_ensemble_weight=0.5,
            max_new_tokens=4,
        )


def test_a_refused_call_leaves_the_next_one_alone():
    model, inputs = tiny_target("llama"), prompts([6])
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert "`num_beams`" in refusal(num_beams=3)
    drafter = AutoDrafter.for_target(model, "lookup")
    found = model.generate(**inputs, max_new_tokens=8, do_sample=False, assistant_model=drafter)
    assert torch.equal(found, expected)
    assert hf_specdec.integration.is_installed()
