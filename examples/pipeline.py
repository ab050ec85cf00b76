"""The same drafter behind transformers' text-generation pipeline."""

import torch
from transformers import pipeline

from hf_specdec import AutoDrafter
from hf_specdec.demo import load_small_target


def main() -> None:
    """Print one answer and what the drafter did for it."""
    model, tokenizer = load_small_target(torch.bfloat16)
    lookup = AutoDrafter.for_target(model, "lookup")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=lookup)
    message = [{"role": "user", "content": "List the planets of the solar system, one per line."}]
    answer = pipe(message, do_sample=False, max_new_tokens=96)
    print(answer[0]["generated_text"][-1]["content"])
    print(lookup.last_stats.summary())


if __name__ == "__main__":
    main()
