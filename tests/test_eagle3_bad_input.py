"""A head that cannot draft for a target is refused with one sentence, before any forward."""

import os

import pytest
import torch
from eagle3_formats import FORMATS, random_head, write, write_head
from safetensors.torch import load_file, save_file
from tiny import prompts, tiny_target

from hf_specdec import AutoDrafter


def refusal(folder, target=None, **options) -> str:
    target = tiny_target("llama") if target is None else target
    forward = target.forward
    target.forward = None  # whoever runs it fails
    try:
        with pytest.raises(ValueError) as caught:
            AutoDrafter.from_pretrained(folder, target=target, **options)
    finally:
        target.forward = forward
    message = str(caught.value)
    assert "\n" not in message
    return message


CONFIGS = {
    "a head size of 0": (dict(head_dim=0), "head_dim 0 where a positive integer belongs"),
    "a negative head size": (dict(head_dim=-16), "head_dim -16"),
    "a head size that does not divide": (dict(head_dim=24), "4 heads of size 24"),
    "a head size in words": (dict(head_dim="16"), "head_dim '16'"),
    "no heads": (dict(num_attention_heads=0), "num_attention_heads 0"),
    "neither heads nor their size": (dict(num_attention_heads=None, head_dim=None), "neither num_attention_heads"),
    "a negative epsilon": (dict(rms_norm_eps=-1e-5), "rms_norm_eps -1e-05"),
    "a flag in words": (dict(norm_output="false"), "norm_output 'false' where true or false belongs"),
    "layer ids in words": (dict(eagle_aux_hidden_state_layer_ids="2,4"), "a list of integers belongs"),
    "an eagle_config in words": (dict(eagle_config="yes"), "eagle_config 'yes' where an object belongs"),
    "an unknown activation": (dict(hidden_act="silly"), "hidden_act 'silly'"),
    "an unknown rotary embedding": (dict(rope_scaling={"type": "spiral"}), "'spiral'"),
    "yarn without a factor": (dict(rope_scaling={"type": "yarn"}), "'yarn' without factor"),
    "a negative rope factor": (dict(rope_scaling={"type": "linear", "factor": -2}), "factor -2"),
    "a rope in words": (dict(rope_scaling="yarn"), "rope_scaling 'yarn' where an object belongs"),
    "windows in words": (dict(use_sliding_window=True, max_window_layers="all"), "max_window_layers 'all'"),
    "a negative window": (dict(sliding_window=-1), "sliding_window -1"),
    "another vocabulary": (dict(vocab_size=32000), "vocabulary of 32000 and the target's is 97"),
    "more layers than the target has": (dict(eagle_aux_hidden_state_layer_ids=[2, 3, 9]), "the target has 3 layers"),
    "negative layer ids": (dict(eagle_aux_hidden_state_layer_ids=[2, 1, -1]), "the target has 3 layers"),
    "two layer ids for three": (dict(eagle_aux_hidden_state_layer_ids=[2, 1]), "fc for 192 inputs, and 2 hidden"),
    "another hidden size": (dict(target_hidden_size=128), "fc for 192 inputs"),
    "a norm that is missing": (dict(fc_norm=True), "says fc_norm is True and lacks the tensor fc_norm.0.weight"),
    "another missing norm": (dict(norm_before_fc=True), "lacks the tensor input_norm.weight"),
    "a quantised head": (dict(quantization_config={"quant_method": "fp8"}), "is quantised"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_absurd_configs_are_refused(tmp_path, case):
    fields, expected = CONFIGS[case]
    # Without t2d, which is believed before vocab_size.
    config, tensors = FORMATS["SpecForge"](random_head())
    del tensors["t2d"]
    message = refusal(write(tmp_path, {**config, "eagle_config": {}, **default_ids(fields), **fields}, tensors))
    assert expected in message


def default_ids(fields) -> dict:
    return {} if "eagle_aux_hidden_state_layer_ids" in fields else {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}


def offsets(change) -> dict:
    head = random_head()
    ids = head.kept.clone()
    change(ids)
    return {"d2t": ids - torch.arange(len(ids))}


def beyond(ids):
    ids[-1] = 97


def doubled(ids):
    ids[5] = ids[4]


def negative(ids):
    ids[0] = -1


TENSORS = {
    "a d2t beyond the vocabulary": (offsets(beyond), "leave the target's vocabulary of 97 or do not increase"),
    "a d2t that names a token twice": (offsets(doubled), "do not increase"),
    "a negative d2t": (offsets(negative), "leave the target's vocabulary"),
    "a short d2t": ({"d2t": torch.zeros(7, dtype=torch.long)}, "a d2t of shape [7] for 41 draft tokens"),
    "no d2t": ({"d2t": None}, "has no d2t to say which"),
    "a d2t that was never filled in": ({"d2t": torch.zeros(41, dtype=torch.long)}, "name different tokens"),
    "a t2d of another target": ({"t2d": torch.ones(500, dtype=torch.bool)}, "vocabulary of 500 and the target's is 97"),
    "no head for a reduced vocabulary": ({"lm_head.weight": None}, "has no lm_head.weight"),
    "no fc": ({"fc.weight": None}, "says use_aux_hidden_state is True and lacks the tensor fc.weight"),
    "no last norm": ({"norm.weight": None}, "lacks the tensors norm.weight"),
    "no projection": ({"midlayer.self_attn.o_proj.weight": None}, "lacks the tensor layers.0.self_attn.o_proj.weight"),
    "a surplus tensor": ({"gate.weight": torch.ones(4)}, "does not call for: gate.weight"),
    "norms for too few states": ({"fc_norm.0.weight": torch.ones(64)}, "lacks the tensors fc_norm.1.weight"),
    "attention from one half only": (
        {"midlayer.self_attn.q_proj.weight": torch.ones(64, 64)},
        "q_proj.weight of shape [64, 64] where [64, 128] is expected",
    ),
    "P-EAGLE without a mask token": ({"mask_hidden": torch.ones(1, 1, 192)}, "does not say which token it masks with"),
    "latent attention": ({"midlayer.self_attn.q_a_proj.weight": torch.ones(8, 128)}, "MLA"),
    "a head of numbers": ({"lm_head.weight": torch.tensor(1.0)}, "lm_head.weight of shape [] where a matrix belongs"),
    "an empty vocabulary": (
        {"lm_head.weight": torch.ones(0, 64), "d2t": torch.ones(0, dtype=torch.long)},
        "leave the target's vocabulary",
    ),
    "scales": ({"midlayer.mlp.up_proj.weight_scale": torch.ones(1)}, "is quantised"),
    "packed weights": ({"midlayer.mlp.up_proj.weight": torch.ones(80, 32, dtype=torch.uint8)}, "is quantised"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_make_the_head_are_refused(tmp_path, case):
    changes, expected = TENSORS[case]
    config, tensors = FORMATS["SpecForge"](random_head())
    tensors = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    assert expected in refusal(write(tmp_path, config, tensors))


def test_targets_of_another_shape_are_refused(tmp_path):
    folder = write_head(tmp_path / "wide", random_head(target_hidden_size=96))
    assert "fc for 288 inputs" in refusal(
        write_head(tmp_path / "a", random_head(target_hidden_size=96), "ModelOpt", target_hidden_size=None)
    )
    assert "made for a hidden size of 96 and the target's is 64" in refusal(folder)
    narrow = random_head(hidden_size=32)
    assert "no embedding, and the target's is 64 wide where 32" in refusal(write_head(tmp_path / "b", narrow))
    shared = random_head(hidden_size=32, draft_vocab_size=97, own_embedding=True).with_tensors(lm_head__weight=None)
    assert "no output head, and the target's is 64 wide" in refusal(write_head(tmp_path / "c", shared, "ModelOpt"))
    few = write_head(tmp_path / "d", random_head(), "SpecForge", eagle_config=None)
    assert "the target has 2 layers" in refusal(few, tiny_target("gpt_oss"))
    assert "has no embed_tokens.weight" in refusal(few, own_embedding=True, aux_layers=(0, 1, 2))
    assert "num_draft_tokens" in refusal(few, num_draft_tokens=-1)


def test_a_bound_head_is_refused_by_another_target(tmp_path):
    drafter = AutoDrafter.from_pretrained(write_head(tmp_path, random_head()), target=tiny_target("llama"))
    with pytest.raises(ValueError, match="vocabulary of 97 and the target's is 50"):
        drafter.bind(tiny_target("llama", vocab_size=50))
    with pytest.raises(ValueError, match="reads hidden state 3 and the target has 2 layers"):
        drafter.bind(tiny_target("gpt_oss"))


def test_truncated_weights_are_refused(tmp_path):
    folder = write_head(tmp_path, random_head())
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert "truncated or corrupt" in refusal(folder)


class WritesAFile:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["code", "numbers", "a list", "text", "half"])
def test_pickles_of_anything_but_tensors_are_refused_and_never_run(tmp_path, kind):
    folder = write_head(tmp_path / "head", random_head(), "SafeAILab")
    file, marker = folder / "pytorch_model.bin", tmp_path / "was_run"
    if kind == "code":
        torch.save({"fc.weight": WritesAFile(marker)}, file)
    elif kind == "numbers":
        torch.save({"fc.weight": 3}, file)
    elif kind == "a list":
        torch.save([torch.ones(2)], file)
    elif kind == "text":
        file.write_text("hello")
    else:
        file.write_bytes(file.read_bytes()[:1000])
    assert "plain tensors, so it is not read" in refusal(folder)
    assert not marker.exists()


def test_other_pickles_beside_the_weights_are_left_alone(tmp_path):
    folder = write_head(tmp_path / "head", random_head(), "SafeAILab")
    torch.save(WritesAFile(tmp_path / "was_run"), folder / "training_args.bin")
    AutoDrafter.from_pretrained(folder, target=tiny_target("llama"))
    assert not (tmp_path / "was_run").exists()


def test_a_hidden_quantisation_is_refused(tmp_path):
    folder = write_head(tmp_path, random_head(), "ModelOpt")
    (folder / "hf_quant_config.json").write_text("{}")
    assert "is quantised" in refusal(folder)


def test_embeddings_as_a_prompt_are_refused(tmp_path):
    target = tiny_target("llama")
    drafter = AutoDrafter.from_pretrained(write_head(tmp_path, random_head()), target=target)
    embeddings = target.get_input_embeddings()(prompts([9])["input_ids"])
    with pytest.raises(ValueError, match="`inputs_embeds` is not served with a 'eagle3' drafter"):
        target.generate(inputs_embeds=embeddings, assistant_model=drafter, max_new_tokens=4)


def test_no_whole_model_is_taken_for_a_head_nor_a_head_for_a_whole_model(tmp_path):
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "model")
    assert AutoDrafter.detect(tmp_path / "model").method == "draft_model"
    config, tensors = FORMATS["SpecForge"](random_head())
    for field in ("draft_vocab_size", "eagle_config"):
        del config[field]
    folder = write(tmp_path / "head", {**config, "architectures": ["LlamaForCausalLM"]}, tensors)
    assert AutoDrafter.detect(folder).method == "eagle3"
    one = load_file(folder / "model.safetensors")
    save_file({"fc.weight": one["fc.weight"]}, folder / "model.safetensors")
    assert "no known drafter format matches" in refusal(folder)
