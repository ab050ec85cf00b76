"""Drafters that read the target's hidden states draft under autocast, as a trainer evaluates."""

from collections.abc import Callable
from pathlib import Path

import mtp_formats
import pytest
import torch
from dflash_formats import random_net, write_net
from dspark_formats import random_drafter, write_drafter
from eagle3_formats import random_head, write_head
from tiny import prompts, tiny_target

from hf_specdec import AutoDrafter

FOLDERS: dict[str, Callable[[Path], Path]] = {
    "eagle3": lambda folder: write_head(folder, random_head(aux_layers=(0, 2, 3))),
    "dflash": lambda folder: write_net(folder, random_net()),
    "dflash 2": lambda folder: write_net(folder, random_net(num_candidates=6)),
    "dspark": lambda folder: write_drafter(folder, random_drafter()),
    "mtp": lambda folder: mtp_formats.write_standalone(folder, mtp_formats.llama()),
}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
def test_a_drafter_drafts_under_autocast(tmp_path, kind, sampling):
    model, inputs = tiny_target("llama"), prompts([9, 4])
    drafter = AutoDrafter.from_pretrained(FOLDERS[kind](tmp_path / "drafter"), target=model, seed=1)
    options = {"do_sample": sampling, "max_new_tokens": 12, "eos_token_id": None}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text = model.generate(**inputs, **options, assistant_model=drafter)
    assert text.shape == (2, 9 + 12)
    assert drafter.last_stats.num_drafted > 0
