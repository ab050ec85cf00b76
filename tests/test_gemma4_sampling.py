"""Sampled text with a Gemma 4 assistant has the target's law, which transformers' own path for it does not keep."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from gemma4_formats import VOCAB, F, S, assistant_of, tiny_assistant, tiny_gemma4
from scipy import stats
from test_sampling import sample
from tiny import prompts
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

import hf_specdec
from hf_specdec import AutoDrafter
from hf_specdec.drafters.auto import drafter_of_model
from hf_specdec.drafters.gemma4.checkpoints import from_model
from hf_specdec.drafters.gemma4.session import Gemma4Session

# One token of the prefill, then a draft of two and a bonus token, or the round after a rejection.
SIZE, TOKENS, RUNS, BATCH = 3, 4, 65536, 8192
LAYERS = {"31B": (S, F), "E4B": ()}  # of the target
CLUSTERS = {"num_centroids": 2, "centroid_intermediate_top_k": 1}
LAW_OPTIONS = {"temperature": 1.4, "top_k": 0, "repetition_penalty": 1.2, "eos_token_id": None}


def target_of(layout: str, vocab_size: int):
    return tiny_gemma4(layout, vocab_size, LAYERS[layout])


def small_assistant(layout: str, vocab_size: int):
    changes = CLUSTERS if layout == "E4B" else {"layer_types": [S, F]}
    return tiny_assistant(layout, vocab_size, **changes)


def drafter_of(layout: str, vocab_size: int, **options):
    drafter = from_model(small_assistant(layout, vocab_size))
    drafter.spec_config = drafter.spec_config.with_options(num_draft_tokens=2, **options)
    return drafter.bind(target_of(layout, vocab_size))


@torch.no_grad()
def joint_law(layout: str, vocab_size: int, temperature: float = 1.4) -> torch.Tensor:
    """[vocab_size ** TOKENS] probabilities of all continuations, one position at a time."""
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(temperature)])
    texts, law = inputs_of(1)["input_ids"], torch.ones(1, dtype=torch.double)
    for _ in range(TOKENS):
        logits = target_of(layout, vocab_size)(texts).logits[:, -1].float()
        law = (law[:, None] * processors(texts, logits).double().softmax(dim=-1)).flatten()
        longer = torch.arange(vocab_size).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(vocab_size, dim=0), longer], dim=1)
    return law


def inputs_of(num_rows: int) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[1, 2]]).repeat(num_rows, 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def counts_of(target, assistant, vocab_size: int, runs: int = RUNS, batch: int = BATCH) -> torch.Tensor:
    """[vocab_size ** TOKENS] how often each continuation came."""
    weights, counts = vocab_size ** torch.arange(TOKENS - 1, -1, -1), torch.zeros(vocab_size**TOKENS)
    for _ in range(runs // batch):
        found = sample(target, inputs_of(batch), assistant, max_new_tokens=TOKENS, **LAW_OPTIONS)[:, 2:]
        counts += torch.bincount((found * weights).sum(dim=1), minlength=len(counts))
    return counts.double()


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Of a chi-square test; cells below five expected counts are pooled."""
    expected = law * counts.sum()
    small = expected < 5
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


def shifted(law: torch.Tensor, distance: float) -> torch.Tensor:
    """A law at a total variation of `distance`, spread so that a chi-square has the least to see."""
    up = law[law.argsort()].cumsum(0)[law.argsort().argsort()] > 0.5
    return torch.where(up, law * (1 + distance / law[up].sum()), law * (1 - distance / law[~up].sum()))


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "match"])
def test_sampled_text_has_the_targets_law(rule):
    target, law = target_of("31B", SIZE), joint_law("31B", SIZE)
    torch.manual_seed(5)
    drafter = drafter_of("31B", SIZE, rule=rule)
    counts = counts_of(target, drafter, SIZE)
    assert 0.05 < drafter.last_stats.acceptance_rate < 0.95
    assert p_value(counts, law) > 1e-3
    other = shifted(law, 0.02)
    assert abs(float((other - law).abs().sum()) / 2 - 0.02) < 1e-9
    assert p_value(counts, other) < 1e-3, "there should be samples enough for a total variation of 0.02"


def test_drafts_of_clusters_keep_the_law():
    torch.manual_seed(5)
    drafter, law = drafter_of("E4B", 4, rule="rejection"), joint_law("E4B", 4)
    counts = counts_of(target_of("E4B", 4), drafter, 4, runs=2 * BATCH)
    assert 0.05 < drafter.last_stats.acceptance_rate < 0.95
    assert p_value(counts, law) > 1e-3
    assert p_value(counts, joint_law("E4B", 4, temperature=2.0)) < 1e-6


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_false_law_gives_another_text(rule):
    """Negative control: the likeliest token is drafted, and the law says that it was drawn."""
    target, law = target_of("31B", SIZE), joint_law("31B", SIZE)
    drafter = drafter_of("31B", SIZE, rule=rule)

    class Likeliest(Gemma4Session):
        def propose(self, budget, verification):
            draft = super().propose(budget, verification)
            draft.tokens.copy_(draft.law.logits.argmax(dim=-1).masked_fill(draft.tokens < 0, -1))
            return draft

    drafter.start = lambda request: Likeliest(drafter, request)
    torch.manual_seed(5)
    assert p_value(counts_of(target, drafter, SIZE, runs=BATCH), law) < 1e-6


@contextmanager
def without_hf_specdec() -> Iterator[None]:
    hf_specdec.uninstall()
    try:
        yield
    finally:
        hf_specdec.install()


def test_transformers_own_path_gives_another_text():
    """The control of the issue: its drafts are the likeliest tokens, and its rule is told that they were drawn."""
    target, law = target_of("31B", SIZE), joint_law("31B", SIZE)
    assistant = small_assistant("31B", SIZE)
    assistant.generation_config.num_assistant_tokens = 2
    torch.manual_seed(5)
    with without_hf_specdec():
        theirs = counts_of(target, assistant, SIZE, runs=300, batch=1)
    assert p_value(theirs, law) < 1e-6
    ours = counts_of(target, assistant, SIZE, runs=300, batch=300)
    assert p_value(ours, law) > 1e-3


@pytest.mark.parametrize("layout", ["E4B", "31B"])
@pytest.mark.parametrize("lengths", [[12], [12, 5, 9]], ids=["one row", "batch"])
def test_one_seed_gives_one_text_with_and_without_the_drafter(lengths, layout):
    target, inputs = tiny_gemma4(layout), prompts(lengths, vocab_size=VOCAB)
    for options in ({"top_k": 0}, {"top_p": 0.8, "temperature": 0.7}, {"repetition_penalty": 1.3}):
        expected = sample(target, inputs, AutoDrafter.for_target(target, "none", seed=11), **options)
        for k, rule in ((1, "auto"), (4, "auto"), (3, "match")):
            drafter = drafter_of_model(assistant_of(layout), target)
            drafter.spec_config = drafter.spec_config.with_options(seed=11, num_draft_tokens=k, rule=rule)
            assert torch.equal(sample(target, inputs, drafter, **options), expected), (options, k, rule)
            assert drafter.last_stats.num_drafted > 0
