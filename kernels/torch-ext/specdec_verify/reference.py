"""Every op in torch, fp64 inside, on any device: what the kernels are held against, and what runs without Triton.

Written from the definitions, not from the kernels: the integer words with 64-bit arithmetic, sorts where the kernels
search.
"""

import math
from typing import Any, NamedTuple

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


class VerifiedReference(NamedTuple):
    """A verification, and how clear its closest decision was.

    Args:
        num_accepted: [B] int64, -1 for a row that cannot be decided.
        tokens: [B, n + 1] int64; -1 pads.
        path: [B, n] int64 for a tree; -1 pads.
        margin: [B] fp64, the smallest distance of a decision from another outcome, in log-weight.
    """

    num_accepted: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor | None
    margin: torch.Tensor


def walk(
    logits: torch.Tensor,
    method: str,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    parents: torch.Tensor | None = None,
    **noise: Any,
) -> VerifiedReference:
    """As `_walk.walk`; `noise` is what `row_sample` takes."""
    drawn = row_sample(logits, method, **noise)
    gaps = drawn.losses.topk(2, dim=-1, largest=False).values[..., -1]
    batch_size, n = tokens.shape
    num_accepted, margin = torch.zeros_like(lengths), torch.full_like(gaps[:, 0], torch.inf)
    emitted, path = tokens.new_full((batch_size, n + 1), -1), torch.full_like(tokens, -1)
    for b in range(batch_size):
        chain = range(-1, n - 1)
        parent_of = list(chain) if parents is None else parents.expand_as(tokens)[b].tolist()
        node = -1
        for step in range(n + 1):
            choice = int(drawn.token[b, node + 1])
            margin[b] = min(margin[b], gaps[b, node + 1])
            if choice < 0:
                num_accepted[b], emitted[b], path[b] = -1, -1, -1
                break
            emitted[b, step] = choice
            children = [i for i in range(int(lengths[b])) if parent_of[i] == node and int(tokens[b, i]) == choice]
            if not children:
                break
            node = path[b, step] = children[0]
            num_accepted[b] += 1
    return VerifiedReference(num_accepted, emitted, None if parents is None else path, margin)


ACCEPT, RESIDUAL, BONUS = 2, 3, 4
RATIO_ROUNDING = 4e-6
"""How far fp32 may be off in q / p, relatively: a residual weight p - q is uncertain by that share of p."""


class _Chain(NamedTuple):
    """log p [B, n + 1, V], log q [B, n, V], which slots are one-hot [B, n], coins [B, n], noise [B, V] by stream."""

    log_p: torch.Tensor
    log_q: torch.Tensor
    one_hot: torch.Tensor
    coins: torch.Tensor
    gumbel: dict[int, torch.Tensor]


def _chain(
    logits: torch.Tensor, tokens: torch.Tensor, law: Any, keys: torch.Tensor, counters: torch.Tensor, scale: float
) -> _Chain:
    vocab_size, n = logits.shape[-1], tokens.shape[1]
    log_p = (logits.double() * scale).log_softmax(dim=-1)
    one_hot = torch.ones_like(tokens, dtype=torch.bool)
    log_q = log_p.new_full((*tokens.shape, vocab_size), -torch.inf)
    if law is not None:
        q = law.logits.double()
        q = q.log_softmax(dim=-1) if law.lse is None else q - law.lse.double()[..., None]
        if law.positions is not None:
            ids = (law.positions >= 0).nonzero()[:, 0]
            log_q[..., ids] = q[..., law.positions[ids].long()]
        else:
            log_q = q if law.ids is None else log_q.scatter(-1, law.ids, q)
        one_hot = torch.zeros_like(one_hot) if law.one_hot is None else law.one_hot
    at_token = torch.zeros_like(log_q, dtype=torch.bool).scatter(-1, tokens.clamp_min(0)[..., None], True)
    log_q = torch.where(one_hot[..., None], torch.where(at_token, 0.0, -torch.inf).double(), log_q)
    slots = torch.arange(n, dtype=torch.int32, device=logits.device)
    coins = uniform_from_words(words(keys, counters[:, None] + slots, ACCEPT, 1)[0][..., 0])
    noise = {stream: gumbel(keys, counters[:, None], stream, vocab_size)[:, 0] for stream in (RESIDUAL, BONUS)}
    return _Chain(log_p, log_q, one_hot, coins, noise)


def _draw(chain: _Chain, b: int, accepted: int, length: int, log_pi: float) -> tuple[int, float]:
    """The last token of a row, -1 if it is broken, and by how much it is the best."""
    log_p = chain.log_p[b, accepted]
    lower = upper = log_p
    if accepted < length:
        log_q = chain.log_q[b, accepted]
        if chain.one_hot[b, accepted]:
            lower = upper = log_p.masked_fill(log_q == 0.0, -torch.inf)
        else:
            kept = -torch.expm1(torch.where(log_p.isneginf(), 0.0, log_q - log_p - log_pi))
            kept = kept.masked_fill(log_p.isneginf(), 0.0)
            rounding = RATIO_ROUNDING * (log_p > -torch.inf) * (log_q > -torch.inf)
            lower, upper = (log_p + (kept + sign * rounding).clamp_min(0.0).log() for sign in (-1.0, 1.0))
            if bool((kept <= 0.0).all()):
                lower, upper = log_p, log_p + torch.inf  # nothing left but rounding: p, and no margin
        if log_q.isnan().any():
            return -1, torch.inf
    noise = chain.gumbel[RESIDUAL if accepted < length else BONUS][b]
    lower, upper = lower + noise, upper + noise
    if bool(lower.isnan().any()) or bool(lower.isneginf().all()):
        return (-1, torch.inf) if bool(log_p.isnan().any()) else (int(upper.argmax()), 0.0)
    best = int(lower.argmax())
    others = upper.clone()
    others[best] = -torch.inf
    return best, float(lower[best] - others.max())


def _verified(tokens: torch.Tensor, rows: list[tuple[int, int, float]]) -> VerifiedReference:
    """From each row's (accepted, last token, margin)."""
    emitted = tokens.new_full((tokens.shape[0], tokens.shape[1] + 1), -1)
    for b, (accepted, token, _) in enumerate(rows):
        if token >= 0:
            emitted[b, :accepted] = tokens[b, :accepted]
            emitted[b, accepted] = token
    num_accepted = [accepted if token >= 0 else -1 for accepted, token, _ in rows]
    margins = torch.tensor([margin for *_, margin in rows], dtype=torch.float64)
    return VerifiedReference(torch.tensor(num_accepted, device=tokens.device), emitted, None, margins)


def residual(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    law: Any,
    *,
    keys: torch.Tensor,
    counters: torch.Tensor,
    inv_temperature: float = 1.0,
) -> VerifiedReference:
    """As `_residual.residual`."""
    chain = _chain(logits, tokens, law, keys, counters, inv_temperature)
    rows = []
    for b in range(len(tokens)):
        accepted, margin, length = 0, torch.inf, int(lengths[b])
        while accepted < length:
            d = int(tokens[b, accepted])
            log_p, log_q = float(chain.log_p[b, accepted, d]), float(chain.log_q[b, accepted, d])
            distance = float(chain.coins[b, accepted].log()) + log_q - log_p
            if log_p != log_p or log_q != log_q or log_p == -torch.inf:
                break
            margin = min(margin, abs(distance))
            if not distance < 0.0:
                break
            accepted += 1
        token, gap = _draw(chain, b, accepted, length, 0.0)
        rows.append((accepted, token, min(margin, gap)))
    return _verified(tokens, rows)


def block_mass(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    law: Any,
    *,
    keys: torch.Tensor,
    counters: torch.Tensor,
    inv_temperature: float = 1.0,
) -> VerifiedReference:
    """As `_block_mass.block_mass`."""
    chain = _chain(logits, tokens, law, keys, counters, inv_temperature)
    rows = []
    for b in range(len(tokens)):
        log_pi, length = [0.0], int(lengths[b])
        for i in range(length):
            d = int(tokens[b, i])
            log_p, log_q = float(chain.log_p[b, i, d]), float(chain.log_q[b, i, d])
            if log_p != log_p or log_q != log_q:
                break
            log_pi.append(-torch.inf if -torch.inf in (log_p, log_pi[-1]) else min(0.0, log_pi[-1] + log_p - log_q))
        reached = len(log_pi) - 1
        accepted, margin = 0, torch.inf
        for i in range(1, reached + 1):
            pi, coin = math.exp(log_pi[i]), float(chain.coins[b, i - 1])
            total, passes = 1.0, pi
            if i < reached:
                mass = float((pi * chain.log_p[b, i].exp() - chain.log_q[b, i].exp()).clamp_min(0.0).sum())
                total = mass + 1.0 - pi
                passes = mass / total if total > 0.0 else 1.0
            margin = min(margin, abs(coin - passes) * max(total, 1e-30) if 0.0 < passes < 1.0 else torch.inf)
            accepted = i if coin < passes else accepted
        token, gap = _draw(chain, b, accepted, length, log_pi[accepted])
        rows.append((accepted, token, min(margin, gap)))
    return _verified(tokens, rows)


def compact(tensors: list[torch.Tensor], path: torch.Tensor, starts: torch.Tensor) -> list[torch.Tensor]:
    """What `_compact.compact` makes of the tensors [B, H, S, D], as new ones."""
    moved = [tensor.clone() for tensor in tensors]
    for before, after in zip(tensors, moved, strict=True):
        for b, start in enumerate(starts.tolist()):
            for place, node in enumerate(node for node in path[b].tolist() if node >= 0):
                after[b, :, start + place] = before[b, :, start + node]
    return moved
