"""Every published DSpark format loads, and is the same drafter."""

from dataclasses import replace

import pytest
import torch
from dspark_formats import FORMATS, GEMMA4, MASK, Drafter, random_drafter, write_drafter
from dspark_reference import Reference
from eagle3_formats import write
from tiny import perturbed, prompts, tiny_target
from watched import largest_error, rounds_of

from hf_specdec import AutoDrafter

TEXT = prompts([11, 6])


def target():
    return tiny_target("llama")


def load(folder, **options):
    return AutoDrafter.from_pretrained(folder, target=target(), **options)


def first_logits(drafter) -> torch.Tensor:
    return rounds_of(drafter, target(), TEXT, alter=False, max_new_tokens=8, eos_token_id=None)[0][2]


def assert_is(drafter, one: Drafter, atol: float = 1e-5) -> None:
    rounds = rounds_of(drafter, target(), TEXT, max_new_tokens=14, eos_token_id=None)
    assert largest_error(rounds, Reference(one, target())) < atol


DRAFTERS = {
    "vanilla": {},
    "gated": dict(kind="gated"),
    "rnn": dict(kind="rnn"),
    "no markov head": dict(rank=0, confidence_reads_markov=False),
    "causal windows": dict(windows=(6, 6), causal=(True, True)),
    "windows": dict(windows=(6, 6)),
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_one_drafter_gives_the_same_logits_in_every_format(tmp_path, kind):
    """But for windows, which speculators counts from the anchor and everyone else from each row."""
    one, logits = random_drafter(seed=1, **DRAFTERS[kind]), {}
    for format in FORMATS:
        config = {}
        if format == "SpecForge" and any(one.windows) and not any(one.causal):
            config = {"is_causal": False}
        folder = write_drafter(tmp_path / format, one, format, **config)
        detected = AutoDrafter.detect(folder)
        assert detected.method == "dspark" and detected.reason
        logits[format] = first_logits(load(folder))
    for format, found in logits.items():
        same = format != "speculators" or not any(one.windows)
        assert torch.equal(found, logits["DeepSpec"]) == same, format
    assert_is(load(tmp_path / "ModelOpt"), one)
    assert_is(load(tmp_path / "speculators"), replace(one, from_anchor=True))


def test_detection_names_the_format_and_what_tells(tmp_path):
    told = {
        "DeepSpec": ("DeepSpec", "markov_head"),
        "speculators": ("speculators", "speculators_model_type"),
        "SpecForge": ("SpecForge", "projector_type"),
        "ModelOpt": ("ModelOpt", "projector_type"),
    }
    for format, (variant, reason) in told.items():
        detected = AutoDrafter.detect(write_drafter(tmp_path / format, random_drafter(), format))
        assert detected.variant == variant and reason in detected.reason, format


def test_deepspecs_own_dflash_drafters_guess_from_the_anchor(tmp_path):
    """They are named after DFlash, and are DSpark drafters without heads (vLLM #49614)."""
    one = random_drafter(rank=0, confidence=False)
    folder = write_drafter(tmp_path, one)
    assert AutoDrafter.detect(folder).method == "dspark"
    drafter = load(folder)
    assert drafter.max_num_draft_tokens == one.block_size and not drafter.gives_confidence
    assert_is(drafter, one)


def test_the_projector_type_decides_and_not_the_class(tmp_path):
    config, tensors = FORMATS["SpecForge"](random_drafter())
    named = write(tmp_path / "named", {**config, "architectures": ["DFlashDraftModel"]}, tensors)
    assert AutoDrafter.detect(named).method == "dspark"
    other = {**config, "architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "domino"}}
    with pytest.raises(ValueError, match="not a drafter that hf_specdec can load"):
        AutoDrafter.detect(write(tmp_path / "other", other, tensors))


@pytest.mark.parametrize("options", [{}, {"values_are_keys": False}, {"kind": "rnn"}], ids=str)
def test_drafters_for_gemma_4_load(tmp_path, options):
    one = random_drafter(seed=1, **GEMMA4, **options)
    drafter = load(write_drafter(tmp_path, one))
    assert_is(drafter, one)
    assert ("layers.0.self_attn.v_proj.weight" in drafter.model.state_dict()) == ("values_are_keys" in options)


def test_prefixes_shards_and_half_precision_load(tmp_path):
    one = random_drafter(seed=1)
    config, tensors = FORMATS["DeepSpec"](one)
    whole = first_logits(load(write(tmp_path / "whole", config, tensors)))
    assert torch.equal(first_logits(load(write(tmp_path / "shards", config, tensors, shards=4))), whole)
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    assert torch.equal(first_logits(load(write(tmp_path / "prefixed", config, prefixed))), whole)
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    drafter = load(write(tmp_path / "half", config, half))
    assert drafter.dtype == torch.float32  # the target's
    assert_is(drafter, Drafter(**{**vars(one), "tensors": {name: t.float() for name, t in half.items()}}))
    assert load(tmp_path / "half", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_fields_copied_from_the_target_do_no_harm(tmp_path):
    one = random_drafter(seed=1)
    lies = dict(
        num_key_value_heads=1,
        intermediate_size=7,
        head_dim=64,
        num_attention_heads=2,
        partial_rotary_factor=0.25,
        attn_output_gate=True,
        linear_num_key_heads=4,
        tie_word_embeddings=True,
        attention_bias=True,
        quantization_config={"quant_method": "fp8"},
        layer_types=["linear_attention", "full_attention"],
        max_window_layers=28,
        use_sliding_window=False,
    )
    for format in ("DeepSpec", "SpecForge", "ModelOpt"):
        assert_is(load(write_drafter(tmp_path / format, one, format, **lies)), one)


# Conventions that differ between formats


def test_layer_ids_name_the_layer_that_a_state_comes_out_of_or_enters(tmp_path):
    one = random_drafter(seed=1, aux_layers=(0, 1, 3))
    for format, field in (("DeepSpec", "target_layer_ids"), ("speculators", "aux_hidden_state_layer_ids")):
        config, _ = FORMATS[format](one)
        assert config[field] == ([-1, 0, 2] if format == "DeepSpec" else [0, 1, 3])
        drafter = load(write_drafter(tmp_path / format, one, format))
        assert drafter.signals.hidden_states == (0, 1, 3) and drafter.signals.pre_norm_last
    assert load(tmp_path / "DeepSpec", aux_layers=(1, 2, 2)).signals.hidden_states == (1, 2, 2)


PROPOSALS = {  # (speculative_tokens, sample_from_anchor) -> first slot
    "tokens of the whole block": (5, None, 0),
    "one token less": (4, None, 1),
    "only the flag": (None, True, 0),
    "only the flag, off": (None, False, 1),
    "neither": (None, None, 1),
    "tokens that say nothing": (3, True, 0),
}


@pytest.mark.parametrize("case", PROPOSALS)
def test_which_row_guesses_first_follows_the_files(tmp_path, case):
    tokens, flag, first = PROPOSALS[case]
    one = random_drafter(seed=1, first_slot=first)
    proposals = [] if tokens is None else [{"proposal_type": "greedy", "speculative_tokens": tokens}]
    fields = dict(speculators_config={"proposal_methods": proposals}, sample_from_anchor=flag)
    drafter = load(write_drafter(tmp_path, one, "speculators", **fields))
    assert drafter.model.config.first_slot == first and drafter.max_num_draft_tokens == 5 - first
    assert_is(drafter, one)


@pytest.mark.parametrize("format", ["SpecForge", "ModelOpt"])
def test_other_formats_may_say_that_the_anchor_does_not_guess(tmp_path, format):
    one = random_drafter(seed=1, first_slot=1)
    assert_is(load(write_drafter(tmp_path, one, format)), one)


def test_a_contradiction_about_the_first_row_is_said_and_can_be_corrected(tmp_path):
    folder = write_drafter(tmp_path, random_drafter(seed=1), "speculators", sample_from_anchor=False)
    with pytest.warns(UserWarning, match=r"sample_from_anchor False.*first_slot=0 is taken.*give first_slot=1"):
        assert load(folder).model.config.first_slot == 0
    assert load(folder, first_slot=1).model.config.first_slot == 1


def test_sliding_layers_are_causal_unless_a_field_says_otherwise(tmp_path):
    one = random_drafter(seed=1, windows=(6, None))
    for format in ("SpecForge", "speculators"):
        field = "is_causal" if format == "SpecForge" else "sliding_window_non_causal"
        config = load(write_drafter(tmp_path / format, one, format, **{field: None})).model.config
        assert config.causal == (True, False) and config.windows == (6, None)
    assert load(write_drafter(tmp_path / "all", one, "SpecForge", is_causal=True)).model.config.causal == (True, True)


# What a drafter borrows


def test_what_the_files_leave_out_is_the_targets(tmp_path):
    one = random_drafter(seed=1).with_tensors(lm_head__weight=None)
    drafter = load(write_drafter(tmp_path, one, "speculators"))
    assert drafter.head is None and not hasattr(drafter.model, "embed_tokens")
    assert_is(drafter, one)


def test_copies_of_the_targets_embedding_and_head_take_no_memory(tmp_path):
    theirs = target()
    embedding, head = (
        module.weight.detach().clone() for module in (theirs.get_input_embeddings(), theirs.get_output_embeddings())
    )
    one = random_drafter(seed=1).with_tensors(lm_head__weight=head, embed_tokens__weight=embedding)
    drafter = load(write_drafter(tmp_path / "copies", one))
    assert drafter.head is None and not hasattr(drafter.model, "embed_tokens")
    assert_is(drafter, one)
    trained = perturbed(theirs, 0.08)
    one = one.with_tensors(
        lm_head__weight=head + 0.01, embed_tokens__weight=trained.get_input_embeddings().weight.detach()
    )
    drafter = load(write_drafter(tmp_path / "trained", one))
    assert drafter.head is not None and hasattr(drafter.model, "embed_tokens")
    assert_is(drafter, one)


def test_the_mask_is_a_row_of_the_embedding(tmp_path):
    drafter = load(write_drafter(tmp_path, random_drafter(seed=1), mask_token_id=0))
    assert drafter.model.config.mask_token_id == 0 != MASK
    assert not torch.equal(first_logits(drafter), first_logits(load(write_drafter(tmp_path, random_drafter(seed=1)))))
