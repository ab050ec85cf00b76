"""MTP layers in a repository of their own, under the names of their family."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..drafters.mtp.modeling import MtpModel


def save_mtp(
    folder: Path, model: MtpModel, target_ids: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors.

    Args:
        folder: where; made if it is not there.
        model: the layers.
        target_ids: [Vd] ids of the tokens to draft, ascending; None for all.
        dtype: of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "model." + model.published_name(name): tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    if target_ids is not None:
        ids = target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))  # offsets, as EAGLE-3 heads have them
    fields = {
        "architectures": ["MtpDraftModel"],
        "model_type": "mtp",
        "mtp_family": model.family.name,
        "mtp_carry": model.family.carry,
        "num_nextn_predict_layers": len(model.layers),
        # Of the target, to tell it apart from others.
        "num_hidden_layers": model.first_layer,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
