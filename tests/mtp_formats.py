"""Tiny targets with random MTP layers under the names that each family publishes: one function a family."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import EOS, PAD, VOCAB_SIZE, randomise
from tiny_hybrids import config_of
from tiny_vision import tiny_vlm
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

SIZE = 64
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


@dataclass
class Layer:
    """An MTP layer as the reference computes it.

    Args:
        norms: weights "embedding", "hidden" and "final", each what the normed state is multiplied with; without
            "final" there is no such norm.
        projection: [H, 2 H].
        blocks: the target's decoder layers.
    """

    norms: dict[str, torch.Tensor]
    projection: torch.Tensor
    blocks: list[nn.Module]


@dataclass
class Published:
    """A tiny target and its MTP layers.

    Args:
        config: of the target.
        layers: the MTP layers.
        tensors: the same by their published names.
        carry: "raw" or "normed".
        hidden_first: order of the projection.
        window: tokens that each layer attends over, None for all.
        kind: kind of the layers for a rotary embedding that takes one.
        auto: class that makes the target.
        divisor: what the output head's input is divided by.
    """

    config: PreTrainedConfig
    layers: list[Layer]
    tensors: dict[str, torch.Tensor]
    carry: str = "raw"
    hidden_first: bool = False
    window: int | None = None
    kind: str | None = None
    auto: Any = AutoModelForCausalLM
    divisor: float = 1.0


def random_layer(seed: int, blocks: list[nn.Module], final: bool = True) -> Layer:
    """A layer around blocks, whose weights are drawn here as well."""
    generator = torch.Generator().manual_seed(seed)
    for number, block in enumerate(blocks):
        randomise(block, seed + 100 * number)
    names = ("embedding", "hidden", "final") if final else ("embedding", "hidden")
    norms = {name: 1 + 0.3 * torch.randn(SIZE, generator=generator) for name in names}
    return Layer(norms, 0.15 * torch.randn(SIZE, 2 * SIZE, generator=generator), blocks)


def block_of(config: PreTrainedConfig, name: str, index: int = 0, **changes: object) -> nn.Module:
    """A decoder layer of the target's module, called `name`, from its config with changes."""
    fields = {key: value for key, value in config.to_dict().items() if key not in changes}
    config = type(config)(**fields, **changes)
    config._attn_implementation = config._experts_implementation = "eager"
    module = import_module(type(config).__module__.replace("configuration_", "modeling_"))
    return getattr(module, name)(config, index).eval()


def per_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with those of experts one by one, as checkpoints have them."""
    apart = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                stem = f"{name.removesuffix('gate_up_proj')}{number}."
                apart[stem + "gate_proj.weight"], apart[stem + "up_proj.weight"] = gate, up
        elif name.endswith(("experts.down_proj", "experts.up_proj")):
            stem, _, kind = name.rpartition(".")
            apart |= {f"{stem}.{number}.{kind}.weight": expert for number, expert in enumerate(tensor)}
        else:
            apart[name] = tensor
    return apart


def under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}


def deepseek_names(layer: Layer, index: int) -> dict[str, torch.Tensor]:
    """The names of DeepSeek-V3, GLM-4 and others, with `index` counted on from the target's layers."""
    prefix = f"model.layers.{index}."
    tensors = {
        "enorm.weight": layer.norms["embedding"],
        "hnorm.weight": layer.norms["hidden"],
        "eh_proj.weight": layer.projection,
        "shared_head.norm.weight": layer.norms["final"],
        **per_expert(layer.blocks[0].state_dict()),
    }
    return under(prefix, tensors)


def qwen_names(layer: Layer) -> dict[str, torch.Tensor]:
    """The names of Qwen3-Next and later; norms are stored as their distance from one."""
    tensors = {
        "fc.weight": layer.projection,
        "pre_fc_norm_embedding.weight": layer.norms["embedding"] - 1,
        "pre_fc_norm_hidden.weight": layer.norms["hidden"] - 1,
        "norm.weight": layer.norms["final"] - 1,
        **under("layers.0.", per_expert(layer.blocks[0].state_dict())),
    }
    return under("mtp.", tensors)


def deepseek_v3(num_layers: int = 1) -> Published:
    config = transformers.DeepseekV3Config(
        **{**_SHAPE, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
        num_nextn_predict_layers=num_layers,
    )
    layers = [
        random_layer(7 + i, [block_of(config, "DeepseekV3DecoderLayer", first_k_dense_replace=0)])
        for i in range(num_layers)
    ]
    tensors = {}
    for i, layer in enumerate(layers):
        tensors |= deepseek_names(layer, 3 + i)
    return Published(config, layers, tensors)


def llama(num_layers: int = 1) -> Published:
    """DeepSeek's names for a target that is published without MTP layers, as a training recipe writes them."""
    config = transformers.LlamaConfig(**_SHAPE)
    layers = [random_layer(7 + i, [block_of(config, "LlamaDecoderLayer")]) for i in range(num_layers)]
    tensors = {}
    for i, layer in enumerate(layers):
        tensors |= deepseek_names(layer, 3 + i)
    return Published(config, layers, tensors)


def _qwen(name: str, block: str) -> Published:
    config = config_of(name)
    config.mtp_num_hidden_layers = 1
    changes = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    layer = random_layer(7, [block_of(config, block, **changes)])
    return Published(config, [layer], qwen_names(layer), carry="normed")


def qwen3_next() -> Published:
    return _qwen("qwen3_next", "Qwen3NextDecoderLayer")


def qwen3_5() -> Published:
    return _qwen("qwen3_5", "Qwen3_5DecoderLayer")


def qwen3_5_moe() -> Published:
    return _qwen("qwen3_5_moe", "Qwen3_5MoeDecoderLayer")


def glm4_moe() -> Published:
    config = transformers.Glm4MoeConfig(
        **_SHAPE,
        head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        rms_norm_eps=1e-6,
        num_nextn_predict_layers=1,
    )
    layer = random_layer(7, [block_of(config, "Glm4MoeDecoderLayer", first_k_dense_replace=0)])
    return Published(config, [layer], deepseek_names(layer, 3))


def mellum() -> Published:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = transformers.MellumConfig(
        **_SHAPE,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=kinds,
        sliding_window=8,
        rms_norm_eps=1e-6,
        num_nextn_predict_layers=1,
    )
    block = block_of(config, "MellumDecoderLayer", index=1)
    layer = random_layer(7, [block])
    tensors = qwen_names(layer)
    tensors |= {name: tensor + 1 for name, tensor in tensors.items() if name in PLAIN_NORMS}
    return Published(config, [layer], tensors, carry="normed", window=8, kind="sliding_attention")


def ernie4_5_moe() -> Published:
    config = transformers.Ernie4_5_MoeConfig(
        **_SHAPE,
        moe_intermediate_size=32,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        rms_norm_eps=1e-6,
    )
    config.num_nextn_predict_layers = 1
    layer = random_layer(7, [block_of(config, "Ernie4_5_MoeDecoderLayer")], final=False)  # layer 0 is a dense one
    tensors = {
        "mtp_emb_norm.0.weight": layer.norms["embedding"],
        "mtp_hidden_norm.0.weight": layer.norms["hidden"],
        "mtp_linear_proj.0.weight": layer.projection,
        **under("mtp_block.0.", layer.blocks[0].state_dict()),
    }
    return Published(config, [layer], under("model.", tensors))


def nemotron_h(num_layers: int = 1) -> Published:
    config = config_of("nemotron_h")
    config.num_nextn_predict_layers, config.layer_norm_epsilon = num_layers, 1e-6
    kinds = config.mtp_layers_block_type
    tensors, layers = {}, []
    for i in range(num_layers):
        blocks = [block_of(config, "NemotronHBlock", j, layers_block_type=kinds) for j in range(2)]
        layer = random_layer(7 + i, blocks)
        first = {
            "enorm.weight": layer.norms["embedding"],
            "hnorm.weight": layer.norms["hidden"],
            "eh_proj.weight": layer.projection,
            **blocks[0].state_dict(),
        }
        last = {"final_layernorm.weight": layer.norms["final"], **per_expert(blocks[1].state_dict())}
        tensors |= under(f"mtp.layers.{2 * i}.", first) | under(f"mtp.layers.{2 * i + 1}.", last)
        layers.append(layer)
    return Published(config, layers, tensors, carry="normed")


def mimo() -> Published:
    """MiMo-7B's names for the class that its own code derives from."""
    config = transformers.Qwen2Config(**_SHAPE)
    layer = random_layer(7, [block_of(config, "Qwen2DecoderLayer")])
    tensors = {
        "token_layernorm.weight": layer.norms["embedding"],
        "hidden_layernorm.weight": layer.norms["hidden"],
        "input_proj.weight": layer.projection,
        "final_layernorm.weight": layer.norms["final"],
        **layer.blocks[0].state_dict(),
    }
    return Published(config, [layer], under("model.mtp_layers.0.", tensors), carry="normed", hidden_first=True)


def qwen3_5_vl() -> Published:
    """The same layers in a composite model."""
    config = copy.deepcopy(tiny_vlm("qwen3_5").config)
    text = config.text_config
    text.mtp_num_hidden_layers = 1
    block = block_of(text, "Qwen3_5DecoderLayer", layer_types=["full_attention"], num_hidden_layers=1)
    layer = random_layer(7, [block])
    return Published(config, [layer], qwen_names(layer), carry="normed", auto=AutoModelForImageTextToText)


def step3p7() -> Published:
    """Three layers that slide, with more heads than others; the second one has experts."""
    full, sliding = "full_attention", "sliding_attention"
    shape = dict(
        _SHAPE,
        head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        share_expert_dim=32,
        sliding_window=8,
        rms_norm_eps=1e-6,
        attention_other_setting={"num_attention_heads": 8},
    )
    text = dict(
        shape,
        layer_types=[full, sliding, full, sliding, sliding, sliding],
        moe_layers_enum="1,2,4",
        num_nextn_predict_layers=3,
        rope_theta=[10000.0, 5000.0, 10000.0, 5000.0, 5000.0, 5000.0],
        swiglu_limits_shared=[0.0, 0.0, 0.3, 0.0, 0.0, 0.0],
    )
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Step3p7Config(text_config=text, vision_config=vision, image_token_id=VOCAB_SIZE - 1)
    block_config = transformers.Step3p7Config(
        text_config=dict(shape, layer_types=[sliding] * 3, moe_layers_enum="1", rope_theta=5000.0), vision_config=vision
    ).text_config
    block_config._attn_implementation = block_config._experts_implementation = "eager"
    module = import_module("transformers.models.step3p7.modeling_step3p7")
    layers = [random_layer(7 + i, [module.Step3p7DecoderLayer(block_config, i).eval()]) for i in range(3)]
    tensors = {}
    for i, layer in enumerate(layers):
        prefix, infix = f"model.layers.{3 + i}.", "transformer." if i == 2 else ""
        tensors |= under(
            prefix,
            {
                "enorm.weight": layer.norms["embedding"] - 1,
                "hnorm.weight": layer.norms["hidden"] - 1,
                "eh_proj.weight": layer.projection,
                f"{infix}shared_head.norm.weight": layer.norms["final"] - 1,
            },
        )
        for name, tensor in layer.blocks[0].state_dict().items():
            name = name.replace("mlp.shared_experts.", "share_expert.").replace("mlp.gate.weight", "moe.gate.weight")
            name = name.replace("mlp.gate.e_score_correction_bias", "moe.router_bias")
            name = name.replace("mlp.experts.down_proj", "moe.down_proj.weight")
            if name == "mlp.experts.gate_up_proj":
                parts = dict(zip(("moe.gate_proj.weight", "moe.up_proj.weight"), tensor.chunk(2, dim=1), strict=True))
            else:
                parts = {name: tensor}
            tensors |= under(prefix + infix, parts)
    return Published(config, layers, tensors, window=8, kind=sliding, auto=AutoModelForImageTextToText)


def inkling(chain_norm: bool = True) -> Published:
    """Two layers with short convolutions and learned biases for positions, one norm for both of them."""
    text = dict(
        {name: value for name, value in _SHAPE.items() if name not in ("num_key_value_heads", "pad_token_id")},
        num_key_value_heads=2,
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=8,
        local_layer_ids=[0],
        d_rel=8,
        rel_extent=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        logits_mup_width_multiplier=2.0,
        pad_token_id=PAD,
    )
    mtp = {"num_nextn_predict_layers": 2, "chain_hidden_post_norm": chain_norm}
    parts = {
        "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
        "vision_config": {"patch_size": 4, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    }
    config = transformers.InklingConfig(text_config=dict(text), mtp_config=mtp, **parts)
    blocks = [
        block_of(
            config.text_config, "InklingDecoderLayer", i, layer_types=["hybrid"] * 3, mlp_layer_types=["dense"] * 3
        )
        for i in range(2)
    ]
    layers = [random_layer(7 + i, [block], final=chain_norm) for i, block in enumerate(blocks)]
    tensors = {}
    if chain_norm:
        layers[1].norms["final"] = layers[0].norms["final"]
        tensors["chain_norm.weight"] = layers[0].norms["final"]
    names = {
        "self_attn.q_proj": "attn.wq_du",
        "self_attn.k_proj": "attn.wk_dv",
        "self_attn.v_proj": "attn.wv_dv",
        "self_attn.r_proj": "attn.wr_du",
        "self_attn.o_proj": "attn.wo_ud",
        "self_attn": "attn",
        "sconv.conv1d": "sconv",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        "mlp.down_proj": "mlp.w2_md",
    }
    for i, layer in enumerate(layers):
        tensors |= under(
            f"layers.{i}.",
            {
                "embed_norm.weight": layer.norms["embedding"],
                "hidden_norm.weight": layer.norms["hidden"],
                "input_proj.weight": layer.projection,
            },
        )
        block = layer.blocks[0].state_dict()
        gate_up = [block.pop(f"mlp.{name}_proj.weight") for name in ("gate", "up")]
        block["mlp.w13_dn.weight"] = torch.stack(gate_up, dim=1).flatten(0, 1)  # rows by turns
        for name, tensor in block.items():
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            tensors[f"layers.{i}.transformer_block.{name}"] = tensor
    return Published(
        config,
        layers,
        under("model.mtp.", tensors),
        carry="normed",
        hidden_first=True,
        auto=AutoModelForImageTextToText,
        divisor=2.0,
    )


def inkling_without_norm() -> Published:
    return inkling(chain_norm=False)


PLAIN_NORMS = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")

FAMILIES: dict[str, Callable[[], Published]] = {
    function.__name__: function
    for function in (
        deepseek_v3,
        qwen3_next,
        qwen3_5,
        qwen3_5_moe,
        qwen3_5_vl,
        glm4_moe,
        mellum,
        ernie4_5_moe,
        nemotron_h,
        step3p7,
        inkling,
        inkling_without_norm,
    )
}
# Of targets that are published without MTP layers, or whose class is not in transformers.
STANDALONE: dict[str, Callable[[], Published]] = {function.__name__: function for function in (llama, mimo)}


def random_target(published: Published, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = published.auto.from_config(published.config).float().eval()
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # a final norm without weights would make the state before it as good as the one after it
        for parameter in model.get_decoder().parameters(recurse=True):
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def write_target(folder: Path, published: Published, seed: int = 0) -> Path:
    """A checkpoint of the target, its MTP layers in a shard of their own."""
    random_target(published, seed).save_pretrained(folder)
    own = (folder / "model.safetensors").rename(folder / "own.safetensors")
    names = dict.fromkeys(load_file(own), own.name)
    save_file(published.tensors, folder / "mtp.safetensors", metadata={"format": "pt"})
    names |= dict.fromkeys(published.tensors, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def write_standalone(folder: Path, published: Published, **fields: object) -> Path:
    """A repository that holds the MTP layers only."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(published.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "mtp", **fields}))
    return folder
