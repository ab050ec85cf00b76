"""A streamer gets what plain generate gives it, as soon as it is final."""

from threading import Thread

import pytest
import torch
from test_greedy import coin, drafters, plain, speculative
from test_stopping import RAGGED, WIDTH, K, all_right, free_text, tokenizer
from tiny import EOS, tiny_target
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from hf_specdec import SpecGenerate


class Recorder(BaseStreamer):
    """What a streamer is given, and how many target forwards had run by then."""

    def __init__(self, model=None):
        self.puts, self.forwards, self.ended, self.num_forwards = [], [], 0, 0
        if model is not None:
            self.hook = model.register_forward_pre_hook(self._count)

    def _count(self, *args):
        self.num_forwards += 1

    def put(self, value):
        assert not self.ended
        self.puts.append(value.tolist())
        self.forwards.append(self.num_forwards)

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("lengths", [[WIDTH], RAGGED], ids=["one row", "ragged batch"])
def test_a_streamer_gets_the_puts_of_plain_generate(lengths):
    model, tok = tiny_target("llama"), tokenizer()
    inputs, free = free_text(lengths)
    string = tok.decode(free[0, 12:14].tolist())
    for options in (
        {"eos_token_id": None},
        {"eos_token_id": [int(free[-1, 7]), int(free[0, 15])]},
        {"eos_token_id": EOS, "stop_strings": [string], "tokenizer": tok},
    ):
        theirs = Recorder()
        expected = plain(model, inputs, streamer=theirs, **options)
        for kind, drafter in drafters(model, free.tolist()):
            ours = Recorder()
            assert torch.equal(speculative(model, inputs, drafter, streamer=ours, **options), expected), kind
            assert ours.puts == theirs.puts, kind
            assert ours.ended == 1, kind
        columns = torch.tensor(theirs.puts[1:]).T
        assert theirs.puts[0] == inputs["input_ids"].tolist()
        assert torch.equal(columns, expected[:, WIDTH:])


def test_the_streamer_of_custom_generate_gets_the_same_puts():
    model = tiny_target("llama")
    inputs, free = free_text([WIDTH])
    eos = int(free[0, 9])
    theirs, ours = Recorder(), Recorder()
    expected = plain(model, inputs, streamer=theirs, eos_token_id=eos)
    door = SpecGenerate(all_right(model, free), streamer=ours)
    assert torch.equal(plain(model, inputs, custom_generate=door, eos_token_id=eos), expected)
    assert ours.puts == theirs.puts
    assert ours.ended == 1


@pytest.mark.parametrize("right", [1_000, 1], ids=["all right", "one right"])
def test_tokens_are_streamed_by_the_block_and_not_at_the_end(right):
    model = tiny_target("llama")
    inputs, free = free_text([WIDTH])
    recorder = Recorder(model)
    drafter = all_right(model, free, right=lambda row, round: right)
    speculative(model, inputs, drafter, streamer=recorder, eos_token_id=None)
    recorder.hook.remove()
    accepted = min(right, K)
    assert recorder.forwards[:2] == [0, 1]  # the prompt, and the token of the prefill
    for i, forwards in enumerate(recorder.forwards[2:]):
        assert forwards == 2 + i // (accepted + 1)


def test_a_row_that_lags_holds_the_stream_of_a_batch_back():
    """A batch is streamed column by column, so what a fast row has ahead of a slow one waits."""
    model = tiny_target("llama")
    inputs, free = free_text([WIDTH, 4])
    recorder = Recorder(model)
    drafter = all_right(model, free, right=lambda row, round: K if row == 0 else 0)
    speculative(model, inputs, drafter, streamer=recorder, eos_token_id=None)
    recorder.hook.remove()
    assert recorder.forwards[1:] == list(range(1, 41))  # the slow row emits one token a forward


def test_streamed_text_is_the_final_text():
    model, tok = tiny_target("llama"), tokenizer()
    inputs, free = free_text([WIDTH])
    eos = int(free[0, 21])
    expected = plain(model, inputs, eos_token_id=eos)
    for kind, drafter in drafters(model, free.tolist()):
        streamer = TextIteratorStreamer(tok, skip_prompt=True, timeout=60)
        options = {**inputs, "assistant_model": drafter, "streamer": streamer, "eos_token_id": eos}
        thread = Thread(target=model.generate, kwargs={**options, "max_new_tokens": 40, "do_sample": False})
        thread.start()
        pieces = list(streamer)
        thread.join()
        assert "".join(pieces) == tok.decode(expected[0, WIDTH:].tolist()), kind
        assert len([piece for piece in pieces if piece]) > 3, kind


def test_a_text_streamer_prints_what_plain_generate_prints(capsys):
    model, tok = tiny_target("llama"), tokenizer()
    inputs, free = free_text([WIDTH])
    plain(model, inputs, streamer=TextStreamer(tok), eos_token_id=int(free[0, 9]))
    expected = capsys.readouterr().out
    assert len(expected) > 10
    drafter = all_right(model, free, right=coin)
    speculative(model, inputs, drafter, streamer=TextStreamer(tok), eos_token_id=int(free[0, 9]))
    assert capsys.readouterr().out == expected
