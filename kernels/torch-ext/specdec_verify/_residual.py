"""Verification by rejection, chains: accept d with probability min(1, p(d) / q(d)), else draw from max(p - q, 0).

Leviathan, Kalman, Matias 2023, algorithm 1. scores [B, n + 1, V], drafted tokens [B, n] and their law -> emitted tokens
and number accepted, in three launches where some of them were drawn:

1. `law_stats` of `_law.py` over the rows of p and q; the bonus token is drawn there.
2. `residual_blocks`, grid (B, blocks): every program decides its batch row anew from 16 numbers a row, then draws in
   its block of the one row that was rejected. A batch row without a rejection reads nothing more.
3. `residual_merge`, grid (B,).

Tokens that were computed, all of them, take the two launches of `_one_hot.py`.

Neither p nor q is ever stored, and q is never spread over the vocabulary. Weights of the residual come from the
difference of logits, log p + log(1 - exp(log q - log p)), which holds where q is close to p.
"""

import torch
import triton
import triton.language as tl

from ._checks import check_verification
from ._config import Config, launch_options
from ._decide import at_slot, coins, draft_state, first_rejected
from ._draws import merge_draws, residual_block, store_draws, store_verdict
from ._law import DraftLaw, statistics
from ._one_hot import verify_one_hot
from ._walk import Verified


@triton.jit
def residual_blocks(
    p_ptr,
    inv_temperature,
    q_ptr,
    positions_ptr,
    ids_ptr,
    one_hot_ptr,
    lse_ptr,
    draft_ptr,
    lengths_ptr,
    keys_ptr,
    counters_ptr,
    stats_ptr,
    draws_ptr,
    accepted_ptr,
    V,
    C,
    n,
    num_spans,
    num_blocks,
    p_stride_b,
    p_stride_m,
    q_stride_b,
    q_stride_n,
    ids_stride_b,
    ids_stride_n,
    one_hot_stride,
    lse_stride,
    draft_stride,
    FLAGS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    MODE: tl.constexpr,
    SLOTS: tl.constexpr,
    SPANS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decide one batch row, and draw from one block of its residual as draws [4, B, blocks]."""
    batch_row, block, batch_size = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    slots = tl.arange(0, SLOTS)
    length = tl.minimum(tl.load(lengths_ptr + batch_row).to(tl.int32), n)
    here = slots < length
    drafted, is_one_hot, log_ratio, p0, p1, q0, q1 = draft_state(
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
        FLAGS,
        HAS_LSE,
        MODE,
        SLOTS,
        SPANS,
    )
    accepted = first_rejected(coins(keys_ptr, counters_ptr, batch_row, SLOTS), log_ratio, here, SLOTS)
    if block == 0:
        tl.store(accepted_ptr + batch_row, accepted.to(tl.int64))
    if accepted < length:
        best, token, plain, plain_token, _mass = residual_block(
            p_ptr,
            inv_temperature,
            q_ptr,
            positions_ptr,
            ids_ptr,
            keys_ptr,
            counters_ptr,
            batch_row,
            accepted,
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
            at_slot(drafted, accepted, SLOTS),
            at_slot(is_one_hot, accepted, SLOTS),
            at_slot(p0, accepted, SLOTS),
            at_slot(p1, accepted, SLOTS),
            at_slot(q0, accepted, SLOTS),
            at_slot(q1, accepted, SLOTS),
            0.0,
            False,
            MODE,
            CHUNK,
            BLOCK,
        )
        plane = batch_size.to(tl.int64) * tl.num_programs(1)
        out = draws_ptr + batch_row.to(tl.int64) * tl.num_programs(1) + block
        store_draws(out, plane, best, token, plain, plain_token)


@triton.jit
def residual_merge(
    draft_ptr,
    lengths_ptr,
    stats_ptr,
    draws_ptr,
    accepted_ptr,
    tokens_ptr,
    n,
    rows,
    num_spans,
    num_blocks,
    draft_stride,
    SLOTS: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Join the blocks of one batch row. One warp: the number accepted is read and then overwritten."""
    batch_row, batch_size = tl.program_id(0), tl.num_programs(0)
    slots = tl.arange(0, SLOTS)
    length = tl.minimum(tl.load(lengths_ptr + batch_row).to(tl.int32), n)
    accepted = tl.load(accepted_ptr + batch_row).to(tl.int32)
    token = merge_draws(
        stats_ptr,
        draws_ptr,
        batch_row,
        batch_row,
        accepted,
        length,
        n,
        rows,
        batch_size,
        num_spans,
        num_blocks,
        SPANS,
        BLOCKS,
    )
    draft_row = draft_ptr + batch_row.to(tl.int64) * draft_stride
    drafted = tl.load(draft_row + slots, mask=slots < accepted, other=-1).to(tl.int32)
    store_verdict(accepted_ptr, tokens_ptr, batch_row, accepted, drafted, token, n, SLOTS)


def residual(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    law: DraftLaw | None,
    *,
    keys: torch.Tensor,
    counters: torch.Tensor,
    inv_temperature: float = 1.0,
    config: Config | None = None,
) -> Verified:
    """Verify a chain by rejection.

    Args:
        logits: [B, n + 1, V] fp32, bf16 or fp16; the last dimension is contiguous, the others have any strides. p is
            softmax(logits inv_temperature).
        tokens: [B, n] int64 drafted tokens; anything past a row's length.
        lengths: [B] int64 drafted tokens per row, 0 .. n.
        law: how the tokens were drawn; None: they were computed (q = 1 at the token).
        keys: [B, 2] int32, one 64-bit key a row.
        counters: [B] int32, the second counter word at slot 0: the verification's number times 1024.
        inv_temperature: factor of the logits, > 0. `law.logits` are taken as they are.
        config: block size and warps; None looks them up.

    Returns:
        Verified.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.
    """
    check_verification(logits, tokens, lengths, law, keys, counters, inv_temperature)
    if law is None or tokens.numel() == 0:
        return verify_one_hot("residual", logits, tokens, lengths, keys, counters, inv_temperature, config)
    given = statistics("residual", logits, tokens, lengths, law, keys, counters, inv_temperature, config)
    batch_size, n = tokens.shape
    num_accepted = torch.empty(batch_size, dtype=torch.int64, device=logits.device)
    emitted = torch.empty(batch_size, n + 1, dtype=torch.int64, device=logits.device)
    draws = torch.empty(4, batch_size, given.grid_blocks, dtype=torch.float32, device=logits.device)
    residual_blocks[(batch_size, given.grid_blocks)](
        *given.law,
        given.stats,
        draws,
        num_accepted,
        *given.sizes,
        given.num_blocks,
        *given.strides,
        **given.constants,
        num_warps=given.config.num_warps,
        **launch_options(False, given.config.waves_per_eu),
    )
    residual_merge[(batch_size,)](
        tokens,
        lengths,
        given.stats,
        draws,
        num_accepted,
        emitted,
        n,
        given.stats.shape[1],
        given.num_spans,
        given.grid_blocks,
        tokens.stride(0),
        SLOTS=given.constants["SLOTS"],
        SPANS=given.constants["SPANS"],
        BLOCKS=triton.next_power_of_2(given.grid_blocks),
        num_warps=1,
        **launch_options(exact_denormals=False),
    )
    return Verified(num_accepted, emitted)
