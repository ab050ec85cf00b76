"""Every published format of masked diffusion models loads into its native class, drafts, and proposes real tokens."""

import json

import pytest
import torch
from diffusion_formats import BEGIN, CLASSES, FORMATS, MASK, random_model, write_model, write_tokenizer
from diffusion_rounds import largest_error, load, passes_of
from safetensors.torch import load_file, save_file
from test_greedy import plain, speculative
from tiny import VOCAB_SIZE, prompts, tiny_target
from transformers import PreTrainedModel

from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter

TEXT = prompts([9, 4])


def target():
    return tiny_target("llama")


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_is_recognised_and_loads_into_its_native_class_without_remote_code(tmp_path, format):
    how, model = FORMATS[format], random_model(format)
    folder = write_model(tmp_path, format, model)
    detected = AutoDrafter.detect(folder)
    assert detected.method == "diffusion" and format.startswith(detected.variant) and detected.reason
    drafter = AutoDrafter.from_pretrained(folder, target=target())
    assert type(drafter.model) is CLASSES[how.native][1]
    loaded = drafter.model.state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    assert drafter.canvas.block_size == (how.block_size or 32)
    assert drafter.canvas.full_attention == (how.block_size is None)
    assert drafter.canvas.shift == how.shifts
    assert drafter.canvas.barred == ((BEGIN, MASK) if how.begin else (MASK,))


@pytest.mark.parametrize("format", FORMATS)
def test_mask_and_begin_tokens_are_never_proposed(tmp_path, format):
    """Their rows of the head are made the likeliest ones."""
    model = random_model(format)
    with torch.no_grad():
        model.lm_head.weight[[MASK, BEGIN]] *= 30.0
    drafter = load(tmp_path, format, target(), model, num_draft_tokens=6, effort=2, seed=3)
    never = [MASK, BEGIN] if FORMATS[format].begin else [MASK]
    for one in passes_of(drafter, target(), TEXT, max_new_tokens=12):
        assert bool(one.logits[..., never].isneginf().all())
        assert not set(one.logits.argmax(dim=-1).unique().tolist()) & set(never)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 7, VOCAB_SIZE - 7])
@pytest.mark.parametrize("format", ["SDAR", "Dream"])
def test_vocabularies_may_be_padded_to_another_size(tmp_path, format, vocab_size):
    model = random_model(format, vocab_size=vocab_size)
    with torch.no_grad():
        model.lm_head.weight[VOCAB_SIZE:] *= 30.0
    drafter = load(tmp_path, format, target(), model, num_draft_tokens=5)
    passes = passes_of(drafter, target(), TEXT, max_new_tokens=12)
    assert largest_error(passes, model, format, VOCAB_SIZE) < 1e-4
    for rule in ("rejection", "coupled"):
        drafter = load(tmp_path / rule, format, target(), model, num_draft_tokens=5, rule=rule, seed=1)
        out = target().generate(**TEXT, do_sample=True, assistant_model=drafter, max_new_tokens=12)
        assert int(out.max()) < VOCAB_SIZE


def test_a_mask_beyond_the_targets_vocabulary_serves(tmp_path):
    model = random_model("SDAR", vocab_size=VOCAB_SIZE + 5)
    folder = write_model(tmp_path, "SDAR", model, mask_token_id=VOCAB_SIZE + 1)
    drafter = AutoDrafter.from_pretrained(folder, target=target())
    assert torch.equal(speculative(target(), TEXT, drafter), plain(target(), TEXT))


@pytest.mark.parametrize("format", ["SDAR", "Fast-dLLM v2"])
def test_a_tied_head_is_the_embedding(tmp_path, format):
    model = random_model(format)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    folder = write_model(tmp_path, format, model, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    drafter = AutoDrafter.from_pretrained(folder, target=target(), num_draft_tokens=4)
    passes = passes_of(drafter, target(), TEXT, max_new_tokens=10)
    assert largest_error(passes, model, format, VOCAB_SIZE) < 1e-4


def test_weights_may_be_a_pickle_of_plain_tensors(tmp_path):
    folder = write_model(tmp_path, "SDAR", random_model("SDAR"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert AutoDrafter.detect(folder).method == "diffusion"
    drafter = AutoDrafter.from_pretrained(folder, target=target())
    assert torch.equal(speculative(target(), TEXT, drafter), plain(target(), TEXT))


def test_dtype_and_rope_of_the_files_are_kept(tmp_path):
    folder = write_model(tmp_path, "Dream", random_model("Dream"), rope_theta=5e5)
    drafter = AutoDrafter.from_pretrained(folder, target=target(), dtype=torch.bfloat16)
    assert drafter.dtype == torch.bfloat16
    assert drafter.model.config.rope_parameters["rope_theta"] == 5e5
    assert drafter.model.config._attn_implementation == "sdpa"


def test_the_block_size_is_named_by_sdars_and_by_fields(tmp_path):
    for folder, fields, expected in (
        ("SDAR-4B-Chat-b16", {}, 16),
        ("models--JetLM--SDAR-4B-Chat-b32/snapshots/0a1b2c", {}, 32),
        ("SDAR-4B-Chat", {}, 4),
        ("SDAR-4B-Chat-b16", {"block_size": 8}, 8),
    ):
        written = write_model(tmp_path / str(expected), "SDAR", random_model("SDAR"), **fields)
        moved = tmp_path / "named" / str(expected) / folder
        moved.parent.mkdir(parents=True)
        written.rename(moved)
        assert AutoDrafter.from_pretrained(moved, target=target()).canvas.block_size == expected
        assert AutoDrafter.from_pretrained(moved, target=target(), block_size=5).canvas.block_size == 5


def test_an_a2d_without_a_telling_name_wants_to_be_told(tmp_path):
    folder = write_model(tmp_path, "a2d Qwen3, mdlm", random_model("a2d Qwen3, mdlm"))
    folder = folder.rename(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"give attention='full' or attention='block_causal'"):
        AutoDrafter.from_pretrained(folder, target=target())
    drafter = AutoDrafter.from_pretrained(folder, target=target(), attention="block_causal", block_size=16)
    assert not drafter.canvas.full_attention and drafter.canvas.block_size == 16


def test_a_separator_may_be_told(tmp_path):
    model = random_model("open-dcoder")
    folder = write_model(tmp_path, "open-dcoder", model)
    drafter = AutoDrafter.from_pretrained(folder, target=target(), separator_token_id=BEGIN, num_draft_tokens=4)
    assert drafter.canvas.barred == (BEGIN, MASK)
    passes = passes_of(drafter, target(), TEXT, max_new_tokens=12)
    assert largest_error(passes, model, "open-dcoder, DEER", VOCAB_SIZE) < 1e-4


def test_a_plain_qwen2_stays_a_draft_model(tmp_path):
    folder = write_model(tmp_path, "open-dcoder", random_model("open-dcoder"))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    (folder / "tokenizer_config.json").unlink()
    config.pop("auto_map")
    (folder / "config.json").write_text(json.dumps(config))
    drafter = AutoDrafter.from_pretrained(folder, target=target())
    assert isinstance(drafter, DraftModelDrafter)


# What is refused


@pytest.fixture
def no_forward(monkeypatch):
    def forward(*args, **kwargs):
        raise AssertionError("a forward pass was made")

    monkeypatch.setattr(PreTrainedModel, "__call__", forward)


def refusal(folder, of=None, **options) -> str:
    with pytest.raises(ValueError) as error:
        AutoDrafter.from_pretrained(folder, target=target() if of is None else of, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [("llada", "LLaDA has a tokenizer of its own"), ("llada2_moe", "LLaDA 2")],
)
def test_families_that_cannot_draft_are_refused_by_name(tmp_path, no_forward, model_type, sentence):
    folder = write_model(tmp_path, "SDAR", random_model("SDAR"), model_type=model_type, architectures=["Remote"])
    assert AutoDrafter.detect(folder).variant == model_type
    found = refusal(folder)
    assert sentence in found and "LlamaForCausalLM" in found


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"reveal_order": "random"}, "`reveal_order` is 'random'; it must be one of 'auto', 'parallel'"),
        ({"final_resample": 1}, "`final_resample` is 1; give True or False"),
        ({"attention": "causal"}, "`attention` is 'causal'; give 'full', 'block_causal'"),
        ({"block_size": 0}, "`block_size` is 0; give an integer from 1 to 1024"),
        ({"mask_token_id": VOCAB_SIZE}, f"`mask_token_id` is {VOCAB_SIZE}"),
        ({"mask_token_id": True}, "`mask_token_id` is True"),
        ({"separator_token_id": 7}, "`separator_token_id` is 7; a drafter in blocks has none"),
        ({"aux_layers": [1]}, "unknown option 'aux_layers'"),
        ({"effort": 0}, "`effort` is 0"),
        ({"schedule": "best"}, "`schedule` is 'best'"),
    ],
    ids=str,
)
def test_options(tmp_path, no_forward, options, sentence):
    assert sentence in refusal(write_model(tmp_path, "SDAR", random_model("SDAR")), **options)


def test_one_parallel_pass_cannot_be_two(tmp_path):
    drafter = load(tmp_path, "SDAR", target(), reveal_order="parallel", effort=2)
    with pytest.raises(ValueError, match="`effort` is 2 and `reveal_order` 'parallel'"):
        target().generate(**TEXT, assistant_model=drafter)
    for options in ({"effort": 1}, {"effort": 2, "final_resample": True}):
        drafter = load(tmp_path / str(len(options)), "SDAR", target(), reveal_order="parallel", **options)
        assert torch.equal(speculative(target(), TEXT, drafter), plain(target(), TEXT))


def test_other_drafters_refuse_effort():
    for method in ("lookup", "none"):
        with pytest.raises(ValueError, match=f"`effort` is 2 and a '{method}' drafter .*only diffusion drafters can"):
            AutoDrafter.for_target(target(), method, effort=2)
    drafter = AutoDrafter.for_target(target(), "lookup")
    with pytest.raises(ValueError, match="only diffusion drafters"):
        drafter.spec_config = drafter.spec_config.with_options(effort=3)


def test_a_draft_longer_than_the_masks_of_full_attention(tmp_path):
    drafter = load(tmp_path, "Dream", target(), num_draft_tokens=33)
    with pytest.raises(ValueError, match="`num_draft_tokens` is 33; this 'diffusion' drafter drafts at most 32"):
        target().generate(**TEXT, assistant_model=drafter)


@pytest.mark.parametrize(
    ("format", "changed", "sentence"),
    [
        ("SDAR", {"hidden_size": None, "num_hidden_layers": None}, "lacks hidden_size, num_hidden_layers"),
        ("SDAR", {"num_hidden_layers": 3}, "missing tensors model.layers.2."),
        ("SDAR", {"num_hidden_layers": 1}, "unexpected tensors model.layers.1."),
        ("SDAR", {"intermediate_size": 64}, "mismatched tensors model.layers.0.mlp.down_proj.weight"),
        ("SDAR", {"use_sliding_window": True}, "sliding windows"),
        ("SDAR", {"quantization_config": {"bits": 4}}, "is quantised"),
        ("SDAR", {"mask_token_id": None}, "the mask token that SDAR models were published with is 151669"),
        ("SDAR", {"mask_token_id": "x"}, "mask_token_id 'x' where an integer from 0 on belongs"),
        ("SDAR", {"block_size": 2.5}, "block_size 2.5"),
        ("Dream", {"block_size": 32}, "a Dream with blocks"),
        ("Efficient-DLM", {"mask_token_id": None}, "does not say which token is its mask"),
    ],
    ids=str,
)
def test_files_that_do_not_fit(tmp_path, no_forward, format, changed, sentence):
    assert sentence in refusal(write_model(tmp_path, format, random_model(format), **changed))


def test_another_vocabulary(tmp_path, no_forward):
    model = random_model("SDAR", vocab_size=2 * VOCAB_SIZE)
    assert f"a vocabulary of {2 * VOCAB_SIZE} and the target one of {VOCAB_SIZE}" in refusal(
        write_model(tmp_path, "SDAR", model)
    )


def test_another_tokenizer_but_for_tokens_of_its_own(tmp_path, monkeypatch):
    from copy import deepcopy

    folder = write_model(tmp_path, "Dream", random_model("Dream"))
    of = deepcopy(target())
    theirs = tmp_path / "target"
    theirs.mkdir()
    of.name_or_path = str(theirs)

    def tokenizer(where, **changed):
        words = {f"w{id}": id for id in range(10)}
        for word, id in changed.items():
            words = {w: i for w, i in words.items() if i != id}
            words[word] = id
        (where / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": []}))

    tokenizer(theirs)
    tokenizer(folder, mask=MASK, begin=BEGIN)
    write_tokenizer(folder, {BEGIN: "<|beginoftext|>"})
    assert AutoDrafter.from_pretrained(folder, target=of).method == "diffusion"
    tokenizer(folder, other=7)
    assert "another tokenizer than the target: 1 tokens differ (for example 'other')" in refusal(folder, of)
