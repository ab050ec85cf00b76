"""DSpark's layers for Gemma 4 are transformers' own Gemma 4 layers, where both can be asked the same."""

import pytest
import torch
from dspark_formats import GEMMA4, random_drafter, write_drafter
from tiny import tiny_target
from torch.nn import functional as F
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextRotaryEmbedding

from hf_specdec import AutoDrafter

LENGTH = 9


def their_config(values_are_keys: bool) -> Gemma4TextConfig:
    config = Gemma4TextConfig(
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=8,
        global_head_dim=16,
        vocab_size=97,
        vocab_size_per_layer_input=97,
        layer_types=["full_attention", "full_attention"],
        attention_k_eq_v=values_are_keys,
        rms_norm_eps=1e-5,
        hidden_size_per_layer_input=0,
        enable_moe_block=False,
        num_kv_shared_layers=0,
    )
    config._attn_implementation = "eager"
    return config


@pytest.mark.parametrize("values_are_keys", [True, False])
def test_a_layer_over_rows_alone_is_transformers_layer(tmp_path, values_are_keys):
    kv_heads = 1 if values_are_keys else 2
    one = random_drafter(seed=2, **{**GEMMA4, "num_key_value_heads": kv_heads}, values_are_keys=values_are_keys)
    drafter = AutoDrafter.from_pretrained(write_drafter(tmp_path, one), target=tiny_target("llama"))
    config, ours = their_config(values_are_keys), drafter.model.layers[1]
    theirs = Gemma4TextDecoderLayer(config, 1).eval()
    loaded = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not loaded.unexpected_keys and not loaded.missing_keys
    states = torch.randn(1, LENGTH, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH)[None] + 100

    rotary = Gemma4TextRotaryEmbedding(config)
    expected_rotation = rotary(states, positions, "full_attention")
    rotation = drafter.model.rotary(states, positions)
    for one_part, other in zip(rotation, expected_rotation, strict=True):
        torch.testing.assert_close(one_part, other, atol=1e-6, rtol=0)

    def attend(index, queries, keys, values):
        scale = drafter.model.config.attention_scale
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)

    above = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        found = ours(states[:, None], states[:, :0], rotation, attend)[:, 0]
        expected = theirs(
            states, position_embeddings=expected_rotation, attention_mask=above, shared_kv_states={}, cache=None
        )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
