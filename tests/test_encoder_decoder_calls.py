"""Encoder-decoders: experts of limited capacity, and an encoder's output of the caller's own."""

import pytest
import torch
from scripted import ScriptedDrafter
from tiny import PAD, VOCAB_SIZE, prompts, randomise, tiny_encoder_decoder
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from hf_specdec import AutoDrafter
from hf_specdec.integration import row_by_row

OPTIONS = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}


def tiny_switch(capacity: int) -> SwitchTransformersForConditionalGeneration:
    config = SwitchTransformersConfig(
        vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=2, num_experts=2, expert_capacity=capacity,
        bos_token_id=1, eos_token_id=2, pad_token_id=PAD, decoder_start_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = SwitchTransformersForConditionalGeneration(config).eval()
    randomise(model, 0, std=0.3)
    return model


def right_drafts(model, inputs) -> tuple[torch.Tensor, ScriptedDrafter]:
    """Plain text, and a drafter that knows it and drafts 20 tokens."""
    expected = model.generate(**inputs, **OPTIONS)
    return expected, ScriptedDrafter(expected[:, 1:].tolist(), num_draft_tokens=20).bind(model)


@pytest.mark.parametrize("capacity", [1, 4])
@pytest.mark.parametrize("lengths", [[9], [9, 5, 7]], ids=["one row", "batch"])
def test_no_verification_is_longer_than_what_every_expert_takes(lengths, capacity):
    model, inputs = tiny_switch(capacity), prompts(lengths, seed=3)
    expected, drafter = right_drafts(model, inputs)
    for one in (drafter, AutoDrafter.for_target(model, "lookup", min_ngram=1)):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant_model=one), expected)
    assert drafter.last_stats.num_verifications >= len(lengths) * 40 / capacity


def test_a_longer_one_would_show(monkeypatch):
    """Negative control: tokens that are too many for an expert are dropped."""
    model, inputs = tiny_switch(4), prompts([9], seed=3)
    expected, drafter = right_drafts(model, inputs)
    monkeypatch.setattr(row_by_row, "most_tokens_at_once", lambda model: None)
    assert not torch.equal(model.generate(**inputs, **OPTIONS, assistant_model=drafter), expected)


def test_an_encoders_output_may_be_a_tuple():
    model, inputs = tiny_encoder_decoder("t5"), prompts([9, 5])
    with torch.no_grad():
        state = model.get_encoder()(**inputs).last_hidden_state
    inputs = {**inputs, "encoder_outputs": (state,), **OPTIONS}
    expected = model.generate(**inputs)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    assert torch.equal(model.generate(**inputs, assistant_model=drafter), expected)
