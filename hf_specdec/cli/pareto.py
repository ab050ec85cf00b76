"""Measure effort, lenience and draft length on your prompts, and choose the fastest setting within your limits."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, how, and what to choose by."""
    parser.add_argument("--target", required=True, help="the model that answers: a name on the Hub or a folder")
    parser.add_argument("--drafter", required=True, help="a drafter's name or folder, or 'lookup', 'mtp', 'dspark'")
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines with "prompt" or "messages"')
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; give it again to go on")
    parser.add_argument("--effort", type=_list_of(int), default=[1], help="passes of the drafter: 1,2,4")
    parser.add_argument("--lenience", type=_list_of(float), default=[1.0], help="1 is lossless: 1,0.7,0.5")
    parser.add_argument("--num-draft-tokens", type=_list_of(int), default=[2, 4, 8], help="draft lengths: 2,4,8")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="of the answers, without top-k and top-p; 0 decodes greedily"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--limit", type=int, help="take only the first so many prompts")
    parser.add_argument("--repeats", type=int, default=3, help="how often each answer is timed")
    parser.add_argument("--seed", type=int, default=0, help="of sampled answers")
    parser.add_argument("--dtype", default="bfloat16", help="of target and drafter")
    parser.add_argument("--metric", help="MODULE:FUNCTION, (prompt, answer) -> a number, higher is better")
    parser.add_argument("--min-quality", type=float, help="the choice has at least this mean of the metric")
    parser.add_argument("--max-kl", type=float, help="the choice loses at most so many nats a token")
    parser.add_argument("--max-itl-ms", type=float, help="95%% of its tokens come so many milliseconds after another")
    parser.add_argument("--measure-all", action="store_true", help="measure what screening would leave out, too")


def run(arguments: argparse.Namespace) -> int:
    """Sweep, write, and print the front."""
    try:
        print(_sweep(arguments))
    except (ValueError, OSError) as error:
        print(f"hf-specdec pareto: {error}", file=sys.stderr)
        return 1
    return 0


def _sweep(chosen: argparse.Namespace) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..drafters import AutoDrafter
    from ..training.prompts import read_jsonl
    from ..tuning import Limits, pareto

    limits = Limits(chosen.min_quality, chosen.max_kl, chosen.max_itl_ms)
    metric = _metric(chosen.metric) if chosen.metric else None
    chats = read_jsonl(chosen.prompts)[: chosen.limit]
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    target = AutoModelForCausalLM.from_pretrained(chosen.target, dtype=chosen.dtype).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(chosen.target)
    drafter: Any
    if "/" in chosen.drafter or os.path.isdir(chosen.drafter):
        drafter = AutoDrafter.from_pretrained(chosen.drafter, target=target)
    else:
        drafter = AutoDrafter.for_target(target, chosen.drafter)
    report = pareto(
        target,
        drafter,
        tokenizer,
        chats if tokenizer.chat_template else [chat[-1]["content"] for chat in chats],
        chosen.out,
        effort=chosen.effort,
        lenience=chosen.lenience,
        num_draft_tokens=chosen.num_draft_tokens,
        max_new_tokens=chosen.max_new_tokens,
        temperature=chosen.temperature,
        repeats=chosen.repeats,
        seed=chosen.seed,
        metric=metric,
        limits=limits,
        measure_all=chosen.measure_all,
    )
    return (
        (chosen.out / "report.md").read_text(encoding="utf-8")
        + f"\n{chosen.out / 'recommended.json'} has "
        + str(report.recommended)
    )


def _metric(name: str) -> Callable[..., float]:
    """The function of MODULE:FUNCTION; modules of the working folder count."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--metric is {name!r}, which cannot be loaded ({error}); give MODULE:FUNCTION.") from error
    finally:
        sys.path.remove(os.getcwd())


def _list_of(kind: type) -> Callable[[str], list]:
    def values(text: str) -> list:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 1,2") from error

    return values
