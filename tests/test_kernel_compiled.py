"""Every kernel compiles for every GPU that is promised, and costs there what its golden numbers say.

Measured without a GPU: what the compiler reports, not what the hardware does. After a change that is meant,
`python tests/kernel_aot.py --write` writes the numbers anew; read their difference before committing it.
"""

import json
import re

import pytest

triton = pytest.importorskip("triton")

import kernel_aot  # noqa: E402
from kernel_registry import ENTRIES  # noqa: E402

pytestmark = pytest.mark.slow

WIDE = re.compile(r"(global|buffer)_load_(dwordx4|b128)|ld\.global(\.\w+)*\.v4\.b32|ld\.global(\.\w+)*\.v2\.b64")


@pytest.fixture(scope="module", params=kernel_aot.TARGETS)
def compiled(request) -> tuple[str, dict]:
    return request.param, kernel_aot.compiled_in_a_process(request.param)


def test_nothing_spills_and_four_waves_fit(compiled):
    for name, measures in compiled[1].items():
        assert measures["spills"] == measures["scratch_bytes"] == 0, name
        assert measures["occupancy"] >= 4, name


def test_aligned_logits_are_loaded_128_bits_at_a_time(compiled):
    for entry in ENTRIES:
        loads = compiled[1][entry.name]["loads"]
        wide = sum(count for load, count in loads.items() if WIDE.fullmatch(load))
        if entry.scalars is not None:
            assert wide > 0 and sum(loads.values()) - wide <= entry.scalars, (entry.name, loads)


def test_row_bases_are_64_bits_wide(compiled):
    # vllm-project/vllm#46560: int32 row * V wraps past 2^31.
    for entry in ENTRIES:
        if {"stride_m", "p_stride_m"} & set(entry.arguments) and entry.block:
            assert compiled[1][entry.name]["wide_products"] >= 2, entry.name


def test_registers_are_within_a_tenth_of_the_golden_numbers(compiled):
    target, found = compiled
    golden = json.loads((kernel_aot.GOLDEN / f"{target}.json").read_text())
    assert set(golden["kernels"]) == set(found), "write the golden numbers anew: a kernel came or went"
    if golden["triton"] != triton.__version__:
        pytest.skip(f"the golden numbers are those of Triton {golden['triton']}")
    for name, measures in found.items():
        assert measures["registers"] <= 1.1 * golden["kernels"][name]["registers"] + 1, name
        assert measures["loads"] == golden["kernels"][name]["loads"], name


def test_noise_costs_at_most_half_of_philox(compiled):
    # One Philox-4x32-10 call a logit costs about 100 vector instructions on gfx942, a fifth of them at quarter rate.
    target, found = compiled
    if not target.startswith("gfx9"):
        pytest.skip("counted for wave64 targets")
    small, large = found["row_blocks gumbel bf16"], found["row_blocks gumbel bf16 4096"]
    lanes = 64 * 4
    assert (large["valu"] - small["valu"]) / ((4096 - 2048) / lanes) <= 40
    assert (large["quarter_rate"] - small["quarter_rate"]) / ((4096 - 2048) / lanes) <= 2


def test_the_table_in_the_documents_is_that_of_the_golden_numbers():
    assert kernel_aot.table() in kernel_aot.DOCUMENT.read_text(), "python tests/kernel_aot.py --table"
