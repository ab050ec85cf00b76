"""Where training prompts come from: a JSONL file, the target itself, and the Python source on this machine.

A prompt is a list of chat messages ending with the user's, as `apply_chat_template` takes them.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]

_CODE_TASKS = (
    "{head}",
    "{head}",
    "{head}",
    "Complete this Python function:\n\n```python\n{head}```",
    "Write a Python function `{name}`. {summary}",
    "Explain what this code does:\n\n```python\n{source}```",
    "Add comments to this code:\n\n```python\n{source}```",
    "Rewrite this function with type hints:\n\n```python\n{source}```",
    "Rename the function `{name}` to `{other}` in this code and return all of it:\n\n```python\n{source}```",
    "Write a unit test for this function:\n\n```python\n{source}```",
    "Find and fix any bug in this code:\n\n```python\n{source}```",
    "Add a check of the arguments to this code:\n\n```python\n{source}```",
)
_TEXT_TASKS = (
    "Summarize this text in one sentence:\n\n{text}",
    "Summarize the following text in three bullet points:\n\n{text}",
    "Rewrite this text in a formal tone:\n\n{text}",
    "Rewrite the following so that a child can understand it:\n\n{text}",
    "Fix the grammar and the spelling of this text and return all of it:\n\n{text}",
    "What is the main idea of this passage?\n\n{text}",
    "Make a list of the names, places and dates in this text, as JSON:\n\n{text}",
    "Write a title for this text:\n\n{text}",
    "Continue this text:\n\n{text}",
    "Ask three questions about this text and answer them:\n\n{text}",
    "Repeat this text, but in the past tense:\n\n{text}",
    "Is the tone of this text positive, negative or neutral? Explain.\n\n{text}",
)
_FOLLOW_UPS = (
    "Rewrite your answer in a more formal tone.",
    "Now write the same for a ten-year-old child.",
    "Make it shorter.",
    "Make it longer, with more details.",
    "Repeat your answer, but as a numbered list.",
    "Repeat your answer and correct any mistake in it.",
    "Can you give an example?",
    "Explain the first part in more detail.",
    "Why is that?",
    "What else should I know about this?",
    "Now do the same in a funny way.",
    "Replace the names in your answer with others.",
    "Put the most important words in bold.",
    "Write it again in another style.",
    "Are you sure? Check your answer step by step.",
    "Is there another way to do this?",
    "Now add comments and examples to it.",
    "Change one thing in it and write it again.",
    "Summarize that in one sentence.",
    "Turn it into a dialogue between two people.",
)


def read_jsonl(path: Path) -> list[Messages]:
    """Prompts of a file with one JSON object a line: `messages` (a chat that ends with the user), or `prompt` (a text).

    Raises:
        ValueError: a line is something else; it names the line.
    """
    prompts = []
    with path.open(encoding="utf-8") as lines:  # not splitlines, which also splits at the U+2028 of a text
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                prompts.append(_messages(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"prompts: line {number} of {path} is not a prompt ({error}); a line is "
                    '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}.'
                ) from error
    return prompts


def write_jsonl(path: Path, prompts: Iterable[Messages]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for messages in prompts:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def openings(seed: int) -> Iterator[str]:
    """Endless beginnings of user messages, to be finished by a chat model (Magpie, Xu et al. 2024, arXiv:2406.08464).

    Left to itself a small model asks about few things. The beginnings spread it over tasks and topics.
    """
    lines = (files(__package__) / "openings.txt").read_text(encoding="utf-8").splitlines()
    beginnings, topics = _parts([line for line in lines if not line.startswith("#")])
    draw = random.Random(seed)
    while True:
        yield draw.choice(beginnings).replace("{topic}", draw.choice(topics))


def python_prompts(seed: int) -> Iterator[str]:
    """Endless tasks about functions of Python's standard library: complete, explain, edit, test.

    Every function comes up once before one comes up again, with another task.
    """
    functions = list(_functions(Path(sysconfig.get_paths()["stdlib"])))
    names = [fields["name"] for fields in functions]
    draw = random.Random(seed)
    while functions:  # some installations come without sources
        draw.shuffle(functions)
        for fields in functions:
            yield draw.choice(_CODE_TASKS).format(**fields, other=draw.choice(names))


def text_prompts(texts: list[str], seed: int) -> Iterator[str]:
    """Endless tasks about given texts: summarise, rewrite, correct, extract."""
    draw = random.Random(seed)
    while texts:
        yield draw.choice(_TEXT_TASKS).format(text=draw.choice(texts))


def follow_up(messages: Messages, answer: str, draw: random.Random) -> Messages:
    """The chat after `answer`, with another question about it."""
    reply = {"role": "assistant", "content": answer}
    return [*messages, reply, {"role": "user", "content": draw.choice(_FOLLOW_UPS)}]


def without_overlap(prompts: Iterable[Messages], held_out: Iterable[Messages], num_words: int = 8) -> list[Messages]:
    """The prompts that share no run of `num_words` words with a held-out prompt. A shorter one is one run."""
    seen = {run for messages in held_out for run in _runs(messages, num_words)}
    return [messages for messages in prompts if seen.isdisjoint(_runs(messages, num_words))]


def without_repeats(prompts: Iterable[Messages]) -> list[Messages]:
    """The prompts without duplicates."""
    return list({json.dumps(messages): messages for messages in prompts}.values())


def without_favourites(texts: Iterable[str], max_alike: int = 60, num_words: int = 4) -> list[str]:
    """The texts, at most `max_alike` of those that open with the same words."""
    kept, opened = [], Counter[tuple[str, ...]]()
    for text in texts:
        opening = tuple(text.lower().split()[:num_words])
        if opened[opening] < max_alike:
            opened[opening] += 1
            kept.append(text)
    return kept


def _messages(entry: Any) -> Messages:
    messages = entry["messages"] if "messages" in entry else [{"role": "user", "content": entry["prompt"]}]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("its last message is not the user's")
    if not all(isinstance(message["content"], str) for message in messages):
        raise ValueError("a message's content is not a text")
    return messages


def _parts(lines: list[str]) -> tuple[list[str], list[str]]:
    """(beginnings, topics): the two parts of the file, with an empty line between them."""
    middle = lines.index("")
    return [line for line in lines[:middle] if line], [line for line in lines[middle:] if line]


def _functions(root: Path) -> Iterator[dict[str, str]]:
    """Name, head, source and summary of each short documented function under `root`."""
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError):
            continue
        lines = text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            doc = ast.get_docstring(node)
            if not doc or not 40 <= len(doc) <= 800 or len(node.body) < 2 or (node.end_lineno or 0) - node.lineno > 40:
                continue
            source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
            head = textwrap.dedent("".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
            summary = " ".join(doc.split("\n\n")[0].split())
            yield {"name": node.name, "head": head, "source": source, "summary": summary}


def _runs(messages: Messages, num_words: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", " ".join(message["content"] for message in messages).lower())
    return {tuple(words[i : i + num_words]) for i in range(max(1, len(words) - num_words + 1))}
