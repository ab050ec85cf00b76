"""training/data.py: the target's own answers with its hidden states, collected once, whatever happens in between."""

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import perturbed, tiny_target, tiny_tokenizer
from tqdm import tqdm

from hf_specdec.training import data
from hf_specdec.training.data import DataOptions, collect
from hf_specdec.training.decode import Text
from hf_specdec.training.prompts import read_jsonl
from hf_specdec.training.shards import HELD_OUT, Sequence, read_ids, read_shard, shards

STATES = (0, 2, 3)
OPTIONS = DataOptions(
    num_tokens=400,
    max_length=48,
    max_new_tokens=24,
    temperatures=(0.0,),
    num_synthesised=0,
    num_code=0,
    num_text=0,
    num_follow_ups=0,
    num_rows=4,
)


def write_prompts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def random_prompts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(6, 97)}" for _ in range(draw.randrange(3, 9))) for _ in range(count)]


def gather(
    folder: Path, texts: list[str] | None = None, target=None, held_out: tuple[str, ...] = (), **changes
) -> Path:
    """The data folder after `collect` was asked for the answers to `texts`."""
    folder.mkdir(exist_ok=True)
    files = [] if texts is None else [write_prompts(folder.with_suffix(".jsonl"), texts)]
    kept_out = [write_prompts(folder.with_suffix(".held-out.jsonl"), list(held_out))] if held_out else []
    options = dataclasses.replace(OPTIONS, **changes)
    collect(target or tiny_target(), tiny_tokenizer(), folder, STATES, options, files, kept_out)
    return folder


def texts_of(folder: Path) -> list[Sequence]:
    return [text for path in shards(folder) for text in read_shard(path)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def greedy(ids: list[int], max_new_tokens: int = 24) -> list[int]:
    return tiny_target().generate(torch.tensor([ids]), do_sample=False, max_new_tokens=max_new_tokens)[0].tolist()


# What is collected


def test_shards_hold_the_targets_answers_and_the_states_of_a_forward(tmp_path):
    target, tokenizer = tiny_target(), tiny_tokenizer()
    folder = gather(tmp_path / "data", random_prompts(30), temperatures=(0.0, 1.0))
    asked, texts, drawn = read_jsonl(folder / "prompts.jsonl"), texts_of(folder), 0
    assert sum(len(text.ids) - text.prompt_length for text in texts) >= 400
    for text in texts:
        chat = tokenizer.apply_chat_template(asked[text.index], add_generation_prompt=True, tokenize=False)
        prompt, ids = tokenizer(chat, add_special_tokens=False)["input_ids"], text.ids.tolist()
        assert ids[: text.prompt_length] == prompt
        if text.index % 2 == 0:
            assert ids == greedy(prompt)
        drawn += ids != greedy(prompt)
        with torch.no_grad():
            states = target(text.ids[None], output_hidden_states=True).hidden_states
        expected = torch.stack([states[i][0] for i in STATES], dim=1)
        torch.testing.assert_close(text.states[:-1], expected[:-1], atol=1e-5, rtol=1e-4)
        assert text.states.shape == expected.shape and not text.states[-1].any()
    assert drawn > 3, "every other answer should be drawn"


def test_ids_are_read_without_the_states(tmp_path):
    folder = gather(tmp_path / "data", random_prompts(30))
    expected = [(text.index, text.ids.tolist(), text.prompt_length) for text in texts_of(folder)]
    assert [entry for path in shards(folder) for entry in read_ids(path)] == expected


def test_the_target_writes_prompts_from_openings(tmp_path):
    folder = gather(tmp_path / "data", num_synthesised=6, num_text=4, max_length=200, max_new_tokens=160)
    (path,) = folder.glob("synthesised-*.jsonl")
    written = [json.loads(line) for line in path.read_text().splitlines()]
    prompts = [messages[0]["content"] for messages in read_jsonl(folder / "prompts.jsonl")]
    assert len(written) == 6 and set(written) < set(prompts)
    assert all(any(text in prompt for text in written) for prompt in prompts), "tasks are about what was written"
    assert all(len(text.split()) >= 4 and "<" not in text for text in written)


def test_held_out_prompts_and_what_quotes_them_are_kept_out(tmp_path):
    texts = random_prompts(12)
    quoted = "w6 w7 w8 w9 w10 w11 w12 w13"
    folder = gather(tmp_path / "data", [*texts, f"w50 {quoted}", texts[0]], held_out=(f"{quoted} w14", texts[3]))
    prompts = [messages[0]["content"] for messages in read_jsonl(folder / "prompts.jsonl")]
    assert sorted(prompts) == sorted(set(texts) - {texts[3]})


def test_a_prompt_without_room_for_an_answer_is_left_out(tmp_path):
    long = " ".join(f"w{i}" for i in range(10, 50))
    folder = gather(tmp_path / "data", [*random_prompts(5), long], num_tokens=10_000)
    assert len(texts_of(folder)) == 5 and len(read_jsonl(folder / "prompts.jsonl")) == 6


def test_second_turns_whose_answers_quote_a_held_out_prompt_are_kept_out(tmp_path):
    options = dict(num_follow_ups=19, max_length=96, num_tokens=10_000)
    free = read_jsonl(gather(tmp_path / "free", random_prompts(20), **options) / "follow_ups.jsonl")
    answer = next(chat[1]["content"] for chat in free if len(chat[1]["content"].split()) >= 8)
    folder = gather(tmp_path / "data", random_prompts(20), held_out=(" ".join(answer.split()[:8]),), **options)
    chats = read_jsonl(folder / "follow_ups.jsonl")
    assert answer not in [chat[1]["content"] for chat in chats]
    assert chats and all(chat in free for chat in chats)


def test_second_turns_quote_the_answers_they_are_about(tmp_path):
    folder = gather(tmp_path / "data", random_prompts(20), num_follow_ups=6, max_length=96)
    asked, chats = read_jsonl(folder / "prompts.jsonl"), read_jsonl(folder / "follow_ups.jsonl")
    assert all(asked.index(chat[:1]) % HELD_OUT for chat in chats), "a follow-up would train on a held-out answer"
    texts = {text.index: text for text in texts_of(folder)}
    answers = {
        index: tiny_tokenizer().decode(text.ids[text.prompt_length :], skip_special_tokens=True)
        for index, text in texts.items()
    }
    assert len(chats) == 6
    for number, chat in enumerate(chats):
        assert [message["role"] for message in chat] == ["user", "assistant", "user"]
        assert answers[asked.index(chat[:1])] == chat[1]["content"]
        assert texts[20 + number].ids.tolist() == greedy(
            texts[20 + number].ids[: texts[20 + number].prompt_length].tolist()
        )


# Answers that are not kept


def scripted_decode(answers: list[list[int]], asked: list[int]):
    """A decoder that gives these answers; `asked` is filled with the numbers of the prompts."""

    def decode(target, prompts, hidden_states=(), **options):
        prompts = list(prompts)
        for prompt in prompts:
            asked.append(prompt.index)
        for prompt in sorted(prompts, key=lambda prompt: prompt.index):
            ids = [*prompt.ids, *answers[prompt.index]]
            yield Text(prompt, ids, states=torch.zeros(len(ids), len(hidden_states), 64))

    return decode


@pytest.mark.parametrize(("share", "kept"), [(0.01, 10), (0.5, 29)])
def test_answers_that_open_alike_are_capped(tmp_path, monkeypatch, share, kept):
    alike = [[10, 11, 12, 13, 14, 20 + i, 21, 22] for i in range(40)]
    others = [[30 + i, 1, 2, 3, 4, 5, 6, 7] for i in range(30)]
    asked: list[int] = []
    monkeypatch.setattr(data, "decode", scripted_decode(others + alike, asked))
    folder = gather(tmp_path / "data", random_prompts(70), num_tokens=10_000, max_alike=share, num_rows=100)
    answers = [text.ids[text.prompt_length :].tolist() for text in texts_of(folder)]
    assert len(asked) == 70
    assert sum(answer in others for answer in answers) == 30
    assert sum(answer in alike for answer in answers) == kept


def test_short_answers_are_left_out_and_not_asked_for_again(tmp_path, monkeypatch, capsys):
    answers = [list(range(10 + i, 18 + i - i % 2)) for i in range(20)]  # 8 and 7 tokens
    asked: list[int] = []
    monkeypatch.setattr(data, "decode", scripted_decode(answers, asked))
    folder = gather(tmp_path / "data", random_prompts(20), num_tokens=1000)
    assert sorted(asked) == list(range(20))
    assert sorted(text.index for text in texts_of(folder)) == list(range(0, 20, 2))
    assert "All prompts are answered before 1,000 tokens were reached" in capsys.readouterr().out
    before = contents(folder)
    gather(folder, num_tokens=1000)
    assert len(asked) == 20 and contents(folder) == before


def test_no_note_where_there_were_prompts_enough(tmp_path, capsys):
    gather(tmp_path / "data", random_prompts(30))
    assert "All prompts" not in capsys.readouterr().out


# Going on


def test_going_on_after_an_interruption_loses_and_repeats_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_SHARD_TOKENS", 150)
    write = data.write_shard

    def write_once(*arguments):
        write(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(data, "write_shard", write_once)
        with pytest.raises(KeyboardInterrupt):
            gather(tmp_path / "data", random_prompts(40))
    folder = tmp_path / "data"
    before = contents(folder)
    assert len(shards(folder)) == 1
    gather(folder)
    assert before.items() <= contents(folder).items(), "what was there should stay"
    texts = texts_of(folder)
    assert len(shards(folder)) > 2 and len({text.index for text in texts}) == len(texts)
    num_tokens = sum(len(text.ids) - text.prompt_length for text in texts)
    assert 400 <= num_tokens < 400 + 24
    assert all(text.ids.tolist() == greedy(text.ids[: text.prompt_length].tolist()) for text in texts)


def test_asking_again_does_nothing_and_asking_for_more_goes_on(tmp_path, monkeypatch):
    folder = gather(tmp_path / "data", random_prompts(40), num_follow_ups=4, max_length=96)
    before = contents(folder)
    with monkeypatch.context() as patched:
        patched.setattr(data, "decode", scripted_decode([], []))
        gather(folder, num_follow_ups=4, max_length=96)
        assert contents(folder) == before
    gather(folder, num_tokens=600)
    assert before.items() <= contents(folder).items()
    assert sum(len(text.ids) - text.prompt_length for text in texts_of(folder) if text.index < 40) >= 600


def test_writing_prompts_goes_on_after_an_interruption(tmp_path, monkeypatch):
    class Interrupted(Exception):
        pass

    def interrupt(*arguments):
        raise Interrupted

    options = dict(num_synthesised=5, max_length=200)
    with monkeypatch.context() as patched:
        patched.setattr(data, "_write_prompts", interrupt)
        with pytest.raises(Interrupted):
            gather(tmp_path / "data", **options)
    (path,) = (tmp_path / "data").glob("synthesised-*.jsonl")
    lines = path.read_text().splitlines()
    assert len(lines) == 5
    path.write_text("\n".join(lines[:2]) + "\n")
    gather(tmp_path / "data", **options)
    again = path.read_text().splitlines()
    assert len(again) == 5 and again[:2] == lines[:2] and len(set(again)) == 5


def test_a_process_that_shows_no_bar_stops_at_its_share(tmp_path, monkeypatch):
    """tqdm does not count where it does not show."""
    monkeypatch.setattr(data, "_bar", lambda *arguments: tqdm(disable=True))
    folder = gather(tmp_path / "data", random_prompts(60), num_synthesised=3, max_length=200)
    assert sum(len(text.ids) - text.prompt_length for text in texts_of(folder)) < 400 + 24
    assert len(next(folder.glob("synthesised-*.jsonl")).read_text().splitlines()) == 3


def test_processes_answer_prompts_of_their_own(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    for process in (0, 1):
        state = SimpleNamespace(
            process_index=process, num_processes=2, is_main_process=process == 0, wait_for_everyone=lambda: None
        )
        monkeypatch.setattr(data, "PartialState", lambda state=state: state)
        gather(folder, random_prompts(90), num_tokens=1000, temperatures=(0.0, 1.0))
    by_process = [[text for path in shards(folder) for text in read_shard(path) if path.stem[-1] == p] for p in "01"]
    for process, texts in enumerate(by_process):
        assert texts and {text.index % 2 for text in texts} == {process}
        is_greedy = [text.ids.tolist() == greedy(text.ids[: text.prompt_length].tolist()) for text in texts]
        assert any(is_greedy) and not all(is_greedy), "each should have answers of every temperature"


# Refusals


def test_data_of_something_else_is_refused(tmp_path):
    folder, options = gather(tmp_path / "data", random_prompts(5)), dataclasses.replace(OPTIONS, num_tokens=10)
    target, tokenizer, other_chat = tiny_target(), tiny_tokenizer(), tiny_tokenizer()
    other_chat.chat_template = "<bos>" + other_chat.chat_template
    for what, model, words, states in (
        ("weights", perturbed(target, 0.1), tokenizer, STATES),
        ("vocab_size", tiny_target(vocab_size=128), tokenizer, STATES),
        ("hidden_states", target, tokenizer, (0, 1, 3)),
        ("chat", target, other_chat, STATES),
    ):
        if what == "vocab_size":
            stored = json.loads((folder / "data.json").read_text())
            del stored["weights"]  # as an older version left it
            (folder / "data.json").write_text(json.dumps(stored))
        with pytest.raises(ValueError, match=rf"data: .* was made with {what} .* and this run has .*; choose another"):
            collect(model, words, folder, states, options, [], [])
    moved = perturbed(target, 0.0)
    moved.config._name_or_path = "/moved/here"
    collect(moved, tokenizer, folder, STATES, options, [], [])


def test_files_are_checked_before_anything_runs(tmp_path, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(data, "decode", scripted_decode([], asked))
    options = dataclasses.replace(OPTIONS, num_synthesised=5)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no json\n")
    for files, held_out in (([bad], []), ([], [bad])):
        with pytest.raises(ValueError, match=r"line 1 of .*bad\.jsonl is not a prompt"):
            collect(tiny_target(), tiny_tokenizer(), tmp_path / "data", STATES, options, files, held_out)
    assert not asked


def test_a_run_without_prompts_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="prompts: there are none; name a JSONL file"):
        gather(tmp_path / "data")
