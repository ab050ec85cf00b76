"""The training loop of all methods: optimisers, schedule, held-out acceptance, and going on where it stopped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn
from tqdm.auto import tqdm

from .batches import Batch, count_batches, held_out_batches, train_batches

_CHECKPOINT = "checkpoint.pt"


class Scores(NamedTuple):
    """What a module says about a batch.

    Attributes:
        loss: [] to be minimised.
        num_hits: [depths] rows whose guesses up to this depth are all what the text goes on with.
        num_rows: [depths] rows asked.
    """

    loss: torch.Tensor
    num_hits: torch.Tensor
    num_rows: torch.Tensor


@dataclass(frozen=True)
class TrainOptions:
    """How to train.

    Attributes:
        epochs: passes over the data.
        batch_tokens: tokens of a batch on each process, padding included.
        learning_rate: at its highest.
        warmup: share of the steps over which it rises; afterwards it falls to zero along a cosine.
        clip: largest norm of the gradient.
        checkpoint_steps: between two checkpoints, each with a look at the held-out texts.
        num_held_out: held-out texts to look at.
        seed: of the order of the batches.
    """

    epochs: int = 4
    batch_tokens: int = 4096
    learning_rate: float = 2e-3
    warmup: float = 0.03
    clip: float = 1.0
    checkpoint_steps: int = 200
    num_held_out: int = 200
    seed: int = 0


def train(
    module: nn.Module, accelerator: Accelerator, folder: Path, work: Path, options: TrainOptions
) -> list[dict[str, Any]]:
    """Train the parameters of `module`, whose forward takes a Batch and gives Scores.

    Args:
        module: on the accelerator's device, its parameters in fp32.
        accelerator: devices, precision and processes.
        folder: a data folder.
        work: where the checkpoint lies; a run that finds one goes on from there.
        options: how.

    Returns:
        One entry for each look at the held-out texts: step, loss, acceptance by position, tau.
    """
    lengths = [
        count_batches(folder, options.batch_tokens, options.seed, epoch, accelerator.num_processes)
        for epoch in range(options.epochs)
    ]
    total = sum(lengths)
    if not total:
        raise ValueError(f"data: {folder} has no texts to train on.")
    held_out = held_out_batches(folder, options.batch_tokens, options.num_held_out)
    optimizers = _optimizers(module, options.learning_rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, _warmup_cosine(total, options.warmup)) for o in optimizers]
    step, history = _restore(work, module, optimizers, schedules, total)
    trained: nn.Module = accelerator.prepare_model(module)
    bar = tqdm(desc="training", total=total, initial=step, unit=" steps", disable=not accelerator.is_main_process)
    for batch in _batches_from(step, folder, options, lengths, accelerator):
        trained.train()
        with accelerator.autocast():
            scores = trained(batch.to(accelerator.device))
        accelerator.backward(scores.loss)
        accelerator.clip_grad_norm_(module.parameters(), options.clip)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        step += 1
        bar.update()
        if step % options.checkpoint_steps == 0 or step == total:
            if accelerator.is_main_process:
                history.append({"step": step, "of": total, **evaluate(module, accelerator, held_out)})
                bar.write(describe(history[-1]))
                _save(work, module, optimizers, schedules, step, total, history)
            accelerator.wait_for_everyone()
    bar.close()
    return history


@torch.no_grad()
def evaluate(module: nn.Module, accelerator: Accelerator, batches: list[Batch]) -> dict[str, Any]:
    """Loss, acceptance by position, and tau of greedy drafts on held-out texts.

    Acceptance at a position is the share of drafts that are right up to there, over all positions of the texts.
    """
    module.eval()
    losses, hits, rows = 0.0, torch.zeros(1), torch.zeros(1)
    for batch in batches:
        with accelerator.autocast():
            scores: Scores = module(batch.to(accelerator.device))
        losses += float(scores.loss) / len(batches)
        hits, rows = hits + scores.num_hits.cpu(), rows + scores.num_rows.cpu()
    accepted = (hits / rows.clamp_min(1)).tolist()
    return {"loss": losses, "accepted_per_position": accepted, "tau": 1 + sum(accepted)}


def describe(entry: dict[str, Any]) -> str:
    accepted = " ".join(f"{share:.3f}" for share in entry["accepted_per_position"])
    return (
        f"step {entry['step']} of {entry['of']}: held-out loss {entry['loss']:.3f}, accepted by position {accepted}, "
        f"tau {entry['tau']:.2f}"
    )


def _batches_from(
    step: int, folder: Path, options: TrainOptions, lengths: list[int], accelerator: Accelerator
) -> Iterator[Batch]:
    """The batches of all epochs, without the first `step`."""
    for epoch, length in enumerate(lengths):
        if step >= length:
            step -= length
            continue
        batches = train_batches(
            folder, options.batch_tokens, options.seed, epoch, accelerator.process_index, accelerator.num_processes
        )
        yield from islice(batches, step, None)
        step = 0


def _optimizers(module: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices inside, AdamW for the output head, norms and biases."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    inside = [p for name, p in named if p.dim() == 2 and "lm_head" not in name and "embed" not in name]
    others = [p for _, p in named if not any(p is q for q in inside)]
    return [
        torch.optim.Muon(inside, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate / 2, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _warmup_cosine(total: int, warmup: float) -> Callable[[int], float]:
    rising = max(1, round(total * warmup))

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rising) / max(1, total - rising))))

    return factor


def _save(
    work: Path,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    schedules: list[Any],
    step: int,
    total: int,
    history: list[dict[str, Any]],
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    partial = work / f".{_CHECKPOINT}.partial"
    content = {
        "step": step,
        "total": total,
        "history": history,
        "module": module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "schedules": [schedule.state_dict() for schedule in schedules],
    }
    torch.save(content, partial)
    partial.replace(work / _CHECKPOINT)


def _restore(
    work: Path, module: nn.Module, optimizers: list[torch.optim.Optimizer], schedules: list[Any], total: int
) -> tuple[int, list[dict[str, Any]]]:
    """(step, history) of the checkpoint in `work`, which is loaded; (0, []) without one."""
    path = work / _CHECKPOINT
    if not path.exists():
        return 0, []
    content = torch.load(path, map_location="cpu", weights_only=True)
    if content["total"] != total:
        raise ValueError(
            f"out: {path} is of a run of {content['total']} steps and this one has {total}; the data or the options "
            "have changed. Delete it to start again, or go back to what it was made with."
        )
    module.load_state_dict(content["module"])
    for optimizer, state in zip(optimizers, content["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    for schedule, state in zip(schedules, content["schedules"], strict=True):
        schedule.load_state_dict(state)
    return content["step"], content["history"]
