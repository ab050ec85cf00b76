"""Tiny random vision-language models, and prompts with images for them as their processors would give them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tiny import PAD, VOCAB_SIZE, randomise, tiny_config
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)

IMAGE = VOCAB_SIZE - 1  # the placeholder, a token like any other to the target's head
SIZE, PATCH = 8, 4  # pixels of an image and of a patch: 2 x 2 patches
_SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_PIXELS = {"image_size": SIZE, "patch_size": PATCH}
_SIGLIP = {**_SHAPE, **_PIXELS}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_OTHERS = {"video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}


def _text(name: str, **changes: Any) -> dict[str, Any]:
    """The arguments of a text config of `tiny`, for a type that takes much the same."""
    config = tiny_config(name).to_dict()
    if "model_type" in changes:
        config.pop("layer_types", None)
    return {**config, **changes}


def _clip() -> CLIPVisionConfig:
    return CLIPVisionConfig(**_SIGLIP)


def _qwen(text: str, **vision: Any) -> dict[str, Any]:
    """A Qwen-VL: 4 x 4 patches, merged two by two."""
    text_config = _text("qwen3", model_type=text, rope_parameters=_MROPE)
    sizes = {"depth": 2, "num_heads": 4, "patch_size": PATCH, "temporal_patch_size": 2, "spatial_merge_size": 2}
    return {"text_config": text_config, "vision_config": {**sizes, **vision}, "image_token_id": IMAGE, **_OTHERS}


def _qwen3_5() -> dict[str, Any]:
    parts = _qwen("qwen3_5_text", hidden_size=32, intermediate_size=48, out_hidden_size=64, num_position_embeddings=16)
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear.update(linear_key_head_dim=16, linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"])
    rope = {**_MROPE, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    parts["text_config"].update(linear, num_hidden_layers=2, rope_parameters=rope)
    return parts


def _mllama() -> dict[str, Any]:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1}
    vision.update(attention_heads=4, vision_output_dim=64, max_num_tiles=1, intermediate_layers_indices=[0], **_PIXELS)
    vision["supported_aspect_ratios"] = [[1, 1]]
    text = _text("llama", model_type="mllama_text_model", num_hidden_layers=3, cross_attention_layers=[1])
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    return {"text_config": text, "vision_config": vision, "image_token_index": VOCAB_SIZE}  # beyond the vocabulary


def _gemma4() -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    rope = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in kinds}
    text = _text("gemma3", model_type="gemma4_text", layer_types=kinds, num_hidden_layers=2, rope_parameters=rope)
    text.update(
        vocab_size_per_layer_input=VOCAB_SIZE, hidden_size_per_layer_input=8, use_bidirectional_attention="vision"
    )
    text.update(global_head_dim=16, num_global_key_value_heads=2)
    vision = {**_SHAPE, "num_key_value_heads": 4, "head_dim": 8, "patch_size": PATCH, "pooling_kernel_size": 2}
    vision["position_embedding_size"] = 16
    special = {"boi_token_id": 94, "eoi_token_id": 93, "boa_token_id": 92, "eoa_token_index": 91, "audio_token_id": 90}
    return {
        "text_config": text, "vision_config": vision, "audio_config": None,
        "image_token_id": IMAGE, "video_token_id": 95, "tie_word_embeddings": False, **special,
    }  # fmt: skip


# model type -> () -> arguments of its config
_CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "llava": lambda: {
        "vision_config": _clip(), "text_config": _text("llama"), "image_token_index": IMAGE, "vision_feature_layer": -1
    },
    "llava_next": lambda: {
        "vision_config": _clip(), "text_config": _text("mistral"), "image_token_index": IMAGE,
        "vision_feature_layer": -1, "image_grid_pinpoints": [[SIZE, SIZE]],
    },
    "llava_onevision": lambda: {
        "vision_config": SiglipVisionConfig(**_SIGLIP), "text_config": _text("qwen3"), "image_token_index": IMAGE,
        "video_token_index": 95, "image_grid_pinpoints": [[SIZE, SIZE]],
    },
    "qwen2_vl": lambda: _qwen("qwen2_vl_text", embed_dim=32, hidden_size=64, mlp_ratio=2),
    "qwen2_5_vl": lambda: _qwen(
        "qwen2_5_vl_text", hidden_size=32, intermediate_size=48, out_hidden_size=64, window_size=8,
        fullatt_block_indexes=[1],
    ),
    "qwen3_vl": lambda: _qwen(
        "qwen3_vl_text", hidden_size=32, intermediate_size=48, out_hidden_size=64, num_position_embeddings=16,
        deepstack_visual_indexes=[0, 1],
    ),
    "qwen3_5": _qwen3_5,
    "glm4v": lambda: {
        **_qwen("glm4v_text", hidden_size=32, intermediate_size=48, out_hidden_size=64, image_size=16),
        "image_start_token_id": 94, "image_end_token_id": 93, "video_start_token_id": 92, "video_end_token_id": 91,
    },
    "gemma3": lambda: {
        "vision_config": SiglipVisionConfig(**_SIGLIP), "text_config": _text("gemma3"), "mm_tokens_per_image": 4,
        "boi_token_index": 94, "eoi_token_index": 93, "image_token_index": IMAGE, "tie_word_embeddings": False,
    },
    "gemma4": _gemma4,
    "paligemma": lambda: {
        "vision_config": SiglipVisionConfig(**_SIGLIP, projection_dim=64), "image_token_index": IMAGE,
        "text_config": _text("llama", model_type="gemma", head_dim=16), "projection_dim": 64, "hidden_size": 64,
        "vocab_size": VOCAB_SIZE, "tie_word_embeddings": False,
    },
    "paligemma2": lambda: {
        "vision_config": SiglipVisionConfig(**_SIGLIP, projection_dim=64), "image_token_index": IMAGE,
        "text_config": _text("llama", model_type="gemma2", head_dim=16, sliding_window=8), "projection_dim": 64,
        "hidden_size": 64, "vocab_size": VOCAB_SIZE, "tie_word_embeddings": False,
    },
    "lfm2_vl": lambda: {
        "vision_config": {"model_type": "siglip2_vision_model", **_SHAPE, "patch_size": PATCH, "num_patches": 16},
        "text_config": _text("llama", model_type="lfm2", layer_types=["conv", "full_attention", "conv"]),
        "image_token_id": IMAGE, "projector_hidden_size": 64, "tie_word_embeddings": False,
    },
    "aya_vision": lambda: {
        "vision_config": SiglipVisionConfig(**_SIGLIP), "text_config": _text("llama"), "image_token_index": IMAGE,
        "tie_word_embeddings": False,
    },
    "idefics2": lambda: {
        "vision_config": _SIGLIP, "text_config": _text("mistral"), "image_token_id": IMAGE,
        "perceiver_config": {
            "hidden_size": 64, "resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 2,
            "resampler_head_dim": 16, "num_key_value_heads": 1,
        },
    },
    "idefics3": lambda: {
        "vision_config": _SIGLIP, "text_config": _text("llama"), "image_token_id": IMAGE, "scale_factor": 2
    },
    "smolvlm": lambda: _CONFIGS["idefics3"](),
    "internvl": lambda: {
        "vision_config": {**_SHAPE, "image_size": [2 * SIZE] * 2, "patch_size": [PATCH, PATCH]},
        "text_config": _text("qwen3"), "image_token_id": IMAGE, "image_seq_length": 4, "tie_word_embeddings": False,
    },
    "mistral3": lambda: {
        "vision_config": {"model_type": "pixtral", **_SIGLIP, "image_size": 2 * SIZE, "head_dim": 8},
        "text_config": _text("mistral"), "image_token_index": IMAGE, "tie_word_embeddings": False,
    },
    "mllama": _mllama,
}  # fmt: skip
TYPES = tuple(_CONFIGS)
_GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")


@functools.cache
def tiny_vlm(name: str) -> PreTrainedModel:
    """A random fp32 vision-language model on the CPU. Shared between tests: leave its weights as they are."""
    config: PreTrainedConfig = AutoConfig.for_model("paligemma" if name == "paligemma2" else name, **_CONFIGS[name]())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).float().eval()
    randomise(model, seed=0)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("gate"):  # of Mllama, closed at first
            parameter.data.fill_(1.0)
    return model


def with_images(name: str, images: Sequence[int], lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded random prompts with images in them, as `generate` takes them.

    Args:
        name: of TYPES.
        images: number of images of each row.
        lengths: text tokens of each row, placeholders not counted; at least one more than it has images.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    if any(images):
        inputs = _pixels(name, images, generator)
    size, placeholder = _tokens_per_image(name), VOCAB_SIZE if name == "mllama" else IMAGE
    rows = []
    for count, length in zip(images, lengths, strict=True):
        text = torch.randint(3, 90, (length,), generator=generator).tolist()
        row = [text.pop(0)]
        for _ in range(count):  # a token between two images, as processors have it
            row += [placeholder] * size + [text.pop(0)]
        rows.append(row + text)
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    inputs.update(input_ids=ids, attention_mask=mask)
    is_image = (ids == placeholder).long()
    if name in (*_GRIDS, "gemma4"):
        inputs["mm_token_type_ids"] = is_image
    elif name == "gemma3":
        inputs["token_type_ids"] = is_image
    elif name in ("paligemma", "paligemma2"):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    elif name == "mllama" and any(images):
        # Each token sees the last image before it; those before the first one see none.
        seen = is_image.cumsum(dim=1)[..., None] == torch.arange(1, max(images) + 1)
        inputs["cross_attention_mask"] = seen[..., None].long()
    return inputs


def _pixels(name: str, images: Sequence[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The pixel inputs of a batch."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    count, most = sum(images), max(images)
    if name in _GRIDS:
        grid = torch.tensor([[1, 4, 6]] * count)
        return {"pixel_values": noise(count * 24, 3 * 2 * PATCH**2), "image_grid_thw": grid}
    if name == "gemma4":
        places = torch.tensor([[x, y] for y in range(2) for x in range(2)])
        return {"pixel_values": noise(count, 4, 3 * PATCH**2), "image_position_ids": places.expand(count, -1, -1)}
    if name == "lfm2_vl":
        shapes = torch.tensor([[4, 4]] * count)
        seen = torch.ones(count, 16, dtype=torch.long)
        return {"pixel_values": noise(count, 16, 3 * PATCH**2), "spatial_shapes": shapes, "pixel_attention_mask": seen}
    if name in ("llava_next", "llava_onevision"):  # the image as a whole, and cut into one tile
        return {"pixel_values": noise(count, 2, 3, SIZE, SIZE), "image_sizes": torch.tensor([[SIZE, SIZE]] * count)}
    if name in ("idefics2", "idefics3", "smolvlm", "mllama"):  # rows with fewer images are filled up
        real = torch.arange(most) < torch.tensor(images)[:, None]
        pixels = noise(len(images), most, 3, SIZE, SIZE) * real[..., None, None, None]
        if name != "mllama":
            return {"pixel_values": pixels}
        ratios = {"aspect_ratio_ids": real.long(), "aspect_ratio_mask": torch.ones(*real.shape, 1, dtype=torch.long)}
        return {"pixel_values": pixels[:, :, None], **ratios}
    size = 2 * SIZE if name in ("internvl", "mistral3") else SIZE
    pixels = {"pixel_values": noise(count, 3, size, size)}
    if name == "mistral3":
        pixels["image_sizes"] = torch.tensor([[size, size]] * count)
    return pixels


@functools.cache
def _tokens_per_image(name: str) -> int:
    if name == "mllama":
        return 1
    with torch.no_grad():
        features = tiny_vlm(name).base_model.get_image_features(**_pixels(name, [1], torch.Generator().manual_seed(0)))
    return len(features.pooler_output[0])
