"""Tiny targets with MTP layers under Qwen's names."""

import copy

import torch
import transformers
from mtp_published import SHAPE, SIZE, Layer, Published, block_of, qwen_names, random_layer
from tiny import VOCAB_SIZE
from tiny_hybrids import config_of
from tiny_vision import tiny_vlm
from transformers import AutoModelForImageTextToText

_NORMS = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")


def plain_qwen_names(layer: Layer) -> dict[str, torch.Tensor]:
    """The same names for families whose norms are stored as they are."""
    return {name: tensor + (name in _NORMS) for name, tensor in qwen_names(layer).items()}


def _qwen(name: str, block: str) -> Published:
    config = config_of(name)
    config.mtp_num_hidden_layers = 1
    changes = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    layer = random_layer(7, [block_of(config, block, **changes)])
    return Published(config, [layer], qwen_names(layer))


def qwen3_next() -> Published:
    return _qwen("qwen3_next", "Qwen3NextDecoderLayer")


def qwen3_5() -> Published:
    return _qwen("qwen3_5", "Qwen3_5DecoderLayer")


def qwen3_5_moe() -> Published:
    return _qwen("qwen3_5_moe", "Qwen3_5MoeDecoderLayer")


def qwen3_5_vl() -> Published:
    """The same layers in a composite model."""
    config = copy.deepcopy(tiny_vlm("qwen3_5").config)
    text = config.text_config
    text.mtp_num_hidden_layers = 1
    block = block_of(text, "Qwen3_5DecoderLayer", layer_types=["full_attention"], num_hidden_layers=1)
    layer = random_layer(7, [block])
    return Published(config, [layer], qwen_names(layer), auto=AutoModelForImageTextToText)


def mellum() -> Published:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = transformers.MellumConfig(
        **SHAPE,
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
    return Published(config, [layer], plain_qwen_names(layer), window=8, kind="sliding_attention")


def exaone_moe() -> Published:
    """A dense layer over all of the text, without rotary positions."""
    config = transformers.ExaoneMoeConfig(
        **SHAPE,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        rms_norm_eps=1e-6,
    )
    config.num_nextn_predict_layers = 1
    layer = random_layer(7, [block_of(config, "ExaoneMoeDecoderLayer")])  # layer 0 is dense and sees all
    return Published(config, [layer], plain_qwen_names(layer))


def exaone4_5() -> Published:
    """A layer that slides with norms behind its parts, in a composite model that counts it outside of its text part."""
    text = {**SHAPE, "model_type": "exaone4", "sliding_window": 8, "rms_norm_eps": 1e-6}
    text["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
    vision = {"hidden_size": 32, "depth": 1, "num_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48}
    vision |= {"out_hidden_size": SIZE, "fullatt_block_indexes": [0], "window_size": 28}
    config = transformers.Exaone4_5_Config(
        text_config=text,
        vision_config=vision,
        image_token_id=VOCAB_SIZE - 1,
        video_token_id=VOCAB_SIZE - 2,
        num_nextn_predict_layers=1,
    )
    layer = random_layer(7, [block_of(config.text_config, "Exaone4DecoderLayer")])
    return Published(config, [layer], plain_qwen_names(layer), window=8, auto=AutoModelForImageTextToText)
