"""`residual` and `block_mass` for drafts whose tokens were computed, all of them: q is 1 at the drafted token.

The residual max(pi p - q, 0) is then p without that token, whatever pi is, and its mass is pi (1 - p(d)). So one sweep
over the k + 1 rows of p does for the log-sum-exps and for every token that could come last, in two launches:

1. `one_hot_spans`, grid (B (n + 1), spans): maximum and exp-sum of a span of one row, and its best token with noise,
   the drafted one left out.
2. `one_hot_merge`, grid (B,): joins the spans, throws the coins, takes the kept row's token.
"""

import torch
import triton
import triton.language as tl

from ._config import Config, choose, launch_options
from ._decide import at_slot, coins, drafted_logits, first_rejected, longest_passing, merge_stats, one_minus_exp
from ._draws import load_choice, store_verdict
from ._law import BONUS, RESIDUAL, best_of_pairs, halves, spans_of, with_block
from ._rng import gumbel_pairs, row_key
from ._row_sample import load_block
from ._walk import Verified


@triton.jit
def one_hot_spans(
    p_ptr,
    inv_temperature,
    draft_ptr,
    lengths_ptr,
    keys_ptr,
    counters_ptr,
    stats_ptr,
    V,
    n,
    p_stride_b,
    p_stride_m,
    draft_stride,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One span of one row, as stats [4, rows, spans]: maximum (NaN marks NaN), exp-sum, best value, its token."""
    row, span, num_spans = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch_row, slot = row // (n + 1), row % (n + 1)
    length = tl.load(lengths_ptr + batch_row)
    if slot <= length:
        row_ptr = p_ptr + batch_row.to(tl.int64) * p_stride_b + slot.to(tl.int64) * p_stride_m
        drafted_at = draft_ptr + batch_row.to(tl.int64) * draft_stride + slot
        drafted = tl.load(drafted_at, mask=slot < length, other=-1).to(tl.int32)
        k0, k1 = row_key(keys_ptr, batch_row)
        stream, counter = tl.where(slot < length, RESIDUAL, BONUS), tl.load(counters_ptr + batch_row)
        maximum, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
        best, token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
        has_nan = tl.full([], 0, tl.int32)
        for i in range(SPAN):
            block = span * SPAN + i
            x = load_block(row_ptr, block, V, BLOCK) * inv_temperature
            has_nan = tl.maximum(has_nan, tl.max((x != x).to(tl.int32), axis=0))
            maximum, total = with_block(maximum, total, x)
            even, odd = halves(x, BLOCK)
            noise0, noise1 = gumbel_pairs(k0, k1, stream, counter, block * (BLOCK // 2), BLOCK // 2)
            tokens = block * BLOCK + 2 * tl.arange(0, BLOCK // 2)
            value0 = tl.where(tokens == drafted, float("-inf"), even + noise0)
            value1 = tl.where(tokens + 1 == drafted, float("-inf"), odd + noise1)
            value, at = best_of_pairs(value0, value1, block * BLOCK, BLOCK)
            token = tl.where(value > best, at, token)
            best = tl.maximum(value, best)
        out = stats_ptr + row.to(tl.int64) * num_spans + span
        plane = tl.num_programs(0).to(tl.int64) * num_spans
        tl.store(out, tl.where(has_nan > 0, float("nan"), maximum))
        tl.store(out + plane, total)
        tl.store(out + 2 * plane, best)
        tl.store(out + 3 * plane, token.to(tl.float32, bitcast=True))


@triton.jit
def one_hot_merge(
    p_ptr,
    inv_temperature,
    draft_ptr,
    lengths_ptr,
    keys_ptr,
    counters_ptr,
    stats_ptr,
    accepted_ptr,
    tokens_ptr,
    V,
    n,
    num_spans,
    p_stride_b,
    p_stride_m,
    draft_stride,
    AS_BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Decide one batch row, token by token or as a block."""
    batch_row, m = tl.program_id(0), n + 1
    rows, slots = tl.num_programs(0) * m, tl.arange(0, SLOTS)
    length = tl.minimum(tl.load(lengths_ptr + batch_row).to(tl.int32), n)
    here = slots < length
    drafted = tl.load(draft_ptr + batch_row.to(tl.int64) * draft_stride + slots, mask=here, other=-1).to(tl.int32)
    p0, p1 = merge_stats(stats_ptr, batch_row * m, slots <= length, rows, num_spans, SLOTS, SPANS)
    known = here & (drafted >= 0) & (drafted < V)
    log_p = drafted_logits(p_ptr, batch_row, drafted, known, p_stride_b, p_stride_m, SLOTS) * inv_temperature - p0 - p1
    coin = coins(keys_ptr, counters_ptr, batch_row, SLOTS)
    if AS_BLOCK:
        # A row that is no law ends the block before it, so that getting there is decided without it.
        reached = tl.min(tl.where(here & (log_p == log_p), SLOTS, slots), axis=0)
        log_p = tl.where((slots < reached) & (log_p < 0.0), log_p, 0.0)
        log_pi = tl.cumsum(log_p, axis=0)
        mass = tl.exp(log_pi) * one_minus_exp(tl.gather(log_p, tl.minimum(slots + 1, SLOTS - 1), axis=0))
        accepted = longest_passing(coin, log_pi, mass, reached, SLOTS)
    else:
        accepted = first_rejected(coin, log_p, here, SLOTS)
    plane = rows.to(tl.int64) * num_spans
    choice_ptr = stats_ptr + 2 * plane + (batch_row * m + accepted).to(tl.int64) * num_spans
    value, token = load_choice(choice_ptr, plane, num_spans, SPANS)
    # By rounding a token that has all of p may be rejected; nothing else is left to draw then.
    token = tl.where(value == float("-inf"), at_slot(drafted, accepted, SLOTS), token)
    maximum = at_slot(p0, accepted, SLOTS)
    token = tl.where(maximum == maximum, token, -1)
    store_verdict(accepted_ptr, tokens_ptr, batch_row, accepted, drafted, token, n, SLOTS)


def verify_one_hot(
    op: str,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    keys: torch.Tensor,
    counters: torch.Tensor,
    inv_temperature: float,
    config: Config | None,
) -> Verified:
    """The verdict of `op` on a draft without law; the arguments are those of `residual`, checked."""
    (batch_size, n), vocab_size = tokens.shape, logits.shape[-1]
    found = Verified(
        torch.empty(batch_size, dtype=torch.int64, device=logits.device),
        torch.empty(batch_size, n + 1, dtype=torch.int64, device=logits.device),
    )
    if batch_size == 0:
        return found
    rows = batch_size * (n + 1)
    config = config or choose(op, rows, vocab_size, logits.device)
    span, num_spans = spans_of(triton.cdiv(vocab_size, config.block))
    stats = torch.empty(4, rows, num_spans, dtype=torch.float32, device=logits.device)
    given = (logits, inv_temperature, tokens, lengths, keys, counters, stats)
    strides = (*logits.stride()[:2], tokens.stride(0))
    one_hot_spans[(rows, num_spans)](
        *given,
        vocab_size,
        n,
        *strides,
        SPAN=span,
        BLOCK=config.block,
        num_warps=config.num_warps,
        **launch_options(False, config.waves_per_eu),
    )
    slots, spans = max(2, triton.next_power_of_2(n + 1)), triton.next_power_of_2(num_spans)
    one_hot_merge[(batch_size,)](
        *given,
        found.num_accepted,
        found.tokens,
        vocab_size,
        n,
        num_spans,
        *strides,
        AS_BLOCK=op == "block_mass",
        SLOTS=slots,
        SPANS=spans,
        num_warps=max(1, min(4, slots * spans // 256)),
        **launch_options(exact_denormals=False),
    )
    return found
