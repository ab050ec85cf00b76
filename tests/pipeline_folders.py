"""Small pipelines, with and without a drafter."""

from pathlib import Path

import transformers
from eagle3_formats import random_head, write_head
from tiny import perturbed, tiny_target, tiny_tokenizer
from transformers import pipelines
from transformers.pipelines import Pipeline

GREEDY = {"do_sample": False, "max_new_tokens": 20}
TEXTS = ["w7 w8 w9 w10", "w11 w12", "w13 w7 w8"]
PATCHED = ((Pipeline, "__init__"), (pipelines, "pipeline"))


def write_folders(folder: Path) -> dict[str, Path]:
    """A target with its tokenizer, a head, and a smaller model; neither of those has a tokenizer."""
    tiny_target("llama").save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    write_head(folder / "head", random_head(seed=1))
    perturbed(tiny_target("llama"), 0.02).save_pretrained(folder / "small")
    return {path.name: path for path in folder.iterdir()}


def generator(target, **options):
    return transformers.pipeline("text-generation", model=target, tokenizer=tiny_tokenizer(), **options)


def assert_same_text(pipe, target, **options) -> None:
    assert pipe(TEXTS, **GREEDY, **options) == generator(target)(TEXTS, **GREEDY)
