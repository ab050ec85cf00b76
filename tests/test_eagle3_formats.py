"""Every published EAGLE-3 format loads, and is the same head."""

import pytest
import torch
from eagle3_formats import FORMATS, Head, random_head, vocabulary_maps, write, write_head
from eagle3_reference import Reference
from test_eagle3 import CLOSE
from tiny import perturbed, prompts, tiny_target
from watched import largest_error, rounds_of

from hf_specdec import AutoDrafter
from hf_specdec.drafters.eagle3.configuration import resolve_aux_layers

TEXT = prompts([11, 6])


def target():
    return tiny_target("llama")


def first_logits(drafter) -> torch.Tensor:
    rounds = rounds_of(drafter, target(), TEXT, alter=False, max_new_tokens=8, eos_token_id=None)
    return rounds[0][2]


def load(folder, **options):
    return AutoDrafter.from_pretrained(folder, target=target(), num_draft_tokens=3, **options)


def assert_is(drafter, head: Head, atol: float = 1e-5) -> None:
    rounds = rounds_of(drafter, target(), TEXT, max_new_tokens=16, eos_token_id=None)
    assert largest_error(rounds, Reference(head, target())) < atol


HEADS = {
    "plain": {},
    "EAGLE-3.1": dict(flags=("fc_norm", "norm_output")),
    "norm before fc": dict(flags=("norm_before_fc",)),
    "all tokens": dict(draft_vocab_size=97),
    "qwen3 layer, two layers": dict(qk_norm=True, num_layers=2),
}


@pytest.mark.parametrize("kind", HEADS)
def test_one_head_gives_the_same_logits_in_every_format(tmp_path, kind):
    head = random_head(seed=1, **HEADS[kind])
    logits = {}
    for format in FORMATS:
        folder = write_head(tmp_path / format, head, format)
        detected = AutoDrafter.detect(folder)
        assert detected.method == "eagle3" and detected.reason
        logits[format] = first_logits(load(folder))
    for format, found in logits.items():
        assert torch.equal(found, logits["speculators, old"]), format
    assert_is(load(folder), head)


def test_detection_names_the_format_and_what_tells(tmp_path):
    told = {
        "SafeAILab": ("SafeAILab", "draft_vocab_size"),
        "SpecForge": ("SafeAILab or SpecForge", "midlayer"),
        "AngelSlim": ("SafeAILab or SpecForge", "midlayer"),
        "speculators, old": ("speculators", "speculators_model_type"),
        "speculators, new": ("speculators", "speculators_model_type"),
        "ModelOpt": ("ModelOpt", "layers.0.hidden_norm"),
    }
    for format, (variant, reason) in told.items():
        detected = AutoDrafter.detect(write_head(tmp_path / format, random_head(), format))
        assert detected.variant == variant and reason in detected.reason, format
    without_fc = AutoDrafter.detect(write_head(tmp_path / "without fc", random_head(aux_layers=()), "ModelOpt"))
    assert without_fc.variant == "ModelOpt" and "eagle_config" in without_fc.reason


def test_shards_prefixes_and_half_precision_load(tmp_path):
    head = random_head(seed=1)
    config, tensors = FORMATS["SpecForge"](head)
    whole = first_logits(load(write(tmp_path / "whole", config, tensors)))
    assert torch.equal(first_logits(load(write(tmp_path / "shards", config, tensors, shards=4))), whole)
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    assert torch.equal(first_logits(load(write(tmp_path / "prefixed", config, prefixed))), whole)
    for dtype in (torch.float16, torch.bfloat16):
        half = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        drafter = load(write(tmp_path / str(dtype), config, half))
        assert drafter.dtype == torch.float32  # the target's
        rounded = Head(**{**vars(head), "tensors": {n: t.to(dtype).float() for n, t in head.tensors.items()}})
        assert_is(drafter, rounded)
        assert load(tmp_path / str(dtype), dtype=dtype).dtype == dtype


def test_a_head_of_another_dtype_than_the_target_drafts(tmp_path):
    for name, head in (
        ("own", random_head()),
        ("shared", random_head(draft_vocab_size=97).with_tensors(lm_head__weight=None)),
    ):
        drafter = load(write_head(tmp_path / name, head, "SpecForge"), dtype=torch.bfloat16)
        rounds_of(drafter, target(), TEXT, alter=False, max_new_tokens=12)
        assert drafter.last_stats.num_drafted > 0


def test_old_names_of_the_norms_before_fc_load(tmp_path):
    head = random_head(seed=1, flags=("fc_norm",))
    config, tensors = FORMATS["SpecForge"](head)
    for i, name in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
    del config["fc_norm"]
    assert_is(load(write(tmp_path, {**config, "use_aux_norm": True}, tensors)), head)


def test_vocabulary_maps_of_32_bits_load(tmp_path):
    head = random_head(seed=1)
    config, tensors = FORMATS["SpecForge"](head)
    assert_is(load(write(tmp_path, config, {**tensors, **vocabulary_maps(head, dtype=torch.int32)})), head)


@pytest.mark.parametrize(("format", "default"), [("speculators, old", True), ("SpecForge", False), ("ModelOpt", False)])
def test_a_missing_norm_before_residual_means_what_the_format_means(tmp_path, format, default):
    head = random_head(seed=1, flags=("norm_before_residual",) if default else ())
    assert_is(load(write_head(tmp_path, head, format, norm_before_residual=None)), head)


def test_the_fed_back_state_can_be_forced(tmp_path):
    head = random_head(seed=1, flags=("norm_output",))
    assert_is(load(write_head(tmp_path / "a", head), norm_output=True), head)
    assert_is(load(write_head(tmp_path / "b", head), norm_output=False), random_head(seed=1))


ROPES = {
    "old spelling": dict(rope_scaling={"type": "linear", "factor": 3.0}),
    "newer key": dict(rope_scaling={"rope_type": "linear", "factor": 3.0, "rope_theta": None}),
    "both keys": dict(rope_scaling={"type": "linear", "rope_type": "linear", "factor": 3}),
    "newest spelling": dict(
        rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}
    ),
}


@pytest.mark.parametrize("spelling", ROPES)
def test_rotary_embeddings_load_in_every_spelling(tmp_path, spelling):
    head = random_head(seed=1, rope={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0})
    assert_is(load(write_head(tmp_path, random_head(seed=1), "SpecForge", **ROPES[spelling])), head)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_mrope_is_plain_on_text(tmp_path, key):
    head = random_head(seed=1, rope={"rope_type": "default", "rope_theta": 1e6})
    scaling = {key: "mrope", "mrope_section": [2, 3, 3]}
    assert_is(load(write_head(tmp_path, head, "SpecForge", rope_scaling=scaling)), head)


def test_fields_copied_from_the_target_do_no_harm(tmp_path):
    head = random_head(seed=1)
    lies = dict(
        num_hidden_layers=48,
        tie_word_embeddings=True,
        attention_bias=True,
        architectures=None,
        eos_token_id=None,
        rope_scaling=None,
        sliding_window=4,
        use_sliding_window=False,
        max_window_layers=28,
        partial_rotary_factor=0.25,
        draft_vocab_size=None,
        quantization_config=None,
        head_dim=None,
    )
    for format in ("SpecForge", "ModelOpt"):
        assert_is(load(write_head(tmp_path / format, head, format, **lies)), head)


def test_windows_of_the_old_spelling_start_at_a_layer(tmp_path):
    head = random_head(seed=1, num_layers=2, windows=(None, 4))
    fields = dict(layer_types=None, use_sliding_window=True, max_window_layers=1)
    assert_is(load(write_head(tmp_path, head, "SpecForge", **fields)), head)


def test_a_missing_output_head_is_the_targets(tmp_path):
    head = random_head(seed=1, draft_vocab_size=97).with_tensors(lm_head__weight=None)
    drafter = load(write_head(tmp_path, head, "ModelOpt"))
    assert not hasattr(drafter.model, "lm_head")
    assert_is(drafter, head)


def test_the_embedding_is_the_targets_unless_it_was_trained(tmp_path):
    head, theirs = random_head(seed=1), target().get_input_embeddings().weight.detach()
    trained = perturbed(target(), 0.08).get_input_embeddings().weight.detach()
    noise = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(9))
    for name, weight, fields, is_own in (
        ("copy", theirs.half().float(), {}, False),
        ("trained", trained, {}, True),
        ("said to be trained", theirs + 0.001, {"embed_requires_grad": True}, True),
    ):
        own = head.with_tensors(embed_tokens__weight=weight)
        drafter = load(write_head(tmp_path / name, own, **fields))
        assert hasattr(drafter.model, "embed_tokens") == is_own, name
        assert_is(drafter, own if is_own else head)
    random = head.with_tensors(embed_tokens__weight=noise)
    with pytest.warns(UserWarning, match="nothing to do with the target's .* own_embedding=True"):
        assert_is(load(write_head(tmp_path / "random", random)), head)
    assert_is(load(tmp_path / "random", own_embedding=True), random)
    assert_is(load(tmp_path / "trained", own_embedding=False), head)


def test_weights_are_loaded_without_a_second_copy(tmp_path):
    drafter = load(write_head(tmp_path, random_head()))
    assert not any(parameter.is_meta for parameter in [*drafter.parameters(), *drafter.buffers()])
    assert "embed_tokens.weight" not in drafter.model.state_dict()


# Layer ids

# layers of the target, ids in the file, entering ids, guessed
EAGLE_CONFIG_IDS = [
    (36, (), (2, 18, 33), False),
    (36, (1, 17, 32), (2, 18, 33), False),  # gpt-oss-120b, long context
    (36, (1, 17, 33), (2, 18, 34), False),  # gpt-oss-120b, SpecForge
    (36, (24, 30, 36), (24, 30, 36), False),  # gpt-oss-120b v3: the last one before the final norm
    (24, (1, 11, 21), (2, 12, 22), False),  # gpt-oss-20b
    (94, (1, 46, 90), (2, 47, 91), False),  # Qwen3-235B
    (61, (1, 29, 57), (2, 30, 58), False),  # DeepSeek-V3
    (61, (2, 30, 58), (2, 30, 58), False),  # Kimi-K2
    (48, (1, 23, 44), (2, 24, 45), False),  # Llama-4-Maverick
    (36, (2, 10, 18, 26, 34), (2, 10, 18, 26, 34), False),  # five states
    (45, (4, 20, 40), (5, 21, 41), True),  # Step-3.5
    (32, (3,), (4,), True),
    (32, (2, 16, 29), (2, 16, 29), False),
    (32, (1, 15, 28), (2, 16, 29), False),
]


@pytest.mark.parametrize(("layers", "ids", "entering", "guessed"), EAGLE_CONFIG_IDS)
def test_layer_ids_of_eagle_config_are_told_apart(layers, ids, entering, guessed):
    assert resolve_aux_layers(layers, (), ids) == (entering, guessed)


@pytest.mark.parametrize("ids", [(1, 17, 32), (2, 10, 18, 26, 34), (4, 20, 40)])
def test_layer_ids_of_the_top_level_are_entering_ids(ids):
    assert resolve_aux_layers(45, ids, (7, 8, 9)) == (ids, False)


def test_a_guessed_convention_is_said_and_can_be_corrected(tmp_path):
    head = random_head(seed=1, target_layers=4, aux_layers=(0, 1, 1))
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1], "use_aux_hidden_state": True}
    folder = write_head(tmp_path, head, "SpecForge", eagle_config=ids)
    with pytest.warns(UserWarning, match=r"does not say how it counts layers.*\(1, 2, 2\).*aux_layers"):
        drafter = load(folder)
    assert drafter.signals.hidden_states == (1, 2, 2)
    assert_is(load(folder, aux_layers=[0, 1, 1]), head)


def test_without_ids_the_usual_layers_are_read(tmp_path):
    gemma = tiny_target("gemma3")
    head = random_head(target_layers=4)
    folder = write_head(tmp_path, head, "SpecForge", eagle_config=None)
    drafter = AutoDrafter.from_pretrained(folder, target=gemma)
    assert drafter.signals.hidden_states == (2, 2, 1)
    assert not drafter.signals.pre_norm_last
    torch.testing.assert_close(drafter.model.fc.weight, head.tensors["fc.weight"], **CLOSE)
