"""Effort and lenience together, on the small real target with its diffusion drafter: is more than one knob worth it?

    python benchmarks/pareto_smollm2.py [--out FOLDER]

Sampled answers at temperature 1 to evaluation prompts, MT-Bench and HumanEval by turns, at every combination of effort,
lenience and draft length, measured as `hf-specdec pareto` does. Then, for each setting that turns both knobs (effort
above 1, lenience below 1), whether one that turns at most one is as fast and as close to the target's law. It is
asked twice: of tokens a second here, and of tokens a verification, for targets beside which the drafter costs nothing.
Two quiet cores take 9 minutes, or 7 with --num-prompts 6; give the same command again to go on after a stop.
"""

import argparse
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch

from hf_specdec import AutoDrafter
from hf_specdec.demo import evaluation_prompts, load_small_target
from hf_specdec.tuning import pareto
from hf_specdec.tuning.front import dominates
from hf_specdec.tuning.points import Point

CARD = Path(__file__).parent.parent / "model_cards" / "smollm2-135m-instruct-diffusion"
EFFORTS, LENIENCES, LENGTHS = (1, 2, 4), (1.0, 0.7, 0.5, 0.3), (2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", nargs="?", default=CARD, help="folder of a diffusion drafter for the small target")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--repeats", type=int, default=1, help="answers to a prompt, each from another seed")
    parser.add_argument("--dtype", default="bfloat16", help="of target and drafter")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/pareto_smollm2"), help="folder for what the sweep writes"
    )
    chosen = parser.parse_args()

    model, tokenizer = load_small_target(getattr(torch, chosen.dtype))
    report = pareto(
        model,
        AutoDrafter.from_pretrained(chosen.drafter, target=model),
        tokenizer,
        prompts(chosen.num_prompts),
        chosen.out,
        effort=EFFORTS,
        lenience=LENIENCES,
        num_draft_tokens=LENGTHS,
        max_new_tokens=chosen.new_tokens,
        temperature=1.0,
        repeats=chosen.repeats,
        measure_all=True,
    )
    print((chosen.out / "report.md").read_text(encoding="utf-8"))
    print(statement("tokens a second", report.points, dominates))
    print(statement("tokens a verification", report.points, is_as_good_without_clock))


def prompts(count: int) -> list[list[dict[str, str]]]:
    """Chats, questions of MT-Bench and heads of HumanEval by turns."""
    kinds: tuple[list, list] = ([], [])
    for prompt in evaluation_prompts():
        kinds[prompt.name.startswith("HumanEval")].append([{"role": "user", "content": prompt.turns[0]}])
    return list(chain.from_iterable(zip(*kinds, strict=False)))[:count]


def is_as_good_without_clock(a: Point, b: Point) -> bool:
    """Whether `a` emits as many tokens a verification as `b`, and loses as little."""
    return a.tau >= b.tau and a.kl.mean <= b.kl.mean


def statement(measure: str, points: list[Point], beats: Callable[[Point, Point], bool]) -> str:
    """Whether settings that turn both knobs are beaten by settings that turn one at most."""
    both = [point for point in points if point.setting.effort > 1 and not point.lossless]
    others = [point for point in points if point not in both]
    unbeaten = [point for point in both if not any(beats(other, point) for other in others)]
    lines = [
        f"By {measure} and KL, {len(unbeaten)} of the {len(both)} settings with effort above 1 and lenience below 1 "
        "are beaten by none that has effort 1 or lenience 1" + (":" if unbeaten else ".")
    ]
    for point in sorted(unbeaten, key=lambda point: point.kl.mean):
        lines.append(
            f"- {point.setting.key}: {point.speed.mean:.1f} tokens/s, tau {point.tau:.2f}, KL {point.kl.mean:.4f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
