"""What `residual` and `block_mass` begin with: the draft's law, and the log-sum-exps of p and q.

p is the softmax of the target's scores [B, n + 1, V], q the law of the drafted tokens over C candidates. Candidates are
reached by index, in one of three modes: the vocabulary itself, a reduced vocabulary (an inverse map gives each token's
candidate), or candidates that differ by slot (their ids mark the tokens of a block as bits; a program of their own
reads p at the ids). A draft that was computed as a whole has no q: that is `_one_hot.py`.

`law_stats` is the first launch of both: maximum and exp-sum of every row that can matter, in at most 16 spans a row,
because every program of the second launch joins them again. The row after the whole draft draws its bonus token there.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ._config import Config, choose, launch_options
from ._rng import gumbel_pairs, row_key
from ._row_sample import best_of, exp_sum, load_block

STREAMS = {"accept": 2, "residual": 3, "bonus": 4}
ACCEPT, RESIDUAL, BONUS = (tl.constexpr(i) for i in STREAMS.values())
FULL, REDUCED, CANDIDATES = (tl.constexpr(i) for i in range(3))
MAX_SPANS = 16


class DraftLaw(NamedTuple):
    """The law that a draft was drawn from; None instead of one is a one-hot law.

    Args:
        logits: [B, n, C] fp32, bf16 or fp16 log-weights, contiguous along C.
        positions: [V] int32, each token's candidate in a reduced vocabulary, -1 for none (`candidate_positions`).
        ids: [B, n, C] int64 target ids of candidates that differ by slot, distinct within a slot.
        one_hot: [B, n] bool, slots whose token was computed, not drawn.
        lse: [B, n] fp32 log-sum-exp of `logits`, where the drafter has it already; then q is read where a residual is
            drawn and nowhere else.
    """

    logits: torch.Tensor
    positions: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    one_hot: torch.Tensor | None = None
    lse: torch.Tensor | None = None


def candidate_positions(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[V] int32 inverse of a reduced vocabulary's ids [C]: made once for a drafter."""
    positions = torch.full((vocab_size,), -1, dtype=torch.int32, device=ids.device)
    positions[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    return positions


@triton.jit
def halves(x, SIZE: tl.constexpr):
    """Entries 2 j and 2 j + 1."""
    return tl.split(tl.reshape(x, [SIZE // 2, 2]))


@triton.jit
def with_block(maximum, total, x):
    """Maximum and exp-sum of what there was and of a block x; NaN is left out."""
    x = tl.where(x != x, float("-inf"), x)
    top = tl.maximum(maximum, tl.max(x, axis=0))
    moved = tl.exp(maximum - tl.where(tl.abs(top) == float("inf"), 0.0, top))
    return top, tl.where(maximum == float("-inf"), 0.0, total * moved) + exp_sum(x, top)


@triton.jit
def span_stats(row_ptr, scale, size, first_block, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Maximum (NaN marks NaN) and exp-sum of SPAN blocks."""
    maximum, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    has_nan = tl.full([], 0, tl.int32)
    for i in range(SPAN):
        x = load_block(row_ptr, first_block + i, size, BLOCK) * scale
        has_nan = tl.maximum(has_nan, tl.max((x != x).to(tl.int32), axis=0))
        maximum, total = with_block(maximum, total, x)
    return tl.where(has_nan > 0, float("nan"), maximum), total


@triton.jit
def span_choice(row_ptr, scale, size, k0, k1, stream, counter, first_block, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Best log-weight with noise (NaN marks NaN) and its token, of SPAN blocks."""
    best, index = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    has_nan = tl.full([], 0, tl.int32)
    for i in range(SPAN):
        block = first_block + i
        even, odd = halves(load_block(row_ptr, block, size, BLOCK) * scale, BLOCK)
        has_nan = tl.maximum(has_nan, tl.max(((even != even) | (odd != odd)).to(tl.int32), axis=0))
        noise0, noise1 = gumbel_pairs(k0, k1, stream, counter, block * (BLOCK // 2), BLOCK // 2)
        value, at = best_of_pairs(even + noise0, odd + noise1, block * BLOCK, BLOCK)
        index = tl.where(value > best, at, index)
        best = tl.maximum(value, best)
    return tl.where(has_nan > 0, float("nan"), best), index


@triton.jit
def best_of_pairs(value0, value1, first, BLOCK: tl.constexpr):
    """Best value and its token, of values at first + 2 j and first + 2 j + 1; NaN never wins."""
    tokens = first + 2 * tl.arange(0, BLOCK // 2)
    value0 = tl.where(value0 != value0, float("-inf"), value0)
    value1 = tl.where(value1 != value1, float("-inf"), value1)
    odd_wins = value1 > value0
    return best_of(tl.where(odd_wins, value1, value0), tl.where(odd_wins, tokens + 1, tokens))


@triton.jit
def law_stats(
    p_ptr,
    inv_temperature,
    q_ptr,
    ids_ptr,
    one_hot_ptr,
    draft_ptr,
    lengths_ptr,
    keys_ptr,
    counters_ptr,
    stats_ptr,
    V,
    C,
    n,
    batch_size,
    p_stride_b,
    p_stride_m,
    q_stride_b,
    q_stride_n,
    ids_stride_b,
    ids_stride_n,
    one_hot_stride,
    draft_stride,
    FLAGS: tl.constexpr,
    MODE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One span of one row of p, or, past these, of q, as stats [3, rows, spans].

    Planes of p's rows: maximum, exp-sum; of the bonus row: best value, token. Planes of q's rows: maximum, exp-sum, and
    the drafted token's logit where candidates differ by slot. Rows that cannot matter are left out.
    """
    row, span, num_spans = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    out = stats_ptr + row.to(tl.int64) * num_spans + span
    plane = tl.num_programs(0).to(tl.int64) * num_spans
    m = n + 1
    if row < batch_size * m:
        batch_row, slot = row // m, row % m
        length = tl.load(lengths_ptr + batch_row)
        row_ptr = p_ptr + batch_row.to(tl.int64) * p_stride_b + slot.to(tl.int64) * p_stride_m
        if slot < length:
            maximum, total = span_stats(row_ptr, inv_temperature, V, span * SPAN, SPAN, BLOCK)
            tl.store(out, maximum)
            tl.store(out + plane, total)
        elif slot == length:
            k0, k1 = row_key(keys_ptr, batch_row)
            stream, counter = tl.full([], BONUS, tl.int32), tl.load(counters_ptr + batch_row)
            best, token = span_choice(row_ptr, inv_temperature, V, k0, k1, stream, counter, span * SPAN, SPAN, BLOCK)
            tl.store(out, best)
            tl.store(out + plane, token.to(tl.float32, bitcast=True))
    else:
        batch_row, slot = (row - batch_size * m) // n, (row - batch_size * m) % n
        wanted = slot < tl.load(lengths_ptr + batch_row)
        if FLAGS:
            wanted = wanted & (tl.load(one_hot_ptr + batch_row.to(tl.int64) * one_hot_stride + slot) == 0)
        if wanted:
            row_ptr = q_ptr + batch_row.to(tl.int64) * q_stride_b + slot.to(tl.int64) * q_stride_n
            maximum, total = span_stats(row_ptr, 1.0, C, span * SPAN, SPAN, BLOCK)
            tl.store(out, maximum)
            tl.store(out + plane, total)
            if MODE == CANDIDATES:
                drafted = tl.load(draft_ptr + batch_row.to(tl.int64) * draft_stride + slot)
                ids_row = ids_ptr + batch_row.to(tl.int64) * ids_stride_b + slot.to(tl.int64) * ids_stride_n
                logit, found = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)
                for i in range(SPAN):
                    offsets = (span * SPAN + i) * BLOCK + tl.arange(0, BLOCK)
                    same = tl.load(ids_row + offsets, mask=offsets < C, other=-1) == drafted
                    at = tl.load(row_ptr + offsets, mask=same & (offsets < C), other=0.0).to(tl.float32)
                    logit += tl.sum(at, axis=0)
                    found = tl.maximum(found, tl.max((same & (offsets < C)).to(tl.int32), axis=0))
                tl.store(out + 2 * plane, tl.where(found > 0, logit, float("-inf")))


def spans_of(num_blocks: int) -> tuple[int, int]:
    """Blocks in a span, and spans in a row: at most MAX_SPANS."""
    span = triton.cdiv(num_blocks, MAX_SPANS)
    return span, triton.cdiv(num_blocks, span)


class Statistics(NamedTuple):
    """The first launch's result, and what the later launches of both rules are given alike."""

    stats: torch.Tensor
    config: Config
    num_blocks: int
    grid_blocks: int
    law: tuple
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    constants: dict[str, int | bool]

    @property
    def num_spans(self) -> int:
        return self.stats.shape[-1]


def statistics(
    op: str,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    law: DraftLaw,
    keys: torch.Tensor,
    counters: torch.Tensor,
    inv_temperature: float,
    config: Config | None,
) -> Statistics:
    """Launch `law_stats` for `op`, over at least one row of at least one slot."""
    (batch_size, n), vocab_size, num_candidates = tokens.shape, logits.shape[-1], law.logits.shape[-1]
    mode = (REDUCED if law.positions is not None else FULL if law.ids is None else CANDIDATES).value
    q, ids, flags, lse = law.logits, law.ids, law.one_hot, law.lse
    config = config or choose(op, batch_size * (n + 1), vocab_size, logits.device)
    num_blocks = triton.cdiv(vocab_size, config.block)
    span, num_spans = spans_of(num_blocks)
    with_q = lse is None or mode == CANDIDATES.value
    rows = batch_size * (2 * n + 1 if with_q else n + 1)
    stats = torch.empty(3, rows, num_spans, dtype=torch.float32, device=logits.device)
    strides = (
        *logits.stride()[:2],
        *q.stride()[:2],
        *(ids.stride()[:2] if ids is not None else (0, 0)),
        flags.stride(0) if flags is not None else 0,
        lse.stride(0) if lse is not None else 0,
        tokens.stride(0),
    )
    flags = None if flags is None else flags.view(torch.uint8)
    constants = {"FLAGS": flags is not None, "MODE": mode, "BLOCK": config.block}
    law_stats[(rows, num_spans)](
        logits,
        inv_temperature,
        q,
        ids,
        flags,
        tokens,
        lengths,
        keys,
        counters,
        stats,
        vocab_size,
        num_candidates,
        n,
        batch_size,
        *strides[:7],
        strides[8],
        **constants,
        SPAN=span,
        num_warps=config.num_warps,
        **launch_options(False, config.waves_per_eu),
    )
    constants |= {
        "HAS_LSE": lse is not None,
        "SLOTS": triton.next_power_of_2(n + 1),
        "SPANS": triton.next_power_of_2(num_spans),
        "CHUNK": min(32, max(16, triton.next_power_of_2(num_candidates))),
    }
    return Statistics(
        stats,
        config,
        num_blocks,
        num_blocks + (mode == CANDIDATES.value),
        (logits, inv_temperature, q, law.positions, ids, flags, lse, tokens, lengths, keys, counters),
        (vocab_size, num_candidates, n, num_spans),
        strides,
        constants,
    )
