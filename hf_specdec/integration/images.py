"""Images in a call: the prefill reads them as plain `generate` has it; here is what else a path has to know of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import utils as generation_utils

from ..decoding.placement import input_device

# Inputs of models with `image_layers`, all of them [B, ...].
IMAGE_LAYER_INPUTS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask")


def image_layers(model: PreTrainedModel) -> frozenset[int]:
    """Layers whose keys are those of images (Mllama): they grow with images and not with the text."""
    return frozenset(getattr(model.config.get_text_config(), "cross_attention_layers", None) or ())


def why_images_not_served(model_kwargs: dict[str, Any]) -> str | None:
    """What is missing among the inputs of a model with such layers; None where nothing is.

    States of the caller's own are added to the cache by every forward. Without a mask, transformers hides the later
    part of an image from the first tokens of a forward over several.
    """
    if model_kwargs.get("cross_attention_states") is not None:
        return "`cross_attention_states` is given; give `pixel_values`"
    if model_kwargs.get("pixel_values") is not None and model_kwargs.get("cross_attention_mask") is None:
        return "`pixel_values` is given without `cross_attention_mask`; give both, as the processor returns them,"
    return None


def text_ids(model: PreTrainedModel, num_rows: int, num_columns: int) -> torch.Tensor:
    """[num_rows, num_columns] random ids of a text, always the same, on the model's device; placeholders of images,
    videos and sounds are not among them."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab_size, (num_rows, num_columns), generator=generator)
    for modality in ("image", "video", "audio"):
        placeholder = getattr(model.config, f"{modality}_token_id", None)
        if isinstance(placeholder, int):
            ids.masked_fill_(ids == placeholder, 0)
    return ids.to(input_device(model))


def fill_placeholders(model: PreTrainedModel, input_ids: torch.Tensor, features: dict[str, Any] | None) -> bool:
    """Whether a batch has as many features (see `features_of_row`) as placeholders, so that each row's are known."""
    for modality, output in (features or {}).items():
        placeholder = getattr(model.config, f"{modality}_token_id", None)
        parts = None if output is None else output.get("pooler_output")
        if placeholder is None or parts is None:
            return False
        if sum(part.numel() // part.shape[-1] for part in parts) != int((input_ids == placeholder).sum()):
            return False
    return True


def features_of_row(
    model: PreTrainedModel, input_ids: torch.Tensor, features: dict[str, Any], row: int
) -> dict[str, Any]:
    """What `generate` encoded of the images of one row.

    Args:
        model: the target.
        input_ids: [B, W] the prompts; their placeholders, row after row, are filled with the features in their order.
        features: modality -> the encoder's output for the batch.
        row: index of the row.
    """
    of_row = {}
    for modality, output in features.items():
        placeholders = input_ids == getattr(model.config, f"{modality}_token_id")
        first, count = int(placeholders[:row].sum()), int(placeholders[row].sum())
        if count > 0:
            wanted = torch.arange(first, first + count, device=input_ids.device)
            of_row[modality] = generation_utils._slice_mm_encoder_output(output, wanted)
    return of_row
