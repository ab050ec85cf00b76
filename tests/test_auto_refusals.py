"""A repository that cannot be loaded is refused with a sentence that says what was found."""

import json
import struct
from pathlib import Path

import pytest
import torch
from draft_model_folders import change_config, change_tensors, refusal, save_draft_model
from safetensors.torch import load_file, save_file
from tiny import EOS, VOCAB_SIZE, tiny_encoder_decoder, tiny_target
from transformers import AutoModelForCausalLM, Mamba2Config, Mamba2ForCausalLM

from hf_specdec import AutoDrafter


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_draft_model(tmp_path / "draft")


@pytest.fixture
def target():
    return tiny_target("llama")


def test_an_unknown_format_is_refused_with_all_that_was_found(tmp_path, target):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["UnheardOf"], "model_type": "unheard_of"}))
    (tmp_path / "README.md").write_text("hello")
    save_file({f"layers.{i}.weight": torch.zeros(2) for i in range(7)}, tmp_path / "draft.safetensors")
    message = refusal(tmp_path, target)
    for found in ("UnheardOf", "unheard_of", "README.md", "draft.safetensors", "layers.0.weight", "(7 in all)"):
        assert found in message
    with pytest.raises(ValueError, match="no known drafter format"):
        AutoDrafter.detect(tmp_path)


def test_an_empty_name_is_not_the_current_folder(folder, target, monkeypatch):
    monkeypatch.chdir(folder)
    assert AutoDrafter.from_pretrained(".", target=target).method == "draft_model"
    assert "the drafter's name is ''; give a folder, '.' for this one" in refusal("", target)
    with pytest.raises(ValueError, match="the drafter's name is ''"):
        target.generate(torch.ones(1, 3, dtype=torch.long), assistant_model="", max_new_tokens=2)


def test_an_empty_folder_is_refused(tmp_path, target):
    assert "files: none; config: none; tensors: none" in refusal(tmp_path, target)


@pytest.mark.parametrize(
    "tensor",
    ["fc.weight", "d2t", "t2d", "midlayer.self_attn.q_proj.weight", "model.fc.weight", "enorm.weight", "hnorm.weight"],
)
def test_a_head_that_calls_itself_a_language_model_is_not_taken_for_one(folder, target, tensor):
    change_tensors(folder, lambda tensors: tensors.update({tensor: torch.zeros(4, 4)}))
    assert "no known drafter format" in refusal(folder, target)


@pytest.mark.parametrize(
    "field",
    [
        {"draft_vocab_size": 32},
        {"eagle_config": {}},
        {"dflash_config": {}},
        {"speculators_model_type": "eagle3"},
        {"markov_rank": 4},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_config_of_a_head_is_not_taken_for_a_language_models(folder, target, field):
    change_config(folder, **field)
    assert "no known drafter format" in refusal(folder, target)


def test_a_head_in_bin_files_is_refused_for_the_tensors_that_it_lacks(folder, target):
    """Nothing of it can be seen before it is loaded: the config is a whole model's."""
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if "layers.0." in name or "embed" in name
    }
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "fc.weight": torch.zeros(64, 128)}, folder / "pytorch_model.bin")
    message = refusal(folder, target)
    assert "not a complete Qwen3ForCausalLM: missing tensors" in message


@pytest.mark.parametrize("size", [0, 5, 60, 2_000, 100_000, -1])
def test_a_truncated_safetensors_file_is_refused_by_name(folder, target, size):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    message = refusal(folder, target)
    assert "model.safetensors is not a readable safetensors file (truncated or corrupt)" in message


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 5) + b"[1,2]",
        struct.pack("<Q", 1) + b"7",
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    ],
    ids=["a huge header", "a list", "a number", "no tensor", "no text", "a pointer of git lfs"],
)
def test_a_corrupt_safetensors_file_is_refused_by_name(folder, target, content):
    (folder / "model.safetensors").write_bytes(content)
    message = refusal(folder, target)
    assert "model.safetensors is not a readable safetensors file (truncated or corrupt)" in message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"null", b'"config"', b"\xff\xfe{}"])
def test_a_config_that_is_no_json_object_is_refused_by_name(folder, target, content):
    (folder / "config.json").write_bytes(content)
    assert "config.json" in refusal(folder, target)


@pytest.mark.parametrize("architectures", [None, [], 5, "Qwen3ForCausalLM", [["a"]], [None], ["A", "B"], {}])
def test_architectures_of_any_other_form_are_an_unknown_format(folder, target, architectures):
    change_config(folder, architectures=architectures)
    assert "no known drafter format" in refusal(folder, target)


def test_a_folder_without_a_config_is_refused(folder, target):
    (folder / "config.json").unlink()
    message = refusal(folder, target)
    assert "no known drafter format" in message and "config: none" in message


@pytest.mark.parametrize(
    ("fields", "found"),
    [({"vocab_size": "many"}, "vocab_size"), ({"model_type": "unheard_of"}, "unheard_of")],
    ids=["a field", "the type"],
)
def test_a_config_that_transformers_refuses_is_named(folder, target, fields, found):
    change_config(folder, **fields)
    message = refusal(folder, target)
    assert "does not load as Qwen3ForCausalLM" in message and found in message


MISSING = "model.layers.1.mlp.up_proj.weight"


def test_missing_tensors_are_named(folder, target):
    change_tensors(folder, lambda tensors: tensors.pop(MISSING))
    assert f"not a complete Qwen3ForCausalLM: missing tensors {MISSING}." in refusal(folder, target)


def test_surplus_tensors_are_named(folder, target):
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.9.gate": torch.zeros(2)}))
    assert "unexpected tensors model.layers.9.gate." in refusal(folder, target)


def test_tensors_of_the_wrong_shape_are_named_with_both_shapes(folder, target):
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}))
    assert "mismatched tensors model.norm.weight [3] (the model's is [64])." in refusal(folder, target)


def test_a_model_that_cannot_roll_back_is_refused_as_a_draft_model(tmp_path, target):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}
    Mamba2ForCausalLM(Mamba2Config(vocab_size=VOCAB_SIZE, eos_token_id=EOS, **shape)).save_pretrained(tmp_path)
    assert "Mamba2ForCausalLM cannot be a draft model" in refusal(tmp_path, target)


def test_an_encoder_decoder_is_no_draft_model_for_a_target_without_an_encoder(tmp_path, target):
    tiny_encoder_decoder().save_pretrained(tmp_path)
    assert "a T5ForConditionalGeneration, which needs an encoder" in refusal(tmp_path, target)


def test_unknown_options_are_refused_before_weights_are_read(folder, target, monkeypatch):
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("weights were read")
    )
    assert "unknown option 'draft_tokens'" in refusal(folder, target, draft_tokens=3)
    assert "`rule` is 'fast'" in refusal(folder, target, rule="fast")
