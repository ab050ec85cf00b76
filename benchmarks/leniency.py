"""What each lenient rule loses and gains: TV and KL to the target's law a token, against tau.

    python benchmarks/leniency.py FOLDER [--limit 10] [--out benchmarks/results/FILE.json]

The drafter in FOLDER drafts 4 tokens for the small real target, which answers the first MT-Bench questions and
HumanEval problems with at most 64 tokens each, once by each rule: sampled at temperature 1 from one seed, then
greedily. TV and KL are computed from the laws of both models at every emitted token. In greedy decoding TV is the share
of tokens other than the target's best, and KL the log-probability that they lose against it, averaged over all tokens.
Different rules write different texts. tau is emitted tokens per verification, the prefill not counted.
"""

import argparse
import json
from pathlib import Path

import torch

from hf_specdec import AutoDrafter, SpecStats
from hf_specdec.demo import humaneval_prompts, load_small_target, mtbench_questions
from hf_specdec.lenient import Ensemble, Lenience, Margin, Mentored, TopK, Typical

NEW_TOKENS, NUM_DRAFT_TOKENS, SEED = 64, 4, 0
RULES = {
    "sampling": [
        *(Lenience(x) for x in (1.0, 0.8, 0.5, 0.3)),
        *(Mentored(x) for x in (0.02, 0.1, 0.3)),
        *(Ensemble(x) for x in (0.8, 0.5)),
        Typical(),
        TopK(3),
        Margin(0.3),
    ],
    "greedy": [*(Lenience(x) for x in (1.0, 0.5, 0.3)), TopK(2), Typical()],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="folder of a drafter for the small target")
    parser.add_argument("--limit", type=int, default=10, help="prompts of each set")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()

    model, tokenizer = load_small_target(torch.bfloat16)
    drafter = AutoDrafter.from_pretrained(
        arguments.drafter, target=model, seed=SEED, num_draft_tokens=NUM_DRAFT_TOKENS, governor="off"
    )
    prompts = mtbench_questions()[: arguments.limit] + humaneval_prompts()[: arguments.limit]
    chats = [[{"role": "user", "content": prompt.turns[0]}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    table = []
    print("| decoding | rule | bound a token | TV | KL | accepted | tau |\n|---|---|---|---|---|---|---|")
    for decoding, rules in RULES.items():
        for rule in rules:
            drafter.spec_config = drafter.spec_config.with_options(lenience=rule)
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0} if decoding == "sampling" else {}
            model.generate(
                **inputs, **{"do_sample": False, **options}, max_new_tokens=NEW_TOKENS, assistant_model=drafter
            )
            row = {"decoding": decoding, "setting": repr(rule), **counts(drafter.last_stats)}
            table.append(row)
            print(formatted(row), flush=True)
    if arguments.out:
        options = {"drafter": Path(arguments.drafter).name, "prompts": len(chats), "new_tokens": NEW_TOKENS}
        arguments.out.write_text(json.dumps({**options, "seed": SEED, "rows": table}, indent=1) + "\n")


def counts(stats: SpecStats | None) -> dict:
    assert stats is not None
    rounds, tokens = stats.num_verifications - len(stats.rows), stats.num_emitted - len(stats.rows)
    return {
        "bound": stats.bound or "lossless",
        "tv": stats.mean_tv,
        "kl": stats.mean_kl,
        "acceptance": stats.acceptance_rate,
        "tau": tokens / rounds,
    }


def formatted(row: dict) -> str:
    numbers = f"{row['tv']:.3f} | {row['kl']:.3f} | {row['acceptance']:.0%} | {row['tau']:.2f}"
    return f"| {row['decoding']} | `{row['setting']}` | {row['bound']} | {numbers} |"


if __name__ == "__main__":
    main()
