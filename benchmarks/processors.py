"""Temperature, top-k and top-p over the positions of a block: at once, and one by one as in transformers.

    python benchmarks/processors.py [--out benchmarks/results/FILE.json]

Both ways take turns in one run; seconds are medians.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_specdec.decoding.processors import BlockProcessors

VOCAB_SIZE = 151_936
REPEATS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    out = parser.parse_args().out
    rows = []
    for title, warpers in {
        "temperature 0.6, top-k 20, top-p 0.95": [TopKLogitsWarper(20), TopPLogitsWarper(0.95)],
        "temperature 0.6, top-k 50": [TopKLogitsWarper(50)],
        "temperature 0.6, top-p 0.95": [TopPLogitsWarper(0.95)],
    }.items():
        for num_positions in (1, 4, 8):
            row = measure([TemperatureLogitsWarper(0.6), *warpers], num_positions)
            rows.append({"processors": title, "positions": num_positions, **row})
            print(
                f"{title:38} {num_positions} positions: at once {1e3 * row['block']:7.1f} ms, "
                f"one by one {1e3 * row['one_by_one']:7.1f} ms, {row['one_by_one'] / row['block']:5.1f}x",
                flush=True,
            )
    if out:
        machine = {"platform": platform.platform(), "torch": torch.__version__, "threads": torch.get_num_threads()}
        out.write_text(json.dumps({"machine": machine, "vocab_size": VOCAB_SIZE, "rows": rows}, indent=1) + "\n")


def measure(warpers: list, num_positions: int) -> dict[str, float]:
    block, plain = BlockProcessors(warpers), LogitsProcessorList(warpers)
    ids = torch.zeros(1, 64, dtype=torch.long)
    seconds: dict[str, list[float]] = {"block": [], "one_by_one": []}
    for _ in range(REPEATS):
        scores = torch.randn(1, num_positions, VOCAB_SIZE) * 3
        start = time.perf_counter()
        for position in range(num_positions):
            plain(ids, scores[:, position])
        middle = time.perf_counter()
        block(scores, [32], ids)
        seconds["one_by_one"].append(middle - start)
        seconds["block"].append(time.perf_counter() - middle)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
