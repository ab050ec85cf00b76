"""training/prompts.py: where prompts come from, and what is kept out."""

import json
import random
import re
import sysconfig
from itertools import islice

import pytest

from hf_specdec.training.prompts import (
    follow_up,
    openings,
    python_prompts,
    read_jsonl,
    text_prompts,
    without_favourites,
    without_overlap,
    without_repeats,
    write_jsonl,
)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def contents(prompts) -> list[str]:
    return [messages[-1]["content"] for messages in prompts]


# Files


def test_both_spellings_of_a_prompt_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    chat = [*user("Hi."), {"role": "assistant", "content": "Hello!"}, *user("Why?")]
    path.write_text(f'{{"prompt": "What is new?"}}\n\n{json.dumps({"messages": chat, "source": "me"})}\n')
    assert read_jsonl(path) == [user("What is new?"), chat]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1, 2]",
        '"a text"',
        "7",
        '{"text": "What?"}',
        '{"prompt": null}',
        '{"messages": []}',
        '{"messages": {"role": "user"}}',
        '{"messages": ["Hi."]}',
        '{"messages": [{"role": "assistant", "content": "Hello!"}]}',
        '{"messages": [{"role": "user", "content": ["Hi."]}]}',
        '{"messages": [{"role": "user"}]}',
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=rf"prompts: line 3 of {re.escape(str(path))} is not a prompt .*; a line is "):
        read_jsonl(path)


def test_what_is_written_is_read_again(tmp_path):
    """Separators of lines that JSON leaves as they are stay inside their text."""
    prompts = [user(f"a{mark}b") for mark in "\n\r\t\x0b\x0c\x1c\x85\u2028\u2029\N{GRINNING FACE}\"'"]
    write_jsonl(tmp_path / "prompts.jsonl", prompts)
    assert read_jsonl(tmp_path / "prompts.jsonl") == prompts


# Prompts that are made here


def test_openings_are_whole_and_follow_the_seed():
    first, again, other = (list(islice(openings(seed), 4000)) for seed in (0, 0, 1))
    assert first == again and first != other
    for opening in set(first + other):
        assert opening == opening.strip() and "  " not in opening
        assert not set("{}#") & set(opening), f"a place was not filled, or a comment was taken: {opening!r}"
    assert len(set(first)) > 500, "they should be of many kinds"


STDLIB = '''
def {name}(a, b):
    """Give the sum of a and b, whatever {{they}} are.

    Longer text.
    """
    total = a + b
    return total


class Thing:
    @staticmethod
    def {name}_method(x):
        """A method that has a docstring of some length, {{}} included."""
        x += 1
        return x


def _hidden(a):
    """A private function has no prompt, even with documentation."""
    a += 1
    return a


def undocumented(a):
    a += 1
    return a
'''
FUNCTIONS = ("alpha", "alpha_method", "beta", "beta_method")


@pytest.fixture
def small_stdlib(tmp_path, monkeypatch):
    """A standard library of four functions that count."""
    for name in ("alpha", "beta"):
        (tmp_path / f"{name}.py").write_text(STDLIB.format(name=name).replace("{{", "{").replace("}}", "}"))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "gamma.py").write_text(STDLIB.format(name="gamma"))
    (tmp_path / "broken.py").write_text("def delta(:")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})


def test_every_function_comes_up_once_before_one_comes_up_again(small_stdlib):
    made = list(islice(python_prompts(0), 40))
    assert made == list(islice(python_prompts(0), 40)) != list(islice(python_prompts(1), 40))
    for start in range(0, 40, 4):
        rounds = made[start : start + 4]
        # The function is the first one that a prompt names; "Rename" names another one after it.
        named = [re.search(r"(alpha|beta)\w*", prompt)[0] for prompt in rounds]
        assert sorted(named) == sorted(FUNCTIONS)
    assert not any(re.search("gamma|_hidden|undocumented|delta", prompt) for prompt in made)


def test_a_function_is_cut_out_whole(small_stdlib):
    made = set(islice(python_prompts(0), 400))
    head = 'def alpha_method(x):\n    """A method that has a docstring of some length, {} included."""\n'
    assert head in made
    assert f"Explain what this code does:\n\n```python\n{head}    x += 1\n    return x\n```" in made
    assert "Write a Python function `beta`. Give the sum of a and b, whatever {they} are." in made


def test_the_real_library_gives_whole_prompts():
    made = list(islice(python_prompts(0), 1500))
    assert len(set(made)) > 0.98 * len(made)
    for prompt in made:
        assert 20 < len(prompt) < 8000 and prompt.count("```") in (0, 2)
        assert not re.search(r"\{(head|source|name|other|summary)\}", prompt.partition("```")[0])


def test_tasks_about_texts_hold_the_text_and_follow_the_seed():
    texts = ["one {text} here", "another"]
    made = list(islice(text_prompts(texts, 0), 60))
    assert made == list(islice(text_prompts(texts, 0), 60)) != list(islice(text_prompts(texts, 1), 60))
    assert all(sum(text in prompt for text in texts) == 1 for prompt in made)
    assert len(set(made)) > 15


def test_a_follow_up_goes_on_with_the_chat():
    chat = follow_up(user("What?"), "That.", random.Random(0))
    assert chat[:2] == [*user("What?"), {"role": "assistant", "content": "That."}]
    assert len(chat) == 3 and chat[2]["role"] == "user" and chat[2]["content"]
    assert len({follow_up(user("What?"), "That.", random.Random(seed))[2]["content"] for seed in range(50)}) > 10


# What is kept out

HELD_OUT = "one two three four five six seven eight nine"


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        ("so: One, two; three four (five) SIX\nseven   eight?", False),
        ("please two three four five six seven eight nine", False),
        ("one two three four five six seven", True),
        ("one two three four five six seven or eight nine", True),
        ("eight seven six five four three two one", True),
        ("something else", True),
    ],
)
def test_a_prompt_that_quotes_eight_words_is_kept_out(prompt, kept):
    assert without_overlap([user(prompt)], [user(HELD_OUT)]) == ([user(prompt)] if kept else [])


def test_words_of_every_message_count():
    chat = [*user("Hi."), {"role": "assistant", "content": HELD_OUT}, *user("Why?")]
    assert without_overlap([chat, user(HELD_OUT), user("Why?")], [chat]) == [user("Why?")]
    assert without_overlap([chat], [user(HELD_OUT)]) == []


def test_a_short_held_out_prompt_is_kept_out_itself():
    """It has no run of eight words."""
    prompts = [user("What is 2+2?"), user("what is 2 + 2"), user("What is 2+2? And 3+3?")]
    assert without_overlap(prompts, [user("What is 2+2?")]) == prompts[2:]


def test_a_prompt_is_kept_once():
    found = without_repeats([user("a b"), user("c d"), user("a b"), user("A b")])
    assert contents(found) == ["a b", "c d", "A b"]


def test_of_messages_that_open_alike_only_so_many_are_kept():
    alike = [f"{'Write' if i % 2 else 'write'} a poem   about {i}" for i in range(10)]
    others = [f"Write a poem on {i}" for i in range(3)]
    assert without_favourites(alike + others, max_alike=4) == alike[:4] + others
    assert without_favourites(alike + others, max_alike=4, num_words=3) == alike[:4]
    assert without_favourites(alike + others) == alike + others
