"""One token for each row of logits: the argmax, a draw with keyed noise, or a draw by the two-level inverse CDF.

logits [B, m, V] -> token [B, m], log-sum-exp [B, m], status [B, m], in two launches over any number of rows:

1. `row_blocks`, grid (B m, ceil(V / BLOCK)): each program reads one block of one row once and leaves four numbers.
2. `row_merge`, grid (B m,): joins a row's blocks. The inverse CDF draws the block by its mass, reads that block again
   and draws inside it.

"gumbel" chooses argmax(logits inv_temperature + g) with the noise g of `_rng.py`, keyed by (row, counter + slot,
token): a fixed function, so that the same logits give the same token whenever they are looked at. "inverse_cdf" has the
same law from two random numbers a row, and reads 1 + BLOCK / V times the bytes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ._checks import check_rows
from ._config import Config, choose, launch_options
from ._rng import gumbel_pairs, row_key, uniform_pair

OK, HAS_NAN, NOTHING, INFINITE = range(4)
"""Status of a row: drawn; NaN among the logits; all -inf; +inf where a law has to be drawn from."""

METHODS = ("greedy", "gumbel", "inverse_cdf")
GREEDY, GUMBEL, INVERSE_CDF = (tl.constexpr(i) for i in range(3))
_HAS_NAN, _NOTHING, _INFINITE = (tl.constexpr(i) for i in (1, 2, 3))


class RowSample(NamedTuple):
    """Tokens [B, m] int64, -1 where the status is not OK; lse [B, m] fp32 or None; status [B, m] int32."""

    token: torch.Tensor
    lse: torch.Tensor | None
    status: torch.Tensor


@triton.jit
def best_of(value, index):
    """The largest value and its index, the lowest one where values tie. No value may be NaN.

    Two plain reductions: they cost fewer instructions than one over (value, index) pairs.
    """
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, index, 0x7FFFFFFF), axis=0)


@triton.jit
def load_block(row_ptr, block, V, BLOCK: tl.constexpr):
    """[BLOCK] fp32 logits of one block, -inf past the vocabulary."""
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(row_ptr + offsets, mask=offsets < V, other=float("-inf")).to(tl.float32)


@triton.jit
def exp_sum(x, maximum):
    """sum exp(x - maximum), 0 where everything is -inf."""
    return tl.sum(tl.exp(x - tl.where(maximum == float("-inf"), 0.0, maximum)), axis=0)


@triton.jit
def row_blocks(
    logits_ptr,
    inv_temperature,
    keys_ptr,
    counters_ptr,
    slots_ptr,
    partials_ptr,
    V,
    m,
    stream,
    stride_b,
    stride_m,
    num_blocks,
    METHOD: tl.constexpr,
    WITH_LSE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Best value and its index, maximum and exp-sum of one block, as partials [4, rows, blocks]; NaN marks NaN."""
    row, block = tl.program_id(0), tl.program_id(1)
    batch_row, slot = row // m, row % m
    row_ptr = logits_ptr + batch_row.to(tl.int64) * stride_b + slot.to(tl.int64) * stride_m
    x = load_block(row_ptr, block, V, BLOCK) * inv_temperature
    even, odd = tl.split(tl.reshape(x, [BLOCK // 2, 2]))
    has_nan = tl.max(((even != even) | (odd != odd)).to(tl.int32), axis=0) > 0
    maximum = tl.max(tl.maximum(even, odd), axis=0)
    out = partials_ptr + row.to(tl.int64) * num_blocks + block
    plane = tl.num_programs(0).to(tl.int64) * num_blocks
    if METHOD != INVERSE_CDF:
        first = block * BLOCK + 2 * tl.arange(0, BLOCK // 2)
        if METHOD == GUMBEL:
            if HAS_SLOTS:
                counter = tl.load(counters_ptr + batch_row) + tl.load(slots_ptr + row)
            else:
                counter = tl.load(counters_ptr + batch_row) + slot
            k0, k1 = row_key(keys_ptr, batch_row)
            noise0, noise1 = gumbel_pairs(k0, k1, stream, counter, block * (BLOCK // 2), BLOCK // 2)
            value0, value1 = even + noise0, odd + noise1
        else:
            value0, value1 = even, odd
        odd_wins = value1 > value0
        value, index = best_of(tl.where(odd_wins, value1, value0), tl.where(odd_wins, first + 1, first))
        tl.store(out, tl.where(has_nan, float("nan"), value))
        tl.store(out + plane, index.to(tl.float32, bitcast=True))
    if WITH_LSE or METHOD == INVERSE_CDF:
        total = exp_sum(even, maximum) + exp_sum(odd, maximum)
        tl.store(out + 2 * plane, tl.where(has_nan, float("nan"), maximum))
        tl.store(out + 3 * plane, total)


@triton.jit
def load_partials(partials_ptr, row, rows, num_blocks, PLANE: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """[NUM_BLOCKS] one plane of a row's partials; -inf past the last block."""
    blocks = tl.arange(0, NUM_BLOCKS)
    base = partials_ptr + (rows.to(tl.int64) * PLANE + row) * num_blocks
    return tl.load(base + blocks, mask=blocks < num_blocks, other=float("-inf"))


@triton.jit
def merge_choice(partials_ptr, row, rows, num_blocks, DRAWN: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """Token (-1 where there is none) and status of a row, from the best values of its blocks."""
    value = load_partials(partials_ptr, row, rows, num_blocks, 0, NUM_BLOCKS)
    index = load_partials(partials_ptr, row, rows, num_blocks, 1, NUM_BLOCKS).to(tl.int32, bitcast=True)
    has_nan = tl.max((value != value).to(tl.int32), axis=0) > 0
    value, index = best_of(tl.where(value != value, float("-inf"), value), index)
    status = tl.where(value == float("-inf"), _NOTHING, 0)
    if DRAWN:
        status = tl.where(value == float("inf"), _INFINITE, status)
    status = tl.where(has_nan, _HAS_NAN, status)
    return tl.where(status == 0, index, -1), status


@triton.jit
def merge_lse(partials_ptr, row, rows, num_blocks, NUM_BLOCKS: tl.constexpr):
    """The blocks' masses relative to the row's maximum [NUM_BLOCKS], and the row's log-sum-exp."""
    block_max = load_partials(partials_ptr, row, rows, num_blocks, 2, NUM_BLOCKS)
    block_sum = load_partials(partials_ptr, row, rows, num_blocks, 3, NUM_BLOCKS)
    has_nan = tl.max((block_max != block_max).to(tl.int32), axis=0) > 0
    maximum = tl.max(tl.where(block_max != block_max, float("-inf"), block_max), axis=0)
    finite = tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)
    mass = tl.where(block_max == float("-inf"), 0.0, block_sum * tl.exp(block_max - finite))
    lse = tl.where(tl.abs(maximum) == float("inf"), maximum, finite + tl.log(tl.sum(mass, axis=0)))
    return mass, tl.where(has_nan, float("nan"), lse)


@triton.jit
def invert(mass, uniform, SIZE: tl.constexpr):
    """The first index with positive mass whose running sum exceeds uniform * total; rounding never runs off the end."""
    indices = tl.arange(0, SIZE)
    running = tl.cumsum(mass, axis=0)
    positive = mass > 0.0
    beyond = positive & (running > uniform * tl.max(running, axis=0))
    first = tl.min(tl.where(beyond, indices, SIZE), axis=0)
    last = tl.max(tl.where(positive, indices, 0), axis=0)
    return tl.minimum(first, last)


@triton.jit
def row_merge(
    logits_ptr,
    inv_temperature,
    keys_ptr,
    counters_ptr,
    slots_ptr,
    partials_ptr,
    token_ptr,
    lse_ptr,
    status_ptr,
    V,
    m,
    stream,
    stride_b,
    stride_m,
    num_blocks,
    METHOD: tl.constexpr,
    WITH_LSE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Join the partials of one row."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    if METHOD == INVERSE_CDF:
        mass, lse = merge_lse(partials_ptr, row, rows, num_blocks, NUM_BLOCKS)
        status = tl.where(lse == float("-inf"), _NOTHING, tl.where(lse == float("inf"), _INFINITE, 0))
        status = tl.where(lse != lse, _HAS_NAN, status)
        batch_row, slot = row // m, row % m
        if HAS_SLOTS:
            counter = tl.load(counters_ptr + batch_row) + tl.load(slots_ptr + row)
        else:
            counter = tl.load(counters_ptr + batch_row) + slot
        k0, k1 = row_key(keys_ptr, batch_row)
        uniform0, uniform1 = uniform_pair(k0, k1, stream, counter)
        token = tl.full([], -1, tl.int32)
        if status == 0:
            block = invert(mass, uniform0, NUM_BLOCKS)
            row_ptr = logits_ptr + batch_row.to(tl.int64) * stride_b + slot.to(tl.int64) * stride_m
            x = load_block(row_ptr, block, V, BLOCK) * inv_temperature
            token = block * BLOCK + invert(tl.exp(x - tl.max(x, axis=0)), uniform1, BLOCK)
    else:
        token, status = merge_choice(partials_ptr, row, rows, num_blocks, METHOD == GUMBEL, NUM_BLOCKS)
        if WITH_LSE:
            mass, lse = merge_lse(partials_ptr, row, rows, num_blocks, NUM_BLOCKS)
    if WITH_LSE:
        tl.store(lse_ptr + row, lse)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(status_ptr + row, status)


def row_sample(
    logits: torch.Tensor,
    method: str,
    *,
    inv_temperature: float = 1.0,
    keys: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    stream: int = 0,
    with_lse: bool = False,
    config: Config | None = None,
) -> RowSample:
    """One token for each row.

    Args:
        logits: [B, m, V] fp32, bf16 or fp16; the last dimension is contiguous, the others have any strides.
        method: "greedy", "gumbel" or "inverse_cdf".
        inv_temperature: factor of the logits, > 0.
        keys: [B, 2] int32, one 64-bit key a row; drawn methods need it.
        counters: [B] int32, the second counter word at slot 0; drawn methods need it.
        slots: [B, m] int32 added to the counters; None is 0 .. m - 1.
        stream: the noise stream, 0 .. 63.
        with_lse: whether to return the log-sum-exp of logits * inv_temperature.
        config: block size and warps; None looks them up.

    Returns:
        RowSample. A row with a status other than OK has token -1: whoever reads it on the host must raise.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.
    """
    rows, partials, config = row_partials(
        logits, method, inv_temperature, keys, counters, slots, stream, with_lse, config
    )
    batch_size, m, vocab_size = logits.shape
    token = torch.empty(batch_size, m, dtype=torch.int64, device=logits.device)
    status = torch.empty(batch_size, m, dtype=torch.int32, device=logits.device)
    lse = torch.empty(batch_size, m, dtype=torch.float32, device=logits.device) if with_lse else None
    if rows:
        num_blocks = partials.shape[-1]
        row_merge[(rows,)](
            logits,
            inv_temperature,
            keys,
            counters,
            slots,
            partials,
            token,
            lse,
            status,
            vocab_size,
            m,
            stream,
            logits.stride(0),
            logits.stride(1),
            num_blocks,
            METHOD=METHODS.index(method),
            WITH_LSE=with_lse,
            HAS_SLOTS=slots is not None,
            BLOCK=config.block,
            NUM_BLOCKS=triton.next_power_of_2(num_blocks),
            num_warps=config.num_warps if method == "inverse_cdf" else 1,
            **launch_options(exact_denormals=method == "greedy"),
        )
    return RowSample(token, lse, status)


def row_partials(
    logits: torch.Tensor,
    method: str,
    inv_temperature: float,
    keys: torch.Tensor | None,
    counters: torch.Tensor | None,
    slots: torch.Tensor | None,
    stream: int,
    with_lse: bool,
    config: Config | None,
) -> tuple[int, torch.Tensor, Config]:
    """The first launch alone: number of rows, partials [4, rows, blocks] for `merge_choice` and `merge_lse`, config."""
    if method not in METHODS:
        raise ValueError(f"`method` is {method!r}; it must be one of {', '.join(map(repr, METHODS))}.")
    check_rows(logits, inv_temperature, keys, counters, slots, stream, drawn=method != "greedy")
    batch_size, m, vocab_size = logits.shape
    rows = batch_size * m
    config = config or choose("row_sample", rows, vocab_size, logits.device)
    num_blocks = triton.cdiv(vocab_size, config.block)
    partials = torch.empty(4, rows, num_blocks, dtype=torch.float32, device=logits.device)
    if rows:
        row_blocks[(rows, num_blocks)](
            logits,
            inv_temperature,
            keys,
            counters,
            slots,
            partials,
            vocab_size,
            m,
            stream,
            logits.stride(0),
            logits.stride(1),
            num_blocks,
            METHOD=METHODS.index(method),
            WITH_LSE=with_lse,
            HAS_SLOTS=slots is not None,
            BLOCK=config.block,
            num_warps=config.num_warps,
            **launch_options(method == "greedy", config.waves_per_eu),
        )
    return rows, partials, config
