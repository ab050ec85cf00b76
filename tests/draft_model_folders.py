"""Folders of a small draft model: changed in one place, refused, or drafting for a target."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_greedy import plain, speculative
from tiny import VOCAB_SIZE, prompts, tiny_target
from tokenizers import Tokenizer, models

from hf_specdec import AutoDrafter


def save_draft_model(folder: Path) -> Path:
    """A tiny qwen3 as save_pretrained writes it."""
    tiny_target("qwen3", seed=1).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, size: int = VOCAB_SIZE, swapped: bool = False) -> None:
    vocabulary = {f"token{i}": i for i in range(size)}
    if swapped:
        vocabulary["token5"], vocabulary["token6"] = 6, 5
    Tokenizer(models.WordLevel(vocabulary, unk_token="token0")).save(str(folder / "tokenizer.json"))


@cache
def expected_text():
    model, inputs = tiny_target("llama"), prompts([9, 4])
    return inputs, plain(model, inputs)


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(fields)
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path, target, error=ValueError, **options) -> str:
    with pytest.raises(error) as caught:
        AutoDrafter.from_pretrained(folder, target=target, **options)
    return str(caught.value)


def assert_drafts(drafter, target) -> None:
    """It drafts for the target, and the text is the target's own."""
    inputs, expected = expected_text()
    assert torch.equal(speculative(target, inputs, drafter), expected)
    assert drafter.last_stats.num_drafted > 0
