"""The drafters in model_cards/ are complete repositories that do what their cards say."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hf_specdec import AutoDrafter
from hf_specdec.demo import Unavailable, load_small_target, mtbench_questions

CARDS = sorted(path for path in (Path(__file__).parent.parent / "model_cards").iterdir() if path.is_dir())
EAGLE3, MTP, DIFFUSION = (CARDS[0].parent / f"smollm2-135m-instruct-{name}" for name in ("eagle3", "mtp", "diffusion"))
BLOCKS = [path for path in CARDS if path not in (EAGLE3, MTP, DIFFUSION)]


@pytest.mark.parametrize("folder", CARDS, ids=lambda path: path.name)
def test_a_repository_is_complete_and_small(folder):
    assert {path.name for path in folder.iterdir()} >= {"README.md", "config.json", "model.safetensors"}
    assert (folder / "model.safetensors").stat().st_size <= 24e6
    front = (folder / "README.md").read_text().split("---")[1]
    for field in ("license:", "base_model:", "tags:", "library_name:"):
        assert f"\n{field}" in front
    assert AutoDrafter.detect(folder).method in folder.name.replace("-", "_") + folder.name


@pytest.mark.parametrize("folder", BLOCKS, ids=lambda path: path.name)
def test_the_block_drafters_are_in_speculators_format(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] in folder.name
    assert config["aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    with safe_open(folder / "model.safetensors", "pt") as file:
        names, offsets, kept = set(file.keys()), file.get_tensor("d2t"), file.get_tensor("t2d")
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight"} <= names
    assert torch.equal(kept.nonzero().flatten(), torch.arange(len(offsets)) + offsets)


def test_the_eagle3_head_is_in_the_format_of_serving_engines():
    config = json.loads((EAGLE3 / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
    with safe_open(EAGLE3 / "model.safetensors", "pt") as file:
        names, offsets, kept = set(file.keys()), file.get_tensor("d2t"), file.get_tensor("t2d")
    assert {"fc.weight", "norm.weight", "lm_head.weight", "midlayer.hidden_norm.weight", "fc_norm.0.weight"} <= names
    assert torch.equal(kept.nonzero().flatten(), torch.arange(len(offsets)) + offsets)


def test_the_mtp_layer_has_deepseeks_names_and_shares_embedding_and_head():
    config = json.loads((MTP / "config.json").read_text())
    assert config["mtp_family"] == "deepseek_v3" and config["num_nextn_predict_layers"] == 1
    assert config["mtp_carry"] == "raw", "as it was trained"
    with safe_open(MTP / "model.safetensors", "pt") as file:
        names = {name.removeprefix("model.layers.30.") for name in set(file.keys())}
        assert file.get_slice("model.layers.30.eh_proj.weight").get_shape() == [576, 1152]
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "mlp.up_proj.weight"} <= names
    assert not any(name.startswith(("model.", "embed_tokens.", "shared_head.head.")) for name in names)


def test_the_diffusion_drafter_holds_layers_only():
    config = json.loads((DIFFUSION / "config.json").read_text())
    assert (config["model_type"], config["block_size"], config["mask_token_id"]) == ("block_diffusion", 8, 16)
    assert (config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]) == (576, 49152, 3)
    with safe_open(DIFFUSION / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert len(names) == 3 * 9 + 1
    assert all(name.startswith("model.layers.") or name == "model.norm.weight" for name in names)


@pytest.fixture(scope="module")
def target():
    try:
        return load_small_target(torch.float32)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.real_target
@pytest.mark.parametrize("folder", CARDS, ids=lambda path: path.name)
def test_a_drafter_drafts_well_and_changes_nothing(folder, target):
    """On questions that it was not trained on."""
    model, tokenizer = target
    drafter = AutoDrafter.from_pretrained(folder, target=model, governor="off")
    emitted = verifications = 0
    for question in mtbench_questions()[:3]:
        message = [{"role": "user", "content": question.turns[0]}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        options = {"do_sample": False, "max_new_tokens": 64}
        expected = model.generate(**inputs, **options)
        found = model.generate(**inputs, **options, assistant_model=drafter)
        assert torch.equal(found, expected)
        emitted += drafter.last_stats.num_emitted
        verifications += drafter.last_stats.num_verifications
    assert emitted / verifications > (1.25 if folder == DIFFUSION else 1.5)  # it does not see the target's states
