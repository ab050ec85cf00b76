"""Block sizes and warps: a table for each device's name where there is one, a rule elsewhere."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import torch

FOLDER = Path(__file__).parent / "configs"


class Config(NamedTuple):
    """Elements that a program reads at once (a power of two), its warps, and AMD's hint of waves a SIMD (0: none)."""

    block: int
    num_warps: int
    waves_per_eu: int = 0


def choose(op: str, rows: int, vocab_size: int, device: torch.device) -> Config:
    """The config of `op` for this many rows: the table's entry for the next larger size, or the rule's.

    The rule keeps 8 to 16 elements a lane, and small blocks where few rows would leave the device idle. Programs of
    "residual" and "block_mass" decide their row before they read their block, so theirs are always large.
    """
    if device.type == "cuda":
        for entry in _table(_device_name(device.index or 0)).get(op, ()):
            if rows <= entry["rows"] and vocab_size <= entry["vocab_size"]:
                return Config(entry["block"], entry["num_warps"], entry["waves_per_eu"])
    if op in ("residual", "block_mass"):
        return Config(4096, 8)
    return Config(2048, 4) if rows <= 64 else Config(4096, 4)


def launch_options(exact_denormals: bool, waves_per_eu: int = 0) -> dict[str, bool | int]:
    """Compiler options beside the warps.

    Products may join sums in one rounding. On AMD, exact denormals cost five instructions a logarithm or exponential;
    kernels that only add noise to logits or exponentiate differences do without.
    """
    if torch.version.hip is not None:
        hint = {"waves_per_eu": waves_per_eu} if waves_per_eu else {}
        return {"enable_fp_fusion": True, "allow_flush_denorm": not exact_denormals, **hint}
    return {"enable_fp_fusion": True}


@functools.cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index).replace(" ", "_")


@functools.cache
def _table(name: str) -> dict[str, list[dict[str, int]]]:
    """Entries {vocab_size, rows, block, num_warps, waves_per_eu, tuned} of each op; {} for a device without a table.

    They rise in vocab_size, then in rows: the first that is large enough counts. `tuned` is false where nobody has
    measured yet and the entry is the rule's.
    """
    path = FOLDER / f"device_name={name}.json"
    return json.loads(path.read_text()) if path.exists() else {}
