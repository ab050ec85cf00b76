"""A DFlash drafter that cannot draft for a target is refused with one sentence, before any forward."""

import pytest
import torch
from dflash_formats import FORMATS, MASK, random_net, write_net
from eagle3_formats import write
from test_eagle3_bad_input import refusal
from tiny import prompts, tiny_target

from hf_specdec import AutoDrafter

IDS = {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2]}


def nested(**fields) -> dict:
    return {"dflash_config": {**IDS, **fields}}


CONFIGS = {
    "a Domino drafter": (nested(projector_type="domino"), "a Domino drafter"),
    "an unknown projector": (nested(projector_type="spiral"), "projector_type 'spiral', which is not known"),
    "a quantised drafter": (dict(quantization_config={"quant_method": "fp8"}), "is quantised"),
    "sinks": (nested(attention_sink_bias=True), "has attention_sink_bias, which is not served"),
    "scaled values": (nested(attention_value_scale=0.5), "has attention_value_scale 0.5"),
    "no mask token": (dict(dflash_config={"target_layer_ids": [0, 1, 2]}), "mask_token_id None where the id"),
    "a mask token in words": (nested(mask_token_id="<mask>"), "mask_token_id '<mask>'"),
    "a negative mask token": (nested(mask_token_id=-1), "mask_token_id -1"),
    "a mask token beyond the table": (nested(mask_token_id=97), "masks with token 97 and the embedding has 97 rows"),
    "layers beyond the target": (nested(target_layer_ids=[0, 1, 3]), "[1, 2, 4] and the target has 3 layers"),
    "negative layers": (nested(target_layer_ids=[0, 1, -2]), "[1, 2, -1] and the target has 3 layers"),
    "too few layers": (nested(target_layer_ids=[0, 1]), "an fc for 192 inputs, and 2 hidden states [1, 2]"),
    "layers in words": (nested(target_layer_ids="0,1"), "target_layer_ids '0,1' where a list of integers"),
    "two lists of layers": (dict(aux_hidden_state_layer_ids=[0, 1, 2]), "which are the hidden states [1, 2, 3]"),
    "no layers, and another number of them": (dict(dflash_config={"mask_token_id": MASK}), "2 hidden states"),
    "another hidden size": (dict(target_hidden_size=128), "of a target of width 128 make 384"),
    "another vocabulary": (dict(vocab_size=32000), "vocabulary of 32000 and the target's is 97"),
    "a block of the anchor alone": (dict(block_size=1), "block_size 1, and the anchor's row is no draft"),
    "a negative block": (nested(block_size=-4), "block_size -4"),
    "a block in words": (nested(block_size="8"), "block_size '8' where a positive integer"),
    "windows without a size": (dict(layer_types=["sliding_attention"] * 2), "layers that slide and no sliding_window"),
    "ModelOpt's window without a size": (nested(use_swa=True), "use_swa and no swa_window_size"),
    "another kind of layer": (dict(layer_types=["chunked_attention"] * 2), "layers of type chunked_attention"),
    "causality in words": (dict(is_causal="no"), "is_causal 'no' where true or false"),
    "a negative cap": (nested(final_logit_softcapping=-3.0), "final_logit_softcapping -3.0"),
    "a multiplier of 0": (nested(output_multiplier=0), "output_multiplier 0"),
    "an unknown activation": (dict(hidden_act="silly"), "hidden_act 'silly'"),
    "an unknown rotary embedding": (dict(rope_scaling={"type": "spiral"}), "'spiral'"),
    "a rotary embedding for each type of layer": (
        dict(rope_parameters={"full_attention": {"rope_type": "default"}}),
        "rope_parameters for each type of layer",
    ),
    "heads that do not fit": (dict(head_dim=24), "4 heads of size 24"),
    "a dflash_config in words": (dict(dflash_config="yes"), "dflash_config 'yes' where an object belongs"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_absurd_configs_are_refused(tmp_path, case):
    fields, expected = CONFIGS[case]
    assert expected in refusal(write_net(tmp_path, random_net(), **fields))


TENSORS = {
    "no fc": ({"fc.weight": None}, "lacks the tensor fc.weight"),
    "no norm of the context": ({"hidden_norm.weight": None}, "lacks the tensors hidden_norm.weight"),
    "no norm of the keys": ({"layers.1.self_attn.k_norm.weight": None}, "lacks the tensors layers.1.self_attn.k_norm"),
    "no projection": ({"layers.0.self_attn.q_proj.weight": None}, "lacks the tensor layers.0.self_attn.q_proj.weight"),
    "a surplus tensor": ({"gate.weight": torch.ones(4)}, "does not call for: gate.weight"),
    "a layer of another shape": (
        {"layers.1.mlp.up_proj.weight": torch.ones(70, 64)},
        "layers.1.mlp.up_proj.weight of shape [70, 64] where [80, 64] is expected",
    ),
    "a flat fc": ({"fc.weight": torch.ones(64)}, "fc.weight of shape [64] where a matrix belongs"),
    "a mask embedding": ({"mask_embedding": torch.ones(64)}, "a mask embedding of its own"),
    "sinks": ({"layers.0.self_attn.sinks": torch.ones(4)}, "attention sinks"),
    "Domino": ({"prefix_gru.weight": torch.ones(4, 4)}, "a Domino projector"),
    "fused projections": (
        {"layers.0.self_attn.qkv_proj.weight": torch.ones(128, 64)},
        "fused queries, keys and values",
    ),
    "gated attention": ({"layers.0.self_attn.g_proj.weight": torch.ones(64, 64)}, "gated attention"),
    "norms of hidden states": ({"aux_hidden_norms.0.weight": torch.ones(64)}, "a norm for each hidden state"),
    "packed weights": ({"layers.0.mlp.up_proj.weight": torch.ones(80, 32, dtype=torch.uint8)}, "is quantised"),
    "scales": ({"layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, "is quantised"),
    "a head of another width": ({"lm_head.weight": torch.ones(97, 32)}, "lm_head.weight of shape [97, 32]"),
    "a reduced head without a map": ({"lm_head.weight": torch.ones(41, 64)}, "drafts 41 of 97 tokens and has no d2t"),
    "a map without a head": ({"d2t": torch.zeros(41, dtype=torch.long)}, "has no lm_head.weight"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_make_the_drafter_are_refused(tmp_path, case):
    changes, expected = TENSORS[case]
    config, tensors = FORMATS["z-lab"](random_net())
    tensors = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    assert expected in refusal(write(tmp_path, config, tensors))


KERNEL, PROJECTION = "layers.0.attention_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight"
SECOND = {
    "no convolutions": ({KERNEL: None}, "has the shape [2, taps, 64]; it has none"),
    "a kernel for one side": ({KERNEL: torch.ones(1, 2, 64)}, "it has one of shape [1, 2, 64]"),
    "no dynamic kernel": ({PROJECTION: None}, "lacks the tensor layers.0.attention_conv.kernel_projection.weight"),
    "groups that do not divide": ({PROJECTION: torch.ones(12, 64)}, "makes no groups of equal size"),
    "kernels of two sizes": (
        {"layers.1.mlp_conv.base_kernel": torch.ones(2, 3, 64)},
        "layers.1.mlp_conv.base_kernel of shape [2, 3, 64] where [2, 2, 64] is expected",
    ),
    "no selector": (
        {"candidate_selector.predecessor_codebook": None},
        "lacks the tensor candidate_selector.predecessor",
    ),
    "half a selector": (
        {"candidate_selector.successor_codebook": None},
        "lacks the tensors candidate_selector.successor_codebook",
    ),
    "a selector of another target": (
        {"candidate_selector.predecessor_codebook": torch.ones(50, 8)},
        "a candidate selector for 50 tokens and the target has 97",
    ),
}


@pytest.mark.parametrize("case", SECOND)
def test_parts_that_do_not_make_dflash_2_are_refused(tmp_path, case):
    changes, expected = SECOND[case]
    config, tensors = FORMATS["z-lab"](random_net(num_candidates=6))
    tensors = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    assert expected in refusal(write(tmp_path, config, tensors))
    config["dflash_config"]["selector_top_k"] = 0
    tensors = FORMATS["z-lab"](random_net(num_candidates=6))[1]
    assert "selector_top_k 0 where a positive integer" in refusal(write(tmp_path / "none", config, tensors))


def test_targets_of_another_shape_are_refused(tmp_path):
    folder = write_net(tmp_path / "a", random_net(aux_layers=(1, 2)))
    drafter = AutoDrafter.from_pretrained(folder, target=tiny_target("llama"))
    with pytest.raises(ValueError, match="vocabulary of 97 and the target's is 50"):
        drafter.bind(tiny_target("llama", vocab_size=50))
    deep = write_net(tmp_path / "b", random_net())
    assert "[1, 2, 3] and the target has 2 layers" in refusal(deep, tiny_target("gpt_oss"))
    assert "num_draft_tokens" in refusal(folder, num_draft_tokens=-1)
    assert "has no embed_tokens.weight" in refusal(folder, own_embedding=True)
    assert "norm_output" in refusal(folder, norm_output=True)
    assert "made for a hidden size of 128 and the target's is 64" in refusal(
        write_net(tmp_path / "c", random_net(aux_layers=(1, 2)), target_hidden_size=128), aux_layers=[1]
    )


def test_a_reduced_vocabulary_without_its_head_is_refused(tmp_path):
    net = random_net(draft_vocab_size=41).with_tensors(lm_head__weight=None)
    assert "the target's cannot serve its reduced vocabulary" in refusal(write_net(tmp_path, net, "speculators, new"))


def test_domino_and_gguf_are_known_by_name(tmp_path):
    folder = write_net(tmp_path / "domino", random_net(), **nested(projector_type="domino"))
    assert AutoDrafter.detect(folder).variant == "Domino"
    key, kind, value = b"general.architecture", (8).to_bytes(4, "little"), b"dflash"
    header = b"GGUF" + (3).to_bytes(4, "little") + bytes(16) + len(key).to_bytes(8, "little") + key + kind
    for name, architecture in (("gguf", value), ("other", b"llama")):
        (tmp_path / name).mkdir()
        content = header + len(architecture).to_bytes(8, "little") + architecture
        (tmp_path / name / "model.gguf").write_bytes(content)
    assert AutoDrafter.detect(tmp_path / "gguf").variant == "GGUF"
    assert "holds a GGUF file, which is not served yet" in refusal(tmp_path / "gguf")
    assert "no known drafter format matches" in refusal(tmp_path / "other")


def test_weights_without_fields_and_fields_without_weights_are_refused(tmp_path):
    config, tensors = FORMATS["z-lab"](random_net())
    only = write(tmp_path / "only fields", config, {})
    assert "lacks the tensor fc.weight" in refusal(only)
    (only / "model.safetensors").unlink()
    assert "no known drafter format matches" in refusal(only)
    del tensors["fc.weight"]
    assert "no known drafter format matches" in refusal(write(tmp_path / "no fc", {"model_type": "qwen3"}, tensors))


def test_embeddings_as_a_prompt_are_refused(tmp_path):
    target = tiny_target("llama")
    drafter = AutoDrafter.from_pretrained(write_net(tmp_path, random_net()), target=target)
    embeddings = target.get_input_embeddings()(prompts([9])["input_ids"])
    with pytest.raises(ValueError, match="`inputs_embeds` is not served with a 'dflash' drafter"):
        target.generate(inputs_embeds=embeddings, assistant_model=drafter, max_new_tokens=4)
