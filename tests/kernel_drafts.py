"""Drafts of every law, for the tests of the kernels that verify by them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from kernel_cases import BATCH_SIZES, DEVICE, DRAFT_LENGTHS, VOCAB_SIZES, config_for, triton

from hf_specdec import _kernels as kernels
from hf_specdec._kernels import Config, DraftLaw, Verified, candidate_positions, reference
from hf_specdec.verification import Draft, Noise, OneHot, RoundNoise, Sampled, Verdict

LAWS = ("one-hot", "full", "full with lse", "some one-hot", "reduced", "reduced with lse", "candidates",
        "candidates with lse, some one-hot")  # fmt: skip


def laws_at(vocab_size: int, batch_size: int, num_drafted: int) -> tuple[str, ...]:
    """The laws that the grid takes at one size: all, or three beyond the smallest vocabulary.

    These go round: every law meets every vocabulary, and every batch size with every length of a draft. Where nothing
    was drafted one law is as another.
    """
    if num_drafted == 0:
        return LAWS[:1]
    if vocab_size == VOCAB_SIZES[0]:
        return LAWS
    place = VOCAB_SIZES.index(vocab_size) + BATCH_SIZES.index(batch_size)
    return tuple(LAWS[(3 * place + DRAFT_LENGTHS.index(num_drafted) + i) % len(LAWS)] for i in range(3))


def random_draft(
    law: str,
    batch_size: int,
    n: int,
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 2.0,
    likeness: float = 0.7,
    filtered: float = 0.0,
) -> tuple[Draft, torch.Tensor, RoundNoise]:
    """A ragged draft, scores that resemble its law, and the round's noise.

    Past a row's length stand -1 and NaN, which nothing may read.

    Args:
        law: one of LAWS.
        likeness: how much of the scores is the law's logits, 0 .. 1.
        filtered: the share of tokens without probability.
    """
    common, own = _normal_twice(batch_size, n + 1, vocab_size, seed)
    generator = torch.Generator().manual_seed(seed)
    scores = spread * (likeness * common + (1.0 - likeness) * own)
    q = spread * common[:, :-1]
    for weights in (scores, q) if filtered else ():
        dropped = torch.rand(weights.shape, generator=generator) < filtered
        dropped[..., vocab_size // 2] = False
        weights.masked_fill_(dropped, -torch.inf)
    num_candidates = max(1, vocab_size // 3)
    ids = None
    if law.startswith("reduced"):
        ids = torch.randperm(vocab_size, generator=generator)[:num_candidates]
        ids[0] = vocab_size // 2 if vocab_size // 2 not in ids.tolist() else ids[0]
        q = q[..., ids]
    elif law.startswith("candidates"):
        num_candidates = min(num_candidates, 20)
        apart = vocab_size // num_candidates
        within = torch.randint(apart, (batch_size, n, num_candidates), generator=generator)
        ids = apart * torch.randperm(num_candidates, generator=generator) + within
        ids[..., 0] = torch.where((ids == vocab_size // 2).any(dim=-1), ids[..., 0], vocab_size // 2)
        q = q.gather(-1, ids)
    positions = torch.zeros(batch_size, dtype=torch.long, device=DEVICE)
    noise = RoundNoise(Noise.from_seed(seed, batch_size, DEVICE), positions, seed % 50)
    scores, q = scores.to(dtype).to(DEVICE), q.to(dtype)
    drawn = torch.multinomial(q.float().softmax(dim=-1).flatten(0, 1), 1, generator=generator)
    tokens, q = drawn.view(batch_size, n).to(DEVICE), q.to(DEVICE)
    ids = None if ids is None else ids.to(DEVICE)
    tokens = tokens if ids is None else ids.expand(q.shape).gather(-1, tokens[..., None])[..., 0]
    lengths = torch.randint(max(0, n - 2), n + 1, (batch_size,), generator=generator)
    lengths[0] = n
    lengths = lengths.to(DEVICE)
    past = torch.arange(n + 1, device=DEVICE) > lengths[:, None]
    scores = scores.masked_fill(past[..., None], torch.nan)
    one_hot = torch.rand(batch_size, n, generator=generator).to(DEVICE) < 0.5
    sampled = Sampled(
        q.masked_fill(past[:, 1:, None], torch.nan),
        ids=ids,
        one_hot=one_hot if "some one-hot" in law else None,
        lse=q.float().logsumexp(dim=-1) if "lse" in law else None,
    )
    return Draft(tokens.masked_fill(past[:, 1:], -1), lengths, OneHot() if law == "one-hot" else sampled), scores, noise


@functools.lru_cache(maxsize=1)
def _normal_twice(batch_size: int, m: int, vocab_size: int, seed: int) -> torch.Tensor:
    """[2, B, m, V] kept, because drafts of every law begin with them and they take longest."""
    return torch.randn(2, batch_size, m, vocab_size, generator=torch.Generator().manual_seed(1000 + seed))


def law_of(draft: Draft, vocab_size: int) -> DraftLaw | None:
    """The kernels' form of a draft's law."""
    if isinstance(draft.law, OneHot):
        return None
    ids, positions = draft.law.ids, None
    if ids is not None and ids.dim() == 1:
        ids, positions = None, candidate_positions(ids, vocab_size)
    return DraftLaw(draft.law.logits, positions, ids, draft.law.one_hot, draft.law.lse)


def noise_of(noise: RoundNoise) -> dict[str, torch.Tensor]:
    """`keys` and `counters` of a round's verification."""
    keys = noise.noise.keys
    counters = torch.full((len(keys),), noise.verification << 10, dtype=torch.int32, device=DEVICE)
    return {"keys": keys, "counters": counters}


def row_of(draft: Draft, law: DraftLaw | None, b: int) -> tuple[torch.Tensor, torch.Tensor, DraftLaw | None]:
    """Tokens, lengths and law of one row."""
    here = slice(b, b + 1)
    if law is not None:
        law = DraftLaw(
            law.logits[here],
            law.positions,
            *(None if tensor is None else tensor[here] for tensor in (law.ids, law.one_hot, law.lse)),
        )
    return draft.tokens[here], draft.lengths[here], law


ROUNDING = 2e-5
"""A margin of the reference, in log-weight, that fp32 does not turn over."""


def same_row(found: Verified | Verdict, expected: Any, b: int, row: int = 0) -> bool:
    """Whether row b of one verdict is a row of another, and well formed."""
    tokens, accepted = found.tokens[b], int(found.num_accepted[b])
    assert (tokens[: accepted + 1] >= 0).all() and (tokens[accepted + 1 :] == -1).all()  # a token or a mark
    return accepted == int(expected.num_accepted[row]) and torch.equal(tokens, expected.tokens[row])


def check_against_reference(op: str, draft: Draft, scores: torch.Tensor, noise: RoundNoise, **options: Any) -> int:
    """The kernel's verdict is the reference's wherever the reference's margin exceeds rounding; how many rows that is.

    Row by row: a batch's laws in fp64 take gigabytes.
    """
    law, vocab_size, arguments = law_of(draft, scores.shape[-1]), scores.shape[-1], noise_of(noise)
    config = options.pop("config", None) or config_for(vocab_size)
    found = getattr(kernels, op)(scores, draft.tokens, draft.lengths, law, config=config, **arguments, **options)
    clear = 0
    for b in range(len(scores)):
        own = {name: tensor[b : b + 1] for name, tensor in arguments.items()}
        row = row_of(draft, law, b)
        expected = getattr(reference, op)(scores[b : b + 1], *row, **own, **options)
        same = same_row(found, expected, b)
        assert same or float(expected.margin[0]) <= ROUNDING
        clear += float(expected.margin[0]) > ROUNDING
    return clear


def rule_by(op: str) -> Callable[[Draft, torch.Tensor, RoundNoise], Verdict]:
    """The rule that a kernel stands for, by that kernel."""

    def rule(draft: Draft, scores: torch.Tensor, noise: RoundNoise) -> Verdict:
        law, config = law_of(draft, scores.shape[-1]), Config(max(32, triton.next_power_of_2(scores.shape[-1])), 1)
        scores = scores.to(DEVICE)
        found = getattr(kernels, op)(
            scores, draft.tokens.to(DEVICE), draft.lengths.to(DEVICE), law, config=config, **noise_of(noise)
        )
        return Verdict(found.num_accepted.cpu(), found.tokens.cpu())

    return rule


def broken_draft(law: str) -> tuple[Draft, torch.Tensor, RoundNoise]:
    """Twenty rows of three drafted tokens with NaN, nothing, or +inf in rows of p and of q."""
    draft, scores, noise = random_draft(law, 20, 3, 40, seed=8, likeness=0.9)
    lengths = torch.full_like(draft.lengths, 3)
    scores = scores.nan_to_num(nan=0.5)
    tokens = draft.tokens.clamp_min(0)
    if draft.law.__class__ is Sampled and draft.law.ids is not None:  # tokens that q can have drawn
        ids = draft.law.ids.expand(draft.law.logits.shape)
        tokens = torch.where(draft.tokens < 0, ids[..., 0], draft.tokens)
    values = (torch.nan, -torch.inf, torch.inf)
    for b in range(16):
        row = scores[b, b % 4]
        if b // 4 == 1:
            row[:] = -torch.inf
        elif b // 4 == 3:
            row[13] = torch.nan
        else:
            row[39] = values[b // 4]
    law_now = draft.law
    if isinstance(law_now, Sampled):
        logits = law_now.logits.nan_to_num(nan=0.25, neginf=-torch.inf)
        for b in range(16, 20):
            if b < 19:
                logits[b, 1, -1] = values[b - 16]
            else:
                logits[b, 1] = -torch.inf
        law_now = replace(law_now, logits=logits)
    return Draft(tokens, lengths, law_now), scores, noise
