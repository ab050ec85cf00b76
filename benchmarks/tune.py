"""Search block sizes and warps for the GPU at hand, and write them where the kernels look for them.

    python benchmarks/tune.py [--op row_sample ...]      measures; minutes
    python benchmarks/tune.py --untuned AMD_Instinct_MI300X     the rule's values, marked as nobody's measurement

Writes kernels/torch-ext/specdec_verify/configs/device_name=NAME.json. A config whose tokens differ from the reference's
is never written, however fast. Ops that are not named keep their entries.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

CONFIGS = Path(__file__).parents[1] / "kernels/torch-ext/specdec_verify/configs"
VOCAB_SIZES = (32768, 65536, 131072, 262144)
ROWS = (8, 64, 512)
BLOCKS, WARPS, WAVES = (1024, 2048, 4096, 8192), (1, 2, 4, 8, 16), (0, 2, 4)
VARIANTS = {"row_sample": ("greedy", "gumbel"), "residual": ("full",), "block_mass": ("full",)}
"""The ops that have a config, and the variants whose summed time it is chosen by."""

Entry = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=list(VARIANTS), help="what to tune (default: all)")
    parser.add_argument("--untuned", metavar="NAME", help="write the rule's values for a device of this name")
    parser.add_argument("--folder", type=Path, default=CONFIGS, help="where the table goes")
    given = parser.parse_args(arguments)
    if given.untuned:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # nothing is launched, so no GPU need be there
    elif not torch.cuda.is_available():
        print("There is no GPU here that torch can use; --untuned NAME writes a table without measuring.")
        return 2
    from kernel_ops import kernels

    path = given.folder / f"device_name={given.untuned or torch.cuda.get_device_name().replace(' ', '_')}.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    for op in given.op or [op for op in VARIANTS if hasattr(kernels, op)]:
        table[op] = [
            untuned(op, vocab_size, rows) if given.untuned else tuned(op, vocab_size, rows, torch.device("cuda"))
            for vocab_size, rows in itertools.product(VOCAB_SIZES, ROWS)
        ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(as_json(table))
    print(f"written to {path}")
    return 0


def untuned(op: str, vocab_size: int, rows: int) -> Entry:
    """The rule's entry: that of a device without a table."""
    from kernel_ops import kernels

    return entry(vocab_size, rows, kernels.choose(op, rows, vocab_size, torch.device("cpu")), measured=False)


def tuned(op: str, vocab_size: int, rows: int, device: torch.device) -> Entry:
    """The fastest entry among those that are right."""
    from gpu_sections import seconds
    from kernel_ops import OPS, TOLERANCE, RowOp, Shape

    logits = Shape(max(1, rows // 8), 7, vocab_size, torch.bfloat16).logits(device)
    ops = [each for each in OPS if isinstance(each, RowOp) and each.name == op and each.variant in VARIANTS[op]]
    calls = [(each, each.arguments(logits, seed=1)) for each in ops]
    times = {}
    for config in candidates():
        try:
            times[config] = sum(
                seconds(lambda c=c, a=a, config=config: c.run({**a, "config": config})) for c, a in calls
            )
        except Exception as error:  # what a compiler refuses is no candidate
            print(f"{op} {tuple(config)}: {type(error).__name__}")
    for config in sorted(times, key=times.__getitem__):
        found = [(each, {**a, "config": config}) for each, a in calls]
        if max(each.loss(a, each.run(a)) for each, a in found) <= TOLERANCE:
            print(f"{op} V {vocab_size} rows {rows}: {tuple(config)}, {1e6 * times[config]:.1f} us", flush=True)
            return entry(vocab_size, rows, config, measured=True)
        print(f"{op} {tuple(config)} gives wrong tokens")
    raise RuntimeError(f"no config of {op} is right on this device; run benchmarks/gpu_check.py and report it")


def candidates() -> list[Any]:
    """Configs with 2 to 32 elements a lane, of at most 1024 lanes; hints of waves on AMD only."""
    from kernel_ops import kernels

    lanes = torch.cuda.get_device_properties(0).warp_size
    waves = WAVES if torch.version.hip is not None else (0,)
    return [
        kernels.Config(block, num_warps, hint)
        for block, num_warps, hint in itertools.product(BLOCKS, WARPS, waves)
        if 2 <= block / (num_warps * lanes) <= 32 and num_warps * lanes <= 1024
    ]


def entry(vocab_size: int, rows: int, config: Any, measured: bool) -> Entry:
    return {"vocab_size": vocab_size, "rows": rows, **config._asdict(), "tuned": measured}


def as_json(table: dict[str, list[Entry]]) -> str:
    """An entry a line."""
    ops = (f' "{op}": [\n  ' + ",\n  ".join(map(json.dumps, entries)) + "\n ]" for op, entries in table.items())
    return "{\n" + ",\n".join(ops) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
