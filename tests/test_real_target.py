"""The small real target: the same text in fp32, and in bf16 up to rounding."""

import pytest
import torch
from scripted import ScriptedDrafter

from hf_specdec import AutoDrafter
from hf_specdec.demo import Unavailable, evaluation_prompts, load_small_target
from hf_specdec.drafters.draft_model import DraftModelDrafter

pytestmark = [pytest.mark.real_target, pytest.mark.timeout(1800)]

# A bf16 logit near 16 has steps of 1/8; of 2,000 positions none with a top-2 margin above two steps flipped.
BF16_MARGIN = 0.25


@pytest.fixture(scope="module")
def real():
    try:
        return load_small_target(torch.float32)
    except Unavailable as reason:
        pytest.skip(str(reason))


def chats(tokenizer, count):
    """Left-padded chat prompts, every eighth of the evaluation set."""
    try:
        texts = [prompt.turns[0] for prompt in evaluation_prompts()[::8][:count]]
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert len(texts) == count
    messages = [[{"role": "user", "content": text}] for text in texts]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )


def rows(inputs, first, count):
    """A part of a batch, without the columns that are padding in all of its rows."""
    part = {name: tensor[first : first + count] for name, tensor in inputs.items()}
    start = int((part["attention_mask"].sum(dim=0) == 0).sum())
    return {name: tensor[:, start:] for name, tensor in part.items()}


def some_right(row, round):
    return (3 * row + round * round) % 7


def check_greedy(model, inputs, new_tokens):
    options = {"do_sample": False, "max_new_tokens": new_tokens}
    expected = model.generate(**inputs, **options)
    texts = expected[:, inputs["input_ids"].shape[1] :].tolist()
    for name, drafter in {
        "lookup": AutoDrafter.for_target(model, "lookup"),
        "some right": ScriptedDrafter(texts, right=some_right, num_draft_tokens=6).bind(model),
        "all right": ScriptedDrafter(texts, num_draft_tokens=6).bind(model),
        "all wrong": ScriptedDrafter(texts, right=lambda row, round: 0, num_draft_tokens=2).bind(model),
    }.items():
        found = model.generate(**inputs, **options, assistant_model=drafter)
        assert torch.equal(found, expected), name


def test_greedy_text_of_a_batch_is_plain_generates(real):
    model, tokenizer = real
    check_greedy(model, chats(tokenizer, 4), 40)


def test_one_seed_gives_one_text(real):
    model, tokenizer = real
    inputs = chats(tokenizer, 2)
    texts = [
        model.generate(**inputs, do_sample=True, temperature=0.8, max_new_tokens=32, assistant_model=drafter)
        for drafter in (
            AutoDrafter.for_target(model, "none", seed=1),
            AutoDrafter.for_target(model, "lookup", seed=1, num_draft_tokens=6),
            DraftModelDrafter(model, seed=1, num_draft_tokens=3).bind(model),
        )
    ]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_bf16_text_parts_from_plain_generates_at_near_ties_only(real):
    _, tokenizer = real
    model, _ = load_small_target(torch.bfloat16)
    inputs = rows(chats(tokenizer, 3), 2, 1)
    options = {"do_sample": False, "max_new_tokens": 96, "eos_token_id": None}
    plain = model.generate(**inputs, **options)[0]
    found = model.generate(**inputs, **options, assistant_model=AutoDrafter.for_target(model, "lookup"))[0]
    parts = (plain != found).nonzero()
    if len(parts):
        with torch.no_grad():
            best = model(plain[None, : int(parts[0])]).logits[0, -1].float().topk(2).values
        assert best[0] - best[1] <= BF16_MARGIN


@pytest.mark.slow
def test_greedy_text_of_20_prompts_is_plain_generates_one_row(real):
    model, tokenizer = real
    inputs = chats(tokenizer, 20)
    for i in range(20):
        check_greedy(model, rows(inputs, i, 1), 128)


@pytest.mark.slow
def test_greedy_text_of_20_prompts_is_plain_generates_in_batches_of_4(real):
    model, tokenizer = real
    inputs = chats(tokenizer, 20)
    for i in range(0, 20, 4):
        check_greedy(model, rows(inputs, i, 4), 128)
