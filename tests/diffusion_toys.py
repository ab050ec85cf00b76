"""Toy masked diffusion drafters over a small vocabulary, for enumerating what a draft's schedule does to the law."""

from collections.abc import Callable

import torch
from laws import EnumeratedNoise, Propose, Text

from hf_specdec.drafters.diffusion.reveal import ORDERS, Order, own_law_holds, reveal
from hf_specdec.verification import Draft, OneHot, Sampled

MASK = -1
Canvas = Callable[[Text, Text], torch.Tensor]


def random_canvas(vocab_size: int, num_slots: int, seed: int) -> Canvas:
    """(text, canvas of tokens and masks) -> [n, V] independent random log-weights for every slot; those of odd seeds
    are so sure that an entropy bound reveals several slots at once."""
    scale = 4.0 if seed % 2 else 1.5
    generator = torch.Generator().manual_seed(seed)
    rows: dict[tuple[Text, Text], torch.Tensor] = {}

    def logits(text: Text, canvas: Text) -> torch.Tensor:
        if (text, canvas) not in rows:
            shape = (num_slots, vocab_size)
            rows[text, canvas] = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        return rows[text, canvas]

    return logits


class EachWorld:
    """Draws that EnumeratedNoise counts once for each world: worlds that do not draw a slot now must not branch.

    No world may draw a slot twice.
    """

    def __init__(self, noise: EnumeratedNoise, num_worlds: int, num_slots: int) -> None:
        self.noise, self.drawn = noise, torch.zeros(num_worlds, num_slots, dtype=torch.bool)

    def choose(self, scores: torch.Tensor, slot: int, now: torch.Tensor) -> torch.Tensor:
        assert not bool((self.drawn[:, slot] & now).any()), f"slot {slot} is drawn twice"
        self.drawn[:, slot] |= now
        first = torch.zeros_like(scores)
        first[..., 0] = 1.0
        return self.noise._outcome(torch.where(now[:, None, None], scores.softmax(dim=-1), first))


def repeats_less(scores: torch.Tensor, slot: int, tokens: torch.Tensor) -> torch.Tensor:
    """A processor that reads ids: what was drafted before a slot is less likely there, and no 0 follows a 1."""
    for earlier in range(slot):
        scores = scores - torch.nn.functional.one_hot(tokens[:, earlier], scores.shape[-1])[:, None].to(scores)
    if slot:
        forbidden = (tokens[:, slot - 1] == 1)[:, None, None] & (torch.arange(scores.shape[-1]) == 0)
        scores = scores.masked_fill(forbidden, -torch.inf)
    return scores


def diffusion_drafter(
    canvas: Canvas,
    num_slots: int,
    effort: int,
    order: str | Order,
    *,
    sampled: bool = True,
    resample: bool = False,
    stages: tuple[int, ...] | None = None,
    process: Callable | None = None,
    declared: str = "the truth",
) -> Propose:
    """Drafts by `reveal`.

    Args:
        stages: of each slot; one stage where None.
        declared: "the truth", "own laws" for every slot (false for most orders), or "one-hot" for every slot.
    """
    pick = ORDERS[order] if isinstance(order, str) else order

    def propose(texts: list[Text], noise: EnumeratedNoise) -> Draft:
        worlds = EachWorld(noise, len(texts), num_slots)
        turns = torch.tensor(stages or (0,) * num_slots).expand(len(texts), -1)
        chosen = torch.ones(len(texts), num_slots, dtype=torch.bool)  # of the pass, as far as its turn goes

        def run(tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
            nonlocal chosen
            chosen = torch.ones_like(masked) if resample else masked
            rows = tokens.masked_fill(masked, MASK).tolist()
            return torch.stack([canvas(text, tuple(row)) for text, row in zip(texts, rows, strict=True)])

        def select(logits: torch.Tensor, masked: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            nonlocal chosen
            chosen = pick(logits, masked, count)
            return chosen

        def draw(scores: torch.Tensor, slot: int) -> torch.Tensor:
            return worlds.choose(scores, slot, chosen[:, slot]) if sampled else scores.argmax(dim=-1)

        plain = process or (lambda scores, slot, tokens: scores)
        found = reveal(turns, int(turns.max()) + 1, effort, select, run, plain, draw, resample)
        lengths = torch.full((len(texts),), num_slots)
        if not sampled:
            return Draft(found.tokens, lengths, OneHot())
        one_hot = {
            "the truth": ~own_law_holds(found.drawn_in),
            "own laws": torch.zeros_like(found.tokens, dtype=torch.bool),
            "one-hot": torch.ones_like(found.tokens, dtype=torch.bool),
        }[declared]
        return Draft(found.tokens, lengths, Sampled(found.scores, one_hot=one_hot))

    return propose
