"""The exact law of the text through logits processors, by enumeration over two rounds."""

import functools

import pytest
import torch
from laws import EXACT, chain_drafter, emitted_law, greedy_drafter, law_error, random_language
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specdec.decoding.processors import BlockProcessors
from hf_specdec.verification import Draft, Sampled

VOCAB, SLOTS, TOKENS = 4, 2, 4
PROCESSORS = {
    "temperature": [TemperatureLogitsWarper(0.6)],
    "top-k": [TopKLogitsWarper(2)],
    "top-p": [TopPLogitsWarper(0.7)],
    "min-p": [MinPLogitsWarper(0.25)],
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.7)],
    "all of them": [
        RepetitionPenaltyLogitsProcessor(1.7),
        TemperatureLogitsWarper(1.3),
        TopKLogitsWarper(3),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.1),
    ],
}
PROMPT = (1,)


def processed(language, processors, one_position_at_a_time=False):
    """The language after the processors, as the loop applies them or as transformers does."""

    @functools.cache
    def after(text):
        ids, scores = torch.tensor([PROMPT + text]), language(text)[None].clone()
        if one_position_at_a_time:
            return LogitsProcessorList(processors)(ids, scores)[0]
        return BlockProcessors(processors)(scores[None], [ids.shape[1]], ids)[0, 0]

    return after


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
def test_the_law_is_that_of_transformers_processors(rule, name):
    target, drafter = random_language(VOCAB, seed=1, filtered=0.0), random_language(VOCAB, seed=2, filtered=0.0)
    ours = processed(target, PROCESSORS[name])
    theirs = processed(target, PROCESSORS[name], one_position_at_a_time=True)
    q = processed(drafter, PROCESSORS[name])
    for propose in (chain_drafter(q, SLOTS), greedy_drafter(q, SLOTS), chain_drafter(drafter, SLOTS)):
        law = emitted_law(ours, propose, rule, TOKENS)
        assert law_error(theirs, law, TOKENS) < EXACT


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_control_a_processor_on_one_side_of_the_draft_only_is_rejected(rule, name):
    """The tokens are drawn from the processed law, and the law before the processors is declared."""
    target, drafter = random_language(VOCAB, seed=1, filtered=0.0), random_language(VOCAB, seed=2, filtered=0.0)
    draws = chain_drafter(processed(drafter, PROCESSORS[name]), SLOTS)

    def propose(texts, noise):
        draft = draws(texts, noise)
        rows = zip(texts, draft.tokens.tolist(), strict=True)
        declared = [[drafter(text + tuple(tokens[:slot])) for slot in range(SLOTS)] for text, tokens in rows]
        logits = torch.stack([torch.stack(row) for row in declared])
        return Draft(draft.tokens, draft.lengths, Sampled(logits))

    ours = processed(target, PROCESSORS[name])
    assert law_error(ours, emitted_law(ours, propose, rule, TOKENS), TOKENS) > 1e-3
