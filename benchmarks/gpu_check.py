"""One check of the verification kernels for any GPU: right numbers first, then times.

    python benchmarks/gpu_check.py [--minutes 8] [--out FILE.json]
    python benchmarks/gpu_check.py --interpret       the checks alone, small, on a CPU in Triton's interpreter

Needs nothing but this checkout. Each section has its share of the minutes and takes its cases in turn, the telling ones
first; what is left when its time is over is counted, not run. A failure is a line of the table and an exit status of 1.
An achieved fraction is the least bytes an op must move, over its time, over the bandwidth of a copy measured here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
SHARES = {"numbers": 7, "offsets": 1, "draws": 2, "times": 5, "verification": 4}
"""Of the minutes, less a twentieth for starting."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything (default 8)")
    parser.add_argument("--op", nargs="+", metavar="NAME", help="check these ops only (default: all)")
    parser.add_argument("--interpret", action="store_true", help="check on a CPU, in Triton's interpreter")
    parser.add_argument("--out", type=Path, help="where the JSON goes (on a GPU: benchmarks/results/, by its name)")
    given = parser.parse_args(arguments)
    if given.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, about masked lanes
    elif not torch.cuda.is_available():
        print("There is no GPU here that torch can use; --interpret checks the kernels on the CPU, without times.")
        return 2
    from gpu_sections import SECTIONS, SMALL_SECTIONS
    from kernel_ops import OPS, served

    ops = served(given.op)
    if given.op and {op.name for op in ops} != set(given.op):
        known = ", ".join(sorted({op.name for op in served()}))
        parser.error(f"`--op` is {' '.join(given.op)}; the kernel package has {known}.")
    device = torch.device("cpu" if given.interpret else "cuda")
    started = time.monotonic()
    report: dict[str, Any] = {"machine": machine(device), "minutes": given.minutes, "ops": given.op, "sections": {}}
    if missing := sorted({op.name for op in OPS} - {op.name for op in served()}):
        print(f"not in this kernel package: {', '.join(missing)}")
    sections = SMALL_SECTIONS if given.interpret else SECTIONS
    seconds_a_share = 0.95 * 60.0 * given.minutes / sum(SHARES[name] for name in sections)
    for name, cases in sections.items():
        report["sections"][name] = section(name, cases(device, ops), seconds_a_share * SHARES[name])
    report["seconds"] = round(time.monotonic() - started, 1)
    out = given.out
    if out is None and not given.interpret:
        out = RESULTS / f"gpu_check_{report['machine']['device'].replace(' ', '_')}.json"
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")
    failed = [row for each in report["sections"].values() for row in each["rows"] if not row["ok"]]
    print(f"\n{len(failed)} failed, {report['seconds']:.0f} s" + (f", written to {out}" if out else ""))
    return 1 if failed else 0


def section(name: str, cases: Iterable[tuple[str, Callable[[], dict[str, Any]]]], seconds: float) -> dict[str, Any]:
    """Run cases, each a title and a function, until the time is over; what raises has failed."""
    print(f"\n{name}", flush=True)
    deadline, rows, left_out = time.monotonic() + seconds, [], 0
    for title, case in cases:
        if time.monotonic() > deadline:
            left_out += 1
            continue
        try:
            row = case()
        except Exception as error:  # one op that a compiler or a driver refuses must not hide the others
            row = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        row = {"case": title, **row}
        rows.append(row)
        print("  " + line(row), flush=True)
    if left_out:
        print(f"  {left_out} cases left out, the time was over")
    return {"rows": rows, "left_out": left_out}


def line(row: dict[str, Any]) -> str:
    values = [f"{name} {short(value)}" for name, value in row.items() if name not in ("case", "ok")]
    return f"{'ok    ' if row['ok'] else 'FAILED'} {row['case']:80} {'  '.join(values)}"


def short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and not math.isnan(value) else str(value).split("\n")[0][:160]


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    import triton

    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, interpreted",
        "driver": driver() if on_gpu else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        "platform": platform.platform(),
    }


def driver() -> str | None:
    """The kernel driver's version, None where it cannot be asked for."""
    amd = Path("/sys/module/amdgpu/version")
    if torch.version.hip is not None:
        return amd.read_text().strip() if amd.exists() else None
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
