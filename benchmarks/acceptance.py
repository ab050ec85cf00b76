"""What drafters are accepted for on prompts that none was trained on: MT-Bench 81-140 (both turns), HumanEval/0-99.

    python benchmarks/acceptance.py [FOLDER ...] [--out benchmarks/results/FILE.json]

Greedy answers of at most 128 tokens by the small real target; prompt lookup is in every table, because it costs
nothing. tau is emitted tokens per verification, the prefill not counted. Speed is not measured here: that is
efficiency.py, one answer at a time.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import AutoDrafter, Drafter
from hf_specdec.demo import evaluation_prompts, load_small_target

NEW_TOKENS = 128
BATCH_SIZE = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", help="folders of drafters for the small target")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="of those; lookup drafts as it does by default")
    parser.add_argument("--dtype", default="bfloat16", help="of target and drafters")
    parser.add_argument("--limit", type=int, help="take only the first so many prompts of each set")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()

    model, tokenizer = load_small_target(getattr(torch, arguments.dtype))
    drafters = {"lookup": AutoDrafter.for_target(model, "lookup")}
    for folder in arguments.drafters:
        drafters[Path(folder).name] = AutoDrafter.from_pretrained(
            folder, target=model, num_draft_tokens=arguments.num_draft_tokens
        )
    rows = []
    for name, drafter in drafters.items():
        for title, row in measure(model, tokenizer, drafter, arguments.limit).items():
            rows.append({"prompts": title, "drafter": name, **row})
            accepted = " ".join(f"{share:.3f}" for share in row["accepted_per_position"][:8])
            print(f"{title:18} {name:32} tau {row['tau']:.2f}   accepted by position {accepted}", flush=True)
    if arguments.out:
        options = {"dtype": arguments.dtype, "num_draft_tokens": arguments.num_draft_tokens, "new_tokens": NEW_TOKENS}
        arguments.out.write_text(json.dumps({**options, "rows": rows}, indent=1) + "\n")


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: Drafter, limit: int | None
) -> dict[str, dict]:
    """Set of prompts -> tau and acceptance by position."""
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
    heads = [[{"role": "user", "content": turns[0]}] for turns in code[:limit]]
    table["HumanEval"] = answer(model, tokenizer, drafter, heads)[1]
    table["MT-Bench"] = total([table["MT-Bench, turn 1"], table["MT-Bench, turn 2"]])
    table["all"] = total([table["MT-Bench"], table["HumanEval"]])
    return {title: finished(counts) for title, counts in table.items()}


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
