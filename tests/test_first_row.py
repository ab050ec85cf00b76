"""A block drafter that is read from another row than the one that was trained to guess first says so."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from dflash_formats import random_net
from dflash_rounds import load
from test_greedy import plain, speculative
from tiny import prompts, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.demo import Unavailable, load_small_target, mtbench_questions
from hf_specdec.drafters.common.features import _FLOOR
from hf_specdec.drafters.common.first_row import _NUM_TOKENS, FirstRowCheck

CARDS = Path(__file__).parent.parent / "model_cards"
VOCAB_SIZE = 50


def look(boost: tuple[float, float], num_rounds: int = _NUM_TOKENS // 2, never: int = 0) -> list[str]:
    """The warnings of a check that sees two rows of a batch, a third one having ended.

    Args:
        boost: of the right token's logit in row 0 and row 1 of a block, over the noise.
        num_rounds: to look at.
        never: tokens that the drafter cannot draft.
    """
    generator, check = torch.Generator().manual_seed(0), FirstRowCheck(0, "Do this")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_rounds):
            logits = 2 * torch.randn(3, 2, VOCAB_SIZE, generator=generator)
            tokens = torch.randint(VOCAB_SIZE, (3,), generator=generator)
            for row, token in enumerate(tokens):
                logits[row, :, token] += torch.tensor(boost)
            logits[:, :, :never] = -torch.inf
            assert check.is_open
            check.observe(logits, tokens, [True, True, False])
        assert check.is_open == (num_rounds < _NUM_TOKENS // 2)
    return [str(warning.message) for warning in caught]


def test_a_row_that_knows_better_is_named_with_the_remedy():
    (message,) = look((2.0, 4.0))
    assert message.startswith("this drafter looks mismatched: row 0 of its blocks guesses the next token, and row 1")
    assert message.endswith("over 128 tokens. Do this.")
    assert "over 10" in look((2.0, 4.0), never=10)[0]


@pytest.mark.parametrize("boost", [(4.0, 2.0), (3.0, 3.0), (0.0, 0.0), (0.0, 1.0)], ids=str)
def test_the_right_row_equal_rows_and_rows_that_know_nothing_are_no_reason_to_warn(boost):
    assert not look(boost)


def test_calls_that_see_the_last_token_at_once_conclude_once():
    check = FirstRowCheck(0, "Do this")
    logits, tokens, is_live = (
        torch.zeros(_NUM_TOKENS, 2, VOCAB_SIZE),
        torch.zeros(_NUM_TOKENS).long(),
        [True] * _NUM_TOKENS,
    )

    class Interrupted(list):
        def append(self, found):
            super().append(found)
            if len(self) == 1:  # the other call goes on here
                check.observe(logits, tokens, is_live)

    check.found = Interrupted()
    check.observe(logits, tokens, is_live)
    assert not check.is_open and not check.found


def test_too_few_tokens_are_no_reason_to_warn():
    assert not look((2.0, 4.0), num_rounds=_NUM_TOKENS // 2 - 1)
    assert not look((2.0, 4.0), never=45)


def test_the_tokens_of_several_calls_are_looked_at_once(tmp_path):
    target, inputs, options = tiny_target("llama"), prompts([9, 4]), dict(max_new_tokens=16)
    drafter = load(tmp_path, random_net(3), target, governor="off")
    check = drafter.first_row_check
    for _ in range(12):
        before = check.num_seen
        assert torch.equal(speculative(target, inputs, drafter, **options), plain(target, inputs, **options))
        if not check.is_open:
            break
        assert check.num_seen > before
    assert _NUM_TOKENS <= check.num_seen <= _NUM_TOKENS + 1 and not check.found


# Trained drafters


@pytest.fixture(scope="module")
def real():
    try:
        model, tokenizer = load_small_target(torch.float32)
        texts = [question.turns[0] for question in mtbench_questions()[:4]]
    except Unavailable as reason:
        pytest.skip(str(reason))
    messages = [[{"role": "user", "content": text}] for text in texts]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    return model, inputs


def with_fields(folder: Path, card: str, **fields) -> Path:
    """A copy of a card with fields of its config replaced."""
    shutil.copytree(CARDS / card, folder / card)
    config = json.loads((folder / card / "config.json").read_text())
    (folder / card / "config.json").write_text(json.dumps({**config, **fields}))
    return folder / card


def mismatches(real, drafter) -> list[str]:
    """Warnings of a mismatch in a call long enough for every check."""
    model, inputs = real
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate(**inputs, do_sample=False, max_new_tokens=100, assistant_model=drafter)
    assert not drafter.first_row_check.is_open
    return [str(warning.message) for warning in caught if "looks mismatched" in str(warning.message)]


def first_accepted(drafter) -> float:
    stats = drafter.last_stats
    return stats.accepted_per_position[0] / stats.num_verifications


@pytest.mark.slow
@pytest.mark.real_target
@pytest.mark.parametrize("card", ["smollm2-135m-instruct-dspark", "smollm2-135m-instruct-dflash"])
def test_a_trained_drafter_read_as_its_files_say_does_not_warn(real, card):
    drafter = AutoDrafter.from_pretrained(CARDS / card, target=real[0], governor="off")
    assert not mismatches(real, drafter)
    assert first_accepted(drafter) > 0.3


@pytest.mark.slow
@pytest.mark.real_target
def test_a_trained_dspark_drafter_with_the_wrong_first_slot_names_it(real):
    folder = CARDS / "smollm2-135m-instruct-dspark"
    drafter = AutoDrafter.from_pretrained(folder, target=real[0], governor="off", first_slot=1)
    (message,) = mismatches(real, drafter)
    assert message.endswith("Load it with first_slot=0.")
    assert first_accepted(drafter) > _FLOOR, "the floor of acceptance would find it by itself"


@pytest.mark.slow
@pytest.mark.real_target
def test_a_trained_dflash_drafter_with_the_wrong_first_row_names_it(real, tmp_path):
    folder = with_fields(tmp_path, "smollm2-135m-instruct-dflash", sample_from_anchor=True)
    drafter = AutoDrafter.from_pretrained(folder, target=real[0], governor="off")
    (message,) = mismatches(real, drafter)
    assert "row 1 gave it" in message and "sample_from_anchor" in message
