"""What the compilers make of every kernel, for GPUs that need not be there.

    python tests/kernel_aot.py gfx942 [name ...]     compile for one target and print what came out, as JSON
    python tests/kernel_aot.py --write [target ...]  write tests/kernel_golden/ anew, and its table
    python tests/kernel_aot.py --table               write the table of golden numbers in docs/kernels.md anew

Runs in a process of its own: the kernels of a process are either interpreted or compiled, as TRITON_INTERPRET says when
they are imported. A new kernel is one `Entry` in `kernel_registry.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "kernel_golden"
DOCUMENT = Path(__file__).parents[1] / "docs/kernels.md"
TARGETS = {
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
    "gfx1100": ("hip", "gfx1100", 32),
    "gfx1201": ("hip", "gfx1201", 32),
    "sm_90": ("cuda", 90, 32),
}
TABLE_HEAD = f"| kernel | {' | '.join(TARGETS)} | vector instructions, gfx942 |\n|---|{'---|' * len(TARGETS)}---|\n"


def compiled_in_a_process(target: str) -> dict[str, dict[str, Any]]:
    """{entry's name: measures} of every registered kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, target],
            env={**environment, "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def compile_entry(entry: Any, target: str) -> dict[str, Any]:
    """Compile one entry and read registers, spills, occupancy, loads and instruction counts."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = entry.kernel()
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind = entry.arguments[name]
        if isinstance(kind, str):
            signature[name] = kind.removesuffix("/16")
            if kind.endswith("/16"):
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name], constexprs[(index,)] = "constexpr", kind
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": entry.num_warps, "enable_fp_fusion": True}
    if target.startswith("gfx"):
        options["allow_flush_denorm"] = not entry.exact_denormals
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    if target.startswith("gfx"):
        measures = amd_measures(compiled.asm["amdgcn"])
    else:
        measures = nvidia_measures(compiled.asm["ptx"], target)
    measures["shared_bytes"] = compiled.metadata.shared
    measures["wide_products"] = len(re.findall(r"arith\.muli .* : i64", compiled.asm["ttir"]))
    return measures


def amd_measures(assembly: str) -> dict[str, Any]:
    """Of one kernel's AMD assembly."""

    def number(pattern: str) -> int:
        return max((int(found) for found in re.findall(pattern, assembly)), default=0)

    opcodes = re.findall(r"^\s+([a-z]\w+)", assembly, flags=re.MULTILINE)
    loads = [code for code in opcodes if re.match(r"(global|buffer|flat)_load", code)]
    valu = [code for code in opcodes if code.startswith("v_")]
    return {
        "registers": number(r"\.vgpr_count:\s+(\d+)"),
        "spills": number(r"\.vgpr_spill_count:\s+(\d+)") + number(r"\.sgpr_spill_count:\s+(\d+)"),
        "scratch_bytes": number(r"\.private_segment_fixed_size:\s+(\d+)"),
        "occupancy": number(r"; Occupancy: (\d+)"),
        "loads": counts(loads),
        "valu": len(valu),
        "quarter_rate": sum(bool(re.match(r"v_(log|exp|rcp|rsq|sqrt|mul_hi|mul_lo)", code)) for code in valu),
    }


def nvidia_measures(ptx: str, target: str) -> dict[str, Any]:
    """Of one kernel's PTX, by the assembler that Triton brings."""
    from triton.backends.nvidia.compiler import get_ptxas

    ptxas = get_ptxas(TARGETS[target][1]).path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={target}a", path, "-o", Path(folder, "kernel.cubin")]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])  # type: ignore[index]
    return {
        "registers": registers,
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr))),
        "scratch_bytes": sum(map(int, re.findall(r"(\d+) bytes stack frame", done.stderr))),
        "occupancy": min(16, 65536 // (32 * 4 * max(registers, 1))),  # warps a scheduler, by registers
        "loads": counts(re.findall(r"\b(ld\.global[.\w]*)", ptx)),
    }


def table() -> str:
    """The golden registers, and waves that fit a SIMD, of every kernel."""
    golden = {target: json.loads((GOLDEN / f"{target}.json").read_text())["kernels"] for target in TARGETS}
    lines = []
    for name in sorted(golden["gfx942"]):
        fits = [f"{golden[target][name]['registers']} ({golden[target][name]['occupancy']})" for target in TARGETS]
        lines.append(f"| `{name}` | {' | '.join(fits)} | {golden['gfx942'][name]['valu']} |\n")
    return TABLE_HEAD + "".join(lines)


def write_table() -> None:
    """Put the table where the one in the document stands."""
    before, after = DOCUMENT.read_text().split(TABLE_HEAD)
    DOCUMENT.write_text(before + table() + re.sub(r"\A(\|.*\n)*", "", after))


def counts(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}


def main(arguments: list[str]) -> None:
    from kernel_registry import ENTRIES

    if arguments == ["--table"]:
        return write_table()
    if arguments[:1] == ["--write"]:
        import triton

        for target in arguments[1:] or TARGETS:
            found = {"triton": triton.__version__, "kernels": compiled_in_a_process(target)}
            (GOLDEN / f"{target}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return write_table()
    target, *names = arguments
    entries = [entry for entry in ENTRIES if not names or entry.name in names]
    print(json.dumps({entry.name: compile_entry(entry, target) for entry in entries}))


if __name__ == "__main__":
    main(sys.argv[1:])
