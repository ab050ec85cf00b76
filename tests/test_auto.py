"""A repository is loaded as what it is, from wherever it is."""

import shutil
import socket
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
import torch
from draft_model_folders import assert_drafts, change_config, refusal, save_draft_model, save_tokenizer
from safetensors.torch import load_file
from tiny import EOS, VOCAB_SIZE, tiny_config, tiny_target
from transformers import AutoModelForCausalLM

from hf_specdec import AutoDrafter, DrafterFormat
from hf_specdec.drafters.draft_model import DraftModelDrafter

COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Copy it before changing it."""
    return save_draft_model(tmp_path_factory.mktemp("saved") / "draft")


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "draft")


@pytest.fixture
def target():
    return tiny_target("llama")


# What loads


def test_a_causal_language_model_is_a_draft_model(saved, target):
    detected = AutoDrafter.detect(saved)
    assert isinstance(detected, DrafterFormat)
    assert detected.method == "draft_model"
    assert "Qwen3ForCausalLM" in detected.reason
    drafter = AutoDrafter.from_pretrained(saved, target=target)
    assert isinstance(drafter, DraftModelDrafter)
    original = tiny_target("qwen3", seed=1).state_dict()
    for name, tensor in drafter.model.state_dict().items():
        assert torch.equal(tensor, original[name]), name
    assert_drafts(drafter, target)


def test_a_path_may_be_a_string(saved, target):
    assert AutoDrafter.detect(str(saved)) == AutoDrafter.detect(saved)
    AutoDrafter.from_pretrained(str(saved), target=target)


def test_options_reach_the_config_of_the_drafter(saved, target):
    drafter = AutoDrafter.from_pretrained(saved, target=target, num_draft_tokens=3, rule="block", seed=7)
    assert (drafter.spec_config.num_draft_tokens, drafter.spec_config.rule, drafter.spec_config.seed) == (3, "block", 7)


def test_a_subfolder_is_searched_instead_of_the_folder(folder, target):
    assert AutoDrafter.detect(folder.parent, subfolder="draft").method == "draft_model"
    assert_drafts(AutoDrafter.from_pretrained(folder.parent, subfolder="draft", target=target), target)
    assert "`subfolder` is 'elsewhere'" in refusal(folder.parent, target, subfolder="elsewhere")


def test_shards_with_an_index_are_one_model(tmp_path, target):
    tiny_target("qwen3", seed=1).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert_drafts(AutoDrafter.from_pretrained(tmp_path, target=target), target)
    next(tmp_path.glob("model-00002-*")).unlink()
    assert "model-00002" in refusal(tmp_path, target)


def test_a_repository_with_bin_files_only_loads(folder, target):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert AutoDrafter.detect(folder).method == "draft_model"
    assert_drafts(AutoDrafter.from_pretrained(folder, target=target), target)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x02K\x05."], ids=["empty", "no pickle", "a pickled number"])
def test_a_broken_bin_file_is_refused_by_name(folder, target, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    assert "does not load as Qwen3ForCausalLM" in refusal(folder, target)


def test_weights_come_in_the_targets_dtype_and_on_its_device(saved, target):
    drafter = AutoDrafter.from_pretrained(saved, target=target)
    assert (drafter.dtype, drafter.device) == (torch.float32, target.device)
    half = AutoModelForCausalLM.from_config(tiny_config("llama")).to(torch.bfloat16)
    assert AutoDrafter.from_pretrained(saved, target=half).dtype == torch.bfloat16
    assert AutoDrafter.from_pretrained(saved, target=half, dtype=torch.float16).dtype == torch.float16
    assert AutoDrafter.from_pretrained(saved, target=half, device="cpu").device == torch.device("cpu")


def test_code_in_a_repository_is_never_run(folder, target):
    marker = folder / "was_run"
    (folder / "modeling.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.Config"})
    AutoDrafter.detect(folder)
    AutoDrafter.from_pretrained(folder, target=target)
    assert not marker.exists()


# The Hub's cache


@pytest.fixture
def hub(saved, tmp_path, monkeypatch) -> Path:
    """A cache with two revisions of org/draft, and no network."""

    def no_network(*args, **kwargs):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--draft"
    (repository / "refs").mkdir(parents=True)
    for name, commit in (("main", COMMIT), ("older", OTHER_COMMIT)):
        (repository / "refs" / name).write_text(commit)
        shutil.copytree(saved, repository / "snapshots" / commit)
    (repository / "blobs").mkdir()
    weights = repository / "snapshots" / COMMIT / "model.safetensors"
    weights.rename(repository / "blobs" / "0123")  # as in a real cache, files are links
    weights.symlink_to(repository / "blobs" / "0123")
    change_config(repository / "snapshots" / OTHER_COMMIT, architectures=["SomethingElse"])
    shutil.copytree(saved, repository / "snapshots" / OTHER_COMMIT / "small")
    return repository


def test_a_cached_repository_loads_without_a_network(hub, target):
    assert AutoDrafter.detect("org/draft", local_files_only=True).method == "draft_model"
    drafter = AutoDrafter.from_pretrained("org/draft", target=target, local_files_only=True)
    assert_drafts(drafter, target)


def test_a_revision_is_the_one_that_was_asked_for(hub, target):
    for revision in ("main", COMMIT):
        AutoDrafter.from_pretrained("org/draft", target=target, revision=revision, local_files_only=True)
    for revision in ("older", OTHER_COMMIT):
        message = refusal("org/draft", target, revision=revision, local_files_only=True)
        assert "SomethingElse" in message
        where = {"revision": revision, "subfolder": "small", "local_files_only": True}
        assert AutoDrafter.detect("org/draft", **where).method == "draft_model"
        AutoDrafter.from_pretrained("org/draft", target=target, **where)


def test_a_revision_or_repository_that_is_not_there_is_named(hub, target):
    message = refusal("org/draft", target, OSError, revision="v9", local_files_only=True)
    assert "org/draft at revision 'v9'" in message
    assert "org/another" in refusal("org/another", target, OSError, local_files_only=True)
    message = refusal("org/draft", target, subfolder="small", local_files_only=True)
    assert "`subfolder` is 'small'" in message


def test_only_the_files_of_a_drafter_are_downloaded(saved, tmp_path, target, monkeypatch):
    """A Hub with a repository that holds more than one needs."""
    remote = shutil.copytree(saved, tmp_path / "remote")
    (remote / "training").mkdir()
    for name in (
        "optimizer.pt",
        "model.gguf",
        "pytorch_model.bin",
        "modeling.py",
        "training/state.bin",
        "consolidated.safetensors",
    ):
        (remote / name).write_bytes(b"large")
    shutil.copytree(saved, remote / "small")
    shutil.copytree(saved, remote / "older")
    torch.save(load_file(remote / "older" / "model.safetensors"), remote / "older" / "pytorch_model.bin")
    (remote / "older" / "model.safetensors").unlink()
    calls = []

    def snapshot_download(name, allow_patterns, ignore_patterns, **options):
        calls.append((name, options))
        local = tmp_path / f"local{len(calls)}"
        for file in remote.rglob("*"):
            relative = file.relative_to(remote).as_posix()
            allowed, ignored = (
                any(fnmatch(relative, pattern) for pattern in patterns)
                for patterns in (allow_patterns, ignore_patterns)
            )
            if file.is_file() and allowed and not ignored:
                (local / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, local / relative)
        return str(local)

    def downloaded(i):
        local = tmp_path / f"local{i}"
        return {file.relative_to(local).as_posix() for file in local.rglob("*") if file.is_file()}

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    AutoDrafter.from_pretrained("org/draft", target=target, revision="v1", token="secret")
    assert calls == [("org/draft", {"revision": "v1", "token": "secret", "local_files_only": False})]
    assert downloaded(1) == {file.name for file in saved.iterdir()}
    AutoDrafter.from_pretrained("org/draft", target=target, subfolder="small")
    assert downloaded(2) == {f"small/{file.name}" for file in saved.iterdir()}
    AutoDrafter.from_pretrained("org/draft", target=target, subfolder="older")
    assert downloaded(4) == {"older/pytorch_model.bin"} | downloaded(3)


@pytest.mark.parametrize("name", ["no/such/folder", "./nowhere", "/nowhere/at/all"])
def test_a_path_that_is_not_there_is_refused_as_one(hub, target, name):
    message = refusal(name, target, local_files_only=True)
    assert repr(name) in message and "neither a folder nor a repository" in message


def test_the_tokenizer_of_a_cached_target_is_found(folder, hub, monkeypatch):
    save_tokenizer(folder)
    save_tokenizer(hub / "snapshots" / COMMIT, swapped=True)
    target = AutoModelForCausalLM.from_config(tiny_config("llama")).eval()
    target.name_or_path = "org/draft"
    assert "another tokenizer" in refusal(folder, target)
    save_tokenizer(hub / "snapshots" / COMMIT)
    AutoDrafter.from_pretrained(folder, target=target)


# The door itself


def test_a_target_that_is_no_model_is_refused(saved):
    assert "`target` is a str" in refusal(saved, "org/target")
    with pytest.raises(ValueError, match="`target` is a Linear"):
        AutoDrafter.for_target(torch.nn.Linear(2, 2), "lookup")


def test_drafters_that_need_no_weights_live_in_the_target(target):
    for method in ("none", "lookup"):
        drafter = AutoDrafter.for_target(target, method, seed=3)
        assert drafter.method == method and drafter.spec_config.seed == 3
        assert drafter.config.vocab_size == VOCAB_SIZE and drafter.config.eos_token_id == EOS


@pytest.mark.parametrize("method", ["draft_model", "eagle3", ""])
def test_a_method_that_needs_weights_is_not_built_for_a_target(target, method):
    with pytest.raises(ValueError, match="are 'dspark', 'lookup', 'mtp', 'none'"):
        AutoDrafter.for_target(target, method)


def test_the_door_has_no_instances():
    with pytest.raises(TypeError, match="AutoDrafter has no instances"):
        AutoDrafter()
