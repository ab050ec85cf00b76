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
        scalars: where every load of logits must be of 128 bits, how many others there may be: a row's length, key, ...
        exact_denormals: as the launcher passes it to `launch_options`.
    """

    name: str
    module: str
    function: str
    arguments: dict[str, Any]
    num_warps: int
    block: int = 0
    scalars: int | None = None
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
    scalars = 4 if aligned else None
    return Entry(f"row_blocks {name}", "_row_sample", "row_blocks", arguments, num_warps, block, scalars, method == 0)


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


def _walk_rows(name: str, tree: bool, drawn: bool) -> Entry:
    arguments = {
        "partials_ptr": "*fp32/16",
        "draft_ptr": "*i64",
        "lengths_ptr": "*i64/16",
        "parents_ptr": "*i64/16" if tree else None,
        "accepted_ptr": "*i64/16",
        "tokens_ptr": "*i64/16",
        "path_ptr": "*i64/16" if tree else None,
        "n": "i32",
        "draft_stride": "i64",
        "parents_stride": "i64",
        "num_blocks": "i32",
        "DRAWN": drawn,
        "TREE": tree,
        "ROWS": 64 if tree else 16,
        "CHUNK": 16 if tree else 64,
    }
    return Entry(f"walk_rows {name}", "_walk", "walk_rows", arguments, 4, exact_denormals=not drawn)


ENTRIES += [_walk_rows("chain greedy", False, False), _walk_rows("tree gumbel", True, True)]


MODES = {"full": 0, "reduced": 1, "candidates": 2}


def law_arguments(mode: int, flags: bool, lse: bool, aligned: bool = True) -> dict[str, Any]:
    """The arguments that the kernels of `residual` and `block_mass` share."""
    by = "/16" if aligned else ""
    return {
        "p_ptr": f"*bf16{by}",
        "inv_temperature": "fp32",
        "q_ptr": f"*bf16{by}",
        "positions_ptr": "*i32/16" if mode == 1 else None,
        "ids_ptr": "*i64/16" if mode == 2 else None,
        "one_hot_ptr": "*u8" if flags else None,
        "lse_ptr": "*fp32" if lse else None,
        "draft_ptr": "*i64",
        "lengths_ptr": "*i64/16",
        "keys_ptr": "*i32/16",
        "counters_ptr": "*i32/16",
        "stats_ptr": "*fp32/16",
        "draws_ptr": "*fp32/16",
        "accepted_ptr": "*i64/16",
        "tokens_ptr": "*i64/16",
        "log_pi_ptr": "*fp32/16",
        **dict.fromkeys(("V", "C"), f"i32{by}"),
        **dict.fromkeys(("n", "batch_size", "rows", "num_spans", "num_blocks"), "i32"),
        **dict.fromkeys(("p_stride_b", "q_stride_b", "ids_stride_b"), f"i64{by}"),
        **dict.fromkeys(("p_stride_m", "q_stride_n", "ids_stride_n"), f"i32{by}"),
        **dict.fromkeys(("one_hot_stride", "lse_stride", "draft_stride"), "i32"),
        "FLAGS": flags,
        "HAS_LSE": lse,
        "MODE": mode,
        "SLOTS": 16,
        "SPANS": 16,
        "SPAN": 3,
        "CHUNK": 32,
        "BLOCK": 4096,
        "BLOCKS": 64,
        "TILE": 64,
    }


def _law_entry(module: str, function: str, variant: str, num_warps: int = 8, block: int = 4096) -> Entry:
    """A variant is a mode, then any of "lse", "flags", "any stride"."""
    arguments = law_arguments(MODES[variant.split()[0]], "flags" in variant, "lse" in variant, "any" not in variant)
    scalars = 5 if (function, variant) == ("law_stats", "full") else None
    return Entry(f"{function} {variant}", module, function, arguments, num_warps, block, scalars)


ENTRIES += [
    _law_entry("_law", "law_stats", "full"),
    _law_entry("_law", "law_stats", "full flags"),
    _law_entry("_law", "law_stats", "candidates"),
    _law_entry("_residual", "residual_blocks", "full"),
    _law_entry("_residual", "residual_blocks", "full lse flags"),
    _law_entry("_residual", "residual_blocks", "full any stride"),
    _law_entry("_residual", "residual_blocks", "reduced"),
    _law_entry("_residual", "residual_blocks", "candidates flags"),
    _law_entry("_residual", "residual_merge", "full", 1, 0),
    _law_entry("_block_mass", "mass_blocks", "full"),
    _law_entry("_block_mass", "mass_blocks", "full lse flags"),
    _law_entry("_block_mass", "mass_blocks", "reduced"),
    _law_entry("_block_mass", "mass_blocks", "candidates flags"),
    _law_entry("_block_mass", "mass_merge", "full", 4, 0),
]


def _one_hot_entry(name: str, num_warps: int, block: int = 0, **constants: Any) -> Entry:
    arguments = law_arguments(MODES["full"], False, False) | constants
    return Entry(name, "_one_hot", name.split()[0], arguments, num_warps, block, 5 if block else None)


ENTRIES += [
    _one_hot_entry("one_hot_spans", 8, 4096),
    _one_hot_entry("one_hot_merge residual", 1, AS_BLOCK=False),
    _one_hot_entry("one_hot_merge block_mass", 1, AS_BLOCK=True),
]


def _compact_heads(name: str, word: str) -> Entry:
    import triton.language as tl

    arguments = {
        "addresses_ptr": "*i64/16",
        "path_ptr": "*i64",
        "starts_ptr": "*i64/16",
        **dict.fromkeys(("batch_size", "H", "S", "D", "n"), "i32"),
        **dict.fromkeys(("stride_b", "stride_h", "stride_s", "path_stride"), "i64"),
        "WORD": getattr(tl, word),
        "HEADS": 16,
        "COLUMNS": 32,
    }
    return Entry(f"compact_heads {name}", "_compact", "compact_heads", arguments, 4)


ENTRIES += [_compact_heads("64 bits", "int64"), _compact_heads("16 bits", "int16")]
