"""Every drafter with every feature of generate, on every path: the text is plain generate's, token for token."""

from collections.abc import Callable

import pytest
import torch
from dflash_formats import random_net, write_net
from dspark_formats import random_drafter, write_drafter
from eagle3_formats import random_head, write_head
from scripted import RowScript
from test_greedy import coin
from tiny import PAD, VOCAB_SIZE, perturbed, prompts, tiny_target
from tiny_hybrids import tiny_own
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria, StoppingCriteriaList

from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter

# Ragged rows; cut back, put back, and step by step over the target's own cache.
TARGETS: dict[str, Callable] = {
    "llama": lambda: tiny_target("llama"),
    "gemma3": lambda: tiny_target("gemma3"),
    "bloom": lambda: tiny_own("bloom"),
    "qwen3_next": lambda: tiny_own("qwen3_next"),
    "mamba": lambda: tiny_own("mamba"),
}
LENGTHS = [13, 8, 3]
NEW_TOKENS = 20


class EndsOnDigitSum(StoppingCriteria):
    """A row ends where its last three ids add up to a multiple of seven."""

    def __call__(self, ids, scores, **kwargs):
        return ids[:, -3:].sum(dim=1) % 7 == 0


class PrefersNeighbours(LogitsProcessor):
    """Depends on the last id, as a user's own processor may."""

    def __call__(self, ids, scores):
        near = (torch.arange(scores.shape[-1]) - ids[:, -1:]).abs() < 9
        return scores + 2.0 * near


def stops_of(model, inputs) -> dict:
    """Tokens that end the rows of the plain text apart."""
    free = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None)[:, LENGTHS[0] :]
    return {"eos_token_id": [int(free[b, 5 + 4 * b]) for b in range(len(free))]}


FEATURES: dict[str, Callable] = {
    "nothing more": lambda model, inputs: {},
    "rows end apart": stops_of,
    "one new token": lambda model, inputs: {"max_new_tokens": 1},
    "two new tokens": lambda model, inputs: {"max_new_tokens": 2},
    "a length": lambda model, inputs: {"max_length": LENGTHS[0] + 7, "max_new_tokens": None},
    "a least length": lambda model, inputs: {**stops_of(model, inputs), "min_new_tokens": 9},
    "a criterion": lambda model, inputs: {
        "stopping_criteria": StoppingCriteriaList([EndsOnDigitSum()]),
        "eos_token_id": 95,
    },
    "penalties": lambda model, inputs: {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "a processor": lambda model, inputs: {"logits_processor": [PrefersNeighbours()]},
    "bad words": lambda model, inputs: {"bad_words_ids": [[7], [9, 11]], "suppress_tokens": [4]},
    "several sequences": lambda model, inputs: {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
    "a dictionary with scores": lambda model, inputs: {"return_dict_in_generate": True, "output_scores": True},
    "a prompt in chunks": lambda model, inputs: {"prefill_chunk_size": 5},
    "a cache": lambda model, inputs: {"cache": DynamicCache(config=model.config)},
}
CASES = [(name, feature) for name in TARGETS for feature in FEATURES]
CASES.remove(("mamba", "a prompt in chunks"))  # plain generate fails on it
REFUSED = {("a cache", name) for name in ("bloom", "qwen3_next", "mamba")}  # with a sentence


def drafters(model, texts, tmp_path):
    yield "none", AutoDrafter.for_target(model, "none")
    yield "lookup", AutoDrafter.for_target(model, "lookup", min_ngram=1)
    yield "perfect", RowScript(texts, num_draft_tokens=5).bind(model)
    yield "adversarial", RowScript(texts, right=lambda row, round: 0, num_draft_tokens=5).bind(model)
    yield "noisy", RowScript(texts, right=coin, num_draft_tokens=5).bind(model)
    if model.config.model_type in ("llama", "gemma3_text"):
        yield "draft model", DraftModelDrafter(perturbed(model, 0.03), num_draft_tokens=4).bind(model)
        head = random_head(target_layers=model.config.num_hidden_layers, vocab_size=VOCAB_SIZE)
        yield "EAGLE-3", AutoDrafter.from_pretrained(write_head(tmp_path / "eagle3", head), target=model)
        for kind, num_candidates in (("DFlash", 0), ("DFlash 2", 6)):
            net = random_net(target_layers=model.config.num_hidden_layers, num_candidates=num_candidates)
            yield kind, AutoDrafter.from_pretrained(write_net(tmp_path / kind, net), target=model)
    one = random_drafter(target_layers=model.config.num_hidden_layers, std=0.2)
    folder = write_drafter(tmp_path / "dspark", one)
    yield "DSpark", AutoDrafter.from_pretrained(folder, target=model, schedule=0.4)


@pytest.mark.parametrize(("name", "feature"), CASES)
def test_text_is_that_of_plain_generate(tmp_path, name, feature):
    model, inputs = TARGETS[name](), prompts(LENGTHS, seed=6)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": PAD}

    def run(**assistant):
        chosen = {**options, **FEATURES[feature](model, inputs), **assistant}
        output = model.generate(**inputs, **{key: value for key, value in chosen.items() if value is not None})
        return output.sequences if hasattr(output, "sequences") else output

    if (feature, name) in REFUSED:
        with pytest.raises(ValueError, match="`cache` is yours"):
            run(assistant_model=AutoDrafter.for_target(model, "lookup"))
        return
    expected = run()
    texts = expected[:, LENGTHS[0] :].tolist()
    for kind, drafter in drafters(model, texts, tmp_path):
        found = run(assistant_model=drafter)
        assert torch.equal(found, expected), kind
