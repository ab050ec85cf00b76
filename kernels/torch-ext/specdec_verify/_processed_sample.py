"""One token for each row of logits after temperature, top-k, top-p and min-p, without sorting or storing a row.

logits [B, m, V] -> token [B, m], status [B, m], in two launches:

1. `row_blocks` of `_row_sample.py`: each block's best logit with noise, maximum and exp-sum, nothing being filtered.
2. `processed_rows`, grid (B m,): finds top-k's threshold by radix selection, then looks whether the best token passes
   the filters. If not, the best among what ranks above it is next.

Filters keep the upper part of a row's ranking, so everything that passes ranks above a token that does not. The best of
what ranks above it is therefore the best of what passes, as soon as it passes itself: the token is the one that noise
over the filtered row gives, exactly. Mostly the first token passes, with probability the kept mass. After the selection
only blocks whose maximum reaches the bound are read.

The filters and their order are those of transformers' `generate`: top-k keeps everything that ties with the k-th value;
top-p sees what top-k left and removes, lowest first, what sums up to at most 1 - top_p, but never the last one; min-p
keeps what has at least min_p times the largest probability. Which of equal values top-p removes first depends on the
sort that torch takes; here it is the lower index, as in a stable sort.
"""

import torch
import triton
import triton.language as tl

from ._checks import check_filters
from ._config import Config, launch_options
from ._rng import gumbel_pairs, row_key
from ._row_sample import RowSample, best_of, load_block, load_partials, merge_choice, merge_lse, row_partials

ROW_WARPS = 16
"""A row's program works alone, so it takes what a compute unit has; fewer elements a lane also keep the histogram's
lane masks in registers on AMD."""


@triton.jit
def ordered(x):
    """uint32 keys in the order of the fp32 values."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def from_ordered(key):
    """The fp32 value of a key."""
    return tl.where(key >> 31 != 0, key & 0x7FFFFFFF, ~key).to(tl.float32, bitcast=True)


@triton.jit
def next_block(block_max, after, bound, NUM_BLOCKS: tl.constexpr):
    """The first block after `after` whose maximum reaches `bound` and is above -inf; NUM_BLOCKS where there is none."""
    blocks = tl.arange(0, NUM_BLOCKS)
    wanted = (blocks > after) & (block_max >= bound) & (block_max > float("-inf"))
    return tl.min(tl.where(wanted, blocks, NUM_BLOCKS), axis=0)


@triton.jit
def kth_largest(row_ptr, inv_temperature, block_max, k, V, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """The k-th largest value of a row, -inf where it has fewer values above that; a sweep for each digit of 8 bits."""
    digits = tl.arange(0, 256)
    prefix = tl.full([], 0, tl.uint32)  # the digits found so far, in place
    known = tl.full([], 0, tl.uint32)  # ones where they are
    bound = tl.full([], float("-inf"), tl.float32)
    shift = tl.full([], 24, tl.uint32)
    enough = k > 0
    for _step in range(4):
        counts = tl.zeros([256], tl.int32)
        block = next_block(block_max, -1, bound, NUM_BLOCKS)
        while block < NUM_BLOCKS:
            x = load_block(row_ptr, block, V, BLOCK) * inv_temperature
            key = ordered(x)
            candidate = (x > float("-inf")) & ((key ^ prefix) & known == 0)
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=candidate)
            block = next_block(block_max, block, bound, NUM_BLOCKS)
        total = tl.sum(counts, axis=0)
        enough = enough & (total >= k)  # true in later sweeps, where it is in the first
        above = total - tl.cumsum(counts, axis=0)
        digit = tl.min(tl.where(above < k, digits, 255), axis=0)
        k -= tl.sum(tl.where(digits == digit, above, 0), axis=0)
        prefix = prefix | (digit.to(tl.uint32) << shift)
        known = known | (tl.full([], 255, tl.uint32) << shift)
        bound = from_ordered(prefix)
        shift -= 8
    return tl.where(enough, bound, float("-inf"))


@triton.jit
def processed_rows(
    logits_ptr,
    inv_temperature,
    keys_ptr,
    counters_ptr,
    slots_ptr,
    partials_ptr,
    token_ptr,
    status_ptr,
    V,
    m,
    stream,
    stride_b,
    stride_m,
    num_blocks,
    top_k,
    top_p,
    min_p,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """The token of one row."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    batch_row, slot = row // m, row % m
    row_ptr = logits_ptr + batch_row.to(tl.int64) * stride_b + slot.to(tl.int64) * stride_m
    token, status = merge_choice(partials_ptr, row, rows, num_blocks, True, NUM_BLOCKS)
    if status == 0:
        block_max = load_partials(partials_ptr, row, rows, num_blocks, 2, NUM_BLOCKS)
        maximum = tl.max(block_max, axis=0)
        threshold = tl.full([], float("-inf"), tl.float32)
        if TOP_K:
            threshold = kth_largest(row_ptr, inv_temperature, block_max, top_k, V, BLOCK, NUM_BLOCKS)
        if TOP_P:
            kept_mass = tl.full([], 0.0, tl.float32)
            if TOP_K:
                block = next_block(block_max, -1, threshold, NUM_BLOCKS)
                while block < NUM_BLOCKS:
                    x = load_block(row_ptr, block, V, BLOCK) * inv_temperature
                    kept_mass += tl.sum(tl.where(x >= threshold, tl.exp(x - maximum), 0.0), axis=0)
                    block = next_block(block_max, block, threshold, NUM_BLOCKS)
            else:
                mass, _lse = merge_lse(partials_ptr, row, rows, num_blocks, NUM_BLOCKS)
                kept_mass = tl.sum(mass, axis=0)
        if HAS_SLOTS:
            counter = tl.load(counters_ptr + batch_row) + tl.load(slots_ptr + row)
        else:
            counter = tl.load(counters_ptr + batch_row) + slot
        k0, k1 = row_key(keys_ptr, batch_row)

        value = tl.load(row_ptr + token).to(tl.float32) * inv_temperature
        passes = value >= threshold  # top-k and min-p; what a sweep finds passes these
        if MIN_P:
            passes = passes & (tl.exp(value - maximum) >= min_p)
        searching = tl.full([], 1, tl.int32)
        if not TOP_P:
            searching = tl.where(passes, 0, 1)
        while searching != 0:
            # One sweep over what ranks above the token: its mass, and the best of what is kept, with noise.
            mass_above = tl.full([], 0.0, tl.float32)
            best = tl.full([], float("-inf"), tl.float32)
            best_index = token
            block = next_block(block_max, -1, tl.maximum(value, threshold), NUM_BLOCKS)
            while block < NUM_BLOCKS:
                x = load_block(row_ptr, block, V, BLOCK) * inv_temperature
                even, odd = tl.split(tl.reshape(x, [BLOCK // 2, 2]))
                index = block * BLOCK + 2 * tl.arange(0, BLOCK // 2)
                above0 = (even >= threshold) & ((even > value) | ((even == value) & (index > token)))
                above1 = (odd >= threshold) & ((odd > value) | ((odd == value) & (index + 1 > token)))
                if tl.max((above0 | above1).to(tl.int32), axis=0) > 0:
                    exp0 = tl.where(above0, tl.exp(even - maximum), 0.0)
                    exp1 = tl.where(above1, tl.exp(odd - maximum), 0.0)
                    mass_above += tl.sum(exp0 + exp1, axis=0)
                    if MIN_P:
                        above0, above1 = above0 & (exp0 >= min_p), above1 & (exp1 >= min_p)
                    noise0, noise1 = gumbel_pairs(k0, k1, stream, counter, block * (BLOCK // 2), BLOCK // 2)
                    value0 = tl.where(above0, even + noise0, float("-inf"))
                    value1 = tl.where(above1, odd + noise1, float("-inf"))
                    odd_wins = value1 > value0
                    in_block, at = best_of(tl.where(odd_wins, value1, value0), tl.where(odd_wins, index + 1, index))
                    best_index = tl.where(in_block > best, at, best_index)
                    best = tl.maximum(in_block, best)
                block = next_block(block_max, block, tl.maximum(value, threshold), NUM_BLOCKS)
            if TOP_P:
                # Without mass above it, it is the last one of top-p's sort, which is never removed.
                passes = passes & ((mass_above < top_p * kept_mass) | (mass_above == 0.0))
                searching = tl.where(passes, 0, 1)
            else:
                searching = tl.full([], 0, tl.int32)
            token = tl.where(passes, token, best_index)
            value = tl.load(row_ptr + token).to(tl.float32) * inv_temperature
            passes = token >= 0
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(status_ptr + row, status)


def processed_sample(
    logits: torch.Tensor,
    *,
    keys: torch.Tensor,
    counters: torch.Tensor,
    inv_temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    slots: torch.Tensor | None = None,
    stream: int = 0,
    config: Config | None = None,
) -> RowSample:
    """A draw with keyed noise from each filtered row: the argmax of what is kept, plus the noise of "gumbel".

    Args:
        logits, keys, counters, inv_temperature, slots, stream, config: as `row_sample` takes them.
        top_k: how many of the largest to keep, >= 1; None keeps all.
        top_p: the mass to keep, 0 .. 1; None keeps all.
        min_p: the share of the largest probability that a token needs, 0 .. 1; None keeps all.

    Returns:
        RowSample without lse.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.
    """
    check_filters(top_k, top_p, min_p)
    rows, partials, config = row_partials(
        logits, "gumbel", inv_temperature, keys, counters, slots, stream, True, config
    )
    batch_size, m, vocab_size = logits.shape
    token = torch.empty(batch_size, m, dtype=torch.int64, device=logits.device)
    status = torch.empty(batch_size, m, dtype=torch.int32, device=logits.device)
    if rows:
        num_blocks = partials.shape[-1]
        processed_rows[(rows,)](
            logits,
            inv_temperature,
            keys,
            counters,
            slots,
            partials,
            token,
            status,
            vocab_size,
            m,
            stream,
            logits.stride(0),
            logits.stride(1),
            num_blocks,
            top_k or 0,
            1.0 if top_p is None else top_p,
            0.0 if min_p is None else min_p,
            TOP_K=top_k is not None and top_k < vocab_size,
            TOP_P=top_p is not None and top_p < 1.0,
            MIN_P=min_p is not None,
            HAS_SLOTS=slots is not None,
            BLOCK=config.block,
            NUM_BLOCKS=triton.next_power_of_2(num_blocks),
            num_warps=ROW_WARPS,
            **launch_options(exact_denormals=False),
        )
    return RowSample(token, None, status)
