"""How much of a drafter's possible speed-up the loop delivers, on the small real target.

    python benchmarks/efficiency.py [--check] [--out benchmarks/results/FILE.json]

The limit of a drafter is tau / (cost of a verification + cost of drafting), both in plain steps: what is left if the
loop were free. Costs are measured on bare forwards, for each width that the run verified; the speed-up is measured
against plain `generate`. Runs are interleaved in rounds and the median of the per-round ratios counts, so that a load
on the machine meets all of them. With --check the exit status tells whether the promises in README hold.
"""

import argparse
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec import AutoDrafter, Drafter
from hf_specdec.decoding.cache import RaggedCache
from hf_specdec.decoding.ragged_model import RaggedModel
from hf_specdec.demo import SHOWN_PROMPTS, load_small_target
from hf_specdec.drafters.common.rotary import layer_config
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.eagle3.modeling import Eagle3Model

HEAD = Path(__file__).parent.parent / "model_cards" / "smollm2-135m-instruct-eagle3"
NEW_TOKENS = 128
ROUNDS = 3
EDIT_SPEED_UP = 1.5  # lookup on the code edit
EFFICIENCY = 0.85  # every drafter, every prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where a promise does not hold")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()

    model, tokenizer = load_small_target(torch.bfloat16)
    drafters = {
        "none": AutoDrafter.for_target(model, "none"),
        "lookup": AutoDrafter.for_target(model, "lookup"),
        "lookup, 7 tokens": AutoDrafter.for_target(model, "lookup", num_draft_tokens=7),
        "draft model, 4 of 30 layers, 3 tokens": DraftModelDrafter(first_layers(model, 4), num_draft_tokens=3).bind(
            model
        ),
        "draft model, the target itself, 3 tokens": DraftModelDrafter(model, num_draft_tokens=3).bind(model),
        "EAGLE-3 head": AutoDrafter.from_pretrained(HEAD, target=model),
        "EAGLE-3 head, 3 tokens": AutoDrafter.from_pretrained(HEAD, target=model, num_draft_tokens=3),
    }
    rows = []
    for title, text in SHOWN_PROMPTS.items():
        message = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        for name, row in measure(model, inputs, drafters).items():
            rows.append({"prompt": title, "drafter": name, **row})
            print(format_row(rows[-1]), flush=True)
    if arguments.out:
        machine = {"platform": platform.platform(), "torch": torch.__version__, "threads": torch.get_num_threads()}
        arguments.out.write_text(json.dumps({"machine": machine, "dtype": "bfloat16", "rows": rows}, indent=1) + "\n")
    if arguments.check and (failures := broken_promises(rows)):
        raise SystemExit("\n".join(failures))


def measure(model: PreTrainedModel, inputs: dict, drafters: dict[str, Drafter]) -> dict[str, dict]:
    """name -> tau, speed-up over plain generate, its limit, and the share of the limit."""
    times: dict[str, list[float]] = {name: [] for name in ("plain", *drafters)}
    widths: dict[str, Counter] = {}
    for round_ in range(ROUNDS + 1):
        for name, drafter in (("plain", None), *drafters.items()):
            with counted_forwards() as counts:
                seconds = generate(model, inputs, drafter)
            if round_ > 0:  # the first one warms up
                times[name].append(seconds)
                widths[name] = counts
    context = inputs["input_ids"].shape[1] + NEW_TOKENS // 2
    costs: dict[tuple, float] = {}
    one_token = (bare_forward, model, 1)
    table = {}
    for name, drafter in drafters.items():
        stats = drafter.last_stats
        for key in (*widths[name], one_token):
            if key not in costs:
                bare, network, width = key
                costs[key] = bare(network, width, context)
        spent = sum(count * costs[key] for key, count in widths[name].items())
        speed_up = statistics.median(p / t for p, t in zip(times["plain"], times[name], strict=True))
        # The prefill emits a token in every run alike; the others cost what they cost in bare forwards.
        limit = (NEW_TOKENS - 1) * costs[one_token] / spent
        table[name] = {
            "tau": stats.mean_accepted_length,
            "acceptance_rate": stats.acceptance_rate,
            "accepted_per_position": stats.accepted_per_position,
            "tokens_per_second": NEW_TOKENS / statistics.median(times[name]),
            "plain_tokens_per_second": NEW_TOKENS / statistics.median(times["plain"]),
            "speed_up": speed_up,
            "limit": limit,
            "share_of_limit": speed_up / limit,
        }
    return table


def generate(model: PreTrainedModel, inputs: dict, drafter: Drafter | None) -> float:
    """Seconds of one greedy answer of NEW_TOKENS tokens."""
    options = {} if drafter is None else {"assistant_model": drafter}
    start = time.perf_counter()
    model.generate(**inputs, **options, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    return time.perf_counter() - start


class counted_forwards:
    """Counts (how to measure it alone, network, tokens per row) of every forward of a target, draft model or head."""

    def __enter__(self) -> Counter:
        counts: Counter = Counter()
        self.originals = [(RaggedModel, "forward"), (Eagle3Model, "forward"), (Eagle3Model, "fuse")]
        self.originals = [(owner, name, getattr(owner, name)) for owner, name in self.originals]
        (*_, whole), (*_, head), (*_, fuse) = self.originals

        def forward(ragged, tokens, *args, **kwargs):
            counts[bare_forward, ragged.model, tokens.shape[1]] += 1
            return whole(ragged, tokens, *args, **kwargs)

        def head_forward(network, embedded, *args, **kwargs):
            counts[bare_head, network, embedded.shape[1]] += 1
            return head(network, embedded, *args, **kwargs)

        def head_fuse(network, states):
            counts[bare_fuse, network, states[0].shape[1]] += 1
            return fuse(network, states)

        RaggedModel.forward, Eagle3Model.forward, Eagle3Model.fuse = forward, head_forward, head_fuse
        return counts

    def __exit__(self, *error) -> None:
        for owner, name, original in self.originals:
            setattr(owner, name, original)


@torch.no_grad()
def bare_forward(model: PreTrainedModel, width: int, context: int) -> float:
    """Median seconds of one forward over `width` tokens after `context` cached ones."""
    ragged = RaggedModel(model, None, 1, context + width)
    ids = torch.randint(1000, 2000, (1, context))
    ragged.prefill(ids, torch.ones_like(ids), torch.arange(context)[None])
    tokens = torch.randint(1000, 2000, (1, width))
    positions = torch.arange(context, context + width)[None]

    def forward() -> None:
        logits = ragged.forward(tokens, torch.tensor([context]), [context], positions).logits
        logits.argmax(dim=-1).tolist()

    return median_seconds(forward)


@torch.no_grad()
def bare_head(head: Eagle3Model, width: int, context: int) -> float:
    """The same for an EAGLE-3 head with its output head, whose next token depends on the one before."""
    config, dtype = head.config, head.norm.weight.dtype
    cache = RaggedCache(layer_config(config), context + width)
    cache.begin_rows()

    def run(count: int, offset: int) -> torch.Tensor:
        cache.place(torch.tensor([offset]), [offset], count)
        entries = torch.arange(offset, offset + count)
        mask = torch.arange(cache.view) <= entries[:, None]

        def attend(index, queries, keys, values):
            keys, values = cache.update(keys, values, index)
            return torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask[None, None], enable_gqa=True
            )

        states = torch.randn(1, count, config.hidden_size, dtype=dtype)
        return head(states, states, entries[None], attend)

    run(context, 0)
    return median_seconds(lambda: head.lm_head(head.norm(run(width, context)[:, -1:])).argmax(dim=-1).tolist())


@torch.no_grad()
def bare_fuse(head: Eagle3Model, width: int, context: int) -> float:
    """The same for the features of `width` tokens."""
    size, dtype = head.config.target_hidden_size, head.norm.weight.dtype
    states = [torch.randn(1, width, size, dtype=dtype) for _ in head.config.aux_layers]
    return median_seconds(lambda: head.fuse(states))


def median_seconds(run: Callable[[], object], repeats: int = 25) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


def first_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The target cut off after some layers: a poor draft model, but one whose cost is a known share."""
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": num_layers})
    small = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    small.load_state_dict(model.state_dict(), strict=False)
    return small.eval()


def format_row(row: dict) -> str:
    return (
        f"{row['prompt']:10} {row['drafter']:42} tau {row['tau']:5.2f}   speed-up {row['speed_up']:5.2f}   "
        f"limit {row['limit']:5.2f}   share {row['share_of_limit']:4.0%}   {row['tokens_per_second']:6.1f} tokens/s"
    )


def broken_promises(rows: list[dict]) -> list[str]:
    """Sentences about what README promises and this run did not show."""
    failures = []
    for row in rows:
        what = f"{row['drafter']} on {row['prompt']}"
        if row["share_of_limit"] < EFFICIENCY:
            failures.append(f"{what}: {row['share_of_limit']:.0%} of the limit, promised are {EFFICIENCY:.0%}")
        if row["prompt"] == "code edit" and row["drafter"] == "lookup" and row["speed_up"] <= EDIT_SPEED_UP:
            failures.append(f"{what}: {row['speed_up']:.2f}x, promised are more than {EDIT_SPEED_UP}x")
    return failures


if __name__ == "__main__":
    main()
