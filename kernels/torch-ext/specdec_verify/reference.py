"""Every op in torch, fp64 inside, on any device: what the kernels are held against, and what runs without Triton.

Written from the definitions, not from the kernels: the integer words with 64-bit arithmetic, sorts where the kernels
search.
"""

from typing import NamedTuple

import torch

OK, HAS_NAN, NOTHING, INFINITE = range(4)

_MASK = 0xFFFFFFFF
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


def threefry(key: tuple[torch.Tensor, torch.Tensor], counter: tuple[torch.Tensor, torch.Tensor]) -> tuple:
    """Threefry-2x32-13 (Salmon et al. 2011, section 4.2); int64 tensors that hold unsigned 32-bit words."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x0, x1 = (counter[0] + keys[0]) & _MASK, (counter[1] + keys[1]) & _MASK
    for i in range(13):
        rotation = _ROTATIONS[i % 8]
        x0 = (x0 + x1) & _MASK
        x1 = ((x1 << rotation | x1 >> 32 - rotation) & _MASK) ^ x0
        if i % 4 == 3:
            s = i // 4 + 1
            x0, x1 = (x0 + keys[s % 3]) & _MASK, (x1 + keys[(s + 1) % 3] + s) & _MASK
    return x0, x1


def uniform_from_words(words: torch.Tensor) -> torch.Tensor:
    """fp64 copies of the fp32 uniforms that the words stand for."""
    u = (words & 0x7FFFFFFF).float() * 2.0**-31 + 2.0**-32
    return u.clamp_max(1.0 - 2.0**-24).double()


def words(
    keys: torch.Tensor, counters: torch.Tensor, stream: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, m, ceil(num_tokens / 2)] the two words of each pair of tokens.

    Args:
        keys: [B, 2] int32.
        counters: [B, m] int32.
        stream: 0 .. 63.
    """
    pairs = torch.arange((num_tokens + 1) // 2, device=keys.device) | stream << 26
    unsigned = keys.long() & _MASK
    return threefry(
        (unsigned[:, 0, None, None], unsigned[:, 1, None, None]), (pairs, (counters.long() & _MASK)[..., None])
    )


def gumbel(keys: torch.Tensor, counters: torch.Tensor, stream: int, vocab_size: int) -> torch.Tensor:
    """[B, m, V] fp64 Gumbel values."""
    both = torch.stack(words(keys, counters, stream, vocab_size), dim=-1).flatten(-2)[..., :vocab_size]
    return -torch.log(-torch.log1p(-uniform_from_words(both)))


def row_status(scores: torch.Tensor, drawn: bool) -> torch.Tensor:
    """[B, m] int32 status of rows [B, m, V]: OK, HAS_NAN, NOTHING or INFINITE."""
    maximum = scores.amax(dim=-1)  # NaN wherever a NaN is
    status = torch.zeros(scores.shape[:2], dtype=torch.int32, device=scores.device)
    status[maximum.isneginf()] = NOTHING
    if drawn:
        status[maximum.isposinf()] = INFINITE
    status[maximum.isnan()] = HAS_NAN
    return status


class RowReference(NamedTuple):
    """What the reference draws, and how much worse another token would be.

    Args:
        token: [B, m] int64, -1 where the status is not OK.
        lse: [B, m] fp64 log-sum-exp.
        status: [B, m] int32.
        losses: [B, m, V] how far each token is from being the one: in log-weight where the largest is taken, in
            probability where a running sum is inverted.
    """

    token: torch.Tensor
    lse: torch.Tensor
    status: torch.Tensor
    losses: torch.Tensor


def row_sample(
    logits: torch.Tensor,
    method: str,
    *,
    inv_temperature: float = 1.0,
    keys: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    stream: int = 0,
    block: int = 0,
) -> RowReference:
    """As `_row_sample.row_sample` with `with_lse`; `block` is the kernel's, and counts for "inverse_cdf" only."""
    scores = logits.double() * inv_temperature
    status = row_status(scores, drawn=method != "greedy")
    if method == "greedy":
        losses = scores.amax(dim=-1, keepdim=True) - scores
    else:
        assert keys is not None and counters is not None
        if slots is None:
            slots = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        row_counters = (counters[:, None] + slots).to(torch.int32)
        if method == "gumbel":
            values = scores + gumbel(keys, row_counters, stream, logits.shape[-1])
            losses = values.amax(dim=-1, keepdim=True) - values
        else:
            losses = inverse_cdf_losses(scores, [w[..., 0] for w in words(keys, row_counters, stream, 2)], block)
    losses = losses.nan_to_num(nan=0.0 if method == "greedy" else torch.inf, posinf=torch.inf)
    token = losses.argmin(dim=-1).masked_fill(status != OK, -1)
    return RowReference(token, scores.logsumexp(dim=-1), status, losses)


def inverse_cdf_losses(scores: torch.Tensor, both_words: list[torch.Tensor], block: int) -> torch.Tensor:
    """[B, m, V] how far the first uniform is from a token's block and the second from the token within its block.

    0 for the one token whose intervals [running sum before, running sum after) hold both; inf without probability.

    Args:
        scores: [B, m, V] fp64.
        both_words: two [B, m] random words.
        block: tokens in a block.
    """
    vocab_size = scores.shape[-1]
    p = torch.nn.functional.pad(scores.softmax(dim=-1), (0, -vocab_size % block)).unflatten(-1, (-1, block))
    mass = p.sum(dim=-1)
    of_block = _distance(mass, uniform_from_words(both_words[0]))[..., None]
    within = _distance(p / mass[..., None], uniform_from_words(both_words[1])[..., None])
    return torch.maximum(of_block, within).flatten(-2)[..., :vocab_size]


def _distance(p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Distance of `uniform` [...] from each interval of the running sum of `p` [..., n]; inf for empty ones."""
    after = p.cumsum(dim=-1)
    uniform = (uniform[..., None] * after[..., -1:]).expand_as(after)
    distance = torch.maximum(after - p - uniform, uniform - after).clamp_min(0.0)
    return distance.masked_fill(~(p > 0.0), torch.inf)


def processed_scores(
    scores: torch.Tensor, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> torch.Tensor:
    """Filtered scores [..., V], -inf at what is removed: transformers' rules, with its CPU's order of equal values."""
    scores = scores.clone()
    if top_k is not None:
        kth = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[..., -1:]
        scores.masked_fill_(scores < kth, -torch.inf)
    if top_p is not None and top_p < 1.0:
        ascending, ids = scores.sort(dim=-1, stable=True)
        removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
        removed[..., -1] = False
        scores.masked_fill_(torch.empty_like(removed).scatter_(-1, ids, removed), -torch.inf)
    if min_p is not None:
        scores.masked_fill_((scores - scores.amax(dim=-1, keepdim=True)).exp() < min_p, -torch.inf)
    return scores


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
) -> RowReference:
    """As `_processed_sample.processed_sample`; the losses are those of the filtered row."""
    scaled = (logits.float() * inv_temperature).double()  # what ties in fp32 must tie here
    filtered = processed_scores(scaled, top_k, top_p, min_p)
    drawn = row_sample(filtered, "gumbel", keys=keys, counters=counters, slots=slots, stream=stream)
    status = row_status(scaled, drawn=True)
    return drawn._replace(token=drawn.token.masked_fill(status != OK, -1), status=status)
