"""Speculative decoding on a small real model: the same text, sooner.

One answer is streamed. Then a free question, a coding task and a code edit are answered by plain `generate`, with
prompt lookup, and with an EAGLE-3 head that was trained for this model: in fp32, where equal text is promised, and in
bf16, where a verification of many tokens costs least and two tokens may tie. Takes a few minutes on two CPU cores,
after one download.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from hf_specdec import AutoDrafter, Drafter, SpecStats
from hf_specdec.demo import SHOWN_PROMPTS, load_small_target

MAX_NEW_TOKENS = 128
HEAD = Path(__file__).parent.parent / "model_cards" / "smollm2-135m-instruct-eagle3"


@dataclass
class Run:
    """New tokens of one answer, its best speed over the repeats, and the statistics where a drafter took part."""

    tokens: torch.Tensor
    tokens_per_second: float
    stats: SpecStats | None


@dataclass
class Difference:
    """Where two answers part: the token's index, the gap of the two best logits there, and one rounding step there."""

    index: int
    gap: float
    rounding: float


def main() -> None:
    """Print everything."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # not on Windows
    cores = os.cpu_count() or 1
    if load_average > cores:
        print(f"Other work keeps this machine busy (load {load_average:.1f} on {cores} cores): distrust the speeds.")
    show_equality(device)
    show_speed(device)


def show_equality(device: str) -> None:
    """In fp32: one streamed answer, then each prompt without and with drafts, greedy and sampling."""
    model, drafters, tokenizer, questions = load(torch.float32, device)
    print(f"\nfp32 on {device}, streamed:\n")
    stream(model, tokenizer, questions["free text"], drafters["EAGLE-3 head"])
    keyed = AutoDrafter.for_target(model, "none")  # plain decoding that samples with the noise a drafter would read
    for title, inputs in questions.items():
        print(report(title, model, inputs, measure(model, inputs, drafters, repeats=1, do_sample=False)))
        plain, *others = measure(model, inputs, {**drafters, "plain": keyed}, repeats=1, do_sample=True).values()
        for other in others:
            print(f"  sampled with one seed: {verdict(first_difference(model, inputs, plain, other), model.dtype)}")


def show_speed(device: str) -> None:
    """In bf16: each prompt without and with drafts."""
    model, drafters, _, questions = load(torch.bfloat16, device)
    print(f"\nbf16 on {device}, where a verification costs least:")
    for title, inputs in questions.items():
        print(report(title, model, inputs, measure(model, inputs, drafters, repeats=3, do_sample=False)))


def load(
    dtype: torch.dtype, device: str
) -> tuple[PreTrainedModel, dict[str, Drafter | None], PreTrainedTokenizerBase, dict[str, BatchEncoding]]:
    """The target, its drafters (None: plain `generate`), its tokenizer and the prompts in its chat format."""
    model, tokenizer = load_small_target(dtype)
    model = model.to(device)
    questions = {title: chat(tokenizer, text).to(device) for title, text in SHOWN_PROMPTS.items()}
    drafters = {
        "plain": None,
        "prompt lookup": AutoDrafter.for_target(model, "lookup"),
        "EAGLE-3 head": AutoDrafter.from_pretrained(HEAD, target=model),
    }
    return model, drafters, tokenizer, questions


def chat(tokenizer: PreTrainedTokenizerBase, text: str) -> BatchEncoding:
    """The model's inputs for one user message."""
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def stream(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: BatchEncoding, drafter: Drafter) -> None:
    """Print the answer as it comes: several tokens at once wherever a draft was accepted."""
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, streamer=streamer)


def measure(
    model: PreTrainedModel, inputs: BatchEncoding, drafters: dict[str, Drafter | None], repeats: int, **options: Any
) -> dict[str, Run]:
    """One run for each drafter, the best of `repeats` after a short one to warm up.

    The drafters take turns, so that a machine that is busy for a while slows all of them. The seed is the same each
    time; it matters only where `options` ask for sampling.
    """
    best: dict[str, Run] = {}
    for repeat in range(repeats + 1):
        limit = MAX_NEW_TOKENS if repeat else 8
        for name, drafter in drafters.items():
            assistant = {} if drafter is None else {"assistant_model": drafter}
            torch.manual_seed(0)
            start = time.perf_counter()
            output = model.generate(
                **inputs, **assistant, **options, max_new_tokens=limit, return_dict_in_generate=True
            )
            tokens = output.sequences[0, inputs["input_ids"].shape[1] :].cpu()  # the copy waits for the device
            run = Run(tokens, len(tokens) / (time.perf_counter() - start), getattr(output, "specdec", None))
            if repeat == 1 or (repeat and run.tokens_per_second > best[name].tokens_per_second):
                best[name] = run
    return best


def first_difference(model: PreTrainedModel, inputs: BatchEncoding, one: Run, other: Run) -> Difference | None:
    """Where two answers part, and how close the two best tokens are there when their common prefix is read again."""
    common = min(len(one.tokens), len(other.tokens))
    unequal = (one.tokens[:common] != other.tokens[:common]).nonzero()
    if len(unequal) == 0 and len(one.tokens) == len(other.tokens):
        return None
    index = int(unequal[0]) if len(unequal) else common
    prefix = torch.cat([inputs["input_ids"][0], one.tokens[:index].to(inputs["input_ids"].device)])
    with torch.no_grad():
        best, second = model(prefix[None]).logits[0, -1].float().topk(2).values.tolist()
    _, exponent = torch.frexp(torch.tensor(best))
    return Difference(index, best - second, torch.finfo(model.dtype).eps * 2.0 ** (int(exponent) - 1))


def verdict(difference: Difference | None, dtype: torch.dtype) -> str:
    """One line: whether two answers are the same text."""
    if difference is None:
        return "identical text: yes"
    apart = f"{difference.gap:.4g} apart where one rounding step is {difference.rounding:.4g}"
    if difference.gap <= 2 * difference.rounding:
        name = str(dtype).removeprefix("torch.")
        return f"identical text: up to token {difference.index}, a tie in {name} (the two best logits are {apart})"
    return f"identical text: no, they part at token {difference.index} (the two best logits are {apart})"


def report(title: str, model: PreTrainedModel, inputs: BatchEncoding, runs: dict[str, Run]) -> str:
    """Plain and speculative decoding side by side."""
    plain = runs["plain"]
    stats = [run.stats for run in runs.values()]
    rows = [
        ("", *runs),
        ("new tokens", *(f"{len(run.tokens)}" for run in runs.values())),
        ("tokens/s", *(f"{run.tokens_per_second:.1f}" for run in runs.values())),
        ("speed-up", *(f"{run.tokens_per_second / plain.tokens_per_second:.2f}x" for run in runs.values())),
        ("tokens per verification (tau)", *(f"{s.mean_accepted_length if s else 1:.2f}" for s in stats)),
        ("drafted tokens accepted", *(f"{s.acceptance_rate:.0%}" if s else "" for s in stats)),
    ]
    lines = [f"\n{title}:", *(f"  {name:<30}" + "".join(f"{cell:>16}" for cell in cells) for name, *cells in rows)]
    for name, run in runs.items():
        if run.stats is not None:
            shares = [f"{count / run.stats.num_verifications:.0%}" for count in run.stats.accepted_per_position[:8]]
            lines.append(f"  {name} accepted at position 1, 2, ... 8: {' '.join(shares) or 'never'}")
            lines.append(f"  {verdict(first_difference(model, inputs, plain, run), model.dtype)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
