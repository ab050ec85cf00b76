"""Sampled text: one seed, one text, whatever the drafter; and the law of the text is the target's."""

import pytest
import torch
from scipy import stats
from scripted import RandomDrafter, ScriptedDrafter
from tiny import perturbed, prompts, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter

NEW_TOKENS = 30
FILTERS = {
    "plain law": {"top_k": 0},
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top-k": {"top_k": 8},
    "top-p": {"top_p": 0.8, "top_k": 0},
    "min-p": {"min_p": 0.1, "top_k": 0},
    "repetition penalty": {"repetition_penalty": 1.3, "top_k": 0},
}


def sample(model, inputs, drafter, **options):
    options = {"max_new_tokens": NEW_TOKENS, **options}
    return model.generate(**inputs, do_sample=True, assistant_model=drafter, **options)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("lengths", [[12], [12, 5, 9, 3]], ids=["one row", "batch"])
def test_one_seed_gives_one_text_with_any_drafter_and_any_draft_length(lengths, filters):
    model, inputs, options = tiny_target("llama"), prompts(lengths), FILTERS[filters]
    expected = sample(model, inputs, AutoDrafter.for_target(model, "none", seed=11), **options)
    texts = expected[:, max(lengths) :].tolist()
    draft_model = perturbed(model, 0.02)
    drafters = {
        "lookup": AutoDrafter.for_target(model, "lookup", min_ngram=1, seed=11),
        "lookup, match": AutoDrafter.for_target(model, "lookup", min_ngram=1, seed=11, rule="match"),
        "draft model, auto": DraftModelDrafter(draft_model, seed=11).bind(model),
        "draft model, match": DraftModelDrafter(draft_model, seed=11, rule="match", num_draft_tokens=3).bind(model),
        "draft model, greedy drafts": DraftModelDrafter(
            draft_model, seed=11, draft_sampling="greedy", num_draft_tokens=2
        ).bind(model),
        "draft model, independent drafts": DraftModelDrafter(
            draft_model, seed=11, rule="match", draft_sampling="sample", num_draft_tokens=4
        ).bind(model),
        "some right": ScriptedDrafter(texts, right=lambda row, round: (row + round) % 4, seed=11).bind(model),
    }
    for k in (1, 4, 7):
        drafters[f"all right, {k}"] = ScriptedDrafter(texts, seed=11, num_draft_tokens=k).bind(model)
        drafters[f"draft model, {k}"] = DraftModelDrafter(draft_model, seed=11, num_draft_tokens=k).bind(model)
    for name, drafter in drafters.items():
        assert torch.equal(sample(model, inputs, drafter, **options), expected), name
    other_seed = AutoDrafter.for_target(model, "none", seed=12)
    assert not torch.equal(sample(model, inputs, other_seed, **options), expected)


def test_set_seed_fixes_the_text_when_no_seed_is_given():
    model, inputs = tiny_target("llama"), prompts([6, 6])
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(sample(model, inputs, AutoDrafter.for_target(model, "lookup")))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_rows_with_their_own_seeds_equal_single_runs():
    model, inputs, seeds = tiny_target("qwen3"), prompts([7, 7, 7]), [5, 9, 5]
    drafter = DraftModelDrafter(perturbed(model, 0.02), seed=seeds, num_draft_tokens=3).bind(model)
    batch = sample(model, inputs, drafter)
    for row, seed in enumerate(seeds):
        one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        alone = sample(model, one, AutoDrafter.for_target(model, "none", seed=seed))
        assert torch.equal(batch[row : row + 1, : alone.shape[1]], alone)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("sampling", [True, False])
def test_four_rows_of_a_ragged_batch_equal_four_single_runs(name, sampling):
    """Where no limit counts padding; each row with its own seed."""
    model, lengths, seeds = tiny_target(name), [9, 3, 14, 6], [5, 9, 5, 7]
    inputs, options = prompts(lengths, seed=2), {"max_new_tokens": 24, "eos_token_id": None, "do_sample": sampling}
    drafter = DraftModelDrafter(perturbed(model, 0.02), seed=seeds, num_draft_tokens=3).bind(model)
    batch = model.generate(**inputs, **options, assistant_model=drafter)
    for row, (length, seed) in enumerate(zip(lengths, seeds, strict=True)):
        alone = AutoDrafter.for_target(model, "lookup", min_ngram=1, seed=seed)
        text = model.generate(inputs["input_ids"][row : row + 1, -length:], **options, assistant_model=alone)
        assert torch.equal(batch[row, -24:], text[0, -24:])


def test_rows_of_one_prompt_have_different_noise():
    model, inputs = tiny_target("llama"), prompts([8])
    drafter = AutoDrafter.for_target(model, "lookup", seed=1)
    rows = sample(model, inputs, drafter, num_return_sequences=4)
    assert len({tuple(row) for row in rows.tolist()}) == 4
    one = sample(model, inputs, drafter)
    assert torch.equal(rows[:1, : one.shape[1]], one)  # row 0 has the seed itself


def coupled_acceptance(amount: float) -> dict[str, float]:
    model, inputs = tiny_target("llama"), prompts([6] * 8)
    rates = {}
    for rule, sampling in (("coupled", "sample"), ("match", "sample"), ("rejection", "sample"), ("block", "sample")):
        drafter = DraftModelDrafter(
            perturbed(model, amount), seed=3, rule=rule, draft_sampling=sampling, num_draft_tokens=2
        )
        sample(model, inputs, drafter.bind(model), max_new_tokens=60, top_k=0, eos_token_id=None)
        rates[rule] = drafter.last_stats.mean_accepted_length
    return rates


def test_shared_noise_accepts_more_than_independent_draws():
    rates = coupled_acceptance(0.02)
    assert rates["coupled"] > rates["match"] + 0.2
    assert rates["rejection"] > rates["match"] + 0.2
    assert rates["block"] > rates["match"] + 0.2


def test_a_draft_model_equal_to_the_target_is_always_accepted():
    model, inputs = tiny_target("mistral"), prompts([6, 4])
    for rule in ("coupled", "rejection", "block"):
        drafter = DraftModelDrafter(perturbed(model, 0.0), seed=3, rule=rule, num_draft_tokens=4).bind(model)
        sample(model, inputs, drafter, top_k=20, repetition_penalty=1.2, eos_token_id=None)
        assert drafter.last_stats.acceptance_rate > 0.999, rule


# Four tokens: one of the prefill, then a draft of two and a bonus token, or the round after a rejection.
VOCAB, TOKENS, RUNS = 5, 4, 8192
LAW_OPTIONS = {"temperature": 1.4, "top_k": 4, "repetition_penalty": 1.2, "eos_token_id": None}


def joint_law(model, inputs, temperature: float = 1.4) -> torch.Tensor:
    """[VOCAB ** TOKENS] probabilities of all continuations, by the same processors one position at a time."""
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
    )

    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(temperature), TopKLogitsWarper(4)]
    )
    prefixes, law = inputs["input_ids"][:1], torch.ones(1, dtype=torch.double)
    for _ in range(TOKENS):
        with torch.no_grad():
            p = processors(prefixes, model(prefixes).logits[:, -1].float()).double().softmax(dim=-1)
        law = (law[:, None] * p).flatten()
        longer = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, dim=0), longer], dim=1)
    return law


def chi_square(texts: torch.Tensor, law: torch.Tensor) -> float:
    """p-value of the observed continuations; cells below five expected counts are pooled."""
    weights = VOCAB ** torch.arange(texts.shape[1] - 1, -1, -1)
    counts = torch.bincount((texts * weights).sum(dim=1), minlength=len(law)).double()
    expected = law * len(texts)
    small = expected < 5
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


def many_texts(drafter, model) -> torch.Tensor:
    inputs = {name: tensor.repeat(RUNS // 4, 1) for name, tensor in prompts([4], vocab_size=VOCAB).items()}
    texts = [sample(model, inputs, drafter, max_new_tokens=TOKENS, **LAW_OPTIONS)[:, 4:] for _ in range(4)]
    return torch.cat(texts)


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection", "block"])
def test_generated_text_has_the_targets_law(rule):
    model = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(model, prompts([4], vocab_size=VOCAB))
    torch.manual_seed(20)
    for drafter in (
        RandomDrafter(VOCAB, rule=rule, num_draft_tokens=2),
        DraftModelDrafter(perturbed(model, 0.1), rule=rule, num_draft_tokens=2),
        AutoDrafter.for_target(model, "lookup", min_ngram=1, rule=rule, num_draft_tokens=2),
    ):
        texts = many_texts(drafter.bind(model), model)
        assert chi_square(texts, law) > 1e-3, drafter.method


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection", "block"])
def test_the_chi_square_tells_another_temperature_apart(rule):
    """Negative control of the test above: the same texts against the law at another temperature."""
    model = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(model, prompts([4], vocab_size=VOCAB), temperature=2.0)
    torch.manual_seed(20)
    drafter = RandomDrafter(VOCAB, rule=rule, num_draft_tokens=2).bind(model)
    assert chi_square(many_texts(drafter, model), law) < 1e-6


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_false_law_gives_another_text(rule):
    """Negative control: the drafter draws from one law and declares another."""
    model = tiny_target("llama", vocab_size=VOCAB)
    law = joint_law(model, prompts([4], vocab_size=VOCAB))
    torch.manual_seed(20)
    drafter = RandomDrafter(VOCAB, declared="uniform", rule=rule, num_draft_tokens=2).bind(model)
    assert chi_square(many_texts(drafter, model), law) < 1e-6
