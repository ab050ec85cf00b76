"""Memory: the cache is allocated ahead, written in place, and nothing else grows with the number of verifications."""

import gc
from itertools import pairwise

import pytest
import torch
from scripted import ScriptedDrafter
from test_greedy import coin
from tiny import prompts, tiny_target

from hf_specdec.decoding.cache import RaggedCache

NEW_TOKENS = 300
RIGHT = {"all wrong": lambda row, round: 0, "some right": coin}


def live_bytes() -> int:
    """Bytes of all storages that a tensor holds."""
    sizes = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor:
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@pytest.fixture
def watched(monkeypatch):
    """(live bytes, where the first layer's keys lie, capacity) before each verification, every 25th for the bytes."""
    gc.collect()  # what other tests have left must not go away between two looks
    seen: list[tuple[int, int, int]] = []
    place = RaggedCache.place

    def watch(self, offsets, host_offsets, num_tokens):
        place(self, offsets, host_offsets, num_tokens)
        bytes_ = live_bytes() if len(seen) % 25 == 0 else 0
        seen.append((bytes_, self.layers[0].keys.data_ptr(), self.capacity))

    monkeypatch.setattr(RaggedCache, "place", watch)
    return seen


def growth(watched, lengths, right, **options) -> float:
    """Bytes that were added between the second look and the largest one, in slots of the cache."""
    model, inputs = tiny_target(), prompts(lengths)
    greedy = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    texts = model.generate(**inputs, **greedy)[:, 20:].tolist()
    drafter = ScriptedDrafter(texts, right=right, num_draft_tokens=4, **options).bind(model)
    model.generate(**inputs, **greedy, assistant_model=drafter)
    assert len(watched) > 60
    counts = [bytes_ for bytes_, _, _ in watched if bytes_]
    slot = 4 * 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * 16 * len(lengths)
    return (max(counts) - counts[1]) / slot


@pytest.mark.parametrize("lengths", [[20], [20, 9, 4]], ids=["one row", "ragged batch"])
@pytest.mark.parametrize("right", RIGHT)
def test_memory_does_not_grow_with_the_number_of_verifications(watched, right, lengths):
    assert growth(watched, lengths, RIGHT[right]) < 64


def test_what_is_kept_of_every_verification_would_show(watched):
    # The script keeps them all. Their rows are views: what counts is that they grow at all beyond the limit above.
    assert growth(watched, [20], RIGHT["all wrong"], hidden_states=(0, 1, 2, 3)) > 64


def test_a_ragged_batch_writes_into_its_cache_and_never_copies_it(watched):
    model, inputs = tiny_target(), prompts([20, 9, 4])
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    texts = model.generate(**inputs, **options)[:, 20:].tolist()
    drafter = ScriptedDrafter(texts, right=coin, num_draft_tokens=4).bind(model)
    model.generate(**inputs, **options, assistant_model=drafter)
    places = [pointer for _, pointer, _ in watched]
    moves = sum(one != other for one, other in pairwise(places))
    dropped = 2  # rows end apart: the first that leaves makes the others move, and so does the second
    assert len({capacity for _, _, capacity in watched}) == 1, "512 slots are allocated ahead"
    assert moves <= dropped
