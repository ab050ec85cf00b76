"""The doors into transformers: what is patched, what is left alone, and that every door leads to the same text."""

import importlib
import os
import pickle
import subprocess
import sys

import pytest
import torch
from scripted import ScriptedDrafter
from tiny import PAD, perturbed, prompts, tiny_encoder_decoder, tiny_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import AutoDrafter, SpecGenerate
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.integration import compat, dispatch

GREEDY = {"do_sample": False, "max_new_tokens": 20}
PATCHED = ("_validate_generation_mode", "_get_candidate_generator", "_assisted_decoding")


class Puts(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], False

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ended = True


def test_importing_installs_once_and_uninstalling_restores():
    assert dispatch.is_installed()
    wrapped = {name: getattr(GenerationMixin, name) for name in PATCHED}
    hf_specdec.install()
    assert {name: getattr(GenerationMixin, name) for name in PATCHED} == wrapped
    hf_specdec.uninstall()
    try:
        for name in PATCHED:
            assert getattr(GenerationMixin, name) is wrapped[name].__wrapped__
        hf_specdec.uninstall()
    finally:
        hf_specdec.install()


def test_an_environment_variable_forbids_the_patch():
    code = (
        "import hf_specdec; from transformers.generation import GenerationMixin as G;"
        "print(hasattr(G._assisted_decoding, '__wrapped__'))"
    )
    for value, expected in (("1", "False"), ("0", "True")):
        environment = {**os.environ, "HF_SPECDEC_NO_INSTALL": value}
        found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert found.stdout.strip() == expected, found.stderr


def test_plain_and_stock_assisted_generation_are_the_same_with_and_without_the_patch():
    model, assistant = tiny_target("llama"), perturbed(tiny_target("llama"), 0.02)
    inputs, batch = prompts([7]), prompts([7, 3])

    def outputs():
        torch.manual_seed(0)
        yield model.generate(**batch, **GREEDY)
        yield model.generate(**batch, do_sample=True, max_new_tokens=20)
        yield model.generate(**batch, num_beams=2, max_new_tokens=20)
        yield model.generate(**inputs, **GREEDY, assistant_model=assistant)
        yield model.generate(**inputs, do_sample=True, max_new_tokens=20, assistant_model=assistant)
        yield model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=3)

    patched = list(outputs())
    hf_specdec.uninstall()
    try:
        plain = list(outputs())
    finally:
        hf_specdec.install()
    assert all(torch.equal(a, b) for a, b in zip(patched, plain, strict=True))


def test_a_changed_signature_is_refused_by_name_and_nothing_is_installed(not_installed, monkeypatch):
    expected = dict(compat.EXPECTED_PARAMETERS)
    monkeypatch.setitem(compat.EXPECTED_PARAMETERS, "_assisted_decoding", ("self", "input_ids"))
    with pytest.raises(RuntimeError, match=r"_assisted_decoding takes .*streamer.* instead of self, input_ids"):
        hf_specdec.install()
    monkeypatch.setattr(compat, "EXPECTED_PARAMETERS", {**expected, "_no_such_method": ("self",)})
    with pytest.raises(RuntimeError, match="_no_such_method is gone"):
        hf_specdec.enable(tiny_target("llama"))
    assert not dispatch.is_installed()
    assert not hasattr(GenerationMixin._assisted_decoding, "__wrapped__")


def test_the_import_says_that_transformers_is_one_it_does_not_know_and_every_door_refuses(not_installed, monkeypatch):
    def of_5_23(self, input_ids, next_sequence_length=None, past_key_values=None, attention_mask=None, **kwargs):
        """The cache had another name."""

    drafter = AutoDrafter.for_target(tiny_target("llama"), "lookup")
    with monkeypatch.context() as older:
        older.setattr(GenerationMixin, "prepare_inputs_for_generation", of_5_23)
        sentence = "does not know transformers .*prepare_inputs_.* takes .*past_key_values.* instead of .* cache,"
        with pytest.warns(RuntimeWarning, match=sentence):
            importlib.reload(hf_specdec)
        assert not dispatch.is_installed()
        for door, argument in ((hf_specdec.enable, tiny_target("llama")), (SpecGenerate, drafter)):
            with pytest.raises(RuntimeError, match=sentence):
                door(argument)
    importlib.reload(hf_specdec)  # with nothing changed it installs
    assert dispatch.is_installed()


@pytest.mark.parametrize("lengths", [[7], [7, 2]], ids=["one row", "batch"])
def test_every_door_gives_the_same_text(not_installed, lengths):
    model = perturbed(tiny_target("llama"), 0.0)
    inputs = prompts(lengths)
    expected = model.generate(**inputs, **GREEDY)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)

    by_callable = SpecGenerate(drafter)
    assert torch.equal(model.generate(**inputs, **GREEDY, custom_generate=by_callable), expected)
    assert drafter.last_stats.num_emitted == expected[:, 7:].ne(PAD).sum()

    hf_specdec.enable(model)
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_model=drafter), expected)
    with pytest.raises(AttributeError):  # another model is not enabled, and transformers does not know what this is
        tiny_target("llama").generate(**inputs, **GREEDY, assistant_model=drafter)

    hf_specdec.install()
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_model=drafter), expected)
    hf_specdec.uninstall()


def test_an_enabled_model_pickles_copies_and_saves_as_its_own_class(not_installed, tmp_path):
    import copy

    model = perturbed(tiny_target("llama"), 0.0)
    cls = type(model)
    assert hf_specdec.enable(hf_specdec.enable(model)) is model
    assert isinstance(model, cls) and type(model).__name__ == cls.__name__
    inputs = prompts([5])
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert isinstance(twin, cls)
        assert torch.equal(twin.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))
    model.save_pretrained(tmp_path)
    assert torch.equal(cls.from_pretrained(tmp_path).lm_head.weight, model.lm_head.weight)
    assert '"LlamaForCausalLM"' in (tmp_path / "config.json").read_text()


def test_the_dispatcher_reaches_classes_of_any_origin():
    class Mine(type(tiny_target("llama"))):
        """A user's own subclass."""

    model = Mine(tiny_target("llama").config).eval()
    model.load_state_dict(tiny_target("llama").state_dict())
    inputs = prompts([5])
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_model=drafter), model.generate(**inputs, **GREEDY))
    t5 = tiny_encoder_decoder()
    drafter = AutoDrafter.for_target(t5, "none")
    assert torch.equal(t5.generate(**inputs, **GREEDY, assistant_model=drafter), t5.generate(**inputs, **GREEDY))


@pytest.mark.parametrize("rule", ["greedy", "rejection", "coupled"])
def test_transformers_own_loop_takes_a_drafter_through_the_candidates_adaptor(rule):
    """An independent loop: same text where text is promised, and the same acceptance where only the law is."""
    model, inputs = tiny_target("llama"), prompts([6])
    stock = GenerationMixin._assisted_decoding.__wrapped__
    config = {"rule": "auto" if rule == "greedy" else rule, "num_draft_tokens": 3, "seed": 1}
    drafter = DraftModelDrafter(perturbed(model, 0.02), **config).bind(model)
    options = {"do_sample": rule != "greedy", "max_new_tokens": 60, "eos_token_id": None, "top_k": 0}
    rounds = []

    def stock_loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        kwargs["cache"].activate_past_recording()
        original = model._get_candidate_generator

        def counted(**arguments):
            generator = original(**arguments)
            update = generator.update_candidate_strategy
            generator.update_candidate_strategy = lambda ids, scores, n: (rounds.append(int(n)), update(ids, scores, n))
            return generator

        model._get_candidate_generator = counted
        try:
            return stock(
                model,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                assistant_model=drafter,
                **kwargs,
            )
        finally:
            del model._get_candidate_generator

    found = model.generate(**inputs, **options, custom_generate=stock_loop)
    ours = model.generate(**inputs, **options, assistant_model=drafter)
    assert found.shape == ours.shape
    assert len(rounds) > 5
    if rule == "greedy":
        assert torch.equal(found, ours)
        assert abs(len(rounds) - drafter.last_stats.num_forwards) <= 1  # transformers drafts in the prefill already
    elif rule == "rejection":
        assert 0.3 < sum(rounds) / len(rounds) <= 3


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(97)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_pipelines_take_a_drafter_object(batch_size):
    model, tokenizer = tiny_target("llama"), word_tokenizer()
    texts = ["w5 w6 w7 w8", "w9 w10", "w11 w5 w6"]
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)
    expected = plain(texts, **GREEDY, batch_size=batch_size)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    fast = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=drafter)
    assert fast(texts, **GREEDY, batch_size=batch_size) == expected
    assert drafter.last_stats.num_emitted > 0
    drafter.last_stats = None
    assert plain(texts, **GREEDY, batch_size=batch_size, assistant_model=drafter) == expected
    assert drafter.last_stats is not None


def test_a_streamer_sees_the_same_through_custom_generate():
    model, inputs = tiny_target("llama"), prompts([6])
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    plain, ours, by_callable = Puts(), Puts(), Puts()
    model.generate(**inputs, **GREEDY, streamer=plain)
    model.generate(**inputs, **GREEDY, streamer=ours, assistant_model=drafter)
    model.generate(**inputs, **GREEDY, custom_generate=SpecGenerate(drafter, streamer=by_callable))
    assert plain.values == ours.values == by_callable.values
    assert ours.ended and by_callable.ended


def test_dictionary_outputs_equal_plain_generates():
    model, inputs = tiny_target("qwen3"), prompts([6])
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options["repetition_penalty"] = 1.2
    expected = model.generate(**inputs, **options)
    drafter = ScriptedDrafter(
        expected.sequences[:, 6:].tolist(), right=lambda row, round: round % 4, num_draft_tokens=3
    ).bind(model)
    found = model.generate(**inputs, **options, assistant_model=drafter)
    assert type(found) is type(expected)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert len(ours) == len(theirs) == found.sequences.shape[1] - 6
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=1e-4, rtol=1e-4)
    assert found.cache.get_seq_length() == expected.cache.get_seq_length()


def test_one_device_to_host_copy_a_round():
    """On the CPU a copy is `aten::_local_scalar_dense` or a tolist; count the tolist of tensors in the loop."""
    model, inputs = tiny_target("llama"), prompts([6, 4])
    long = model.generate(**inputs, do_sample=False, max_new_tokens=41, eos_token_id=None)
    drafter = ScriptedDrafter(long[:, 6:].tolist(), num_draft_tokens=3).bind(model)
    copies = []
    tolist = torch.Tensor.tolist
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", lambda self: copies.append(1) or tolist(self))
        counts = []
        for new_tokens in (21, 41):
            copies.clear()
            with torch.profiler.profile() as profile:
                model.generate(
                    **inputs,
                    do_sample=False,
                    max_new_tokens=new_tokens,
                    eos_token_id=None,
                    assistant_model=drafter,
                )
            scalars = sum(e.count for e in profile.key_averages() if e.key == "aten::_local_scalar_dense")
            counts.append((len(copies), scalars, drafter.last_stats.num_forwards))
    (copies_a, scalars_a, rounds_a), (copies_b, scalars_b, rounds_b) = counts
    assert rounds_b - rounds_a == 5
    assert copies_b - copies_a == rounds_b - rounds_a
    assert scalars_b == scalars_a


def test_the_package_prints_nothing_and_stays_light():
    code = (
        "import sys, hf_specdec;"
        "print([m for m in ('accelerate', 'optimum', 'gguf', 'triton', 'matplotlib', 'scipy') if m in sys.modules])"
    )
    bare = "import sys; from transformers import DynamicCache, PreTrainedModel; print(sorted(sys.modules))"
    before = subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True, check=True)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = [name for name in eval(found.stdout) if f"'{name}'" not in before.stdout]
    assert brought == [] and found.stderr == ""
