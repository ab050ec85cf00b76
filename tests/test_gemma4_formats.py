"""Gemma 4 assistants load from their files and from transformers' models, or are refused with one sentence."""

import json

import pytest
import torch
import transformers
from gemma4_formats import (
    HIDDEN,
    LAYOUTS,
    VOCAB,
    F,
    assistant_of,
    target_config,
    tiny_gemma4,
    write_assistant,
)
from safetensors.torch import load_file, save_file
from test_greedy import plain, speculative
from tiny import prompts, tiny_encoder_decoder, tiny_target, tiny_tokenizer
from tiny_vision import tiny_vlm, with_images
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM

import hf_specdec
from hf_specdec import AutoDrafter
from hf_specdec.drafters.auto import drafter_of_model

OPTIONS = {"max_new_tokens": 16, "eos_token_id": None}


def written(folder, model, config=(), tensors=(), without=()):
    """The files of an assistant with changes; tensors of None are left out."""
    write_assistant(folder, model)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **dict(config)}))
    found = {**load_file(folder / "model.safetensors"), **dict(tensors)}
    save_file({name: x for name, x in found.items() if name not in without}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_and_model_are_one_drafter(tmp_path, layout):
    folder, target = write_assistant(tmp_path, assistant_of(layout)), tiny_gemma4(layout)
    kind = "gemma4_unified_assistant" if layout == "12B" else "gemma4_assistant"
    assert AutoDrafter.detect(folder).reason == f"config.json has model_type {kind}"
    loaded, of_model = (
        AutoDrafter.from_pretrained(folder, target=target),
        drafter_of_model(assistant_of(layout), target),
    )
    theirs, ours = loaded.model.state_dict(), of_model.model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert loaded.model.config == of_model.model.config
    head = of_model.model.lm_head.weight
    assert head.data_ptr() == assistant_of(layout).lm_head.weight.data_ptr(), "weights should not be copied"
    assert loaded.default_num_draft_tokens == of_model.default_num_draft_tokens == 3  # generation_config.json


def test_keys_and_values_of_its_own_are_left_out(tmp_path):
    """transformers ignores them in checkpoints, so they may be there."""
    extra = {
        f"model.layers.{i}.self_attn.{n}.weight": torch.randn(4, 4) for i in range(4) for n in ("k_proj", "v_norm")
    }
    folder = written(tmp_path, assistant_of("31B"), tensors=extra)
    assert AutoDrafter.from_pretrained(folder, target=tiny_gemma4("31B")).method == "gemma4"


def test_a_head_of_its_own_is_taken_where_it_is_not_tied(tmp_path):
    head = torch.randn(VOCAB, 32)
    folder = written(tmp_path, assistant_of("31B"), {"tie_word_embeddings": False}, {"lm_head.weight": head})
    drafter = AutoDrafter.from_pretrained(folder, target=tiny_gemma4("31B"))
    assert torch.equal(drafter.model.lm_head.weight, head)


def test_without_a_recommended_length_four_tokens_are_drafted(tmp_path):
    write_assistant(tmp_path, assistant_of("31B"))
    for content in ("{}", "no json", '{"num_assistant_tokens": "many"}'):
        (tmp_path / "generation_config.json").write_text(content)
        assert AutoDrafter.from_pretrained(tmp_path, target=tiny_gemma4("31B")).default_num_draft_tokens == 4


def bad_ordering():
    ordering = assistant_of("E2B").state_dict()["masked_embedding.token_ordering"].clone()
    ordering[3] = ordering[4]
    return ordering


def experts():
    text = json.loads(assistant_of("31B").config.text_config.to_json_string(use_diff=False))
    return {**text, "enable_moe_block": True}


CASES = {
    "a missing tensor": ("31B", dict(without=["post_projection.weight"]), "lacks the tensors post_projection.weight"),
    "a surplus tensor": ("31B", dict(tensors={"fc.bias": torch.ones(2)}), "does not call for: fc.bias"),
    "another shape": ("31B", dict(tensors={"pre_projection.weight": torch.ones(32, 9)}), "of shape [32, 9]"),
    "no centroids": ("E2B", dict(without=["masked_embedding.centroids.weight"]), "masked_embedding.centroids.weight"),
    "a damaged ordering": ("E2B", dict(tensors={"masked_embedding.token_ordering": bad_ordering}), "every token once"),
    "clusters of two sizes": ("E2B", dict(config={"num_centroids": 7}), "5 of 7 clusters of a vocabulary of 96"),
    "too many clusters": ("E2B", dict(config={"centroid_intermediate_top_k": 13}), "13 of 12 clusters"),
    "experts": ("31B", dict(config={"text_config": experts}), "enable_moe_block must be False"),
    "a size in words": ("31B", dict(config={"backbone_hidden_size": "wide"}), "is no Gemma 4 assistant's"),
    "packed weights": (
        "31B",
        dict(tensors={"pre_projection.weight": torch.ones(32, 96, dtype=torch.int8)}),
        "quantised",
    ),
    "a quantised one": ("31B", dict(config={"quantization_config": {"quant_method": "fp8"}}), "is quantised"),
    "another target's width": ("31B", dict(config={"backbone_hidden_size": 24}), "pre_projection.weight of shape"),
}


def resolved(values: dict) -> dict:
    return {
        key: value() if callable(value) and not isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }


def refusal(call) -> str:
    """The one sentence of a ValueError, before any forward of any model."""
    forwards = []
    watch = torch.nn.modules.module.register_module_forward_pre_hook(lambda *args: forwards.append(1))
    try:
        with pytest.raises(ValueError) as caught:
            call()
    finally:
        watch.remove()
    assert not forwards and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_damaged_files_are_refused(tmp_path, case):
    layout, changes, expected = CASES[case]
    changes = {key: resolved(value) if isinstance(value, dict) else value for key, value in changes.items()}
    folder = written(tmp_path, assistant_of(layout), **changes)
    assert expected in refusal(lambda: AutoDrafter.from_pretrained(folder, target=tiny_gemma4(layout)))


def wider_target():
    config = target_config("31B")
    config.hidden_size = 64
    return Gemma4ForCausalLM(config)


TARGETS = {
    "no Gemma": (lambda: tiny_target("llama"), "what a Gemma 4 model keeps of its text, and the target is a Llama"),
    "an encoder-decoder": (lambda: tiny_encoder_decoder("t5gemma"), "is an encoder-decoder"),
    "another Gemma 4": (lambda: tiny_gemma4("E2B"), "1 key-value heads of size 16 in 'full_attention' layers"),
    "another width": (lambda: wider_target(), f"hidden size of {HIDDEN} and the target's is 64"),
    "another vocabulary": (lambda: tiny_gemma4("31B", 48), "vocabulary of 96 and the target's is 48"),
    "no sliding layers": (lambda: tiny_gemma4("31B", VOCAB, (F, F)), "reads 'sliding_attention' layers"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets_that_it_was_not_made_for_are_refused(tmp_path, case):
    make, expected = TARGETS[case]
    target, folder = make(), write_assistant(tmp_path, assistant_of("31B"))
    assert expected in refusal(lambda: AutoDrafter.from_pretrained(folder, target=target))
    if not target.config.is_encoder_decoder:
        call = lambda: speculative(target, prompts([5], vocab_size=48), assistant_of("31B"))  # noqa: E731
        assert expected in refusal(call)


def test_absurd_options_are_refused(tmp_path):
    folder, target = write_assistant(tmp_path, assistant_of("31B")), tiny_gemma4("31B")
    for value in ("bonus", None, 1, ["last_token"]):
        message = refusal(lambda value=value: AutoDrafter.from_pretrained(folder, target=target, draft_position=value))
        assert message == f"`draft_position` is {value!r}; give 'last_token' or 'token_before'."
    assert "aux_layers" in refusal(lambda: AutoDrafter.from_pretrained(folder, target=target, aux_layers=[1]))


def test_a_quantised_cache_of_the_target_is_refused(tmp_path):
    """vllm issue 41789: an assistant that reads quantised keys drafts nothing that is accepted."""
    drafter = AutoDrafter.from_pretrained(write_assistant(tmp_path, assistant_of("31B")), target=tiny_gemma4("31B"))
    call = lambda: speculative(  # noqa: E731
        tiny_gemma4("31B"), prompts([5]), drafter, cache_implementation="quantized"
    )
    assert "neither offloaded nor quantised" in refusal(call)


def test_an_offloaded_model_is_refused():
    config = assistant_of("31B").config
    with torch.device("meta"):
        model = Gemma4AssistantForCausalLM(config)
    assert "is offloaded in part; load it whole" in refusal(lambda: drafter_of_model(model, tiny_gemma4("31B")))


@pytest.mark.parametrize("layout", ["E4B", "12B"])
def test_generate_takes_transformers_model_of_an_assistant(layout):
    target, inputs = tiny_gemma4(layout), prompts([9, 4, 6], vocab_size=VOCAB)
    expected = plain(target, inputs, **OPTIONS)
    for k in (None, 1, 5):
        given = {} if k is None else {"num_assistant_tokens": k}
        out = speculative(target, inputs, assistant_of(layout), return_dict_in_generate=True, **given, **OPTIONS)
        assert torch.equal(out.sequences, expected)
        assert out.specdec.num_drafted > 0
        if k is not None:
            assert out.specdec.rows[0].num_drafted <= k * out.specdec.rows[0].num_verifications


def test_other_models_are_left_to_transformers():
    target, inputs = tiny_target("llama"), prompts([9])
    assert drafter_of_model(target, target) is None
    out = speculative(target, inputs, target, return_dict_in_generate=True, max_new_tokens=5)
    assert not hasattr(out, "specdec")


def test_pipelines_take_the_folder_and_the_model(tmp_path):
    target, texts = tiny_gemma4("31B"), ["w10 w11 w12 w10 w11", "w30", "w50 w51"]
    options = {"do_sample": False, "max_new_tokens": 10, "return_full_text": False, "batch_size": 3}
    folder = str(write_assistant(tmp_path, assistant_of("31B")))
    assert isinstance(AutoModelForCausalLM.from_pretrained(folder), Gemma4AssistantForCausalLM)
    plain_pipe = transformers.pipeline("text-generation", model=target, tokenizer=tiny_tokenizer(VOCAB))
    expected = plain_pipe(texts, **options)
    for assistant in (folder, assistant_of("31B")):
        pipe = transformers.pipeline(
            "text-generation", model=target, tokenizer=tiny_tokenizer(VOCAB), assistant_model=assistant
        )
        assert pipe(texts, **options) == expected


def test_one_model_may_be_enabled_for_it():
    target, inputs = Gemma4ForCausalLM(target_config("31B")).eval(), prompts([9], vocab_size=VOCAB)
    hf_specdec.uninstall()
    try:
        hf_specdec.enable(target)
        out = speculative(target, inputs, assistant_of("31B"), return_dict_in_generate=True, **OPTIONS)
        assert out.specdec.num_drafted > 0
    finally:
        hf_specdec.install()


def test_a_target_that_sees_images(tmp_path):
    """`Gemma4ForConditionalGeneration`, whose text model is what the assistant reads."""
    target, text = tiny_vlm("gemma4"), tiny_vlm("gemma4").config.text_config
    fields = {**text.to_dict(), "hidden_size": 32, "layer_types": ["sliding_attention", "full_attention"]}
    fields.update(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=2)
    config = Gemma4AssistantConfig(text_config=fields, backbone_hidden_size=text.hidden_size)
    assistant = Gemma4AssistantForCausalLM(config).eval()
    for images, lengths in (([1], [6]), ([2, 1, 0], [7, 9, 5])):
        inputs = with_images("gemma4", images, lengths)
        out = speculative(target, inputs, assistant, return_dict_in_generate=True, pad_token_id=0, **OPTIONS)
        assert torch.equal(out.sequences, plain(target, inputs, pad_token_id=0, **OPTIONS))
        assert out.specdec.num_drafted > 0 and out.specdec.cache == "ragged"
