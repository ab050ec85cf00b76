"""Measuring how far a drafter's confidence can be believed, and writing what corrects it into the drafter's folder.

The drafter drafts for answers of the target, whole blocks are verified, and each slot gets the temperature that makes
its confidence come true (scheduling/calibration.py). Only the speed of `schedule=...` depends on it, never the text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..drafters.auto import AutoDrafter
from ..drafters.base import Drafter, DraftSession, Signals
from ..drafters.request import DraftRequest
from ..scheduling.calibration import prefix_errors, sequential_temperatures
from ..verification import Draft, Verdict
from .prompts import read_jsonl

_FIELD = "confidence_temperatures"
_FURTHEST = 1e-6  # of a probability from 0 and 1; beyond, its logit would be infinite


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="model that is drafted for: a name on the Hub or a folder")
    parser.add_argument("--drafter", type=Path, required=True, help="folder of the drafter; its config.json is changed")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL files with prompts to answer")
    parser.add_argument("--limit", type=int, default=128, help="prompts to answer")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the answers; 0 decodes greedily")
    parser.add_argument("--dtype", default="bfloat16", help="of target and drafter")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")


def main(chosen: argparse.Namespace) -> None:
    config_file = chosen.drafter / "config.json"
    if not config_file.is_file():
        raise SystemExit(f"--drafter: {chosen.drafter} is no folder with a config.json to write the temperatures to.")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    target = AutoModelForCausalLM.from_pretrained(chosen.target, dtype=chosen.dtype).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(chosen.target)
    drafter = AutoDrafter.from_pretrained(chosen.drafter, target=target)
    chats = [chat for path in chosen.prompts for chat in read_jsonl(path)][: chosen.limit]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    if len(prompts) < 2:
        raise SystemExit(f"--prompts: {len(prompts)} prompts are too few; every other one is kept for the measurement.")
    asked = (chosen.max_new_tokens, chosen.temperature, chosen.seed)
    fitted, unseen = measure(target, drafter, prompts[::2], *asked), measure(target, drafter, prompts[1::2], *asked)
    found = sequential_temperatures(*fitted)
    for title, temperatures in (("before", (1.0,) * len(found)), ("after", found)):
        errors = " ".join(f"{error:.3f}" for error in prefix_errors(*unseen, temperatures))
        print(f"calibration error of the first 1, 2, ... tokens, on the other half, {title}: {errors}")
    write_temperatures(chosen.drafter, found)
    print(f"{config_file} has {_FIELD} {[round(t, 3) for t in found]} (times those that it had)")


def measure(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Iterable[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [N, n] of the confidence in N rounds, NaN where a slot was not judged; accepted tokens [N]).

    Raises:
        ValueError: the drafter gives no confidence.
    """
    options = drafter.spec_config
    drafter.spec_config = options.with_options(schedule=0.0, rule="rejection", governor="off", seed=seed)
    rounds: list[tuple[torch.Tensor, int]] = []
    start = drafter.start
    drafter.start = lambda request: _Recorded(start(request), request, rounds)  # type: ignore[method-assign]
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0.0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    try:
        for ids in prompts:
            input_ids = torch.tensor([list(ids)], device=target.device)
            target.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                assistant_model=drafter,
                max_new_tokens=max_new_tokens,
                **sampling,
            )
    finally:
        del drafter.start
        drafter.spec_config = options
    width = max((len(logits) for logits, _ in rounds), default=0)
    padded = torch.full((len(rounds), width), torch.nan, dtype=torch.float64)
    for row, (logits, _) in zip(padded, rounds, strict=True):
        row[: len(logits)] = logits
    return padded, torch.tensor([accepted for _, accepted in rounds])


def write_temperatures(folder: Path, found: Sequence[float]) -> None:
    """Into the drafter's config.json, times what stood there: confidences were measured with that applied."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    before = config.get(_FIELD) or [1.0] * len(found)
    config[_FIELD] = [old * new for old, new in zip(before, found, strict=True)]
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _Recorded(DraftSession):
    """A session of one row whose confidences and verdicts are kept."""

    def __init__(self, inner: DraftSession, request: DraftRequest, rounds: list[tuple[torch.Tensor, int]]) -> None:
        self.inner, self.rows, self.rounds = inner, request.rows, rounds
        self.logits: torch.Tensor | None = None

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        draft = self.inner.propose(budget, verification)
        assert draft.confidence is not None
        self.logits = torch.logit(draft.confidence[0].double().clamp(_FURTHEST, 1.0 - _FURTHEST)).cpu()
        return draft

    def observe(self, signals: Signals | None, verdict: Verdict) -> None:
        if self.logits is not None:  # what lies behind a stop was not judged
            self.rounds.append((self.logits[: self.rows.drafted[0]], self.rows.accepted[0]))
        self.logits = None
        self.inner.observe(signals, verdict)

    def close(self) -> None:
        self.inner.close()
