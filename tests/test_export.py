"""export/eagle3.py: a head that was written is the head that is read."""

import copy
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCAB_SIZE, prompts, randomise, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.drafters.eagle3.configuration import Eagle3Config
from hf_specdec.drafters.eagle3.modeling import Eagle3Model
from hf_specdec.export.eagle3 import save_eagle3

SIZES = dict(
    hidden_size=64,
    intermediate_size=80,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=VOCAB_SIZE,
    draft_vocab_size=41,
    target_hidden_size=64,
    aux_layers=(0, 1, 2),
)
VARIANTS = {
    "plain": dict(),
    "residual after the norm": dict(norm_before_residual=True),
    "norm before fc": dict(norm_before_fc=True),
    "a norm for each state": dict(fc_norm=True),
    "post-norm state fed back": dict(norm_output=True),
    "EAGLE-3.1": dict(fc_norm=True, norm_output=True),
    "all norms": dict(norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True),
    "two layers": dict(windows=(None, None)),
    "qwen3 layers": dict(windows=(None, None, None), qk_norm=True),
    "attention biases": dict(attention_bias=True),
    "output bias": dict(output_bias=True),
    "all biases": dict(attention_bias=True, output_bias=True, mlp_bias=True, fc_bias=True),
    "sliding window": dict(windows=(5,)),
    "layers with and without a window": dict(windows=(None, 4)),
    "the other way round": dict(windows=(4, None)),
    "all tokens": dict(draft_vocab_size=VOCAB_SIZE),
    "one state": dict(aux_layers=(2,)),
    "last states": dict(aux_layers=(1, 2, 3)),
    "the target's final state": dict(aux_layers=()),
    "another eps": dict(rms_norm_eps=1e-3),
    "another activation": dict(hidden_act="gelu"),
    "another shape": dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8),
    "another base": dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "linear rope": dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
    "yarn": dict(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
        }
    ),
    "llama3 rope": dict(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    ),
    "dynamic rope": dict(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, max_position_embeddings=8
    ),
}


def random_model(own_embedding: bool = False, own_head: bool = True, **changes) -> Eagle3Model:
    model = Eagle3Model(Eagle3Config(**{**SIZES, **changes}), own_embedding, own_head).eval()
    randomise(model, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def kept_of(model: Eagle3Model) -> torch.Tensor | None:
    size = model.config.draft_vocab_size
    return None if size == VOCAB_SIZE else torch.arange(size) * 2 + 3


def saved(folder, model: Eagle3Model, **options):
    """The drafter that is read after `model` was written."""
    save_eagle3(folder, model, kept_of(model), torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return AutoDrafter.from_pretrained(folder, target=tiny_target(), **options)


def logits_of(model: Eagle3Model) -> torch.Tensor:
    """Logits of a causal pass over ten entries, then of one more from the state that is fed back."""
    generator = torch.Generator().manual_seed(3)
    model = copy.deepcopy(model)  # into fresh memory: where a file lies in memory decides how sums are rounded
    config = model.config
    states = [torch.randn(1, 10, 64, generator=generator) for _ in config.aux_layers or (0,)]
    embedded = torch.randn(1, 11, 64, generator=generator)
    seen = {}

    def attend(index, queries, keys, values):
        old = seen.get(index, (keys[:, :, :0], values[:, :, :0]))
        seen[index] = keys, values = torch.cat([old[0], keys], 2), torch.cat([old[1], values], 2)
        columns = torch.arange(keys.shape[2])
        distance = columns[-queries.shape[2] :, None] - columns
        window = config.windows[index]
        visible = (distance >= 0) & (distance < (window or 99))
        return torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible, enable_gqa=True
        )

    with torch.no_grad():
        out = model(embedded[:, :10], model.fuse(states), torch.arange(10)[None], attend)
        drafted = model(embedded[:, 10:], model.recurrent(out[:, -1:]), torch.tensor([[10]]), attend)
        normed = model.norm(torch.cat([out, drafted], dim=1))
        head = getattr(model, "lm_head", tiny_target().get_output_embeddings())
        return head(normed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_that_was_written_is_read_bit_for_bit(tmp_path, variant):
    model = random_model(**VARIANTS[variant])
    drafter = saved(tmp_path / "head", model)
    assert torch.equal(logits_of(drafter.model), logits_of(model))
    assert drafter.model.config == model.config
    kept = kept_of(model)
    assert drafter.target_ids is None if kept is None else torch.equal(drafter.target_ids, kept)
    options = dict(max_new_tokens=8, do_sample=False)
    text = tiny_target().generate(**prompts([7]), **options)
    assert torch.equal(tiny_target().generate(**prompts([7]), **options, assistant_model=drafter), text)


@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - {"plain", "last states"}))
def test_what_a_variant_is_about_would_show(variant):
    """Negative control: with the weights of the plain head, as far as they fit, it computes something else."""
    model, plain = random_model(**VARIANTS[variant]), random_model()
    own = model.state_dict()
    shared = {name: x for name, x in plain.state_dict().items() if name in own and x.shape == own[name].shape}
    model.load_state_dict(shared, strict=False)
    found, expected = logits_of(model), logits_of(plain)
    assert found.shape != expected.shape or float((found - expected).abs().max()) > 1e-3


def test_an_embedding_of_its_own_is_taken_whether_it_is_like_the_targets_or_not(tmp_path):
    theirs = tiny_target().get_input_embeddings().weight.detach()
    for name, weight in (("unlike", torch.randn(theirs.shape)), ("alike", theirs * 1.0001), ("near", theirs + 0.1)):
        model = random_model(own_embedding=True)
        model.embed_tokens.weight.data = weight.clone()
        drafter = saved(tmp_path / name, model)
        assert torch.equal(drafter.model.embed_tokens.weight, weight), name


def test_a_head_without_an_output_head_takes_the_targets(tmp_path):
    model = random_model(own_head=False, draft_vocab_size=VOCAB_SIZE)
    drafter = saved(tmp_path, model)
    assert not hasattr(drafter.model, "lm_head") and torch.equal(logits_of(drafter.model), logits_of(model))


def test_both_maps_of_the_vocabulary_name_the_same_tokens(tmp_path):
    model = random_model()
    save_eagle3(tmp_path, model, kept_of(model))
    tensors = load_file(tmp_path / "model.safetensors")
    kept = kept_of(model).tolist()
    assert [i + offset for i, offset in enumerate(tensors["d2t"].tolist())] == kept
    assert tensors["t2d"].nonzero().flatten().tolist() == kept and len(tensors["t2d"]) == VOCAB_SIZE
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool


def test_a_full_vocabulary_needs_no_maps(tmp_path):
    save_eagle3(tmp_path, random_model(draft_vocab_size=VOCAB_SIZE), None)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))


def test_names_and_precision_are_those_of_published_heads(tmp_path):
    model = random_model(windows=(None, None))
    save_eagle3(tmp_path, model, kept_of(model))
    tensors = load_file(tmp_path / "model.safetensors")
    assert {"midlayer.hidden_norm.weight", "midlayer.self_attn.q_proj.weight", "layers.1.mlp.up_proj.weight"} < set(
        tensors
    )
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in tensors.items() if name not in ("d2t", "t2d"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["torch_dtype"] == "bfloat16"
    assert config["draft_vocab_size"] == 41 and config["vocab_size"] == VOCAB_SIZE


def test_layers_are_named_in_both_conventions(tmp_path):
    """vLLM reads the layers that a state enters, SGLang and SpecForge those that it comes out of."""
    save_eagle3(tmp_path, random_model(aux_layers=(1, 2, 3)), kept_of(random_model()))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}


def test_windows_of_several_sizes_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="the format has one for all layers"):
        save_eagle3(tmp_path, random_model(windows=(4, 6)), kept_of(random_model()))
    assert not list(tmp_path.iterdir())
