"""Diffusion drafters in blocks: config.json and the layers, without embedding and output head, which are the target's.

The format is this package's own; the tensors have the names that they have in the target.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "rope_parameters",
)


def save_diffusion(
    folder: Path, model: PreTrainedModel, block_size: int, mask_token_id: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors.

    Args:
        folder: where; made if it is not there.
        model: the layers and their final norm, of llama's, qwen2's or qwen3's class, without an embedding.
        block_size: tokens of a block.
        mask_token_id: row of the target's embedding that stands for a mask.
        dtype: of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": x.detach().to("cpu", dtype).contiguous() for name, x in model.state_dict().items()}
    fields = {
        "architectures": ["BlockDiffusionDraftModel"],
        "model_type": "block_diffusion",
        **{name: value for name in _SIZES if (value := getattr(model.config, name, None)) is not None},
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
