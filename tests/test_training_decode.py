"""training/decode.py: many texts at once are the texts of one at a time, with the states of a plain forward."""

import pytest
import torch
from tiny import EOS, tiny_target

from hf_specdec.training.decode import Prompt, decode, loop_end


def make_prompts(count: int, temperature: float = 0.0, max_new_tokens: int = 24) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 20, (count,), generator=generator).tolist()
    return [
        Prompt(i, torch.randint(3, 97, (length,), generator=generator).tolist(), temperature, max_new_tokens)
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt_oss"])
@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_every_prompt_gets_the_text_of_generate(name, num_rows):
    model, prompts = tiny_target(name), make_prompts(20)
    texts = list(decode(model, iter(prompts), num_rows=num_rows, max_length=40, eos={EOS}))
    assert sorted(text.prompt.index for text in texts) == list(range(20))
    for text in texts:
        limit = min(24, 40 - len(text.prompt.ids))
        wanted = model.generate(torch.tensor([text.prompt.ids]), do_sample=False, max_new_tokens=limit)[0].tolist()
        assert text.ids == wanted[: len(text.ids)]
        assert text.looped or text.ids == wanted
        assert text.ended == (text.ids[-1] == EOS)


def test_states_are_those_of_one_forward_over_the_text():
    model, wanted = tiny_target("llama"), (0, 2, 3)
    # All texts are kept before one is looked at: their rows have been other texts by then.
    for text in list(decode(model, iter(make_prompts(12)), num_rows=5, max_length=40, eos={EOS}, hidden_states=wanted)):
        with torch.no_grad():
            states = model(torch.tensor([text.ids]), output_hidden_states=True).hidden_states
        expected = torch.stack([states[i][0] for i in wanted], dim=1)
        torch.testing.assert_close(text.states[:-1], expected[:-1], atol=1e-5, rtol=1e-4)
        assert text.states.shape == (len(text.ids), 3, 64) and not text.states[-1].any()


def test_drawn_tokens_follow_the_model():
    model, prompt = tiny_target("llama"), [5, 6, 7]
    prompts = (Prompt(i, prompt, 2.0, 1) for i in range(4000))
    texts = list(decode(model, prompts, num_rows=64, max_length=8, eos={EOS}, seed=3))
    counts = torch.bincount(torch.tensor([text.answer[0] for text in texts]), minlength=97)
    with torch.no_grad():
        expected = (model(torch.tensor([prompt])).logits[0, -1] / 2.0).softmax(-1) * 4000
    common = expected > 5
    chi_square = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert chi_square < int(common.sum()) + 4 * (2 * int(common.sum())) ** 0.5
    shifted = expected.roll(1)[common]  # a control: another law is told apart
    assert ((counts[common] - shifted) ** 2 / shifted.clamp_min(1)).sum() > 10 * chi_square


def test_greedy_and_drawn_rows_share_a_batch():
    model, greedy = tiny_target("llama"), make_prompts(10)
    mixed = [Prompt(p.index, p.ids, float(p.index % 2), p.max_new_tokens) for p in greedy]
    alone = {text.prompt.index: text.ids for text in decode(model, iter(greedy), num_rows=4, max_length=40, eos={EOS})}
    both = {text.prompt.index: text.ids for text in decode(model, iter(mixed), num_rows=4, max_length=40, eos={EOS})}
    assert all(both[i] == alone[i] for i in range(0, 10, 2))
    assert any(both[i] != alone[i] for i in range(1, 10, 2))


def test_a_loop_is_cut_after_its_second_round():
    assert loop_end([1, 2, 3]) is None
    assert loop_end([9, 8, *[1, 2, 3, 4] * 6]) == 2 + 8
    assert loop_end([9, 8, *[7] * 24]) == 2 + 2
    assert loop_end([9, 8, *[7] * 23]) is None
    assert loop_end([*range(100), *range(100), *range(100)]) is None  # longer than any period that counts
    assert loop_end([*[1, 2, 3, 4] * 6, 9]) is None  # it has left the loop


def test_a_prompt_without_room_is_refused():
    with pytest.raises(ValueError, match=r"prompts: one has 8 tokens, and max_length=8"):
        list(decode(tiny_target(), iter([Prompt(0, list(range(3, 11)), 0.0, 4)]), num_rows=2, max_length=8, eos={EOS}))
