"""Pipelines take drafters and their names, and give what they give without one."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from pipeline_folders import GREEDY, TEXTS, assert_same_text, generator, write_folders
from tiny import perturbed, tiny_target, tiny_tokenizer
from transformers import TextStreamer, pipelines
from transformers.pipelines import TextGenerationPipeline

import hf_specdec
from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.eagle3.session import Eagle3Drafter

CHAT = [{"role": "user", "content": "w7 w8 w9"}]


@pytest.fixture
def target():
    """A copy: a pipeline may move it, and doors enable it."""
    return perturbed(tiny_target("llama"), 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return write_folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """Names of the drafters that were loaded."""
    names, load = [], AutoDrafter.from_pretrained.__func__

    def counted(cls, name, **options):
        names.append(Path(name).name)
        return load(cls, name, **options)

    monkeypatch.setattr(AutoDrafter, "from_pretrained", classmethod(counted))
    return names


# Names


@pytest.mark.parametrize("kind", [str, Path])
def test_a_smaller_models_folder_is_our_draft_model(folders, target, kind):
    pipe = generator(target, assistant_model=kind(folders["small"]))
    assert type(pipe.assistant_model) is DraftModelDrafter
    assert_same_text(pipe, target, batch_size=3)
    assert pipe.assistant_model.last_stats.num_accepted > 0


def test_names_of_target_and_drafter_are_enough(folders, loads):
    names = {"model": str(folders["target"]), "assistant_model": str(folders["head"])}
    expected = transformers.pipeline("text-generation", model=names["model"])(TEXTS, **GREEDY)
    assert transformers.pipeline("text-generation", **names)(TEXTS, **GREEDY) == expected
    assert hf_specdec.pipeline("text-generation", **names)(TEXTS, **GREEDY) == expected
    assert loads == ["head", "head"]


def test_every_import_of_pipeline_and_the_class_itself_take_a_name(folders, target):
    unpatched = pipelines.pipeline.__wrapped__  # what was imported before hf_specdec
    arguments = {"model": target, "tokenizer": tiny_tokenizer(), "assistant_model": str(folders["head"])}
    for make in (transformers.pipeline, pipelines.pipeline, unpatched):
        assert type(make("text-generation", **arguments).assistant_model) is Eagle3Drafter
    assert type(TextGenerationPipeline(**arguments).assistant_model) is Eagle3Drafter


def test_a_name_at_call_time_is_loaded_once_and_again_where_the_target_has_changed(folders, target, loads):
    pipe = generator(target)
    for _ in range(2):
        assert_same_text(pipe, target, assistant_model=str(folders["head"]), batch_size=2)
    assert_same_text(pipe, target, assistant_model=str(folders["small"]))
    assert loads == ["head", "small"]
    inputs = tiny_tokenizer()("w7 w8", return_tensors="pt")
    out = target.generate(**inputs, **GREEDY, assistant_model=folders["head"], return_dict_in_generate=True)
    assert out.specdec.num_drafted > 0 and loads == ["head", "small"]
    target.to(torch.bfloat16)
    target.generate(**inputs, **GREEDY, assistant_model=str(folders["head"]))
    assert loads == ["head", "small", "head"]


def test_a_pipelines_drafter_is_loaded_once_for_all_calls(folders, target, loads):
    pipe = generator(target, assistant_model=str(folders["head"]))
    drafter = pipe.assistant_model
    for text in TEXTS:
        pipe(text, **GREEDY)
    assert pipe.assistant_model is drafter and loads == ["head"]


def test_a_hub_name_is_read_with_the_pipelines_token_and_not_with_its_revision(folders, target, monkeypatch):
    asked = []

    def snapshot_download(name, revision, token, **options):
        asked.append((name, revision, token))
        return str(folders["head"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    options = {"model": target, "tokenizer": tiny_tokenizer(), "assistant_model": "org/head", "token": "secret"}
    pipe = transformers.pipeline("text-generation", revision="v1", trust_remote_code=True, **options)
    assert type(pipe.assistant_model) is Eagle3Drafter
    assert set(asked) == {("org/head", None, "secret")}
    asked.clear()
    hf_specdec.pipeline("text-generation", **options, assistant_kwargs={"revision": "v2"})
    assert set(asked) == {("org/head", "v2", "secret")}


def test_options_of_the_drafter_come_with_its_name(folders, target):
    options = {"num_draft_tokens": 2, "governor": "off"}
    name = folders["head"]
    pipe = hf_specdec.pipeline(
        "text-generation", target, tokenizer=tiny_tokenizer(), assistant_model=name, assistant_kwargs=options
    )
    assert pipe.assistant_model.spec_config.num_draft_tokens == 2
    assert_same_text(pipe, target)
    with pytest.raises(ValueError, match="`assistant_kwargs` is given beside a loaded"):
        hf_specdec.pipeline("text-generation", target, assistant_model=pipe.assistant_model, assistant_kwargs=options)


# Objects


@pytest.mark.parametrize("bound", [True, False])
def test_a_drafter_object_is_taken_bound_or_not(target, bound):
    drafter = DraftModelDrafter(perturbed(target, 0.02))
    if bound:
        drafter.bind(target)
        target.config.pad_token_id = 5  # transformers would ask for an assistant_tokenizer
    pipe = generator(target, assistant_model=drafter)
    assert pipe.assistant_model is drafter
    assert_same_text(pipe, target)
    assert drafter.last_stats.num_drafted > 0


def test_a_model_as_the_assistant_stays_transformers_own(target):
    assistant = perturbed(target, 0.02)
    ours = hf_specdec.pipeline("text-generation", target, tokenizer=tiny_tokenizer(), assistant_model=assistant)
    for pipe in (generator(target, assistant_model=assistant), ours):
        assert pipe.assistant_model is assistant
        assert_same_text(pipe, target)


# What a pipeline gives


@pytest.fixture(scope="module")
def pair(folders):
    """The same pipeline without an assistant and with one."""
    target, tokenizer = tiny_target("llama"), tiny_tokenizer()
    tokenizer.add_tokens(["abcdef"])  # transformers reads the tokenizer's spaces off this word
    without, fast = (
        TextGenerationPipeline(model=target, tokenizer=tokenizer, device="cpu", **options)
        for options in ({}, {"assistant_model": str(folders["small"])})
    )

    def call(*args, **options):
        fast.assistant_model.last_stats = None
        expected, found = (pipe(*args, **options) for pipe in (without, fast))
        assert fast.assistant_model.last_stats.num_drafted > 0
        return expected, found

    call.fast = fast
    return call


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 3},
        {"return_full_text": False},
        {"return_tensors": True, "batch_size": 2},
        {"skip_special_tokens": False},
        {"prefix": "w20 w21 "},
        {"stop_sequence": "w86"},
        {"stop_sequence": ["w86", "w89"], "batch_size": 3},
        {"repetition_penalty": 1.3, "batch_size": 3},
        {"handle_long_generation": "hole"},
        {"num_return_sequences": 3, "do_sample": True, "top_k": 1},
    ],
    ids=str,
)
def test_the_output_is_what_the_pipeline_gives_without_an_assistant(pair, options):
    expected, found = pair(TEXTS, **{**GREEDY, **options})
    assert found == expected
    assert len({json.dumps(answer) for answer in expected}) == len(TEXTS)


@pytest.mark.parametrize(
    "chats",
    [CHAT, [CHAT, [*CHAT, {"role": "assistant", "content": "w20"}, {"role": "user", "content": "w21"}]]],
    ids=["one", "two"],
)
def test_chats_are_answered_as_without_an_assistant(pair, chats):
    expected, found = pair(chats, **GREEDY, batch_size=2)
    assert found == expected


def test_a_chat_that_ends_in_an_answer_is_continued(pair):
    expected, found = pair([*CHAT, {"role": "assistant", "content": "w20 w21"}], **GREEDY, continue_final_message=False)
    assert found == expected


def test_a_generator_of_texts_is_answered_lazily_and_the_same(pair):
    expected, found = pair(TEXTS, **GREEDY)
    lazily = pair.fast((text for text in TEXTS), **GREEDY)
    assert list(lazily) == found == expected


def test_a_streamer_prints_the_same_text(pair, capsys):
    expected, found = pair(TEXTS[0], **GREEDY, streamer=TextStreamer(tiny_tokenizer(), skip_prompt=True))
    first, second = capsys.readouterr().out.splitlines()
    assert found == expected and first == second and len(first.split()) > 10
