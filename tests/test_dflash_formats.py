"""Every published DFlash format loads, and is the same drafter."""

import pytest
import torch
from dflash_formats import FORMATS, MASK, SPECULATORS, ZLAB, Net, random_net, vocabulary_maps, write_net
from dflash_reference import Reference
from eagle3_formats import write
from tiny import perturbed, prompts, tiny_target
from watched import largest_error, rounds_of

from hf_specdec import AutoDrafter
from hf_specdec.drafters.dflash.layer_ids import default_target_layers

TEXT = prompts([11, 6])
NEAR = {"windows": (4, 4), "causal": (False, False)}


def target():
    return tiny_target("llama")


def load(folder, **options):
    return AutoDrafter.from_pretrained(folder, target=target(), **options)


def first_logits(drafter) -> torch.Tensor:
    return rounds_of(drafter, target(), TEXT, alter=False, max_new_tokens=8, eos_token_id=None)[0][2]


def assert_is(drafter, net: Net, of=None) -> None:
    of = target() if of is None else of
    rounds = rounds_of(drafter, of, TEXT, max_new_tokens=14, eos_token_id=None)
    assert largest_error(rounds, Reference(net, of)) < 1e-5


def test_one_drafter_gives_the_same_logits_in_every_format(tmp_path):
    net, logits = random_net(1), {}
    for format in FORMATS:
        folder = write_net(tmp_path / format, net, format)
        detected = AutoDrafter.detect(folder)
        assert detected.method == "dflash" and detected.reason, format
        logits[format] = first_logits(load(folder))
    for format, found in logits.items():
        assert torch.equal(found, logits["z-lab"]), format
    assert_is(load(folder), net)


@pytest.mark.parametrize("format", [*ZLAB, *SPECULATORS])
def test_dflash_2_loads_in_every_format_that_has_it(tmp_path, format):
    net = random_net(1, num_candidates=6)
    folder = write_net(tmp_path, net, format)
    assert AutoDrafter.detect(folder).variant.endswith(", DFlash 2")
    assert_is(load(folder), net)


def test_codebooks_are_parameters_or_embeddings(tmp_path):
    config, tensors = FORMATS["z-lab"](random_net(1, num_candidates=6))
    for name in ("predecessor_codebook", "successor_codebook"):
        tensors[f"candidate_selector.{name}.weight"] = tensors.pop(f"candidate_selector.{name}")
    assert_is(load(write(tmp_path, config, tensors)), random_net(1, num_candidates=6))


@pytest.mark.parametrize(
    ("format", "facts"),
    [
        ("z-lab", dict(windows=(4, None), causal=(True, False))),
        ("z-lab", NEAR),
        ("z-lab", dict(causal=(True, True))),
        ("z-lab, new", dict(windows=(3, 3), causal=(True, True))),
        ("ModelOpt", NEAR),
        ("ModelOpt", dict(windows=(4, 4), causal=(True, True))),
        ("ModelOpt", dict(causal=(True, True))),
        ("speculators, old", dict(windows=(4, None), causal=(True, False), from_anchor=True)),
        ("speculators, new", dict(windows=(4, 4), from_anchor=True)),
        ("transformers", dict(windows=(None, 4))),
    ],
)
def test_windows_and_causality_are_read_as_the_format_means_them(tmp_path, format, facts):
    net = random_net(1, **facts)
    assert_is(load(write_net(tmp_path, net, format)), net)


def test_dflash_2_of_speculators_is_bidirectional_unless_it_says_otherwise(tmp_path):
    net = random_net(1, num_candidates=6, windows=(4, 4), from_anchor=True)
    assert_is(load(write_net(tmp_path, net, "speculators, new", sliding_window_non_causal=None)), net)


@pytest.mark.parametrize("format", SPECULATORS)
def test_a_reduced_vocabulary_loads(tmp_path, format):
    net = random_net(1, draft_vocab_size=41)
    assert_is(load(write_net(tmp_path, net, format)), net)
    assert vocabulary_maps(net)["d2t"].min() >= 0


@pytest.mark.parametrize("format", [*SPECULATORS, "ModelOpt"])
def test_copies_of_the_targets_embedding_and_head_are_not_kept(tmp_path, format):
    net, of = random_net(1), target()
    config, tensors = FORMATS[format](net)
    tensors["embed_tokens.weight"] = of.get_input_embeddings().weight.detach().clone()
    tensors["lm_head.weight"] = of.get_output_embeddings().weight.detach().clone()
    drafter = load(write(tmp_path, config, tensors))
    assert drafter.head is None and not hasattr(drafter.model, "embed_tokens")
    assert_is(drafter, net)


def test_an_embedding_and_a_head_of_its_own_are_kept(tmp_path):
    other = perturbed(target(), 0.08)
    net = random_net(1).with_tensors(
        embed_tokens__weight=other.get_input_embeddings().weight.detach().clone(),
        lm_head__weight=other.get_output_embeddings().weight.detach().clone(),
    )
    drafter = load(write_net(tmp_path, net, "speculators, old"))
    assert_is(drafter, net)
    forced = load(tmp_path, own_embedding=False)
    assert_is(forced, net.with_tensors(embed_tokens__weight=None))


def test_anchors_that_guess_are_read(tmp_path):
    net = random_net(1, first_slot=0)
    drafter = load(write_net(tmp_path, net, "speculators, new"))
    assert drafter.max_num_draft_tokens == 5
    assert_is(drafter, net)


def test_scales_and_caps_of_logits_and_embeddings_are_read(tmp_path):
    net = random_net(1, embedding_scale=1.7, logit_scale=0.4, logit_cap=2.0)
    for format in ZLAB:
        assert_is(load(write_net(tmp_path / format, net, format)), net)
    config, tensors = FORMATS["z-lab"](random_net(1))
    config["final_logit_softcapping"] = 0  # no cap
    assert_is(load(write(tmp_path / "zero", config, tensors)), random_net(1))


def test_yarn_and_short_position_tables_are_read(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0, "original_max_position_embeddings": 64}
    for format in FORMATS:
        net = random_net(1, rope=rope, max_positions=8)
        assert_is(load(write_net(tmp_path / format, net, format)), net)


def test_a_block_size_that_no_file_names_is_the_formats_own(tmp_path):
    for format, block_size in (("z-lab", 16), ("speculators, new", 8), ("transformers", 16)):
        net = random_net(1, block_size=block_size)
        drafter = load(write_net(tmp_path / format, net, format, block_size=None))
        assert drafter.max_num_draft_tokens == block_size - 1, format
        assert_is(drafter, net)


# The target's embedding


def test_an_embedding_that_scales_its_rows_does_so_for_the_block(tmp_path):
    """Gemma's table is sqrt(hidden size) smaller than what enters its first layer."""
    gemma = tiny_target("gemma3")
    assert float(gemma.get_input_embeddings().embed_scale) == 8.0
    net = random_net(1, target_layers=4, embedding_scale=8.0)
    for format in ("z-lab", "ModelOpt", "transformers"):
        folder = write_net(tmp_path / format, random_net(1, target_layers=4), format)
        assert_is(AutoDrafter.from_pretrained(folder, target=gemma), net, of=gemma)
    # speculators trains on the bare rows.
    bare = random_net(1, target_layers=4)
    folder = write_net(tmp_path / "bare", bare, "speculators, new")
    assert_is(AutoDrafter.from_pretrained(folder, target=gemma), bare, of=gemma)
    both = write_net(tmp_path / "both", random_net(1, target_layers=4, embedding_scale=0.5))
    assert_is(
        AutoDrafter.from_pretrained(both, target=gemma), random_net(1, target_layers=4, embedding_scale=4.0), gemma
    )


def test_a_norm_behind_the_targets_embedding_is_not_applied_to_the_block(tmp_path):
    """Muse Glimmer norms its rows inside the embedding."""

    class Normed(torch.nn.Embedding):
        def forward(self, ids):
            rows = super().forward(ids)
            return rows / rows.pow(2).mean(dim=-1, keepdim=True).sqrt()

    normed = perturbed(target(), 0.0)
    table = Normed(97, 64)
    table.load_state_dict(normed.get_input_embeddings().state_dict())
    normed.set_input_embeddings(table)
    net = random_net(1)
    drafter = AutoDrafter.from_pretrained(write_net(tmp_path, net, "transformers"), target=normed)
    assert_is(drafter, net, of=normed)


# Layer ids


def test_layer_ids_that_no_file_names_are_spread_evenly(tmp_path):
    assert default_target_layers(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layers(40, 5) == (1, 10, 19, 28, 37)
    assert default_target_layers(32, 5) == (1, 8, 15, 22, 29)
    assert default_target_layers(24, 1) == (12,)
    gemma, net = tiny_target("gemma3"), random_net(1, target_layers=4, aux_layers=(3,), num_layers=1)
    folder = write_net(tmp_path, net, dflash_config={"mask_token_id": MASK})
    drafter = AutoDrafter.from_pretrained(folder, target=gemma)
    assert drafter.signals.hidden_states == (3,)


def test_ids_of_both_conventions_are_one_list(tmp_path):
    net = random_net(1, aux_layers=(1, 3))
    for name in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        folder = write_net(tmp_path / name, net, **{name: [1, 3]})
        assert load(folder).signals.hidden_states == (1, 3)
        only = write_net(tmp_path / f"{name}, only", net, **{name: [1, 3]}, dflash_config={"mask_token_id": MASK})
        assert load(only).signals.hidden_states == (1, 3)


def test_layer_ids_can_be_corrected(tmp_path):
    wrong = write_net(tmp_path, random_net(1, aux_layers=(1, 2)))
    assert_is(load(wrong, aux_layers=[2, 3]), random_net(1, aux_layers=(2, 3)))


# Detection


def test_detection_names_the_format_and_what_tells(tmp_path):
    told = {
        "z-lab": ("z-lab", "dflash_config"),
        "z-lab, new": ("z-lab", "dflash_config"),
        "z-lab, flat": ("z-lab", "DFlashDraftModel"),
        "ModelOpt": ("ModelOpt", "dflash_config"),
        "speculators, old": ("speculators", "speculators_model_type 'dflash'"),
        "speculators, new": ("speculators", "speculators_model_type 'dflash'"),
        "transformers": ("transformers", "muse_glimmer_assistant"),
    }
    for format, (variant, reason) in told.items():
        detected = AutoDrafter.detect(write_net(tmp_path / format, random_net(), format))
        assert detected.variant == variant and reason in detected.reason, format
    bare = write_net(tmp_path / "bare", random_net(), "z-lab, flat", architectures=None)
    assert "fc and hidden_norm" in AutoDrafter.detect(bare).reason


def test_relatives_with_another_network_are_left_to_other_methods(tmp_path):
    from hf_specdec.drafters.auto import Repository
    from hf_specdec.drafters.dflash.checkpoints import detect

    markov = {"markov_head.markov_w1.weight": torch.ones(97, 4)}
    nested = {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2]}
    for case, (fields, more) in {
        "a Markov head": ({}, markov),
        "a confidence head": ({}, {"confidence_head.proj.weight": torch.ones(1, 64)}),
        "DeepSpec": ({"architectures": ["Qwen3DSparkModel"]}, {}),
        "DeepSpec without a Markov head": ({"markov_rank": 0}, {}),
        "a DSpark projector": ({"dflash_config": {**nested, "projector_type": "dspark"}}, {}),
        "speculators' DSpark": ({"speculators_model_type": "dspark"}, {}),
        "P-EAGLE": ({"speculators_model_type": "peagle"}, {}),
    }.items():
        config, tensors = FORMATS["z-lab"](random_net())
        folder = write(tmp_path / case, {**config, **fields}, {**tensors, **more})
        assert detect(Repository.read(folder)) is None, case
    target().save_pretrained(tmp_path / "model")
    assert detect(Repository.read(tmp_path / "model")) is None


def test_shards_and_half_precision_load(tmp_path):
    config, tensors = FORMATS["z-lab"](random_net(1))
    whole = first_logits(load(write(tmp_path / "whole", config, tensors)))
    assert torch.equal(first_logits(load(write(tmp_path / "shards", config, tensors, shards=4))), whole)
    assert torch.equal(first_logits(load(write(tmp_path / "pickled", config, tensors, pickled=True))), whole)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    folder = write(tmp_path / "half", config, half)
    assert load(folder).dtype == torch.float32  # the target's
    drafter = load(folder, dtype=torch.bfloat16)
    assert not any(parameter.is_meta for parameter in [*drafter.parameters(), *drafter.buffers()])
    first_logits(drafter)
    assert drafter.last_stats.num_drafted > 0
