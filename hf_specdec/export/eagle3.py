"""EAGLE-3 heads as SpecForge, SGLang and vLLM read them: `midlayer.*` tensors and a Llama-like config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..drafters.eagle3.configuration import Eagle3Config
from ..drafters.eagle3.modeling import Eagle3Model


def save_eagle3(
    folder: Path, model: Eagle3Model, target_ids: torch.Tensor | None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors.

    Args:
        folder: where; made if it is not there.
        model: the head.
        target_ids: [Vd] target id of each draft token, ascending; None where the head drafts the whole vocabulary.
        dtype: of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.replace("layers.0.", "midlayer.", 1): tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    if target_ids is not None:
        ids = target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))  # offsets, not ids
        tensors["t2d"] = torch.zeros(model.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    fields = {**_fields(model.config), "torch_dtype": str(dtype).removeprefix("torch.")}
    if "embed_tokens.weight" in tensors:
        fields["embed_requires_grad"] = True  # an embedding of its own, not a copy of the target's
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _fields(config: Eagle3Config) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta", 10000.0)
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.windows),
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
    }
    if config.target_hidden_size != config.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    windows = {window for window in config.windows if window is not None}
    if len(windows) > 1:
        raise ValueError(f"windows: {config.windows} are of several sizes, and the format has one for all layers.")
    if windows:
        fields["sliding_window"] = windows.pop()
        fields["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if getattr(config, flag):
            fields[flag] = True
    if config.aux_layers:
        # Both spellings: layers that a state enters (vLLM), and layers that it comes out of (SGLang, SpecForge).
        fields["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layers)
        fields["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.aux_layers],
            "use_aux_hidden_state": True,
        }
    else:
        fields["eagle_config"] = {"use_aux_hidden_state": False}
    return fields
