"""Pipelines take drafters and their names, and give what they give without one."""

import json
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from eagle3_formats import random_head, write, write_head
from tiny import (
    perturbed,
    randomise,
    tiny_config,
    tiny_encoder_decoder,
    tiny_target,
    tiny_tokenizer,
)
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    PreTrainedModel,
    TextStreamer,
    pipelines,
)
from transformers.pipelines import Pipeline, TextGenerationPipeline

import hf_specdec
from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.eagle3.session import Eagle3Drafter

GREEDY = {"do_sample": False, "max_new_tokens": 20}
TEXTS = ["w7 w8 w9 w10", "w11 w12", "w13 w7 w8"]
CHAT = [{"role": "user", "content": "w7 w8 w9"}]
PATCHED = ((Pipeline, "__init__"), (pipelines, "pipeline"))


@pytest.fixture
def not_installed():
    hf_specdec.uninstall()
    yield
    hf_specdec.uninstall()  # a test may have installed a part
    hf_specdec.install()


@pytest.fixture
def target():
    """A copy: a pipeline may move it, and doors enable it."""
    return perturbed(tiny_target("llama"), 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A target with its tokenizer, a head, and a smaller model; neither of those has a tokenizer."""
    folder = tmp_path_factory.mktemp("folders")
    tiny_target("llama").save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    write_head(folder / "head", random_head(seed=1))
    perturbed(tiny_target("llama"), 0.02).save_pretrained(folder / "small")
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """Names of the drafters that were loaded."""
    names, load = [], AutoDrafter.from_pretrained.__func__

    def counted(cls, name, **options):
        names.append(Path(name).name)
        return load(cls, name, **options)

    monkeypatch.setattr(AutoDrafter, "from_pretrained", classmethod(counted))
    return names


@pytest.fixture
def no_target(monkeypatch):
    """The target is never loaded, and nothing runs."""

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)


def generator(target, **options):
    return transformers.pipeline("text-generation", model=target, tokenizer=tiny_tokenizer(), **options)


def assert_same_text(pipe, target, **options) -> None:
    assert pipe(TEXTS, **GREEDY, **options) == generator(target)(TEXTS, **GREEDY)


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


# What stays transformers' own


def test_without_the_patch_transformers_behaves_as_stock(folders, tmp_path, target, not_installed):
    stock = pipelines.pipeline
    hf_specdec.install()
    patched = pipelines.pipeline
    hf_specdec.uninstall()
    assert sys.modules["transformers"].pipeline is pipelines.pipeline is stock
    for owner, name in PATCHED:
        assert not hasattr(getattr(owner, name), "__wrapped__")
    for make in (stock, patched):  # the wrapper may have been imported while it was installed
        for folder in (folders["head"], tmp_path):
            with pytest.raises((OSError, ValueError)) as error:
                make("text-generation", model=target, tokenizer=tiny_tokenizer(), assistant_model=str(folder))
            assert "`assistant_model`" not in str(error.value)


def test_our_pipeline_needs_no_patch_and_enables_its_model_only(folders, target, not_installed):
    expected = generator(target)(TEXTS, **GREEDY)
    for model in (str(folders["target"]), target):
        pipe = hf_specdec.pipeline(
            "text-generation", model, tokenizer=tiny_tokenizer(), assistant_model=folders["head"]
        )
        assert pipe(TEXTS, **GREEDY, batch_size=3) == expected
        assert pipe.assistant_model.last_stats.num_drafted > 0
        assert generator(pipe.model)(TEXTS, **GREEDY, assistant_model=str(folders["small"])) == expected
    for owner, name in PATCHED:
        assert not hasattr(getattr(owner, name), "__wrapped__")


def test_a_changed_pipeline_is_refused_by_name_and_nothing_is_installed(not_installed, monkeypatch):
    monkeypatch.setattr(pipelines.base, "load_assistant_model", lambda model, assistant: None)
    with pytest.raises(RuntimeError, match="load_assistant_model takes model, assistant instead of model, assistant_m"):
        hf_specdec.install()
    assert not hasattr(transformers.generation.GenerationMixin._assisted_decoding, "__wrapped__")


def test_a_small_model_with_another_tokenizer_is_left_to_transformers_with_a_warning(tmp_path, target):
    """Universal assisted decoding: transformers translates between the two."""
    small = perturbed(AutoModelForCausalLM.from_config(tiny_config("llama", vocab_size=60)), 0.0)
    randomise(small, 3)
    small.save_pretrained(tmp_path)
    tiny_tokenizer(60).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="vocabulary of 60 and the target one of 97.*transformers' own assisted"):
        pipe = generator(target, assistant_model=str(tmp_path))
    assert type(pipe.assistant_model) is type(small) and pipe.assistant_tokenizer is not None
    assert_same_text(pipe, target)


def test_a_model_that_is_no_language_model_of_ours_is_loaded_by_transformers(tmp_path, target, monkeypatch):
    config = BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pipe = generator(target, assistant_model=str(tmp_path))
    assert type(pipe.assistant_model).__name__ == "BertForMaskedLM"
    with pytest.raises(ValueError, match="is no drafter; load that model and give it"):
        generator(target)("w7", **GREEDY, assistant_model=str(tmp_path))


def test_an_encoder_decoder_beside_a_target_without_an_encoder_is_left_to_transformers(tmp_path, target):
    tiny_encoder_decoder().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="T5ForConditionalGeneration, which needs an encoder.*transformers' own"):
        pipe = generator(target, assistant_model=str(tmp_path))
    assert type(pipe.assistant_model).__name__ == "T5ForConditionalGeneration"


def test_a_pipeline_that_does_not_generate_is_none_of_our_business(folders):
    config = BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'assistant_model'"):
        transformers.pipeline(
            "fill-mask", model=BertForMaskedLM(config), tokenizer=tiny_tokenizer(), assistant_model=str(folders["head"])
        )


# Refusals


def everything() -> list:
    """What a failing pipeline must leave as it was."""
    return [getattr(owner, name) for owner, name in PATCHED] + [pipelines.base.load_assistant_model, *vars(pipelines)]


@pytest.mark.parametrize(
    "make", [lambda *a, **k: transformers.pipeline(*a, **k), hf_specdec.pipeline], ids=["theirs", "ours"]
)
@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("lookup", ValueError, r"`assistant_model` is 'lookup'; give a drafter, as AutoDrafter.for_target"),
        ("/no/such/folder", ValueError, "`assistant_model` is '/no/such/folder': .*neither a folder nor a repository"),
        ("org/gone", OSError, "`assistant_model` is 'org/gone': .*cannot be found"),
        ("unknown", ValueError, "`assistant_model` is '.*unknown': .*no known drafter format matches.*UnheardOf"),
        ("damaged", ValueError, "`assistant_model` is '.*damaged': .*no known drafter format matches"),
        (AutoDrafter, ValueError, "`assistant_model` is AutoDrafter; give a drafter"),
        (["head"], ValueError, r"`assistant_model` is \['head'\]; give a drafter"),
    ],
    ids=str,
)
def test_what_is_no_drafter_is_refused_before_the_target_is_loaded(
    folders, tmp_path, monkeypatch, no_target, make, name, error, match
):
    def gone(name, **options):
        huggingface_hub.utils.validate_repo_id(name)
        raise OSError("404")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", gone)
    write(tmp_path / "unknown", {"architectures": ["UnheardOf"]}, {"layers.0.weight": torch.zeros(2)})
    write(
        tmp_path / "damaged",
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"fc.weight": torch.zeros(2)},
    )
    given = str(tmp_path / name) if name in ("unknown", "damaged") else name
    before = everything()
    model = str(folders["target"]) if isinstance(name, str) else tiny_target("llama")
    with pytest.raises(error, match=match):
        make("text-generation", model, assistant_model=given)
    assert everything() == before


@pytest.mark.parametrize("architectures", [None, 5, [5], [["a"]], {}, "Qwen3ForCausalLM"], ids=str)
def test_a_config_of_any_form_is_refused_as_no_drafter(tmp_path, target, architectures):
    write(tmp_path, {"architectures": architectures, "model_type": "t5"}, {"weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"`assistant_model` is '.*no known drafter format"):
        generator(target, assistant_model=tmp_path)


def test_a_head_for_another_target_is_refused_before_any_forward(tmp_path, target, monkeypatch):
    folder = write_head(tmp_path / "head", random_head(target_hidden_size=32))

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None):
        raise AssertionError("a forward pass ran")

    monkeypatch.setattr(type(target), "forward", forward)
    before = everything()
    with pytest.raises(ValueError, match=f"`assistant_model` is '{folder}': .*hidden size of 32"):
        generator(target, assistant_model=str(folder))
    with pytest.raises(ValueError, match=f"`assistant_model` is '{folder}': .*hidden size of 32"):
        generator(target)("w7", **GREEDY, assistant_model=str(folder))
    assert everything() == before


def test_a_drafter_of_another_target_is_refused_when_the_pipeline_is_made(target):
    drafter = AutoDrafter.for_target(tiny_target("gpt2"), "lookup")
    with pytest.raises(ValueError, match="bound to another target"):
        generator(target, assistant_model=drafter)


@pytest.mark.parametrize("name", ["head", None])
def test_a_tokenizer_beside_a_drafter_is_refused(folders, target, name):
    assistant = str(folders[name]) if name else AutoDrafter.for_target(target, "lookup")
    for make in (generator, lambda target, **options: hf_specdec.pipeline("text-generation", target, **options)):
        with pytest.raises(ValueError, match="`assistant_tokenizer` is given beside a drafter"):
            make(target, assistant_model=assistant, assistant_tokenizer=tiny_tokenizer())


def test_importing_the_package_survives_a_transformers_without_pipelines(not_installed, monkeypatch, target, folders):
    monkeypatch.setitem(sys.modules, "transformers.pipelines", None)
    monkeypatch.delitem(vars(transformers), "pipelines", raising=False)
    hf_specdec.install()
    inputs = tiny_tokenizer()("w7 w8", return_tensors="pt")
    drafter = AutoDrafter.for_target(target, "lookup")
    assert torch.equal(
        target.generate(**inputs, **GREEDY, assistant_model=drafter), target.generate(**inputs, **GREEDY)
    )
