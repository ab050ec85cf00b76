"""Block verification, chains: the accepted length is decided for the block as a whole.

Sun et al. 2024 (arXiv:2403.10444). pi_i is the capped likelihood ratio of the first i drafted tokens, Z_i the mass of
max(pi_i p_i - q_i, 0). Length i < l passes with probability Z_i / (Z_i + 1 - pi_i), l with pi_l; the longest passing
one is kept, and the last token drawn from the residual there. Three launches where some tokens were drawn:

1. `law_stats` of `_law.py` over the rows of p and q; the bonus token is drawn there.
2. `mass_blocks`, grid (B n, blocks): one block of one row's residual, its mass and its best token at once. That row's
   pi comes from 16 numbers a row of the rows before it.
3. `mass_merge`, grid (B,): joins the masses, throws the coins, takes the kept row's token.

A row of p or q that is no law ends the block before it, so that getting there is decided without it. Tokens that were
computed, all of them, take the two launches of `_one_hot.py`.
"""

import torch
import triton
import triton.language as tl

from ._checks import check_verification
from ._config import Config, launch_options
from ._decide import at_slot, coins, draft_state, longest_passing
from ._draws import merge_draws, residual_block, store_draws, store_verdict
from ._law import DraftLaw, statistics
from ._one_hot import verify_one_hot
from ._walk import Verified

_LARGEST_LOG_RATIO = tl.constexpr(88.0)  # q = 0 at a drafted token: a ratio that fp32 can hold


@triton.jit
def extended(log_pi, log_ratio):
    """log of min(pi ratio, 1); NaN where either is."""
    product = log_pi + tl.where(log_ratio > _LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO, log_ratio)
    return tl.where(product > 0.0, 0.0, product)


@triton.jit
def mass_blocks(
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
    log_pi_ptr,
    batch_size,
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
    """Draw from one block of the residual after `slot` accepted tokens, as draws [5, B n, blocks]: mass last."""
    row, block = tl.program_id(0), tl.program_id(1)
    batch_row, slot = row // n, row % n
    slots = tl.arange(0, SLOTS)
    if slot < tl.load(lengths_ptr + batch_row):
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
            slots <= slot,
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
        log_pi = tl.full([], 0.0, tl.float32)
        for before in range(0, slot):
            log_pi = extended(log_pi, at_slot(log_ratio, before, SLOTS))
        if block == 0:
            tl.store(log_pi_ptr + row, extended(log_pi, at_slot(log_ratio, slot, SLOTS)))
        best, token, plain, plain_token, mass = residual_block(
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
            at_slot(drafted, slot, SLOTS),
            at_slot(is_one_hot, slot, SLOTS),
            at_slot(p0, slot, SLOTS),
            at_slot(p1, slot, SLOTS),
            at_slot(q0, slot, SLOTS),
            at_slot(q1, slot, SLOTS),
            log_pi,
            True,
            MODE,
            CHUNK,
            BLOCK,
        )
        plane = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
        out = draws_ptr + row.to(tl.int64) * tl.num_programs(1) + block
        store_draws(out, plane, best, token, plain, plain_token)
        tl.store(out + 4 * plane, mass)


@triton.jit
def mass_merge(
    draft_ptr,
    lengths_ptr,
    keys_ptr,
    counters_ptr,
    stats_ptr,
    draws_ptr,
    log_pi_ptr,
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
    TILE: tl.constexpr,
):
    """Decide one batch row; entry i of its vectors belongs to length i + 1."""
    batch_row, draws_rows = tl.program_id(0), tl.num_programs(0) * n
    slots = tl.arange(0, SLOTS)
    length = tl.minimum(tl.load(lengths_ptr + batch_row).to(tl.int32), n)
    log_pi = tl.load(log_pi_ptr + batch_row * n + slots, mask=slots < length, other=0.0)
    reached = tl.minimum(tl.min(tl.where(log_pi != log_pi, slots, SLOTS), axis=0), length)
    mass = tl.zeros([SLOTS], tl.float32)
    inner = slots + 1 < reached
    masses = draws_ptr + (draws_rows.to(tl.int64) * 4 + batch_row * n + 1) * num_blocks
    for start in range(0, num_blocks, TILE):
        blocks = start + tl.arange(0, TILE)
        here = inner[:, None] & (blocks < num_blocks)[None, :]
        mass += tl.sum(tl.load(masses + slots[:, None] * num_blocks + blocks[None, :], mask=here, other=0.0), axis=1)
    accepted = longest_passing(coins(keys_ptr, counters_ptr, batch_row, SLOTS), log_pi, mass, reached, SLOTS)
    token = merge_draws(
        stats_ptr,
        draws_ptr,
        batch_row,
        batch_row * n + accepted,
        accepted,
        length,
        n,
        rows,
        draws_rows,
        num_spans,
        num_blocks,
        SPANS,
        BLOCKS,
    )
    draft_row = draft_ptr + batch_row.to(tl.int64) * draft_stride
    drafted = tl.load(draft_row + slots, mask=slots < accepted, other=-1).to(tl.int32)
    store_verdict(accepted_ptr, tokens_ptr, batch_row, accepted, drafted, token, n, SLOTS)


def block_mass(
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
    """Verify a chain as a block; arguments, result and errors are those of `residual`."""
    check_verification(logits, tokens, lengths, law, keys, counters, inv_temperature)
    if law is None or tokens.numel() == 0:
        return verify_one_hot("block_mass", logits, tokens, lengths, keys, counters, inv_temperature, config)
    given = statistics("block_mass", logits, tokens, lengths, law, keys, counters, inv_temperature, config)
    batch_size, n = tokens.shape
    num_accepted = torch.empty(batch_size, dtype=torch.int64, device=logits.device)
    emitted = torch.empty(batch_size, n + 1, dtype=torch.int64, device=logits.device)
    draws = torch.empty(5, batch_size * n, given.grid_blocks, dtype=torch.float32, device=logits.device)
    log_pi = torch.empty(batch_size, n, dtype=torch.float32, device=logits.device)
    mass_blocks[(batch_size * n, given.grid_blocks)](
        *given.law,
        given.stats,
        draws,
        log_pi,
        batch_size,
        *given.sizes,
        given.num_blocks,
        *given.strides,
        **given.constants,
        num_warps=given.config.num_warps,
        **launch_options(False, given.config.waves_per_eu),
    )
    slots, blocks = given.constants["SLOTS"], triton.next_power_of_2(given.grid_blocks)
    mass_merge[(batch_size,)](
        tokens,
        lengths,
        keys,
        counters,
        given.stats,
        draws,
        log_pi,
        num_accepted,
        emitted,
        n,
        given.stats.shape[1],
        given.num_spans,
        given.grid_blocks,
        tokens.stride(0),
        SLOTS=slots,
        SPANS=given.constants["SPANS"],
        BLOCKS=blocks,
        TILE=min(blocks, max(16, 1024 // slots)),
        num_warps=max(1, min(4, slots * blocks // 256)),
        **launch_options(exact_denormals=False),
    )
    return Verified(num_accepted, emitted)
