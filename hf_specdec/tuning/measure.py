"""One answer of a target with a drafter: its tokens, when each of them came, and what the drafter's statistics say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import SpecConfig
from ..drafters.base import Drafter


@dataclass(frozen=True)
class Sampler:
    """How answers are written.

    Args:
        max_new_tokens: the longest answer.
        temperature: 0 decodes greedily.
    """

    max_new_tokens: int
    temperature: float

    def __post_init__(self) -> None:
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 2:
            raise ValueError(f"`max_new_tokens` is {self.max_new_tokens!r}; give an integer of at least 2.")
        if not isinstance(self.temperature, int | float) or not 0.0 <= self.temperature < math.inf:
            raise ValueError(
                f"`temperature` is {self.temperature!r}; give 0 for greedy decoding, or a positive number."
            )

    @property
    def options(self) -> dict[str, Any]:
        """Of `generate`; no top-k and no top-p, which a model's own generation config may ask for."""
        if self.temperature == 0.0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": float(self.temperature), "top_k": 0, "top_p": 1.0}


class _Clock:
    """A streamer that notes when tokens come. The tokens of one verification come together."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


def answer(
    target: PreTrainedModel, drafter: Drafter, config: SpecConfig, prompt: Sequence[int], sampler: Sampler
) -> dict[str, Any]:
    """Let the target answer a prompt; batch 1.

    Args:
        target, drafter: the models.
        config: the drafter's options for this call.
        prompt: token ids.
        sampler: how.

    Returns:
        `tokens` of the answer, `arrivals` [tokens] in seconds since the start, and `stats`: sums of the call, and the
        seconds that it spent drafting, verifying and on the host.
    """
    before, drafter.spec_config = drafter.spec_config, config
    clock = _Clock()
    input_ids = torch.tensor([list(prompt)], device=target.device)
    try:
        start = perf_counter()
        ids = target.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            assistant_model=drafter,
            streamer=clock,
            max_new_tokens=sampler.max_new_tokens,
            **sampler.options,
        )
    finally:
        drafter.spec_config = before
    stats = drafter.last_stats
    assert stats is not None
    return {
        "tokens": ids[0, len(prompt) :].tolist(),
        "arrivals": [time - start for time in clock.times[1:]],  # the first put is the prompt
        "stats": {
            **asdict(stats.total),
            **{name: getattr(stats, name) for name in ("draft_time", "verify_time", "host_time", "lossless", "bound")},
        },
    }


@torch.no_grad()
def log_likelihood(target: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> float:
    """Sum over an answer of ln p(token), p the target's own law at `temperature` (1 in greedy decoding)."""
    ids = torch.tensor([[*prompt, *tokens]], device=target.device)
    logits = target(input_ids=ids, logits_to_keep=len(tokens) + 1).logits[0, :-1].double()
    scores = (logits / (temperature or 1.0)).log_softmax(dim=-1)
    return float(scores.gather(-1, ids[0, len(prompt) :, None]).sum())


def share_matched(tokens: Sequence[int], lossless: Sequence[int]) -> float:
    """How much of an answer is the lossless one, up to the first token that differs."""
    same = 0
    for ours, theirs in zip(tokens, lossless, strict=False):
        if ours != theirs:
            break
        same += 1
    return same / max(len(tokens), len(lossless), 1)
