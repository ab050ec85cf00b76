"""training/batches.py and vocabulary.py: what a data folder gives to training, in which order and to whom."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from hf_specdec.training.batches import Batch, count_batches, held_out_batches, train_batches
from hf_specdec.training.decode import Prompt, Text
from hf_specdec.training.shards import HELD_OUT, write_shard
from hf_specdec.training.vocabulary import most_frequent

MAX_TOKENS = 60
NUM_TEXTS, SHARD_TEXTS = 230, 17  # 14 shards, more than are read together


def text_of(index: int, ids: list[int], prompt_length: int = 2) -> Text:
    """Its states say which token of which text they belong to."""
    states = torch.stack([torch.full((len(ids),), float(index)), torch.arange(len(ids)).float()], dim=-1)
    return Text(Prompt(index, ids[:prompt_length], 0.0, 9), ids, states=states[:, None])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Texts of 3 to 25 tokens; a text's first id is its number."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "shards").mkdir()
    lengths = torch.randint(3, 26, (NUM_TEXTS,), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [text_of(i, [i, *range(1, length)], 1 + i % 2) for i, length in enumerate(lengths)]
    for start in range(0, NUM_TEXTS, SHARD_TEXTS):
        write_shard(folder, texts[start : start + SHARD_TEXTS], process=0)
    return folder


def epoch_of(folder: Path, seed: int = 0, epoch: int = 0, num_processes: int = 1) -> list[list[Batch]]:
    """The batches of each process."""
    return [
        list(train_batches(folder, MAX_TOKENS, seed, epoch, process, num_processes)) for process in range(num_processes)
    ]


def indices(batches: list[Batch]) -> list[int]:
    return [index for batch in batches for index in batch.ids[:, 0].tolist()]


def test_an_epoch_has_each_text_once_and_none_that_is_held_out(folder):
    (batches,) = epoch_of(folder)
    assert sorted(indices(batches)) == [i for i in range(NUM_TEXTS) if i % HELD_OUT]


def test_held_out_texts_are_those_that_are_left(folder):
    batches = held_out_batches(folder, MAX_TOKENS, num_texts=100)
    assert sorted(indices(batches)) == [0, 50, 100, 150, 200]
    assert sorted(indices(held_out_batches(folder, MAX_TOKENS, num_texts=2))) == [0, 50]


def test_a_batch_holds_its_texts_with_their_states_and_nothing_else(folder):
    for batch in epoch_of(folder)[0] + held_out_batches(folder, MAX_TOKENS, 100):
        assert batch.ids.shape == batch.states.shape[:2] and batch.ids.shape[1] == int(batch.lengths.max())
        for row, length in enumerate(batch.lengths.tolist()):
            index = int(batch.ids[row, 0])
            assert batch.ids[row, 1:length].tolist() == list(range(1, length))
            assert batch.states[row, :length, 0, 0].tolist() == [index] * length
            assert batch.states[row, :length, 0, 1].tolist() == list(range(length))
            assert int(batch.prompt_lengths[row]) == 1 + index % 2
            assert not batch.ids[row, length:].any() and not batch.states[row, length:].any()


def test_a_batch_stays_within_its_size_and_wastes_little(folder):
    (batches,) = epoch_of(folder)
    assert all(batch.ids.numel() <= MAX_TOKENS for batch in batches)
    padded, held = (sum(sizes) for sizes in zip(*((b.ids.numel(), int(b.lengths.sum())) for b in batches), strict=True))
    assert held > 0.9 * padded, "texts of alike length belong together"


def test_a_text_longer_than_a_batch_is_a_batch(folder):
    batches = list(train_batches(folder, 10, seed=0, epoch=0))
    assert sorted(indices(batches)) == [i for i in range(NUM_TEXTS) if i % HELD_OUT]
    assert all(len(batch.ids) == 1 for batch in batches if batch.ids.numel() > 10)
    assert any(len(batch.ids) > 1 for batch in batches)


@pytest.mark.parametrize("num_processes", [2, 3, 5])
def test_processes_get_equal_shares_that_do_not_meet(folder, num_processes):
    shares = epoch_of(folder, num_processes=num_processes)
    assert len({len(share) for share in shares}) == 1 and shares[0]
    seen = Counter(index for share in shares for index in indices(share))
    assert set(seen.values()) == {1}
    (alone,) = epoch_of(folder)
    dropped = len(alone) - sum(map(len, shares))
    assert 0 <= dropped < 3 * num_processes, "at most a batch a process and part of the data is left out"


@pytest.mark.parametrize("num_processes", [1, 2, 3, 5])
def test_the_number_of_batches_is_known_beforehand(folder, num_processes):
    for epoch in range(3):
        expected = count_batches(folder, MAX_TOKENS, 7, epoch, num_processes)
        assert [len(share) for share in epoch_of(folder, 7, epoch, num_processes)] == [expected] * num_processes


def test_the_order_depends_on_the_seed_and_the_epoch_only(folder):
    (first,), (again,), (later,), (other,) = (epoch_of(folder, *which) for which in ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert indices(first) == indices(again)
    assert indices(first) != indices(later) != indices(other) != indices(first)
    assert {frozenset(b.ids[:, 0].tolist()) for b in first} != {frozenset(b.ids[:, 0].tolist()) for b in later}


# The draft vocabulary


def words(folder: Path, *texts: list[int]) -> Path:
    (folder / "shards").mkdir()
    for index, ids in enumerate(texts):
        write_shard(folder, [text_of(index, ids)], process=0)
    return folder


def test_the_tokens_that_answers_use_most_are_kept_in_ascending_order(tmp_path):
    folder = words(tmp_path, [9, 9, 7, 7, 7, 5], [9, 9, 5, 3, 7, 8, 5])
    found, covered = most_frequent(folder, 2, vocab_size=12)
    assert found.tolist() == [5, 7] and covered == 7 / 9, "tokens of prompts should not count"
    found, covered = most_frequent(folder, 4, vocab_size=12)
    assert found.tolist() == [3, 5, 7, 8] and covered == 1.0


def test_a_vocabulary_larger_than_what_was_seen_is_filled_up(tmp_path):
    folder = words(tmp_path, [9, 9, 7, 7, 2, 5])
    found, covered = most_frequent(folder, 6, vocab_size=12)
    assert found.tolist() == [0, 1, 2, 3, 5, 7] and covered == 1.0
    assert most_frequent(folder, 12, vocab_size=12)[0].tolist() == list(range(12))


def test_a_folder_without_answers_covers_nothing(tmp_path):
    found, covered = most_frequent(words(tmp_path), 3, vocab_size=12)
    assert found.tolist() == [0, 1, 2] and covered == 0.0
