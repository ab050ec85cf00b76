"""The lossless rules: which drafted tokens are kept, and what is emitted after them.

Every rule is a pure function (draft, scores, noise) -> Verdict. `scores` [B, n + 1, V] are the target's log-weights
after all processors: row 0 is the law of the first token, row i + 1 the law after drafted slot i. Each row emits the
accepted tokens and one more, so at least one. p and q below are the softmax of the target's scores and of the draft's
logits.

Nothing here synchronises with the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import kernels as _kernels
from .laws import Draft, OneHot, Sampled, Verdict, law_over_vocabulary
from .noise import BONUS, RESIDUAL, SLOT_BITS, TARGET, RoundNoise

if TYPE_CHECKING:
    from .lenient_rule import LenientRule


def match(draft: Draft, scores: torch.Tensor, noise: RoundNoise | None) -> Verdict:
    """The target chooses a token at every row; the walk goes on while the draft agrees with it.

    With `noise` None the choice is the argmax (greedy decoding). Otherwise it is a draw from p with the target's own
    stream, so the emitted text is what plain decoding with that noise emits, for any draft, chain or tree, however
    drawn. For a one-hot draft this is rejection sampling in one pass: P(choice = d) = p(d), and the choice that
    differs is distributed as the residual. It is also the verification of `coupled`.
    """
    if draft.parents is None:
        choices, weights = _choices(scores, noise)
        agrees = within(draft) & (choices[:, :-1] == draft.tokens)
        num_accepted = agrees.long().cumprod(dim=1).sum(dim=1)
        return padded_verdict(num_accepted, choices, weights, greedy=noise is None)

    parents = draft.parents.expand_as(draft.tokens)
    depths = torch.cat([torch.zeros_like(draft.lengths)[:, None], draft.depths()], dim=1)
    choices, weights = _choices(scores, noise, depths)
    return _walk(draft, parents, choices, weights, greedy=noise is None)


def rejection(draft: Draft, scores: torch.Tensor, noise: RoundNoise) -> Verdict:
    """Token by token: accept d with probability min(1, p(d) / q(d)), else draw from the residual max(p - q, 0).

    Leviathan, Kalman, Matias 2023 (algorithm 1); expected acceptance sum min(p, q).
    """
    p, p_drafted, q_drafted = _probabilities(draft, scores)
    accepted = within(draft) & noise.accepts(p_drafted, q_drafted)
    num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)
    return _finish(draft, scores, num_accepted, torch.ones_like(p[:, 0, 0]), noise)


def block(draft: Draft, scores: torch.Tensor, noise: RoundNoise) -> Verdict:
    """Block verification: the accepted length is decided for the block as a whole.

    Sun et al. 2024 (arXiv:2403.10444). pi_i is the capped likelihood ratio of the first i drafted tokens; slot i < l
    passes with probability Z_i / (Z_i + 1 - pi_i), Z_i = sum_x max(pi_i p_i(x) - q_i(x), 0), and the last one, l, with
    probability pi_l. The longest passing prefix is kept: a later success rescues earlier failures. In expectation over
    the same drafts it accepts at least as many tokens as `rejection`.
    """
    p, p_drafted, q_drafted = _probabilities(draft, scores)
    ratios = p_drafted / q_drafted.clamp_min(torch.finfo(p.dtype).tiny)
    # A row that holds NaN ends the block before it, so that getting there is decided without it, and marked at the end.
    lengths = (within(draft) & ~ratios.isnan()).long().cumprod(dim=1).sum(dim=1)
    slots = torch.arange(1, draft.num_slots + 1, device=p.device)
    inside = slots <= lengths[:, None]
    running = [torch.ones_like(p[:, 0, 0])]
    for i in range(draft.num_slots):
        running.append((running[-1] * ratios[:, i]).clamp_max(1.0))
    pi = torch.stack(running, dim=1)  # [B, n + 1], pi[:, i] after i accepted tokens

    mass = _residual_mass(draft, p, pi)  # [B, n], mass[:, i] is Z_i; Z_0 decides nothing
    passes = mass / (mass + 1.0 - pi[:, :-1]).clamp_min(torch.finfo(p.dtype).tiny)
    passes = torch.where(pi[:, :-1] >= 1.0, 1.0, passes)
    # passes[:, i] belongs to length i; shift so that column i - 1 decides length i, with pi itself at the row's end.
    passes = torch.cat([passes[:, 1:], pi[:, -1:]], dim=1)[:, : draft.num_slots]
    passes = torch.where(slots == lengths[:, None], pi[:, 1:], passes)
    passed = inside & noise.accepts(passes, torch.ones_like(passes))
    num_accepted = torch.cat([torch.zeros_like(draft.lengths)[:, None], passed * slots], dim=1).amax(dim=1)
    return _finish(draft, scores, num_accepted, pi.gather(1, num_accepted[:, None])[:, 0], noise)


RULES: dict[str, Callable[..., Verdict]] = {
    "match": match,
    "coupled": match,
    "rejection": rejection,
    "block": block,
}


def verify(
    draft: Draft,
    target_logits: torch.Tensor,
    rule: str | LenientRule,
    noise: RoundNoise | None,
    kernels: str = "torch",
    slots: torch.Tensor | None = None,
) -> Verdict:
    """Decide a draft by a rule.

    Args:
        draft: the drafted tokens and their law.
        target_logits: [B, n + 1, V] the target's scores after all processors.
        rule: "match", "coupled", "rejection" or "block", which are lossless, or a lenient rule.
        noise: the round's noise; None decodes greedily (`match`, `coupled` and some lenient rules only).
        kernels: "torch", or "triton" where `implementation` says so.
        slots: [B, n] bool, the slots where a lenient rule may lose anything; None where it may everywhere.

    Raises:
        ValueError: the rule cannot do what it promises for this draft.
    """
    if not isinstance(rule, str):
        return rule.verify(draft, target_logits, noise, slots)
    if rule not in RULES:
        raise ValueError(f"`rule` is {rule!r}; it must be one of {', '.join(map(repr, RULES))}.")
    if rule in ("rejection", "block"):
        target_logits = check_draws(draft, target_logits, rule, noise)
    if kernels == "triton":
        return _kernels.verify(draft, target_logits, rule, noise)
    return RULES[rule](draft, target_logits, noise)


def check_draws(draft: Draft, target_logits: torch.Tensor, rule: object, noise: RoundNoise | None) -> torch.Tensor:
    """Refuse what a rule with accept coins cannot judge; the scores, in fp32 at least."""
    if noise is None:
        raise ValueError(f"`rule` {rule!r} samples and needs noise; greedy decoding is `rule='match'`.")
    if draft.parents is not None:
        raise ValueError(f"`rule` {rule!r} verifies chains; a tree needs `rule='match'` or `rule='coupled'`.")
    if isinstance(draft.law, Sampled) and draft.law.shared_noise:
        raise ValueError(
            f"`rule` {rule!r} is biased for a draft that was drawn with the target's own noise; "
            "draw it from the draft stream, or use `rule='coupled'`."
        )
    if draft.num_slots > 1 << SLOT_BITS:
        raise ValueError(
            f"`rule` {rule!r} has noise for {1 << SLOT_BITS} drafted tokens a verification and the draft holds "
            f"{draft.num_slots}; draft fewer."
        )
    # In half precision p itself would be off by up to a percent, and the emitted law with it.
    return target_logits.to(torch.promote_types(target_logits.dtype, torch.float32))


def _choices(
    scores: torch.Tensor, noise: RoundNoise | None, slots: int | torch.Tensor = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, m] the target's choice at every row of `scores` [B, m, V], and its weight."""
    choices = scores.argmax(dim=-1) if noise is None else noise.choose(TARGET, scores, slots)
    return choices, scores.gather(-1, choices.unsqueeze(-1)).squeeze(-1)


def within(draft: Draft) -> torch.Tensor:
    """[B, n] True where a slot holds a drafted token."""
    return torch.arange(draft.num_slots, device=draft.tokens.device) < draft.lengths[:, None]


def _broken(chosen: torch.Tensor, greedy: bool) -> torch.Tensor:
    """Whether the weight of a chosen token shows that its row is broken: NaN, or nothing above -inf.

    +inf has no probability, so it breaks a draw; greedy decoding takes it, and some processors force a token so.
    """
    return (chosen.isnan() | chosen.isneginf()) if greedy else ~chosen.isfinite()


def padded_verdict(num_accepted: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, greedy: bool) -> Verdict:
    """Pad the emitted tokens, and mark rows where an emitted token, by its weight, comes from a broken row."""
    kept = torch.arange(tokens.shape[1], device=tokens.device) <= num_accepted[:, None]
    broken = (kept & _broken(weights, greedy)).any(dim=1)
    return Verdict(num_accepted.masked_fill(broken, -1), tokens.masked_fill(~kept | broken[:, None], -1))


def _probabilities(draft: Draft, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p [B, n + 1, V], and p and q of the drafted tokens [B, n]."""
    p = scores.softmax(dim=-1)
    tokens = draft.tokens.clamp_min(0)
    p_drafted = p[:, :-1].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if isinstance(draft.law, OneHot):
        return p, p_drafted, torch.ones_like(p_drafted)
    q, ids = draft.law.probs(p.dtype), draft.law.target_ids()
    if ids is None:
        q_drafted = q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    else:
        q_drafted = (q * (ids == tokens.unsqueeze(-1))).sum(dim=-1)
    if draft.law.one_hot is not None:
        q_drafted = q_drafted.masked_fill(draft.law.one_hot, 1.0)
    return p, p_drafted, q_drafted


def _residual_mass(draft: Draft, p: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
    """[B, n] sum_x max(pi_i p_i(x) - q_i(x), 0), reading p by index where q lives on few tokens."""
    p, pi = p[:, :-1], pi[:, :-1]
    p_drafted = p.gather(-1, draft.tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    one_hot = (pi * (1.0 - p_drafted)).clamp_min(0.0)  # all of q sits on d, where pi p(d) <= 1 = q(d)
    if isinstance(draft.law, OneHot):
        return one_hot
    q, ids = draft.law.probs(p.dtype), draft.law.target_ids()
    covered = p if ids is None else p.gather(-1, ids)
    mass = (pi.unsqueeze(-1) * covered - q).clamp_min(0.0).sum(dim=-1)
    if ids is not None:
        mass = mass + (pi * (1.0 - covered.sum(dim=-1))).clamp_min(0.0)
    return mass if draft.law.one_hot is None else torch.where(draft.law.one_hot, one_hot, mass)


def _finish(
    draft: Draft, scores: torch.Tensor, num_accepted: torch.Tensor, pi: torch.Tensor, noise: RoundNoise
) -> Verdict:
    """Emit the accepted tokens and one more: a bonus token from p, or one from the residual max(pi p - q, 0).

    The residual of the one row that needs it is taken in fp64: where q is close to p, fp32 would lose the difference.
    """
    if draft.num_slots == 0:
        return emit(draft, scores, num_accepted, None, noise)
    p, q = decided_laws(draft, scores, num_accepted)
    return emit(draft, scores, num_accepted, (pi[:, None].double() * p - q).clamp_min(0.0), noise)


def decided_laws(draft: Draft, scores: torch.Tensor, num_accepted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q [B, V] in fp64 at the first slot that was not accepted; anything where all were."""
    p = scores.gather(1, num_accepted[:, None, None].expand(-1, 1, scores.shape[-1]))[:, 0].double().softmax(dim=-1)
    slot = num_accepted.clamp_max(draft.num_slots - 1)[:, None]
    law = draft.law
    if isinstance(law, Sampled):
        pick = slot[..., None].expand(-1, 1, law.logits.shape[-1])
        ids = law.target_ids()
        law = Sampled(
            law.logits.gather(1, pick),
            ids=None if ids is None else ids.gather(1, pick),
            one_hot=None if law.one_hot is None else law.one_hot.gather(1, slot),
        )
    return p, law_over_vocabulary(law, draft.tokens.gather(1, slot), scores.shape[-1], torch.float64)[:, 0]


def emit(
    draft: Draft,
    scores: torch.Tensor,
    num_accepted: torch.Tensor,
    residual: torch.Tensor | None,
    noise: RoundNoise,
) -> Verdict:
    """The accepted tokens and one more: a bonus token from p where all were accepted, else one from the residual.

    Args:
        draft, scores, noise: of the round.
        num_accepted: [B] accepted tokens.
        residual: [B, V] fp64 weights; None where nothing was drafted.
    """
    last_scores = scores.gather(1, num_accepted[:, None, None].expand(-1, 1, scores.shape[-1]))
    all_accepted = num_accepted == draft.lengths
    weights = last_scores
    if residual is not None:
        # Where p and q agree up to rounding a rejection has (almost) no residual left: draw from p then.
        empty = residual.sum(dim=-1, keepdim=True) <= 0.0
        residual = torch.where(empty, last_scores[:, 0].double(), residual.log()).to(scores.dtype)
        weights = torch.where(all_accepted[:, None, None], last_scores, residual[:, None])
    stream = torch.where(all_accepted, BONUS, RESIDUAL)[:, None]
    emitted = noise.choose(stream, weights)  # [B, 1]
    drafted = torch.nn.functional.pad(draft.tokens, (0, 1), value=-1)
    tokens = drafted.scatter(1, num_accepted[:, None], emitted)
    kept = torch.arange(tokens.shape[1], device=tokens.device) <= num_accepted[:, None]
    chosen = weights[:, 0].gather(1, emitted)
    broken = _broken(chosen, greedy=False)[:, 0]
    return Verdict(num_accepted.masked_fill(broken, -1), tokens.masked_fill(~kept | broken[:, None], -1))


def _walk(draft: Draft, parents: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, greedy: bool) -> Verdict:
    """Follow the target's choices, [B, n + 1] with their weights, down the tree."""
    batch_size, num_nodes = draft.tokens.shape
    nodes = torch.arange(num_nodes, device=draft.tokens.device)
    node = draft.lengths.new_full((batch_size,), -1)
    going = torch.ones_like(node, dtype=torch.bool)
    num_accepted = torch.zeros_like(node)
    path = draft.tokens.new_full((batch_size, num_nodes), -1)
    tokens = draft.tokens.new_full((batch_size, num_nodes + 1), -1)
    broken = torch.zeros_like(going)
    for step in range(num_nodes + 1):
        row = (node + 1)[:, None]
        choice = choices.gather(1, row)
        tokens[:, step] = torch.where(going, choice[:, 0], -1)
        broken |= going & _broken(weights.gather(1, row)[:, 0], greedy)
        if step == num_nodes:
            break
        child = within(draft) & (parents == node[:, None]) & (draft.tokens == choice)
        going = going & child.any(dim=1)
        node = torch.where(going, torch.where(child, nodes, num_nodes).amin(dim=1), node)
        path[:, step] = torch.where(going, node, -1)
        num_accepted += going.long()
    return Verdict(
        num_accepted.masked_fill(broken, -1),
        tokens.masked_fill(broken[:, None], -1),
        path.masked_fill(broken[:, None], -1),
    )
