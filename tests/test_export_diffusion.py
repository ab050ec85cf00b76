"""export/diffusion.py: layers that were written are those that are read, between the target's embedding and head."""

import json

import pytest
import torch
from diffusion_formats import MASK
from safetensors.torch import load_file, save_file
from test_diffusion_formats import no_forward  # noqa: F401
from test_greedy import plain, speculative
from test_training_diffusion import FAMILIES, target_of
from tiny import VOCAB_SIZE, prompts, tiny_config, tiny_target
from transformers import AutoModelForCausalLM

from hf_specdec import AutoDrafter
from hf_specdec.export.diffusion import save_diffusion
from hf_specdec.training.diffusion import new_layers


@pytest.fixture
def folder(tmp_path):
    save_diffusion(tmp_path, new_layers(tiny_target(), 2), 4, MASK, torch.float32)
    return tmp_path


def narrow_target():
    config = tiny_config("llama")
    config.hidden_size, config.head_dim = 32, 8
    return AutoModelForCausalLM.from_config(config)


def rewrite(folder, tensors=None, **fields) -> None:
    """Change the files: fields of config.json, None leaving one out, and tensors beside those that are there."""
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    if tensors is not None:
        kept = {**load_file(folder / "model.safetensors"), **tensors}
        save_file({name: x for name, x in kept.items() if x is not None}, folder / "model.safetensors")


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_that_were_written_are_read_bit_for_bit(tmp_path, name):
    target = target_of(name)
    model = new_layers(target, 2)
    save_diffusion(tmp_path, model, 6, MASK, torch.float32)
    detected = AutoDrafter.detect(tmp_path)
    assert (detected.method, detected.variant) == ("diffusion", "block diffusion")
    drafter = AutoDrafter.from_pretrained(tmp_path, target=target)
    assert type(drafter.model) is type(target)
    loaded = drafter.model.base_model.state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())
    for field in ("rope_parameters", "rms_norm_eps", "head_dim", "hidden_act", "num_key_value_heads"):
        if hasattr(model.config, field):
            assert getattr(drafter.model.config, field) == getattr(model.config, field), field
    canvas = drafter.canvas
    assert (canvas.block_size, canvas.full_attention, canvas.shift, canvas.barred) == (6, False, 0, (MASK,))


def test_embedding_and_head_are_neither_written_nor_kept(folder):
    tensors = load_file(folder / "model.safetensors")
    assert {"model.norm.weight", "model.layers.1.mlp.up_proj.weight"} <= tensors.keys()
    assert not any("embed" in name or "lm_head" in name for name in tensors)
    drafter = AutoDrafter.from_pretrained(folder, target=tiny_target())
    assert all(len(parameter) != VOCAB_SIZE for parameter in drafter.parameters())


def test_weights_are_written_in_bf16_unless_told(tmp_path):
    save_diffusion(tmp_path, new_layers(tiny_target(), 1), 4, MASK)
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(tmp_path / "model.safetensors").values())
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    drafter = AutoDrafter.from_pretrained(tmp_path, target=tiny_target())
    assert drafter.dtype == torch.float32
    assert torch.equal(speculative(tiny_target(), prompts([9, 4]), drafter), plain(tiny_target(), prompts([9, 4])))


# What is refused


@pytest.mark.parametrize(
    ("tensors", "fields", "sentence"),
    [
        (None, {"hidden_size": 32}, "mismatched tensors model."),
        (
            None,
            {"vocab_size": VOCAB_SIZE + 3},
            f"for a vocab_size of {VOCAB_SIZE + 3}; LlamaForCausalLM has {VOCAB_SIZE}",
        ),
        (None, {"vocab_size": "many"}, "vocab_size 'many' where a positive integer belongs"),
        (None, {"num_hidden_layers": 3}, "missing tensors model.layers.2."),
        (None, {"mask_token_id": None}, "does not say which token is its mask"),
        (None, {"mask_token_id": VOCAB_SIZE}, f"mask_token_id of config.json is {VOCAB_SIZE}"),
        (
            {"lm_head.weight": torch.zeros(VOCAB_SIZE, 64)},
            {},
            "holds lm_head.weight; a block diffusion drafter shares the target's",
        ),
        (
            {"model.embed_tokens.weight": torch.zeros(VOCAB_SIZE, 64)},
            {},
            "holds model.embed_tokens.weight; a block",
        ),
        ({"model.norm.weight": None}, {}, "missing tensors model.norm.weight"),
    ],
    ids=str,
)
def test_files_that_do_not_fit(folder, no_forward, tensors, fields, sentence):  # noqa: F811
    rewrite(folder, tensors, **fields)
    with pytest.raises(ValueError) as error:
        AutoDrafter.from_pretrained(folder, target=tiny_target())
    assert sentence in str(error.value)


def test_a_target_of_another_size(folder, no_forward):  # noqa: F811
    for other, sentence in (
        (tiny_target("llama", vocab_size=VOCAB_SIZE + 1), f"vocab_size of {VOCAB_SIZE}; LlamaForCausalLM has"),
        (narrow_target(), "hidden_size of 64; LlamaForCausalLM has 32"),
    ):
        with pytest.raises(ValueError, match=sentence):
            AutoDrafter.from_pretrained(folder, target=other)
