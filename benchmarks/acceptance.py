"""Drafters side by side on prompts that none was trained on: MT-Bench 81-140 (both turns), HumanEval/0-99, and edits
of the solutions of HumanEval/0-29.

    python benchmarks/acceptance.py [FOLDER ...] [--effort 2 4] [--timed 8] [--out benchmarks/results/FILE.json]

Greedy answers of at most 128 tokens by the small real target; prompt lookup is in every table, because it costs
nothing. tau is emitted tokens per verification, the prefill not counted. With --timed the first so many prompts of each
set are answered one by one, by plain `generate` and by each drafter in turn, and the table has the speed-up and what a
draft, a verification and a plain step took.
"""

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import AutoDrafter, Drafter, SpecStats
from hf_specdec.demo import edit_prompts, evaluation_prompts, load_small_target

NEW_TOKENS = 128
BATCH_SIZE = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", help="folders of drafters for the small target")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="of those; lookup drafts as it does by default")
    parser.add_argument(
        "--effort", type=int, nargs="*", default=[], help="also so many passes, of those that take them"
    )
    parser.add_argument("--governor", default="auto", help="of those; 'off' drafts the full length whatever it costs")
    parser.add_argument("--dtype", default="bfloat16", help="of target and drafters")
    parser.add_argument("--limit", type=int, help="take only the first so many prompts of each set")
    parser.add_argument("--timed", type=int, default=0, help="also time the first so many prompts of each set")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()

    model, tokenizer = load_small_target(getattr(torch, arguments.dtype))
    drafters = {"lookup": AutoDrafter.for_target(model, "lookup")}
    for folder in arguments.drafters:
        drafter = AutoDrafter.from_pretrained(
            folder, target=model, num_draft_tokens=arguments.num_draft_tokens, governor=arguments.governor
        )
        drafters[Path(folder).name] = drafter
        for effort in arguments.effort if drafter.takes_effort else ():
            drafters[f"{Path(folder).name}, effort {effort}"] = AutoDrafter.from_pretrained(
                folder, target=model, spec_config=drafter.spec_config.with_options(effort=effort)
            )
    rows = []
    chats: dict[str, list] = {}
    for name, drafter in drafters.items():
        for title, row in measure(model, tokenizer, drafter, arguments.limit, chats).items():
            rows.append({"prompts": title, "drafter": name, **row})
            accepted = " ".join(f"{share:.3f}" for share in row["accepted_per_position"][:8])
            print(f"{title:18} {name:32} tau {row['tau']:.2f}   accepted by position {accepted}", flush=True)
    timed = []
    for title, prompts in chats.items() if arguments.timed else ():
        for name, row in race(model, tokenizer, drafters, prompts[: arguments.timed]).items():
            timed.append({"prompts": title, "drafter": name, **row})
            print(format_timed(timed[-1]), flush=True)
    if arguments.out:
        options = {"dtype": arguments.dtype, "num_draft_tokens": arguments.num_draft_tokens, "new_tokens": NEW_TOKENS}
        machine = {"platform": platform.platform(), "torch": torch.__version__, "threads": torch.get_num_threads()}
        table = {"machine": machine, **options, "rows": rows, "timed": timed}
        arguments.out.write_text(json.dumps(table, indent=1) + "\n")


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: Drafter, limit: int | None, chats: dict
) -> dict[str, dict]:
    """Set of prompts -> tau and acceptance by position; the sets are put into `chats`."""
    first, second, code = [], [], []
    for prompt in evaluation_prompts():
        (code if prompt.name.startswith("HumanEval") else first).append(prompt.turns)
    table = {}
    questions = [[{"role": "user", "content": turns[0]}] for turns in first[:limit]]
    answers, counts = answer(model, tokenizer, drafter, questions)
    table["MT-Bench, turn 1"] = counts
    for question, reply, turns in zip(questions, answers, first, strict=False):
        second.append([*question, {"role": "assistant", "content": reply}, {"role": "user", "content": turns[1]}])
    table["MT-Bench, turn 2"] = answer(model, tokenizer, drafter, second)[1]
    heads, edits = (
        [[{"role": "user", "content": turns[0]}] for turns in sets[:limit]]
        for sets in (code, [prompt.turns for prompt in edit_prompts()])
    )
    table["HumanEval"] = answer(model, tokenizer, drafter, heads)[1]
    table["MT-Bench"] = total([table["MT-Bench, turn 1"], table["MT-Bench, turn 2"]])
    table["all"] = total([table["MT-Bench"], table["HumanEval"]])
    table["code edits"] = answer(model, tokenizer, drafter, edits)[1]
    chats.update({"MT-Bench, turn 1": questions, "HumanEval": heads, "code edits": edits})
    return {title: finished(counts) for title, counts in table.items()}


def race(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafters: dict[str, Drafter], chats: list
) -> dict[str, dict]:
    """name -> speed-up over plain `generate`, and milliseconds of a draft, a verification and a plain step."""
    seconds: defaultdict[str, float] = defaultdict(float)
    tokens: defaultdict[str, int] = defaultdict(int)
    stats: dict[str, SpecStats] = {}
    for warm_up, chat in [(True, chats[0]), *((False, chat) for chat in chats)]:
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        for name, drafter in (("plain", None), *drafters.items()):
            options = {} if drafter is None else {"assistant_model": drafter}
            start = time.perf_counter()
            ids = model.generate(**inputs, **options, do_sample=False, max_new_tokens=NEW_TOKENS)
            if warm_up:
                continue
            seconds[name] += time.perf_counter() - start
            tokens[name] += ids.shape[1] - inputs["input_ids"].shape[1]
            if drafter is not None and drafter.last_stats is not None:
                stats[name] = stats[name] + drafter.last_stats if name in stats else drafter.last_stats
    step = seconds["plain"] / tokens["plain"]
    return {
        name: {
            "speed_up": step / (seconds[name] / tokens[name]),
            "draft_ms": 1e3 * one.draft_time / one.num_forwards,
            "verification_ms": 1e3 * one.verify_time / one.num_forwards,
            "plain_step_ms": 1e3 * step,
        }
        for name, one in stats.items()
    }


def format_timed(row: dict) -> str:
    return (
        f"{row['prompts']:18} {row['drafter']:32} speed-up {row['speed_up']:.2f}   draft {row['draft_ms']:.1f} ms   "
        f"verification {row['verification_ms']:.1f} ms   plain step {row['plain_step_ms']:.1f} ms"
    )


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: Drafter, chats: list[list[dict]]
) -> tuple[list[str], dict]:
    """Answers in the order of the chats, and the counts of all of them."""
    replies, counts = [""] * len(chats), []
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    for batch in batches(texts):
        inputs = tokenizer([texts[i] for i in batch], padding=True, add_special_tokens=False, return_tensors="pt")
        output = model.generate(
            **inputs,
            assistant_model=drafter,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
        )
        for row, i in enumerate(batch):
            ids = output.sequences[row, inputs["input_ids"].shape[1] :]
            replies[i] = tokenizer.decode(ids, skip_special_tokens=True)
        for stats in output.specdec.rows:
            counts.append(
                {
                    "emitted": stats.num_emitted - 1,
                    "verifications": stats.num_verifications - 1,
                    "accepted": stats.accepted_per_position,
                }
            )
    return replies, total(counts)


def batches(texts: list[str]) -> Iterator[list[int]]:
    """Indices, texts of alike length together."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(order), BATCH_SIZE):
        yield order[start : start + BATCH_SIZE]


def total(counts: list[dict]) -> dict:
    accepted: defaultdict[int, int] = defaultdict(int)
    for one in counts:
        for position, count in enumerate(one["accepted"]):
            accepted[position] += count
    return {
        "emitted": sum(one["emitted"] for one in counts),
        "verifications": sum(one["verifications"] for one in counts),
        "accepted": [accepted[position] for position in sorted(accepted)],
    }


def finished(counts: dict) -> dict:
    return {
        "tau": counts["emitted"] / counts["verifications"],
        "verifications": counts["verifications"],
        "accepted_per_position": [count / counts["verifications"] for count in counts["accepted"]],
    }


if __name__ == "__main__":
    main()
