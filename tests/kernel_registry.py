"""Every kernel in the variants that are compiled ahead of time and held against golden numbers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One kernel with one set of argument types.

    Args:
        name: unique; names the golden numbers.
        module, function: where the kernel is, in `hf_specdec._kernels`.
        arguments: for each parameter a type ("*bf16", "i32", "fp32"), with "/16" where it is known to be a multiple of
            16 (a pointer's bytes, a stride's elements), or the value of a constant.
        num_warps: warps of a program.
        block: logits that a program reads in one sweep, for counts per logit; 0 where that says nothing.
        wide_loads: whether every load of logits must be of 128 bits.
        exact_denormals: as the launcher passes it to `launch_options`.
    """

    name: str
    module: str
    function: str
    arguments: dict[str, Any]
    num_warps: int
    block: int = 0
    wide_loads: bool = False
    exact_denormals: bool = False

    def kernel(self) -> Any:
        return getattr(importlib.import_module(f"hf_specdec._kernels.{self.module}"), self.function)


def row_arguments(dtype: str, aligned: bool, drawn: bool, **constants: Any) -> dict[str, Any]:
    """The arguments that kernels over rows of logits share."""
    by = "/16" if aligned else ""
    return {
        "logits_ptr": f"*{dtype}{by}",
        "inv_temperature": "fp32",
        "keys_ptr": "*i32/16" if drawn else None,
        "counters_ptr": "*i32/16" if drawn else None,
        "slots_ptr": None,
        "partials_ptr": "*fp32/16",
        "token_ptr": "*i64/16",
        "lse_ptr": "*fp32/16" if constants.get("WITH_LSE") else None,
        "status_ptr": "*i32/16",
        "V": f"i32{by}",
        "m": "i32",
        "stream": "i32",
        "stride_b": f"i64{by}",
        "stride_m": f"i32{by}",
        "num_blocks": "i32",
        "HAS_SLOTS": False,
        **constants,
    }


def _row_blocks(name: str, method: int, dtype: str = "bf16", aligned: bool = True, **options: Any) -> Entry:
    options = {"WITH_LSE": False, "BLOCK": 2048, "num_warps": 4, **options}
    num_warps, block = options.pop("num_warps"), options["BLOCK"]
    arguments = row_arguments(dtype, aligned, method != 0, METHOD=method, **options)
    return Entry(f"row_blocks {name}", "_row_sample", "row_blocks", arguments, num_warps, block, aligned, method == 0)


def _row_merge(name: str, method: int, num_warps: int) -> Entry:
    arguments = row_arguments("bf16", True, method != 0, METHOD=method, WITH_LSE=True, BLOCK=2048, NUM_BLOCKS=128)
    return Entry(f"row_merge {name}", "_row_sample", "row_merge", arguments, num_warps, exact_denormals=method == 0)


def _processed_rows(name: str, **filters: bool) -> Entry:
    arguments = row_arguments("bf16", True, True, BLOCK=2048, NUM_BLOCKS=128) | {
        "top_k": "i32",
        "top_p": "fp32",
        "min_p": "fp32",
        **{constant: filters.get(constant, False) for constant in ("TOP_K", "TOP_P", "MIN_P")},
    }
    return Entry(f"processed_rows {name}", "_processed_sample", "processed_rows", arguments, 16)


ENTRIES = [
    _row_blocks("greedy bf16", 0),
    _row_blocks("gumbel bf16", 1),
    _row_blocks("gumbel bf16 4096", 1, BLOCK=4096),
    _row_blocks("gumbel bf16 lse", 1, WITH_LSE=True),
    _row_blocks("gumbel bf16 any stride", 1, aligned=False),
    _row_blocks("gumbel fp32", 1, "fp32"),
    _row_blocks("inverse_cdf bf16", 2),
    _row_blocks("inverse_cdf fp32", 2, "fp32"),
    _row_merge("greedy", 0, 1),
    _row_merge("gumbel", 1, 1),
    _row_merge("inverse_cdf", 2, 4),
    _processed_rows("top_k", TOP_K=True),
    _processed_rows("top_p", TOP_P=True),
    _processed_rows("top_k top_p min_p", TOP_K=True, TOP_P=True, MIN_P=True),
]
