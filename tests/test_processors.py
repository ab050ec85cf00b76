"""Drafts are judged with the scores that plain generate would have, whatever processors shape them."""

from functools import cache

import pytest
import torch
from test_greedy import drafters, plain, speculative
from tiny import VOCAB_SIZE, perturbed, prompts, tiny_target
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from hf_specdec.drafters.draft_model import DraftModelDrafter

WIDTH, NEW_TOKENS = 13, 24
BATCHES = {"one row": [WIDTH], "ragged batch": [WIDTH, 9, 4]}


class BanThirdLast(LogitsProcessor):
    """Of the user's own making: forbids what stood three columns before, and favours even tokens after odd ones."""

    def __call__(self, input_ids, scores):
        scores = scores.scatter(1, input_ids[:, -3:-2], -torch.inf)
        odd = (input_ids[:, -1:] % 2).bool()
        return scores + odd * 2.0 * (torch.arange(scores.shape[1]) % 2 == 0)


def other_class(batch_id: int, ids: torch.Tensor) -> list[int]:
    """Tokens of another residue class than the last one's, shifted by the row's number."""
    return [token for token in range(VOCAB_SIZE) if (token + int(ids[-1]) + batch_id) % 3]


def cases(free: torch.Tensor) -> dict[str, dict]:
    """generate kwargs by name, made for a greedy text [B, n] so that each of them changes it."""
    a, b, c, d, e = free[0, 2:7].tolist()
    eos = [int(row[6]) for row in free]
    return {
        "repetition_penalty": {"repetition_penalty": 1.5},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.6},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[a], [b, c], [d, e]]},
        "sequence_bias": {"sequence_bias": {(a,): -8.0, (b, c): -8.0, (7,): 2.5, (8, 9): 6.0}},
        "min_length": {"min_length": WIDTH + 15, "eos_token_id": eos},
        "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": eos},
        "forced_eos_token_id": {"forced_eos_token_id": 11},
        "suppress_tokens": {"suppress_tokens": [a, d]},
        "begin_suppress_tokens": {"begin_suppress_tokens": sorted(set(free[:, 0].tolist()))},
        "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.4), "eos_token_id": 5},
        "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": other_class},
        "watermarking, lefthash": {"watermarking_config": WatermarkingConfig(bias=3.0)},
        "watermarking, selfhash": {
            "watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=2)
        },
        "a user's own": {"logits_processor": LogitsProcessorList([BanThirdLast()])},
        "several": {
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 2,
            "suppress_tokens": [a],
            "min_new_tokens": 8,
            "renormalize_logits": True,
            "logits_processor": LogitsProcessorList([BanThirdLast()]),
        },
    }


def stateful_cases(lengths) -> dict[str, dict]:
    negative = prompts([6, 4, 5][: len(lengths)], seed=9)
    return {
        "guidance_scale": {"guidance_scale": 1.6},
        "guidance_scale, negative prompt": {"guidance_scale": 1.6, "negative_prompt_ids": negative["input_ids"]},
        "guidance_scale, masked negative prompt": {
            "guidance_scale": 0.6,
            "negative_prompt_ids": negative["input_ids"],
            "negative_prompt_attention_mask": negative["attention_mask"],
        },
        "watermarking, SynthID": {
            "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[11, 22, 33], context_history_size=8)
        },
    }


@cache
def start(batch: str):
    """(model, inputs, the greedy text without processors)."""
    model, inputs = tiny_target("llama"), prompts(BATCHES[batch], seed=6)
    return model, inputs, plain(model, inputs, max_new_tokens=NEW_TOKENS)[:, WIDTH:]


NAMES = list(cases(torch.zeros(1, 8, dtype=torch.long)))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", NAMES)
def test_text_under_a_processor_is_that_of_plain_generate(name, batch):
    model, inputs, free = start(batch)
    options = {"max_new_tokens": NEW_TOKENS, **cases(free)[name]}
    expected = plain(model, inputs, **options)
    without = {**options, **dict.fromkeys(set(options) - {"max_new_tokens", "eos_token_id"})}
    assert not torch.equal(plain(model, inputs, **without), expected), "the processor should change the text"
    for kind, drafter in drafters(model, expected[:, WIDTH:].tolist()):
        assert torch.equal(speculative(model, inputs, drafter, **options), expected), kind
        stats = drafter.last_stats
        if kind == "all right":
            assert stats.num_drafted > 0 and stats.acceptance_rate == 1.0
        elif kind == "all wrong":
            assert stats.num_drafted > 0 and stats.num_accepted == 0


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", NAMES)
def test_a_draft_model_that_is_the_target_has_every_token_accepted(name, batch):
    """Its drafts then pass the very processors that the target's scores pass."""
    model, inputs, free = start(batch)
    drafter = DraftModelDrafter(perturbed(model, 0.0), num_draft_tokens=4).bind(model)
    speculative(model, inputs, drafter, **{"max_new_tokens": NEW_TOKENS, **cases(free)[name]})
    assert drafter.last_stats.num_drafted > 0
    assert drafter.last_stats.acceptance_rate == 1.0


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", stateful_cases([1]))
def test_nothing_is_drafted_under_a_processor_that_keeps_state(name, batch):
    model, inputs, _ = start(batch)
    options = {"max_new_tokens": NEW_TOKENS, **stateful_cases(BATCHES[batch])[name]}
    expected = plain(model, inputs, **options)
    assert not torch.equal(expected, plain(model, inputs, max_new_tokens=NEW_TOKENS))
    for kind, drafter in drafters(model, expected[:, WIDTH:].tolist()):
        assert torch.equal(speculative(model, inputs, drafter, **options), expected), kind
        stats = drafter.last_stats
        assert stats.num_drafted == 0, kind
        assert stats.num_plain_steps == stats.num_verifications == stats.num_emitted > NEW_TOKENS / 2, kind


def test_rows_that_end_apart_go_on_in_step_under_a_processor_that_keeps_state():
    model, inputs, _ = start("ragged batch")
    options = {"max_new_tokens": NEW_TOKENS, "guidance_scale": 1.6}
    free = plain(model, inputs, **options)[:, WIDTH:]
    options["eos_token_id"] = [int(free[0, 3]), int(free[1, 10])]
    expected = plain(model, inputs, **options)
    assert len(set((expected[:, WIDTH:] != 0).sum(dim=1).tolist())) > 1
    for kind, drafter in drafters(model, expected[:, WIDTH:].tolist()):
        assert torch.equal(speculative(model, inputs, drafter, **options), expected), kind


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_forced_first_token_and_what_is_suppressed_after_it(batch_size):
    """Both act on prompts of one token only."""
    model = tiny_target("llama")
    inputs = prompts([1] * batch_size, seed=4)
    options = {"max_new_tokens": 12, "forced_bos_token_id": 17}
    after = plain(model, inputs, **options)[:, 2].tolist()
    options["begin_suppress_tokens"] = sorted(set(after))
    expected = plain(model, inputs, **options)
    assert expected[:, 1].tolist() == [17] * batch_size
    assert all(new != old for new, old in zip(expected[:, 2].tolist(), after, strict=True))
    for kind, drafter in drafters(model, expected[:, 1:].tolist()):
        assert torch.equal(speculative(model, inputs, drafter, **options), expected), kind


@pytest.mark.parametrize("batch", BATCHES)
def test_invalid_values_are_removed_where_asked_and_refused_otherwise(batch):
    _, inputs, _ = start(batch)
    model = perturbed(tiny_target("llama"), 0.0)
    spoilt = {"on": False}

    def spoil(module, arguments, output):
        if spoilt["on"]:
            output.logits[..., 40], output.logits[..., 41] = torch.nan, torch.inf

    model.register_forward_hook(spoil)
    for kind, drafter in drafters(model, [[5] * 40] * len(BATCHES[batch])):
        spoilt["on"] = False
        speculative(model, inputs, drafter, max_new_tokens=2)  # the target's self-check is made once
        spoilt["on"] = True
        options = {"max_new_tokens": NEW_TOKENS, "remove_invalid_values": True}
        expected = plain(model, inputs, **options)
        assert (expected[:, WIDTH:] == 41).all()  # infinity becomes the largest number
        assert torch.equal(speculative(model, inputs, drafter, **options), expected), kind
        with pytest.raises(ValueError, match="NaN"):
            speculative(model, inputs, drafter, max_new_tokens=2)


# A processor of the user's own is shown the whole batch, in which lagging rows hold no text of the others' width.
@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        ("prefix_allowed_tokens_fn", "one row"),
        ("prefix_allowed_tokens_fn", "ragged batch"),
        ("a user's own", "one row"),
    ],
)
def test_a_constraint_is_never_shown_a_text_that_breaks_it(kind, batch):
    """Tries have nothing to say about a prefix that they do not hold; transformers raises then, and so do others."""
    model, inputs, _ = start(batch)

    def allowed(row, ids):
        text, before = ids[WIDTH:].tolist(), ids[WIDTH - 1 : -1].tolist()
        if not all((token + previous + row) % 3 for token, previous in zip(text, before, strict=True)):
            return []
        return [token for token in range(VOCAB_SIZE) if (token + int(ids[-1]) + row) % 3]

    def processor(input_ids, scores):
        forbidden = torch.ones_like(scores, dtype=torch.bool)
        for row, ids in enumerate(input_ids):
            tokens = allowed(row, ids)
            assert tokens, "a text that breaks the constraint"
            forbidden[row, tokens] = False
        return scores.masked_fill(forbidden, -torch.inf)

    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "prefix_allowed_tokens_fn": allowed}
    if kind == "a user's own":
        options = {**options, "prefix_allowed_tokens_fn": None, "logits_processor": LogitsProcessorList([processor])}
    expected = plain(model, inputs, **options)
    for name, drafter in drafters(model, expected[:, WIDTH:].tolist()):
        assert torch.equal(speculative(model, inputs, drafter, **options), expected), name


def test_constraints_of_returned_sequences_know_their_prompt():
    model, inputs = tiny_target("llama"), prompts([WIDTH, 9], seed=6)
    asked = set()

    def allowed(prompt, ids):
        asked.add(prompt)
        return [token for token in range(VOCAB_SIZE) if token % 2 == prompt]

    options = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 2, "prefix_allowed_tokens_fn": allowed}
    drafter = DraftModelDrafter(perturbed(model, 0.02), seed=1).bind(model)
    new = speculative(model, inputs, drafter, **options, eos_token_id=None)[:, WIDTH:]
    assert asked == {0, 1}
    assert (new[:2] % 2 == 0).all() and (new[2:] % 2 == 1).all()
