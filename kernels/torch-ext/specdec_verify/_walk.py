"""Verification by match, chain or tree: the target chooses a token at every row, and the walk follows the choices.

logits [B, n + 1, V] and drafted tokens [B, n] -> emitted tokens, number accepted, path, in two launches:

1. `row_blocks` of `_row_sample.py` over all rows.
2. `walk_rows`, grid (B,): joins the blocks of a batch row's rows at once, then walks in registers.

Row 0 is the law of the first token, row i + 1 the law after drafted slot (or node) i. A drafted token is only ever
compared with a choice, so what stands past a row's length is never used as an index.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ._checks import check_draft, check_parents
from ._config import Config, launch_options
from ._row_sample import HAS_NAN, INFINITE, NOTHING, row_partials

_HAS_NAN, _NOTHING, _INFINITE = (tl.constexpr(i) for i in (HAS_NAN, NOTHING, INFINITE))
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


class Verified(NamedTuple):
    """What a verification decided; the fields are those of the package's `Verdict`.

    Args:
        num_accepted: [B] int64; -1 marks a row that cannot be decided (NaN, nothing to choose from, an infinite weight
            to draw). It emits nothing: whoever reads it on the host must raise.
        tokens: [B, n + 1] int64, the accepted tokens and one more; -1 pads.
        path: [B, n] int64, a tree's accepted nodes in order; -1 pads. None for a chain.
    """

    num_accepted: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor | None = None


@triton.jit
def merge_choices(
    partials_ptr, first_row, m, rows, num_blocks, DRAWN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """Tokens and statuses [ROWS] of m rows at once; as `merge_choice` does it for one, but loads do not queue."""
    slots = tl.arange(0, ROWS)
    best, index, has_nan = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.full([ROWS], 0, tl.int32),
        tl.full([ROWS], 0, tl.int32),
    )
    values_ptr = partials_ptr + first_row.to(tl.int64) * num_blocks
    indices_ptr = values_ptr + rows.to(tl.int64) * num_blocks
    for start in range(0, num_blocks, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        offsets = slots[:, None] * num_blocks + blocks[None, :]
        here = (slots < m)[:, None] & (blocks < num_blocks)[None, :]
        value = tl.load(values_ptr + offsets, mask=here, other=float("-inf"))
        at = tl.load(indices_ptr + offsets, mask=here, other=0.0).to(tl.int32, bitcast=True)
        has_nan = tl.maximum(has_nan, tl.max((value != value).to(tl.int32), axis=1))
        value = tl.where(value != value, float("-inf"), value)
        top = tl.max(value, axis=1)
        first = tl.min(tl.where(value == top[:, None], at, _NO_TOKEN), axis=1)
        index = tl.where(top > best, first, index)
        best = tl.maximum(top, best)
    status = tl.where(best == float("-inf"), _NOTHING, 0)
    if DRAWN:
        status = tl.where(best == float("inf"), _INFINITE, status)
    status = tl.where(has_nan > 0, _HAS_NAN, status)
    return tl.where(status == 0, index, -1), status


@triton.jit
def walk_rows(
    partials_ptr,
    draft_ptr,
    lengths_ptr,
    parents_ptr,
    accepted_ptr,
    tokens_ptr,
    path_ptr,
    n,
    draft_stride,
    parents_stride,
    num_blocks,
    DRAWN: tl.constexpr,
    TREE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Walk one batch row."""
    batch_row, m = tl.program_id(0), n + 1
    slots = tl.arange(0, ROWS)
    choices, statuses = merge_choices(
        partials_ptr, batch_row * m, m, tl.num_programs(0) * m, num_blocks, DRAWN, ROWS, CHUNK
    )
    drafted_here = (slots < n) & (slots < tl.load(lengths_ptr + batch_row))
    draft_base = draft_ptr + batch_row.to(tl.int64) * draft_stride
    drafted = tl.load(draft_base + slots, mask=drafted_here, other=-2).to(tl.int32)
    if TREE:
        parents_base = parents_ptr + batch_row.to(tl.int64) * parents_stride
        parents = tl.load(parents_base + slots, mask=drafted_here, other=-2).to(tl.int32)
        tokens, path = tl.full([ROWS], -1, tl.int32), tl.full([ROWS], -1, tl.int32)
        node, accepted, broken = tl.full([], -1, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        going = tl.full([], 1, tl.int32)
        while going != 0:
            here = slots == node + 1
            choice = tl.max(tl.where(here, choices, -1), axis=0)
            broken = tl.maximum(broken, tl.max(tl.where(here, statuses, 0), axis=0))
            tokens = tl.where(slots == accepted, choice, tokens)
            child = drafted_here & (parents == node) & (drafted == choice)
            node = tl.min(tl.where(child, slots, ROWS), axis=0)
            going = tl.where(node < ROWS, 1, 0)
            path = tl.where((slots == accepted) & (node < ROWS), node, path)
            accepted += going
        path_out = path_ptr + batch_row.to(tl.int64) * n
        tl.store(path_out + slots, tl.where(broken > 0, -1, path).to(tl.int64), mask=slots < n)
    else:
        agrees = drafted_here & (drafted == choices)
        accepted = tl.min(tl.where(agrees, ROWS, slots), axis=0)
        tokens = tl.where(slots <= accepted, choices, -1)
        broken = tl.max(tl.where(slots <= accepted, statuses, 0), axis=0)
    tl.store(accepted_ptr + batch_row, tl.where(broken > 0, -1, accepted).to(tl.int64))
    tokens_out = tokens_ptr + batch_row.to(tl.int64) * m
    tl.store(tokens_out + slots, tl.where(broken > 0, -1, tokens).to(tl.int64), mask=slots < m)


def walk(
    logits: torch.Tensor,
    method: str,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    parents: torch.Tensor | None = None,
    *,
    inv_temperature: float = 1.0,
    keys: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    stream: int = 0,
    config: Config | None = None,
) -> Verified:
    """Verify a chain or a tree by match: greedy, or drawn with the noise that plain decoding has there.

    Args:
        logits, inv_temperature, keys, counters, stream, config: as `row_sample` takes them, with m = n + 1 rows.
        method: "greedy" or "gumbel".
        tokens: [B, n] int64 drafted tokens; anything past a row's length.
        lengths: [B] int64 drafted tokens per row, 0 .. n.
        parents: None for a chain; for a tree [n] or [B, n] int64, each node's parent, -1 for the root. Siblings are
            distinct tokens.
        slots: [B, n + 1] int32 depths of the rows, the root at 0; a tree that is drawn needs them.

    Returns:
        Verified.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.
    """
    if method not in ("greedy", "gumbel"):
        raise ValueError(f"`method` is {method!r}; it must be 'greedy' or 'gumbel'.")
    check_draft(logits, tokens, lengths)
    if parents is not None:
        check_parents(parents, tokens)
        if method == "gumbel" and slots is None:
            raise ValueError("`slots` is None; a tree that is drawn needs the depths of its rows, int32 [B, n + 1].")
    batch_size, n = tokens.shape
    rows, partials, config = row_partials(
        logits, method, inv_temperature, keys, counters, slots, stream, with_lse=False, config=config
    )
    num_accepted = torch.empty(batch_size, dtype=torch.int64, device=logits.device)
    emitted = torch.empty(batch_size, n + 1, dtype=torch.int64, device=logits.device)
    path = None if parents is None else torch.empty(batch_size, n, dtype=torch.int64, device=logits.device)
    if rows:
        num_blocks = partials.shape[-1]
        padded_rows = triton.next_power_of_2(n + 1)
        chunk = min(triton.next_power_of_2(num_blocks), max(16, 1024 // padded_rows))
        walk_rows[(batch_size,)](
            partials,
            tokens,
            lengths,
            parents,
            num_accepted,
            emitted,
            path,
            n,
            tokens.stride(0),
            0 if parents is None or parents.dim() == 1 else parents.stride(0),
            num_blocks,
            DRAWN=method == "gumbel",
            TREE=parents is not None,
            ROWS=padded_rows,
            CHUNK=chunk,
            num_warps=max(1, min(8, padded_rows * chunk // 256)),
            **launch_options(exact_denormals=method == "greedy"),
        )
    return Verified(num_accepted, emitted, path)
