"""Device functions of the later launches of `residual` and `block_mass`: how many drafted tokens are kept.

A batch row's drafted tokens under p and q, their coins, and what these decide.
"""

import triton
import triton.language as tl

from ._law import ACCEPT, CANDIDATES, REDUCED
from ._rng import row_key, uniform_pair


@triton.jit
def merge_stats(stats_ptr, first_row, here, rows, num_spans, SLOTS: tl.constexpr, SPANS: tl.constexpr):
    """Maximum (NaN where the row is no law) and log of the exp-sum relative to it, [SLOTS] each."""
    slots, spans = tl.arange(0, SLOTS), tl.arange(0, SPANS)
    base = stats_ptr + first_row.to(tl.int64) * num_spans
    offsets = slots[:, None] * num_spans + spans[None, :]
    mask = here[:, None] & (spans < num_spans)[None, :]
    span_max = tl.load(base + offsets, mask=mask, other=float("-inf"))
    span_sum = tl.load(base + rows.to(tl.int64) * num_spans + offsets, mask=mask, other=0.0)
    has_nan = tl.max((span_max != span_max).to(tl.int32), axis=1) > 0
    maximum = tl.max(tl.where(span_max != span_max, float("-inf"), span_max), axis=1)
    finite = tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)
    total = tl.sum(tl.where(span_max == float("-inf"), 0.0, span_sum * tl.exp(span_max - finite[:, None])), axis=1)
    is_law = (tl.abs(maximum) < float("inf")) & (has_nan == 0)
    return tl.where(is_law, maximum, float("nan")), tl.log(tl.where(is_law, total, 1.0))


@triton.jit
def drafted_logits(row_ptr, batch_row, tokens, known, stride_b, stride_m, SLOTS: tl.constexpr):
    """[SLOTS] fp32 logits of one token a slot, -inf where none is known."""
    base = row_ptr + batch_row.to(tl.int64) * stride_b
    at = base + tl.arange(0, SLOTS).to(tl.int64) * stride_m + tokens
    return tl.load(at, mask=known, other=float("-inf")).to(tl.float32)


@triton.jit
def draft_state(
    p_ptr,
    inv_temperature,
    q_ptr,
    positions_ptr,
    one_hot_ptr,
    lse_ptr,
    draft_ptr,
    stats_ptr,
    batch_row,
    here,
    V,
    n,
    batch_size,
    num_spans,
    p_stride_b,
    p_stride_m,
    q_stride_b,
    q_stride_n,
    one_hot_stride,
    lse_stride,
    draft_stride,
    FLAGS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    MODE: tl.constexpr,
    SLOTS: tl.constexpr,
    SPANS: tl.constexpr,
):
    """For the slots `here` of one batch row, [SLOTS] each: drafted token, whether it is one-hot, log p(d) - log q(d),
    and the log-sum-exps of p and q in two parts.

    A logarithm of a probability is (logit - part 0) - part 1: the first difference is mostly exact, so what q and p
    differ by survives.
    """
    slots, m = tl.arange(0, SLOTS), n + 1
    rows = batch_size * m if HAS_LSE and MODE != CANDIDATES else batch_size * (m + n)
    drafted = tl.load(draft_ptr + batch_row.to(tl.int64) * draft_stride + slots, mask=here, other=-1).to(tl.int32)
    p0, p1 = merge_stats(stats_ptr, batch_row * m, here, rows, num_spans, SLOTS, SPANS)
    known = here & (drafted >= 0) & (drafted < V)
    log_p = drafted_logits(p_ptr, batch_row, drafted, known, p_stride_b, p_stride_m, SLOTS) * inv_temperature - p0 - p1
    q1 = tl.full([SLOTS], 0.0, tl.float32)
    is_one_hot = tl.full([SLOTS], 0, tl.int32)
    if FLAGS:
        flags = one_hot_ptr + batch_row.to(tl.int64) * one_hot_stride
        is_one_hot = tl.load(flags + slots, mask=here, other=0).to(tl.int32)
    drawn = here & (is_one_hot == 0)
    q_row = batch_size * m + batch_row * n
    if HAS_LSE:
        q0 = tl.load(lse_ptr + batch_row.to(tl.int64) * lse_stride + slots, mask=drawn, other=0.0)
        q0 = tl.where(tl.abs(q0) < float("inf"), q0, float("nan"))
    else:
        q0, q1 = merge_stats(stats_ptr, q_row, drawn, rows, num_spans, SLOTS, SPANS)
        q0 = tl.where(drawn, q0, 0.0)
    if MODE == CANDIDATES:
        spans = tl.arange(0, SPANS)
        logits_ptr = stats_ptr + (rows.to(tl.int64) * 2 + q_row) * num_spans
        logits = tl.load(
            logits_ptr + (slots[:, None] * num_spans + spans[None, :]),
            mask=drawn[:, None] & (spans < num_spans)[None, :],
            other=float("-inf"),
        )
        found = tl.max((logits != float("-inf")).to(tl.int32), axis=1) > 0
        logit = tl.sum(tl.where(logits == float("-inf"), 0.0, logits), axis=1)
        logit = tl.where(found, logit, float("-inf"))
    else:
        candidate = drafted
        if MODE == REDUCED:
            candidate = tl.load(positions_ptr + drafted, mask=known & drawn, other=-1)
        known = known & drawn & (candidate >= 0)
        logit = drafted_logits(q_ptr, batch_row, candidate, known, q_stride_b, q_stride_n, SLOTS)
    log_q = tl.where(is_one_hot > 0, 0.0, logit - q0 - q1)
    # Neither of two zeros is a reason to accept.
    log_ratio = tl.where(log_p == float("-inf"), float("-inf"), log_p - log_q)
    log_ratio = tl.where(log_q != log_q, float("nan"), log_ratio)
    return drafted, is_one_hot, log_ratio, p0, p1, q0, q1


@triton.jit
def coins(keys_ptr, counters_ptr, batch_row, SLOTS: tl.constexpr):
    """[SLOTS] one uniform a slot."""
    k0, k1 = row_key(keys_ptr, batch_row)
    counters = tl.load(counters_ptr + batch_row) + tl.arange(0, SLOTS)
    uniform, _other = uniform_pair(k0, k1, tl.full([], ACCEPT, tl.int32), counters)
    return uniform


@triton.jit
def first_rejected(coin, log_ratio, here, SLOTS: tl.constexpr):
    """Slots `here` before the first that its coin rejects, by rejection."""
    # u q < p, strictly: what has no probability is never accepted, and NaN is not.
    accepts = here & (coin * tl.exp(-log_ratio) < 1.0)
    return tl.min(tl.where(accepts, SLOTS, tl.arange(0, SLOTS)), axis=0)


@triton.jit
def longest_passing(coin, log_pi, mass, reached, SLOTS: tl.constexpr):
    """The longest of the lengths up to `reached` that its coin lets pass, by block verification.

    Entry i of log pi, of the mass of max(pi p - q, 0) and of the coins belongs to length i + 1.
    """
    slots = tl.arange(0, SLOTS)
    log_pi = tl.where(slots < reached, log_pi, float("-inf"))
    # u Z + u (1 - pi) < Z: strictly, and without a division.
    passes = (coin * (mass + one_minus_exp(log_pi)) < mass) | (log_pi >= 0.0)
    passes = tl.where(slots + 1 == reached, coin < tl.exp(log_pi), passes) & (slots < reached)
    return tl.max(tl.where(passes, slots + 1, 0), axis=0)


@triton.jit
def at_slot(values, slot, SLOTS: tl.constexpr):
    """One entry of [SLOTS] values."""
    return tl.sum(tl.where(tl.arange(0, SLOTS) == slot, values, 0), axis=0)


@triton.jit
def one_minus_exp(t):
    """1 - exp(t) for t <= 0, relatively exact near 0: there by exp's series, since 1 - exp(t) would cancel."""
    series = 1.0 + t * 0.125
    series = 1.0 + t * (1.0 / 7.0) * series
    series = 1.0 + t * (1.0 / 6.0) * series
    series = 1.0 + t * 0.2 * series
    series = 1.0 + t * 0.25 * series
    series = 1.0 + t * (1.0 / 3.0) * series
    series = 1.0 + t * 0.5 * series
    return tl.where(t > -0.5, -t * series, 1.0 - tl.exp(t))
