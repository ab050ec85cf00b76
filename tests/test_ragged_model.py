"""Rows of different lengths share a forward and know nothing of each other."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedDrafter
from test_greedy import coin, plain, speculative
from tiny import PAD, TARGETS, VOCAB_SIZE, prompts, randomise, tiny_config, tiny_encoder_decoder, tiny_target
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Llama4TextConfig,
    Mamba2Config,
    MambaConfig,
    Qwen3NextConfig,
)

from hf_specdec import AutoDrafter
from hf_specdec.decoding.cache import RaggedCache
from hf_specdec.decoding.ragged_model import RaggedModel, why_not_ragged
from hf_specdec.integration import probe

WINDOW = 8
MODELS = (*TARGETS, "llama4")


def build(config, seed=0, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, **options).float().eval()
    randomise(model, seed)
    return model


def chunked_config():
    """Llama 4: three layers that attend within chunks of 8 tokens, one that attends to everything."""
    return Llama4TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        intermediate_size_mlp=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=512,
        attention_chunk_size=WINDOW,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=PAD,
    )


@cache
def target(name: str, attention: str | None = None):
    """A shared tiny model; `attention` forces a backend."""
    if attention is None and name != "llama4":
        return tiny_target(name)
    config = chunked_config() if name == "llama4" else tiny_config(name)
    return build(config, **({} if attention is None else {"attn_implementation": attention}))


# The cache


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_cache_holds_what_was_written_last_at_every_slot(data):
    """A prefill and blocks at random offsets, growing, against a plain table."""
    batch, slots = data.draw(st.integers(1, 3)), 40
    cache = RaggedCache(tiny_config("llama"), max_slots=data.draw(st.integers(1, slots + 10)))
    table = torch.zeros(2, 3, batch, 2, slots + 10, 4)  # keys and values, layers
    width = data.draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    blocks = [(None, width)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_specdec.decoding.cache._HEADROOM", 4)
        for _ in range(data.draw(st.integers(0, 6))):
            offsets = data.draw(st.lists(st.integers(0, slots - 5), min_size=batch, max_size=batch))
            if data.draw(st.booleans()):
                offsets = offsets[:1] * batch
            blocks.append((offsets, data.draw(st.integers(1, 5))))
        for offsets, count in blocks:
            if offsets is not None:
                if cache.offsets is None:
                    cache.begin_rows()
                cache.place(torch.tensor(offsets), offsets, count)
            for layer in range(3):
                new = torch.randn(2, batch, 2, count, 4, generator=generator)
                for b in range(batch):
                    first = 0 if offsets is None else offsets[b]
                    table[:, layer, b, :, first : first + count] = new[:, b]
                keys, values = cache.update(new[0], new[1], layer)
                view = keys.shape[2]
                assert view == (width if offsets is None else max(offsets) + count)
                assert torch.equal(keys, table[0, layer, :, :, :view])
                assert torch.equal(values, table[1, layer, :, :, :view])


def test_memory_is_taken_as_the_rows_grow_and_never_beyond_the_most():
    cache = RaggedCache(tiny_config("llama"), max_slots=3000)
    keys = torch.randn(1, 2, 10, 4)
    cache.update(keys, keys, 0)
    cache.begin_rows()
    capacities = []
    for end in range(13, 3001):
        cache.place(torch.tensor([end - 3]), [end - 3], 3)
        cache.update(keys[:, :, :3], keys[:, :, :3], 0)
        capacities.append(cache.layers[0].keys.shape[2])
    assert all(end <= capacity <= 3000 for end, capacity in zip(range(13, 3001), capacities, strict=True))
    assert capacities[0] < 1000
    assert len(set(capacities)) < 6
    assert torch.equal(cache.layers[0].keys[:, :, :10], keys)


@pytest.mark.parametrize("width", [9, 600])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_text_may_outgrow_what_was_allocated(name, width, monkeypatch):
    model, inputs = target(name), prompts([width, width // 2], seed=1)
    expected = plain(model, inputs)
    monkeypatch.setattr("hf_specdec.decoding.cache._HEADROOM", 8)
    drafter = ScriptedDrafter(expected[:, width:].tolist(), right=coin, num_draft_tokens=5).bind(model)
    assert torch.equal(speculative(model, inputs, drafter), expected)


# Forwards over ragged rows


def visible(kind: str, padding: int, query: int, key: int) -> bool:
    """The reference of a mask: may the token of column `query` see column `key`?"""
    if key > query or key < padding:
        return False
    if kind == "sliding":
        return query - key < WINDOW
    if kind == "chunked":
        return (query - padding) // WINDOW == (key - padding) // WINDOW
    return True


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", ["full"]),
        ("mistral", ["sliding"]),
        ("gemma3", ["full", "sliding"]),
        ("llama4", ["full", "chunked"]),
    ],
)
def test_masks_know_padding_order_windows_and_chunks(name, kinds, attention):
    model = target(name, attention)
    mask = prompts([11, 4, 1])["attention_mask"]
    ragged = RaggedModel(model, mask, 3, 60)
    offsets = [12, 30, 17]
    ragged.cache.place(torch.tensor(offsets), offsets, 4)
    masks = ragged.masks(torch.tensor(offsets), 4)
    masks = masks if isinstance(masks, dict) else {f"{kinds[0]}_attention": masks}
    assert sorted(masks) == sorted(f"{kind}_attention" for kind in kinds)
    for kind in kinds:
        expected = torch.tensor(
            [
                [[visible(kind, 11 - length, offset + i, key) for key in range(34)] for i in range(4)]
                for length, offset in zip([11, 4, 1], offsets, strict=True)
            ]
        )[:, None]
        found = masks[f"{kind}_attention"]
        if attention == "eager":
            assert found.dtype == model.dtype and found[~expected].eq(torch.finfo(model.dtype).min).all()
            found = found == 0.0
        assert torch.equal(found, expected), kind


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_any_history_of_blocks_and_rollbacks_gives_the_logits_of_each_row_alone(name, attention):
    if name == "gpt_oss" and attention == "sdpa":
        attention = None  # its own default is eager
    model = target(name, attention)
    lengths, width, most = [11, 2, 6], 11, 60
    generator = torch.Generator().manual_seed(7)
    inputs = prompts(lengths, seed=7)
    padding = torch.tensor([width - length for length in lengths])[:, None]
    texts = torch.randint(3, VOCAB_SIZE, (3, most), generator=generator)  # columns, what will be right
    texts[:, :width] = inputs["input_ids"]
    with torch.no_grad():
        alone = [model(texts[b : b + 1, width - length :]).logits[0] for b, length in enumerate(lengths)]
    ragged = RaggedModel(model, inputs["attention_mask"], 3, most)
    columns = torch.arange(most)
    with torch.no_grad():
        first = ragged.prefill(inputs["input_ids"], inputs["attention_mask"], (columns[:width] - padding).clamp_min(0))
    for b, length in enumerate(lengths):
        torch.testing.assert_close(first[b, -1], alone[b][length - 1], atol=2e-4, rtol=1e-4)
    offsets = [width] * 3
    while max(offsets) < most - 6:
        count = int(torch.randint(1, 6, (1,), generator=generator))
        right = torch.randint(0, count + 1, (3,), generator=generator).tolist()
        where = torch.tensor(offsets)[:, None] + columns[:count]
        tokens = texts.gather(1, where)
        for b in range(3):
            tokens[b, right[b] :] = (tokens[b, right[b] :] + 1) % VOCAB_SIZE  # rejected, to be written over
        with torch.no_grad():
            logits = ragged.forward(tokens, torch.tensor(offsets), offsets, where - padding).logits
        for b, length in enumerate(lengths):
            start = offsets[b] - (width - length)
            expected = alone[b][start : start + right[b]]
            torch.testing.assert_close(logits[b, : right[b]], expected, atol=2e-4, rtol=1e-4)
        offsets = [offset + r for offset, r in zip(offsets, right, strict=True)]
    assert min(offsets) > 2 * WINDOW


@pytest.mark.parametrize("lengths", [[17], [17, 12, 3, 9]], ids=["one row", "ragged batch"])
@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "eager"), ("gemma3", "eager"), ("mistral", "eager"), ("llama4", "eager"), ("llama4", None)],
)
def test_text_is_that_of_plain_generate_with_other_masks(name, attention, lengths):
    model, inputs = target(name, attention), prompts(lengths)
    expected = plain(model, inputs)
    drafter = ScriptedDrafter(expected[:, 17:].tolist(), right=coin, num_draft_tokens=5).bind(model)
    assert torch.equal(speculative(model, inputs, drafter), expected)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_without_its_window_a_model_writes_another_text(name, monkeypatch):
    """Negative control: the tests above do look beyond windows and chunks."""
    model, inputs = target(name), prompts([17, 12])
    expected = plain(model, inputs)
    monkeypatch.setattr(probe, "check_ragged", lambda model: None)
    monkeypatch.setattr("hf_specdec.integration.generate.check_ragged", lambda model: None)
    monkeypatch.setattr(RaggedModel, "_limit", lambda self, kind, visible, queries, keys: visible)
    drafter = ScriptedDrafter(expected[:, 17:].tolist(), right=coin, num_draft_tokens=5).bind(model)
    assert not torch.equal(speculative(model, inputs, drafter), expected)


# The next turn


@pytest.mark.parametrize("lengths", [[13], [13, 6, 2]], ids=["one row", "batch"])
@pytest.mark.parametrize("new_tokens", [3, 25])
@pytest.mark.parametrize("name", MODELS)
def test_the_returned_cache_serves_plain_generate_in_the_next_turn(name, new_tokens, lengths):
    model, inputs = target(name), prompts(lengths, seed=5)
    options = {"max_new_tokens": new_tokens, "eos_token_id": None, "return_dict_in_generate": True}
    theirs = plain(model, inputs, **options)
    texts = theirs.sequences[:, 13:].tolist()
    for right in (coin, lambda row, round: 1_000):
        drafter = ScriptedDrafter(texts, right=right).bind(model)
        ours = speculative(model, inputs, drafter, **options)
        assert torch.equal(ours.sequences, theirs.sequences)
        assert ours.cache.get_seq_length() == theirs.cache.get_seq_length() == 13 + new_tokens - 1
        for our_layer, their_layer in zip(ours.cache.layers, theirs.cache.layers, strict=True):
            assert type(our_layer) is type(their_layer)
            assert our_layer.get_seq_length() == their_layer.get_seq_length()
            real = inputs["attention_mask"].bool()
            if their_layer.keys.shape[2] < real.shape[1] or len(lengths) == 1:
                real = None  # a window that has left the padding behind
            for name_ in ("keys", "values"):
                found, expected = getattr(our_layer, name_), getattr(their_layer, name_)
                assert found.shape == expected.shape
                if real is not None:  # what stands at padding is never looked at
                    keep = torch.ones(found.shape[0], found.shape[2], dtype=torch.bool)
                    keep[:, :13] = real
                    found, expected = found.transpose(1, 2)[keep], expected.transpose(1, 2)[keep]
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        question = prompts([5] * len(lengths), seed=8)["input_ids"]
        second = {
            "input_ids": torch.cat([theirs.sequences, question], dim=1),
            "attention_mask": torch.cat(
                [inputs["attention_mask"], torch.ones(len(lengths), new_tokens + 5, dtype=torch.long)], dim=1
            ),
        }
        whole = plain(model, second, max_new_tokens=12, eos_token_id=None)
        answer = plain(model, {**second, "cache": ours.cache}, max_new_tokens=12, eos_token_id=None)
        assert torch.equal(answer, whole)


# Who is served


def test_models_that_take_ragged_rows_are_let_through():
    for name in MODELS:
        assert why_not_ragged(target(name)) is None, name


SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 2}


def hybrid_config():
    """Qwen3-Next: one layer of linear attention, one of full attention."""
    return Qwen3NextConfig(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )


def with_backend(backend: str):
    """A llama that says it runs on a backend; whether its kernels are installed plays no role."""
    model = build(tiny_config("llama"))
    model.config._attn_implementation = backend
    return model


NO_POSITIONS = "its forward takes no `position_ids`"
NO_MASK = "takes no explicit mask; load it with attn_implementation='sdpa'"
NOT_RAGGED = {
    "encoder-decoder": (tiny_encoder_decoder, "it is an encoder-decoder model"),
    "mamba": (lambda: build(MambaConfig(**SMALL, state_size=8)), NO_POSITIONS),
    "mamba2": (lambda: build(Mamba2Config(**SMALL, state_size=8, num_heads=8, head_dim=8, n_groups=1)), NO_POSITIONS),
    "bloom": (lambda: build(BloomConfig(**SMALL, n_head=4)), NO_POSITIONS),
    "linear attention": (lambda: build(hybrid_config()), "its cache has layers of type linear_attention"),
    "flash 2": (lambda: with_backend("flash_attention_2"), f"'flash_attention_2' {NO_MASK}"),
    "flash 3": (lambda: with_backend("flash_attention_3"), f"'flash_attention_3' {NO_MASK}"),
    "flex": (lambda: with_backend("flex_attention"), f"'flex_attention' {NO_MASK}"),
}


@pytest.mark.parametrize("case", NOT_RAGGED)
def test_a_model_that_cannot_take_ragged_rows_is_known_by_its_source(case):
    make, reason = NOT_RAGGED[case]
    found = why_not_ragged(make())
    assert found is not None and reason in found


def test_a_model_that_no_path_serves_is_refused_with_a_reason_before_any_forward():
    model = build(tiny_config("llama"))
    forward = lambda input_ids=None: pytest.fail("a forward was run")  # noqa: E731
    model.forward = forward
    with pytest.raises(ValueError, match=r"LlamaForCausalLM .* its forward takes no `cache`"):
        drafter = AutoDrafter.for_target(model, "lookup")
        model.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=4)
