"""What pipelines leave to transformers, and what they refuse before the target is loaded."""

import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from eagle3_formats import random_head, write, write_head
from pipeline_folders import GREEDY, PATCHED, TEXTS, assert_same_text, generator, write_folders
from tiny import perturbed, randomise, tiny_config, tiny_encoder_decoder, tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, PreTrainedModel, pipelines

import hf_specdec
from hf_specdec import AutoDrafter


@pytest.fixture
def target():
    """A copy: a pipeline may move it, and doors enable it."""
    return perturbed(tiny_target("llama"), 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return write_folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def no_target(monkeypatch):
    """The target is never loaded, and nothing runs."""

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)


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
