"""A text ends where plain generate ends it, at any place in a block."""

from types import SimpleNamespace

import pytest
import torch
from scripted import ScriptedDrafter
from test_greedy import drafters, plain, speculative
from tiny import EOS, PAD, VOCAB_SIZE, prompts, tiny_target
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import stopping_criteria

from hf_specdec import AutoDrafter
from hf_specdec.decoding.stopping import Stops

WIDTH = 11
RAGGED = [WIDTH, 5, 8, 2]
K = 5


def free_text(lengths, seed=3, new_tokens=40):
    """(inputs, [B, new_tokens] the greedy text that nothing stops)."""
    inputs = prompts(lengths, seed=seed)
    model = tiny_target("llama")
    return inputs, plain(model, inputs, max_new_tokens=new_tokens, eos_token_id=None)[:, max(lengths) :]


def all_right(model, texts, **options):
    return ScriptedDrafter(texts.tolist(), num_draft_tokens=K, **options).bind(model)


def counts_with_all_right(new_tokens: int, limit: int = 40) -> dict[str, int]:
    """What the statistics of one row must be when every draft of K is right and the text has so many new tokens.

    The prefill emits the first token, every other verification K + 1; the last one before the length limit drafts only
    what fits. Of the last block only what is in the text counts.
    """
    full, rest = divmod(new_tokens - 1, K + 1)
    room = limit - (1 + full * (K + 1)) - 1
    drafted = K * full + min(K, rest, max(room, 0))
    return {
        "num_verifications": 1 + full + (rest > 0),
        "num_drafted": drafted,
        "num_accepted": drafted,
        "num_emitted": new_tokens,
    }


def tokenizer() -> PreTrainedTokenizerFast:
    """One or two letters a token, so that a string can begin and end inside of tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = ["<pad>", "<s>", "</s>", *letters, *(a + b for a in letters for b in "xyz")]
    vocabulary = {text: i for i, text in enumerate(texts[:VOCAB_SIZE])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


class RowEnds(StoppingCriteria):
    """Ends a row where its last token is one of a few; keeps what it was shown."""

    def __init__(self, tokens):
        self.tokens, self.shown = torch.tensor(tokens), []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(input_ids.tolist())
        return torch.isin(input_ids[:, -1], self.tokens)


class RowsHaveTheirOwnLength(StoppingCriteria):
    """Ends row b at its own number of columns."""

    def __init__(self, columns):
        self.columns = torch.tensor(columns)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.columns


def test_eos_at_each_index_of_a_block_ends_the_text_there():
    model = tiny_target("llama")
    inputs, free = free_text([WIDTH])
    indices = set()
    for i, token in enumerate(free[0].tolist()):
        if token in free[0, :i]:
            continue
        expected = plain(model, inputs, eos_token_id=token)
        assert expected.shape[1] == WIDTH + i + 1
        drafter = all_right(model, free)
        assert torch.equal(speculative(model, inputs, drafter, eos_token_id=token), expected)
        counts = counts_with_all_right(i + 1)
        assert {name: getattr(drafter.last_stats, name) for name in counts} == counts
        indices.add((i - 1) % (K + 1))
    assert indices == set(range(K + 1)), "the text should stop at every index of a block"


def test_a_test_of_the_last_token_of_a_block_alone_would_miss_an_eos():
    """Negative control for the test above."""
    model = tiny_target("llama")
    inputs, free = free_text([WIDTH])
    eos = int(free[0, 3])
    assert eos not in free[0, :3]
    expected = plain(model, inputs, eos_token_id=eos)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stops, "cut", lambda self, tokens, width: tokens[: self.max_width - width])
        assert not torch.equal(speculative(model, inputs, all_right(model, free), eos_token_id=eos), expected)


@pytest.mark.parametrize("lengths", [[WIDTH], RAGGED], ids=["one row", "ragged batch"])
def test_any_of_several_eos_tokens_ends_a_row(lengths):
    model = tiny_target("llama")
    inputs, free = free_text(lengths)
    eos = sorted({int(free[b, i]) for b, i in enumerate((9, 17, 3, 14)[: len(lengths)])} | {EOS})
    expected = plain(model, inputs, eos_token_id=eos)
    ends = (expected[:, WIDTH:] != PAD).sum(dim=1).tolist()
    for kind, drafter in drafters(model, expected[:, WIDTH:].tolist()):
        assert torch.equal(speculative(model, inputs, drafter, eos_token_id=eos), expected), kind
        assert [row.num_emitted for row in drafter.last_stats.rows] == ends, kind
        for row in drafter.last_stats.rows:
            assert row.num_accepted <= row.num_drafted
            assert row.num_accepted + row.num_verifications >= row.num_emitted >= row.num_verifications
            assert sum(row.accepted_per_position) == row.num_accepted


def test_each_rows_statistics_end_with_the_row():
    model = tiny_target("llama")
    inputs, free = free_text(RAGGED)
    stops = RowsHaveTheirOwnLength([WIDTH + n for n in (9, 2, 30, 13)])
    drafter = all_right(model, free)
    speculative(model, inputs, drafter, eos_token_id=EOS, stopping_criteria=StoppingCriteriaList([stops]))
    for row, new_tokens in zip(drafter.last_stats.rows, (9, 2, 30, 13), strict=True):
        counts = counts_with_all_right(new_tokens)
        assert {name: getattr(row, name) for name in counts} == counts


def test_a_stop_string_anywhere_in_a_block_ends_the_text_there():
    model, tok = tiny_target("llama"), tokenizer()
    inputs, free = free_text([WIDTH])
    texts = [tok.decode([token]) for token in free[0].tolist()]
    indices = set()
    for i in range(14):
        for string in (texts[i], texts[i][-1] + texts[i + 1][0], texts[i] + texts[i + 1] + texts[i + 2][0]):
            options = {"stop_strings": [string, "no such text"], "tokenizer": tok, "eos_token_id": None}
            expected = plain(model, inputs, **options)
            drafter = all_right(model, free)
            assert torch.equal(speculative(model, inputs, drafter, **options), expected), string
            counts = counts_with_all_right(expected.shape[1] - WIDTH)
            assert {name: getattr(drafter.last_stats, name) for name in counts} == counts
            indices.add((expected.shape[1] - WIDTH - 2) % (K + 1))
    assert indices == set(range(K + 1))


def test_stop_strings_end_the_rows_of_a_batch_apart():
    model, tok = tiny_target("llama"), tokenizer()
    inputs, free = free_text(RAGGED)
    strings = [tok.decode(free[b, i : i + 2].tolist()) for b, i in enumerate((12, 4, 20, 7))]
    options = {"stop_strings": strings, "tokenizer": tok, "eos_token_id": EOS}
    expected = plain(model, inputs, **options)
    assert len(set((expected[:, WIDTH:] != PAD).sum(dim=1).tolist())) > 2
    for kind, drafter in drafters(model, expected[:, WIDTH:].tolist()):
        assert torch.equal(speculative(model, inputs, drafter, **options), expected), kind


def test_a_users_criterion_sees_every_prefix_in_order_as_in_plain_generate():
    model = tiny_target("llama")
    inputs, free = free_text([WIDTH])
    ends = [int(free[0, 20])]
    theirs = RowEnds(ends)
    expected = plain(model, inputs, stopping_criteria=StoppingCriteriaList([theirs]), eos_token_id=None)
    assert len(theirs.shown) > 5
    for kind, drafter in drafters(model, free.tolist()):
        ours = RowEnds(ends)
        options = {"stopping_criteria": StoppingCriteriaList([ours]), "eos_token_id": None}
        assert torch.equal(speculative(model, inputs, drafter, **options), expected), kind
        assert ours.shown == theirs.shown, kind


@pytest.mark.parametrize("criterion", ["by token", "by length", "both"])
def test_a_users_criterion_ends_the_rows_of_a_ragged_batch_apart(criterion):
    model = tiny_target("llama")
    inputs, free = free_text(RAGGED)
    by_token = RowEnds([int(free[b, i]) for b, i in enumerate((12, 4, 20, 7))])
    by_length = RowsHaveTheirOwnLength([WIDTH + n for n in (1, 24, 13, 6)])
    chosen = {"by token": [by_token], "by length": [by_length], "both": [by_token, by_length]}[criterion]
    options = {"stopping_criteria": StoppingCriteriaList(chosen), "eos_token_id": int(free[3, 17])}
    expected = plain(model, inputs, **options)
    assert len(set((expected[:, WIDTH:] != PAD).sum(dim=1).tolist())) > 2
    for kind, drafter in drafters(model, free.tolist()):
        assert torch.equal(speculative(model, inputs, drafter, **options), expected), kind


@pytest.mark.parametrize("lengths", [[WIDTH], RAGGED], ids=["one row", "ragged batch"])
@pytest.mark.parametrize("form", ["a bool", "one bool tensor", "one number"])
def test_a_criterion_may_judge_all_rows_with_one_value(form, lengths):
    """transformers combines what criteria return by broadcasting."""
    model = tiny_target("llama")
    inputs, free = free_text(lengths)

    def criterion(input_ids, scores, **kwargs):
        done = input_ids.shape[1] >= WIDTH + 9
        return {"a bool": done, "one bool tensor": torch.tensor(done), "one number": torch.tensor([done])}[form]

    options = {"stopping_criteria": StoppingCriteriaList([criterion]), "eos_token_id": EOS}
    expected = plain(model, inputs, **options)
    assert expected.shape[1] == WIDTH + 9
    assert torch.equal(speculative(model, inputs, all_right(model, free), **options), expected)


def test_a_text_that_runs_out_of_time_ends_at_the_next_token():
    """The clock moves by one second a target forward, so plain decoding gets five tokens and drafts of five more."""
    model = tiny_target("llama")
    inputs, free = free_text([WIDTH])
    clock = SimpleNamespace(now=0.0)
    clock.time = lambda: clock.now
    hook = model.register_forward_pre_hook(lambda *args: setattr(clock, "now", clock.now + 1.0))
    options = {"max_time": 4.5, "eos_token_id": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopping_criteria, "time", clock)
        texts = plain(model, inputs, **options)
        clock.now = 0.0
        drafter = all_right(model, free)
        found = speculative(model, inputs, drafter, **options)
    hook.remove()
    assert torch.equal(texts[0, WIDTH:], free[0, :5])
    new_tokens = 1 + 3 * (K + 1) + 1  # the prefill, three blocks in time, the first token of the fourth
    assert torch.equal(found[0, WIDTH:], free[0, :new_tokens])
    assert drafter.last_stats.num_emitted == new_tokens
    assert drafter.last_stats.num_drafted == 3 * K + 1


@pytest.mark.parametrize("lengths", [[WIDTH], RAGGED], ids=["one row", "ragged batch"])
@pytest.mark.parametrize("new_tokens", [1, 2, 6, 7, 8, 13])
def test_no_row_drafts_past_the_length_limit(new_tokens, lengths):
    model = tiny_target("llama")
    inputs, free = free_text(lengths)
    for limit in (
        {"max_new_tokens": new_tokens},
        {"max_new_tokens": None, "max_length": WIDTH + new_tokens},
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(WIDTH + new_tokens)])},
    ):
        expected = plain(model, inputs, eos_token_id=None, **limit)
        assert expected.shape[1] == WIDTH + new_tokens
        drafter = all_right(model, free)
        assert torch.equal(speculative(model, inputs, drafter, eos_token_id=None, **limit), expected)
        for row in drafter.last_stats.rows:
            counts = counts_with_all_right(new_tokens, limit=new_tokens)
            assert {name: getattr(row, name) for name in counts} == counts


def test_a_length_criterion_of_the_user_replaces_a_shorter_limit():
    model = tiny_target("llama")
    inputs, free = free_text([WIDTH])
    options = {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(WIDTH + 30)]),
        "max_new_tokens": 3,
        "eos_token_id": None,
    }
    expected = plain(model, inputs, **options)
    assert expected.shape[1] == WIDTH + 30
    assert torch.equal(speculative(model, inputs, all_right(model, free), **options), expected)


@pytest.mark.parametrize(
    ("limits", "new_tokens"), [([WIDTH + 9, WIDTH + 4], 4), ([WIDTH], 1), ([3], 1)], ids=["two", "reached", "passed"]
)
@pytest.mark.parametrize("lengths", [[WIDTH], RAGGED], ids=["one row", "ragged batch"])
def test_the_shortest_length_criterion_ends_every_text_after_one_token_at_least(lengths, limits, new_tokens):
    model = tiny_target("llama")
    inputs, free = free_text(lengths)
    options = {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(limit) for limit in limits]),
        "eos_token_id": None,
    }
    expected = plain(model, inputs, **options)
    assert expected.shape[1] == WIDTH + new_tokens
    assert torch.equal(speculative(model, inputs, all_right(model, free), **options), expected)


def test_sampled_text_ends_where_plain_decoding_with_its_noise_ends():
    model = tiny_target("llama")
    inputs = prompts(RAGGED, seed=3)
    options = {"do_sample": True, "max_new_tokens": 40, "top_k": 0}
    free = model.generate(
        **inputs, **options, assistant_model=AutoDrafter.for_target(model, "none", seed=4), eos_token_id=None
    )
    eos = [int(free[b, WIDTH + i]) for b, i in enumerate((9, 17, 3, 14))]
    reference = AutoDrafter.for_target(model, "none", seed=4)
    expected = model.generate(**inputs, **options, assistant_model=reference, eos_token_id=eos)
    ends = [row.num_emitted for row in reference.last_stats.rows]
    assert len(set(ends)) > 2
    drafter = all_right(model, free[:, WIDTH:], seed=4)
    assert torch.equal(model.generate(**inputs, **options, assistant_model=drafter, eos_token_id=eos), expected)
    assert [row.num_emitted for row in drafter.last_stats.rows] == ends
