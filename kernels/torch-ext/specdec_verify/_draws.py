"""Device functions of the later launches of `residual` and `block_mass`: what is drawn after the kept tokens.

One block of the residual max(pi p - q, 0), and the last token of a row.
"""

import triton
import triton.language as tl

from ._decide import one_minus_exp
from ._law import CANDIDATES, REDUCED, RESIDUAL, best_of_pairs, halves
from ._rng import STREAM_SHIFT, gumbel_from_word, gumbel_pairs, row_key, threefry
from ._row_sample import best_of, load_block


@triton.jit
def residual_weight(log_p, t):
    """log max(p - q, 0), from log p and t = log q - log p."""
    less = (t < 0.0) & (log_p > float("-inf"))
    return tl.where(less, log_p + tl.log(one_minus_exp(tl.where(less, t, -1.0))), float("-inf"))


@triton.jit
def half_weights(x, y, p0, p1, q0, q1, log_pi):
    """log max(pi p - q, 0) of logits x of p and y of q."""
    t = ((y - q0) - (x - p0)) - (q1 - p1) - log_pi
    return residual_weight((x - p0) - p1 + log_pi, tl.where(y == float("-inf"), float("-inf"), t))


@triton.jit
def mass_of(weight0, weight1):
    """sum exp over both halves."""
    return tl.sum(tl.exp(weight0) + tl.exp(weight1), axis=0)


@triton.jit
def block_members(ids_ptr, block, C, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Whether tokens 2 j and 2 j + 1 of a block are among C distinct ids: collected as bits of 32-bit words."""
    words = tl.zeros([BLOCK // 32], tl.int32)
    for start in range(0, C, CHUNK):
        candidates = start + tl.arange(0, CHUNK)
        at = tl.load(ids_ptr + candidates, mask=candidates < C, other=-1).to(tl.int32) - block * BLOCK
        word = tl.where((candidates < C) & (at >= 0) & (at < BLOCK), at >> 5, -1)
        bits = tl.full([CHUNK], 1, tl.int32) << (at & 31)
        here = word[:, None] == tl.arange(0, BLOCK // 32)[None, :]
        words += tl.sum(tl.where(here, bits[:, None], 0), axis=0)
    pairs = 2 * tl.arange(0, 16)[None, :]
    even, odd = (words[:, None] >> pairs) & 1, (words[:, None] >> (pairs + 1)) & 1
    return tl.reshape(even, [BLOCK // 2]) > 0, tl.reshape(odd, [BLOCK // 2]) > 0


@triton.jit
def residual_block(
    p_ptr,
    inv_temperature,
    q_ptr,
    positions_ptr,
    ids_ptr,
    keys_ptr,
    counters_ptr,
    batch_row,
    slot,
    block,
    V,
    C,
    num_blocks,
    p_stride_b,
    p_stride_m,
    q_stride_b,
    q_stride_n,
    ids_stride_b,
    ids_stride_n,
    drafted,
    is_one_hot,
    p0,
    p1,
    q0,
    q1,
    log_pi,
    WITH_MASS: tl.constexpr,
    MODE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of max(pi p - q, 0): best value with noise (NaN marks NaN) and its token, the same of p, and the mass.

    The block past the vocabulary's stands for the candidates, where they differ by slot.
    """
    k0, k1 = row_key(keys_ptr, batch_row)
    stream, counter = tl.full([], RESIDUAL, tl.int32), tl.load(counters_ptr + batch_row)
    p_row = p_ptr + batch_row.to(tl.int64) * p_stride_b + slot.to(tl.int64) * p_stride_m
    q_row = q_ptr + batch_row.to(tl.int64) * q_stride_b + slot.to(tl.int64) * q_stride_n
    if MODE == CANDIDATES:
        ids_row = ids_ptr + batch_row.to(tl.int64) * ids_stride_b + slot.to(tl.int64) * ids_stride_n
    mass, bad = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)
    plain, plain_token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    best, token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    if block < num_blocks:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        x0, x1 = halves(load_block(p_row, block, V, BLOCK) * inv_temperature, BLOCK)
        noise0, noise1 = gumbel_pairs(k0, k1, stream, counter, block * (BLOCK // 2), BLOCK // 2)
        plain, plain_token = best_of_pairs(x0 + noise0, x1 + noise1, block * BLOCK, BLOCK)
        weight0, weight1 = (x0 - p0) - p1 + log_pi, (x1 - p0) - p1 + log_pi
        if is_one_hot > 0:
            tokens = block * BLOCK + 2 * tl.arange(0, BLOCK // 2)
            weight0 = tl.where(tokens == drafted, float("-inf"), weight0)
            weight1 = tl.where(tokens + 1 == drafted, float("-inf"), weight1)
        elif MODE == CANDIDATES:
            is_candidate0, is_candidate1 = block_members(ids_row, block, C, CHUNK, BLOCK)
            weight0 = tl.where(is_candidate0, float("-inf"), weight0)
            weight1 = tl.where(is_candidate1, float("-inf"), weight1)
        else:
            if MODE == REDUCED:
                at = tl.load(positions_ptr + offsets, mask=offsets < V, other=-1)
                y = tl.load(q_row + at, mask=at >= 0, other=float("-inf")).to(tl.float32)
            else:
                y = load_block(q_row, block, V, BLOCK)
            bad = tl.max(((y != y) | (y == float("inf"))).to(tl.int32), axis=0)
            y0, y1 = halves(y, BLOCK)
            weight0 = half_weights(x0, y0, p0, p1, q0, q1, log_pi)
            weight1 = half_weights(x1, y1, p0, p1, q0, q1, log_pi)
        best, token = best_of_pairs(weight0 + noise0, weight1 + noise1, block * BLOCK, BLOCK)
        if WITH_MASS:
            mass = mass_of(weight0, weight1)
    elif MODE == CANDIDATES:
        for start in range(0, tl.where(is_one_hot > 0, 0, C), CHUNK):
            candidates = start + tl.arange(0, CHUNK)
            ids = tl.load(ids_row + candidates, mask=candidates < C, other=-1).to(tl.int32)
            inside = (ids >= 0) & (ids < V)
            x = tl.load(p_row + ids, mask=inside, other=float("-inf")).to(tl.float32) * inv_temperature
            y = tl.load(q_row + candidates, mask=candidates < C, other=float("-inf")).to(tl.float32)
            bad = tl.maximum(bad, tl.max(((y != y) | (y == float("inf"))).to(tl.int32), axis=0))
            first = (ids >> 1).to(tl.uint32) | (stream.to(tl.uint32) << STREAM_SHIFT)
            word0, word1 = threefry(k0, k1, first, counter.to(tl.uint32))
            noise = gumbel_from_word(tl.where((ids & 1) == 0, word0, word1))
            weight = tl.where(inside, half_weights(x, y, p0, p1, q0, q1, log_pi), float("-inf"))
            value, at = best_of(weight + noise, ids)
            token = tl.where((value > best) | ((value == best) & (at < token)), at, token)
            best = tl.maximum(value, best)
            if WITH_MASS:
                mass += tl.sum(tl.exp(weight), axis=0)
    # A row that is no law has NaN for a part of its log-sum-exp.
    bad = tl.maximum(bad, ((p0 != p0) | (q0 != q0)).to(tl.int32))
    return tl.where(bad > 0, float("nan"), best), token, plain, plain_token, mass


@triton.jit
def store_draws(out, plane, best, token, plain, plain_token):
    """Four planes of one block's draws."""
    tl.store(out, best)
    tl.store(out + plane, token.to(tl.float32, bitcast=True))
    tl.store(out + 2 * plane, plain)
    tl.store(out + 3 * plane, plain_token.to(tl.float32, bitcast=True))


@triton.jit
def load_choice(values_ptr, plane, count, SIZE: tl.constexpr):
    """The best of `count` values, NaN where one is NaN, and its token from the plane after."""
    at = tl.arange(0, SIZE)
    value = tl.load(values_ptr + at, mask=at < count, other=float("-inf"))
    token = tl.load(values_ptr + plane + at, mask=at < count, other=0.0).to(tl.int32, bitcast=True)
    has_nan = tl.max((value != value).to(tl.int32), axis=0) > 0
    value, token = best_of(tl.where(value != value, float("-inf"), value), token)
    return tl.where(has_nan, float("nan"), value), token


@triton.jit
def merge_draws(
    stats_ptr,
    draws_ptr,
    batch_row,
    draws_row,
    accepted,
    length,
    n,
    rows,
    draws_rows,
    num_spans,
    num_blocks,
    SPANS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The last emitted token, -1 for a broken row: the bonus, the residual's draw, or p's where no residual is left."""
    if accepted == length:
        row_ptr = stats_ptr + (batch_row * (n + 1) + accepted).to(tl.int64) * num_spans
        value, token = load_choice(row_ptr, rows.to(tl.int64) * num_spans, num_spans, SPANS)
    else:
        row_ptr = draws_ptr + draws_row.to(tl.int64) * num_blocks
        plane = draws_rows.to(tl.int64) * num_blocks
        value, token = load_choice(row_ptr, plane, num_blocks, BLOCKS)
        # Where p and q agree up to rounding a rejection may have no residual left.
        plain, plain_token = load_choice(row_ptr + 2 * plane, plane, num_blocks, BLOCKS)
        token = tl.where(value == float("-inf"), plain_token, token)
        value = tl.where(value == float("-inf"), plain, value)
    return tl.where(tl.abs(value) < float("inf"), token, -1)


@triton.jit
def store_verdict(accepted_ptr, tokens_ptr, batch_row, accepted, drafted, token, n, SLOTS: tl.constexpr):
    """Accepted tokens, one more, and -1; a broken row is -1 throughout."""
    slots = tl.arange(0, SLOTS)
    tokens = tl.where(slots < accepted, drafted, tl.where(slots == accepted, token, -1))
    tokens = tl.where(token < 0, -1, tokens)
    tl.store(tokens_ptr + batch_row.to(tl.int64) * (n + 1) + slots, tokens.to(tl.int64), mask=slots <= n)
    tl.store(accepted_ptr + batch_row, tl.where(token < 0, -1, accepted).to(tl.int64))
