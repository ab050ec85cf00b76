"""MTP layers are found where they are published, complete or not at all, and nothing else is read."""

import json
from pathlib import Path

import pytest
import torch
from mtp_formats import (
    FAMILIES,
    STANDALONE,
    deepseek_v3,
    deepseek_v4,
    llama,
    mimo_v2_flash,
    qwen3_5,
    qwen4_exp,
    random_target,
    write_standalone,
    write_target,
)
from mtp_reference import Reference
from mtp_rounds import rounds_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_eagle3 import largest_error
from test_greedy import plain, speculative
from tiny import prompts, tiny_target
from tiny_hybrids import tiny_own
from transformers import AutoModelForCausalLM

from hf_specdec import AutoDrafter
from hf_specdec.drafters.mtp import MtpDrafter, source
from hf_specdec.drafters.mtp.families import family_of
from hf_specdec.drafters.mtp.modeling import MtpModel
from hf_specdec.export.mtp import save_mtp

CHAIN = dict(max_new_tokens=36, eos_token_id=None)


def errors(drafter, target, published) -> float:
    return largest_error(rounds_of(drafter, target, prompts([9]), **CHAIN), Reference(published, target))


@pytest.mark.parametrize("family", STANDALONE)
def test_names_of_every_family_may_stand_alone(tmp_path, family):
    published = STANDALONE[family]()
    target = random_target(published)
    drafter = AutoDrafter.from_pretrained(write_standalone(tmp_path, published), target=target)
    assert errors(drafter, target, published) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_every_family_are_known_without_a_target(tmp_path, family):
    assert AutoDrafter.detect(write_standalone(tmp_path, FAMILIES[family]())).method == "mtp"


def test_attention_with_sinks_is_run_eagerly_whatever_the_target_takes(tmp_path):
    published = mimo_v2_flash(1)
    target = random_target(published)
    target.config._attn_implementation = "flash_attention_4"
    drafter = AutoDrafter.from_pretrained(write_standalone(tmp_path, published), target=target)
    assert drafter.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_standalone_repository_serves_its_target(tmp_path, num_layers):
    published = llama(num_layers)
    folder = write_standalone(tmp_path, published, num_nextn_predict_layers=num_layers, num_hidden_layers=3)
    found = AutoDrafter.detect(folder)
    assert (found.method, found.variant) == ("mtp", "standalone, names of deepseek_v3")
    target = random_target(published)
    assert errors(AutoDrafter.from_pretrained(folder, target=target), target, published) < 1e-4


def test_a_standalone_repository_may_be_that_of_another_family(tmp_path):
    published = qwen3_5()
    target = random_target(published)
    folder = write_standalone(tmp_path, published)
    assert AutoDrafter.detect(folder).variant == "standalone, names of qwen3_next"
    assert errors(AutoDrafter.from_pretrained(folder, target=target), target, published) < 1e-4


def test_an_embedding_and_a_head_of_their_own_are_used_and_copies_are_not_kept(tmp_path):
    published = llama()
    target = random_target(published)
    own = dict(published.tensors)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in (
        ("embed_tokens", target.get_input_embeddings().weight),
        ("shared_head.head", target.get_output_embeddings().weight),
    ):
        published.tensors[f"model.layers.3.{name}.weight"] = tensor.detach().clone()
        own[f"model.layers.3.{name}.weight"] = 0.15 * torch.randn(tensor.shape, generator=generator)
    copies = AutoDrafter.from_pretrained(write_standalone(tmp_path / "copies", published), target=target)
    assert not any("embed_tokens" in name or "lm_head" in name for name, _ in copies.named_parameters())
    published.tensors = own
    drafter = AutoDrafter.from_pretrained(write_standalone(tmp_path / "own", published), target=target)
    reference = Reference(published, target)
    reference.embedding = own["model.layers.3.embed_tokens.weight"].double()
    reference.head = own["model.layers.3.shared_head.head.weight"].double()
    assert largest_error(rounds_of(drafter, target, prompts([9]), **CHAIN), reference) < 1e-4


@pytest.mark.parametrize("family", [llama, deepseek_v3, qwen3_5, deepseek_v4, qwen4_exp])
def test_what_is_written_is_read_again(tmp_path, family):
    published = family()
    target = random_target(published)
    model = AutoDrafter.from_pretrained(write_standalone(tmp_path / "read", published), target=target).model
    save_mtp(tmp_path / "written", model, dtype=torch.float32)
    assert AutoDrafter.detect(tmp_path / "written").method == "mtp"
    drafter = AutoDrafter.from_pretrained(tmp_path / "written", target=target)
    assert errors(drafter, target, published) < 1e-4


def test_a_standalone_repository_may_name_its_carry(tmp_path):
    published, target = llama(), tiny_target("llama")
    by_name = {
        carry: AutoDrafter.from_pretrained(
            write_standalone(tmp_path / carry, published, mtp_carry=carry), target=target
        ).model.family.carry
        for carry in ("raw", "normed")
    }
    assert by_name == {"raw": "raw", "normed": "normed"}
    with pytest.raises(ValueError, match="mtp_carry 'both'; it is 'raw' or 'normed'"):
        AutoDrafter.from_pretrained(write_standalone(tmp_path / "both", published, mtp_carry="both"), target=target)


def test_a_whole_model_with_mtp_layers_is_no_standalone_repository(tmp_path):
    assert AutoDrafter.detect(write_target(tmp_path, deepseek_v3())).method == "draft_model"


def promising(folder: Path, drop: str) -> Path:
    """A checkpoint whose config promises an MTP layer, without the tensors whose names hold `drop`."""
    write_target(folder, deepseek_v3())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {name: tensor for name, tensor in load_file(folder / "mtp.safetensors").items() if drop not in name}
    save_file(tensors, folder / "mtp.safetensors", metadata={"format": "pt"})
    kept = {name: file for name, file in index["weight_map"].items() if file != "mtp.safetensors" or name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": kept}))
    return folder


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("", r"promises 1 MTP layers \(num_nextn_predict_layers\) and .* has no tensors named layers\.3\.enorm"),
        ("hnorm", r"lacks the tensors layers\.3\.hnorm\.weight"),
        ("experts.2.up_proj", r"lacks the tensors layers\.3\.mlp\.experts\.2\.up_proj\.weight"),
        ("experts.3.", r"experts\.gate_up_proj of shape \[3, 64, 64\]|experts\.down_proj of shape \[3, 64, 32\]"),
    ],
)
def test_promised_tensors_that_are_absent_are_named_and_never_random(tmp_path, drop, message):
    target = AutoModelForCausalLM.from_pretrained(promising(tmp_path, drop))
    with pytest.raises(ValueError, match=message):
        AutoDrafter.for_target(target, "mtp")


def test_another_checkpoint_of_the_target_may_be_read(tmp_path):
    published = deepseek_v3()
    write_target(tmp_path / "whole", published)
    target = AutoModelForCausalLM.from_pretrained(promising(tmp_path / "without", ""))
    drafter = AutoDrafter.for_target(target, "mtp", repository=tmp_path / "whole")
    assert errors(drafter, target, published) < 1e-4


@pytest.mark.parametrize("num_files", [12])
def test_only_the_shards_that_hold_mtp_tensors_are_touched(tmp_path, num_files, monkeypatch):
    published = deepseek_v3()
    target = AutoModelForCausalLM.from_pretrained(write_target(tmp_path, published))
    index_file = tmp_path / "model.safetensors.index.json"
    names = json.loads(index_file.read_text())["weight_map"]
    mtp = sorted(published.tensors)
    for number in range(2):  # the MTP layer lies in two of the shards
        part = {name: published.tensors[name] for name in mtp[number::2]}
        save_file(part, tmp_path / f"shard-{number}.safetensors", metadata={"format": "pt"})
        names |= dict.fromkeys(part, f"shard-{number}.safetensors")
    others = [name for name in names if name not in published.tensors]
    names |= {name: f"shard-{2 + i % (num_files - 2)}.safetensors" for i, name in enumerate(others)}
    index_file.write_text(json.dumps({"weight_map": names}))
    for file in ("own.safetensors", "mtp.safetensors"):
        (tmp_path / file).unlink()  # and of the shards of the target's own layers, none exists
    opened = []

    def watched(path, **options):
        opened.append(Path(path).name)
        return safe_open(path, **options)

    monkeypatch.setattr(source, "safe_open", watched)
    drafter = AutoDrafter.for_target(target, "mtp")
    assert sorted(opened) == ["shard-0.safetensors", "shard-1.safetensors"]
    assert errors(drafter, target, published) < 1e-4


def test_from_the_hub_only_the_index_and_those_shards_are_asked_for(tmp_path, monkeypatch):
    published = deepseek_v3()
    target = AutoModelForCausalLM.from_pretrained(write_target(tmp_path, published))
    asked = []

    def download(name, file, **where):
        asked.append((name, file, where["revision"], where["subfolder"], where["token"]))
        return str(tmp_path / file)

    monkeypatch.setattr(source, "hf_hub_download", download)
    target.name_or_path, target.config._commit_hash = "org/name", "abc"
    AutoDrafter.for_target(target, "mtp", token="t", subfolder="here")
    files = ["model.safetensors.index.json", "mtp.safetensors"]
    assert asked == [("org/name", file, "abc", "here", "t") for file in files]
    asked.clear()
    AutoDrafter.for_target(target, "mtp", revision="main")
    assert {revision for _, _, revision, _, _ in asked} == {"main"}


@pytest.mark.parametrize("family", [deepseek_v3, deepseek_v4, qwen4_exp])
def test_weights_take_the_dtypes_of_the_targets_own(tmp_path, family):
    published = family()
    target = published.auto.from_pretrained(write_target(tmp_path, published), dtype=torch.bfloat16)
    drafter = AutoDrafter.for_target(target, "mtp")
    decoder, layer = target.get_decoder(), drafter.model.layers[0]
    theirs = {name: tensor.dtype for own in decoder.layers for name, tensor in own.state_dict().items()}
    ours = {name: tensor.dtype for name, tensor in layer.blocks[0].state_dict().items()}
    assert ours == {name: theirs[name] for name in ours}
    assert {torch.bfloat16, torch.float32} == set(ours.values()) or family is qwen4_exp
    for name in ("hc_head", "hyper_connection_mixer"):
        if (head := getattr(layer, name, None)) is not None:
            found = {key: tensor.dtype for key, tensor in getattr(decoder, name).state_dict().items()}
            assert {key: tensor.dtype for key, tensor in head.state_dict().items()} == found
    inputs = prompts([6])
    assert speculative(target, inputs, drafter, **CHAIN).shape == plain(target, inputs, **CHAIN).shape


def test_targets_whose_layers_cannot_be_run_by_themselves_are_refused_by_class():
    family = family_of("deepseek_v3")
    with pytest.raises(ValueError, match="not served for GPT2LMHeadModel: no `layers`"):
        MtpModel(tiny_target("gpt2"), family, 1)
    target = tiny_own("mamba2")
    with pytest.raises(ValueError, match=r"of Mamba2ForCausalLM .* Mamba2Block cannot be run by itself"):
        MtpDrafter(MtpModel(target, family, 1)).bind(target)


def test_an_index_that_is_damaged_is_refused_by_name(tmp_path):
    target = AutoModelForCausalLM.from_pretrained(write_target(tmp_path, deepseek_v3()))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json is not a readable index of tensors: KeyError\('weight_map'\)"):
        AutoDrafter.for_target(target, "mtp")
    (tmp_path / "model.safetensors.index.json").unlink()
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors\.index\.json nor model\.safetensors"):
        AutoDrafter.for_target(target, "mtp")


def test_bad_input_is_refused_before_anything_is_read(tmp_path):
    for name, message in (
        ("llama", r"'mtp' and no MTP layers are known for targets of type 'llama'"),
        ("gpt2", r"'gpt2'"),
    ):
        with pytest.raises(ValueError, match=message):
            AutoDrafter.for_target(tiny_target(name), "mtp")
    target = random_target(deepseek_v3())
    with pytest.raises(ValueError, match=r"was not loaded from a repository.*repository=\.\.\."):
        AutoDrafter.for_target(target, "mtp")
    with pytest.raises(ValueError, match="num_draft_token"):
        AutoDrafter.for_target(target, "mtp", num_draft_token=3)
    folder = write_standalone(tmp_path / "deeper", llama(), num_hidden_layers=30)
    with pytest.raises(ValueError, match="num_hidden_layers 30 and this one's is 3"):
        AutoDrafter.from_pretrained(folder, target=tiny_target("llama"))
    published = llama()
    published.tensors = {name.replace("layers.3.", "layers.61."): t for name, t in published.tensors.items()}
    with pytest.raises(ValueError, match=r"no tensors are named layers\.3\.enorm"):
        AutoDrafter.from_pretrained(write_standalone(tmp_path / "61", published), target=tiny_target("llama"))
    with pytest.raises(ValueError, match="mtp_family 'ernie'"):
        AutoDrafter.from_pretrained(
            write_standalone(tmp_path / "ernie", llama(), mtp_family="ernie"), target=tiny_target("llama")
        )


def test_layers_of_another_width_or_surplus_tensors_are_refused(tmp_path):
    published = llama()
    published.tensors["model.layers.3.self_attn.sinks"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"does not call for: layers\.3\.self_attn\.sinks"):
        AutoDrafter.from_pretrained(write_standalone(tmp_path / "surplus", published), target=tiny_target("llama"))
    published = llama()
    published.tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(80, 64)
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.up_proj\.weight of shape \[80, 64\]"):
        AutoDrafter.from_pretrained(write_standalone(tmp_path / "width", published), target=tiny_target("llama"))
