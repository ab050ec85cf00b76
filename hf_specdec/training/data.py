"""What every method trains on: prompts, the target's own answers, and its hidden states along them.

A data folder holds `data.json` (what was asked for), `prompts.jsonl`, `follow_ups.jsonl`, `shards/*.safetensors`, and
in `refused-*.txt` the numbers of the prompts whose answers are not kept. Each stage goes on where it stopped; several
processes share the prompts between them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .decode import Prompt, Text, decode
from .prompts import (
    Messages,
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
from .shards import HELD_OUT, read_ids, shards, write_shard

_SHARD_TOKENS = 50_000
_MAX_TURN = 160  # tokens of a self-synthesised user message
_TEXT_WORDS = 25  # words that make a message a text to work on
_MARK = "\N{SYMBOL FOR NULL}"
_LEAST_ANSWER = 8  # tokens; shorter answers teach little
_WINDOW = 16  # prompts a row that are sorted by length
_OPENING = 5  # tokens of an answer by which answers are alike


@dataclass(frozen=True)
class DataOptions:
    """How much data, and of which kind.

    Attributes:
        num_tokens: answer tokens to collect.
        max_length: most tokens of a prompt with its answer.
        max_new_tokens: most tokens of an answer.
        temperatures: the answers take these in turn; 0 is greedy.
        num_synthesised: user messages that the target writes itself (Magpie).
        num_code: tasks about functions of Python's standard library.
        num_text: tasks about the longer ones of the synthesised messages.
        num_follow_ups: second turns, about answers that were given; their tokens come on top of num_tokens.
        max_alike: largest share of answers that may open alike.
        num_rows: texts decoded side by side by each process.
        seed: of everything that is drawn.
    """

    num_tokens: int = 2_000_000
    max_length: int = 512
    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.7)
    num_synthesised: int = 10_000
    num_code: int = 4_000
    num_text: int = 2_000
    num_follow_ups: int = 2_000
    max_alike: float = 0.01
    num_rows: int = 96
    seed: int = 0


def collect(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    hidden_states: tuple[int, ...],
    options: DataOptions,
    files: list[Path],
    held_out: list[Path],
) -> None:
    """Fill `folder` up to `options.num_tokens` answer tokens.

    Args:
        target: the model that answers.
        tokenizer: its tokenizer; the chat template is used.
        folder: where the data goes; what is there already is kept.
        hidden_states: the states to keep: index e enters layer e, the number of layers is the final one after the norm.
        options: how much of what.
        files: JSONL files with prompts, used besides those that are made here.
        held_out: JSONL files with prompts that must not be trained on, nor anything that quotes eight words of them.

    Raises:
        ValueError: the folder was made for another target, template or set of states.
    """
    state = PartialState()
    if state.is_main_process:
        _claim(folder, target, tokenizer, hidden_states)
    state.wait_for_everyone()
    writer = _Writer(target, tokenizer, folder, hidden_states, options)
    given, kept_out = ([messages for path in paths for messages in read_jsonl(path)] for paths in (files, held_out))
    if not (folder / "prompts.jsonl").exists():
        writer.synthesise()
        state.wait_for_everyone()
        if state.is_main_process:
            _write_prompts(folder, options, given, kept_out)
        state.wait_for_everyone()
    prompts = read_jsonl(folder / "prompts.jsonl")
    writer.answer(prompts, first_index=0, num_tokens=options.num_tokens)
    state.wait_for_everyone()
    if options.num_follow_ups:
        if state.is_main_process and not (folder / "follow_ups.jsonl").exists():
            _write_follow_ups(tokenizer, folder, options, prompts, kept_out)
        state.wait_for_everyone()
        writer.answer(read_jsonl(folder / "follow_ups.jsonl"), first_index=len(prompts), num_tokens=None)
        state.wait_for_everyone()


class _Writer:
    """The target at work for a data folder; the arguments are those of `collect`."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        hidden_states: tuple[int, ...],
        options: DataOptions,
    ) -> None:
        self.target, self.tokenizer, self.folder = target, tokenizer, folder
        self.hidden_states, self.options, self.state = hidden_states, options, PartialState()

    def synthesise(self) -> None:
        """Have the target write user messages, from nothing but the beginning of the user's turn."""
        state, options = self.state, self.options
        mine = options.num_synthesised // state.num_processes
        path = self.folder / f"synthesised-{state.process_index}-of-{state.num_processes}.jsonl"
        have = len(_lines(path)) if path.exists() else 0
        if have >= mine:
            return
        before = _chat(self.tokenizer, _MARK).partition(_MARK)[0]
        seed = self._seed(have)  # texts end in another order than they began, so a second try draws anew
        begun: dict[int, str] = {}

        def prompts() -> Iterator[Prompt]:
            for index, opening in enumerate(islice(openings(seed), 2 * (mine - have) + options.num_rows)):
                begun[index] = opening
                ids = self.tokenizer(before + opening, add_special_tokens=False)["input_ids"]
                yield Prompt(index, ids, temperature=1.0, max_new_tokens=_MAX_TURN)

        # Line by line, so that a killed process leaves no half line behind.
        with path.open("a", encoding="utf-8", buffering=1) as file, _bar("user messages", mine, have) as bar:
            for text in self._decode(prompts(), (), seed):
                if not text.ended or text.looped:
                    continue
                rest = self.tokenizer.decode(text.answer[:-1], skip_special_tokens=True)
                message = (begun[text.prompt.index] + rest).strip()
                if len(message.split()) < 4:
                    continue
                file.write(json.dumps(message, ensure_ascii=False) + "\n")
                bar.update()
                have += 1  # not bar.n: a bar that is not shown does not count
                if have >= mine:
                    return

    def answer(self, chats: list[Messages], first_index: int, num_tokens: int | None) -> None:
        """Answer the chats that no shard holds yet, until there are enough tokens.

        Args:
            chats: what to answer; the first one has the number `first_index`.
            num_tokens: answer tokens to reach, those in the shards included; None to answer all.
        """
        state, folder = self.state, self.folder
        done = {int(index) for path in folder.glob("refused-*.txt") for index in path.read_text().split()}
        opened, have = Counter[tuple[int, ...]](), 0
        for path in shards(folder):
            for index, ids, prompt_length in read_ids(path):
                if first_index <= index < first_index + len(chats):
                    done.add(index)
                    opened[tuple(ids[prompt_length : prompt_length + _OPENING])] += 1
                    have += len(ids) - prompt_length
        state.wait_for_everyone()  # nobody writes before everybody has counted
        mine = None if num_tokens is None else (num_tokens - have) // state.num_processes
        if mine is not None and mine <= 0:
            return
        todo = [
            (index, messages)
            for index, messages in enumerate(chats, start=first_index)
            if index not in done and index % state.num_processes == state.process_index
        ]
        kept: list[Text] = []
        got = 0
        refused = folder / f"refused-{state.process_index}.txt"
        with refused.open("a", buffering=1) as refusals, _bar("answer tokens", mine, 0) as bar:
            for text in self._decode(self._prompts(todo), self.hidden_states, self._seed(have)):
                opening = tuple(text.answer[:_OPENING])
                allowed = max(10, int(self.options.max_alike * opened.total()))
                if len(text.answer) < _LEAST_ANSWER or opened[opening] >= allowed:
                    refusals.write(f"{text.prompt.index}\n")
                    continue
                opened[opening] += 1
                kept.append(text)
                got += len(text.answer)
                bar.update(len(text.answer))
                if sum(len(text.ids) for text in kept) >= _SHARD_TOKENS:
                    write_shard(folder, kept, state.process_index)
                    kept = []
                if mine is not None and got >= mine:
                    break
        if kept:
            write_shard(folder, kept, state.process_index)
        if mine is not None and got < mine and state.is_main_process:
            tqdm.write(f"All prompts are answered before {num_tokens:,} tokens were reached; more prompts would help.")

    def _prompts(self, todo: list[tuple[int, Messages]]) -> Iterator[Prompt]:
        """Prompts, those of alike length together: attention costs what the longest row costs."""
        options, size = self.options, _WINDOW * self.options.num_rows
        for start in range(0, len(todo), size):
            window = []
            for index, messages in todo[start : start + size]:
                text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                temperature = options.temperatures[index // self.state.num_processes % len(options.temperatures)]
                window.append(Prompt(index, ids, temperature, options.max_new_tokens))
            window.sort(key=lambda prompt: len(prompt.ids))
            yield from (prompt for prompt in window if len(prompt.ids) + _LEAST_ANSWER <= options.max_length)

    def _decode(self, prompts: Iterator[Prompt], hidden_states: tuple[int, ...], seed: int) -> Iterator[Text]:
        eos = self.target.generation_config.eos_token_id
        return decode(
            self.target,
            prompts,
            num_rows=self.options.num_rows,
            max_length=self.options.max_length,
            eos=set(eos) if isinstance(eos, list) else {eos} - {None},
            hidden_states=hidden_states,
            seed=seed,
        )

    def _seed(self, have: int) -> int:
        """Another one for each process, and for each time that a stage goes on."""
        return self.options.seed * 1_000_003 + self.state.process_index * 1009 + have


def _claim(
    folder: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, hidden_states: tuple[int, ...]
) -> None:
    """Write what the data is of, or check that it is the same as before."""
    asked = {
        "target": target.config._name_or_path,
        "weights": _fingerprint(target),
        "vocab_size": target.config.get_text_config().vocab_size,
        "hidden_size": target.config.get_text_config().hidden_size,
        "hidden_states": list(hidden_states),
        "chat": _chat(tokenizer, _MARK),
    }
    path = folder / "data.json"
    if not path.exists():
        (folder / "shards").mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asked, indent=1) + "\n")
        return
    found = json.loads(path.read_text())
    for name, value in asked.items():
        if name != "target" and found.get(name, value) != value:  # a target may have moved
            raise ValueError(
                f"data: {folder} was made with {name} {found[name]!r} and this run has {value!r}; "
                "choose another folder, or empty this one."
            )


def _fingerprint(target: PreTrainedModel) -> str:
    """Tells weights apart by the first number of each, which is the same on every device."""
    numbers = [float(parameter.detach().flatten()[0]) for parameter in target.parameters()]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]


def _write_prompts(folder: Path, options: DataOptions, given: list[Messages], held_out: list[Messages]) -> None:
    """Merge, filter and shuffle all prompts."""
    written = [json.loads(line) for path in sorted(folder.glob("synthesised-*.jsonl")) for line in _lines(path)]
    written.sort()  # so that the order of the processes does not matter for what is drawn here
    texts = [message for message in written if len(message.split()) >= _TEXT_WORDS]
    tasks = [
        *islice(python_prompts(options.seed), options.num_code),
        *islice(text_prompts(texts, options.seed), options.num_text),
    ]
    # Our own tasks open alike by design; a model's messages because it has favourites.
    prompts = without_repeats([*given, *_asked(without_favourites(written)), *_asked(tasks)])
    prompts = without_overlap(prompts, held_out)
    random.Random(options.seed).shuffle(prompts)
    if not prompts:
        raise ValueError("prompts: there are none; name a JSONL file, or ask for synthesised, code or text prompts.")
    partial = folder / ".prompts.partial"
    write_jsonl(partial, prompts)
    partial.replace(folder / "prompts.jsonl")


def _write_follow_ups(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    options: DataOptions,
    prompts: list[Messages],
    held_out: list[Messages],
) -> None:
    """Second turns about finished answers; never about held-out ones, which they would quote."""
    answers = {
        index: tokenizer.decode(ids[prompt_length:], skip_special_tokens=True).strip()
        for path in shards(folder)
        for index, ids, prompt_length in read_ids(path)
        if index % HELD_OUT
    }
    draw = random.Random(options.seed)
    chosen = draw.sample(sorted(answers), min(options.num_follow_ups, len(answers)))
    partial = folder / ".follow_ups.partial"
    chats = [follow_up(prompts[index], answers[index], draw) for index in chosen]
    write_jsonl(partial, without_overlap(chats, held_out))  # an answer may quote what its prompt does not
    partial.replace(folder / "follow_ups.jsonl")


def _asked(texts: list[str]) -> list[Messages]:
    return [[{"role": "user", "content": text}] for text in texts]


def _chat(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    return tokenizer.apply_chat_template([{"role": "user", "content": message}], tokenize=False)


def _lines(path: Path) -> list[str]:
    """Lines of a JSONL file; `splitlines` would also split at the U+2028 of a text."""
    with path.open(encoding="utf-8") as file:
        return list(file)


def _bar(title: str, total: int | None, have: int) -> Any:
    return tqdm(desc=title, total=total, initial=have, disable=not PartialState().is_main_process, mininterval=5)
