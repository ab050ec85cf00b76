"""DFlash and DSpark drafters in the format of speculators, which vLLM reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..drafters.common.block_config import BlockConfig
from ..drafters.common.block_model import BlockModel
from ..drafters.dspark.modeling import DSparkModel


def save_block_drafter(
    folder: Path,
    model: BlockModel,
    head: nn.Linear | None,
    target_ids: torch.Tensor | None,
    verifier: str,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json and model.safetensors.

    Args:
        folder: where; made if it is not there.
        model: the network, a DSparkModel or DFlash's.
        head: its output head [Vd, H]; None where it borrows the target's.
        target_ids: [Vd] target id of each draft token, ascending; None where it drafts the whole vocabulary.
        verifier: name of the target.
        dtype: of the weights.

    Raises:
        ValueError: the format has no field for something that this drafter does.
    """
    fields = {**_fields(model, verifier), "torch_dtype": str(dtype).removeprefix("torch.")}
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    if head is not None:
        tensors["lm_head.weight"] = head.weight.detach().to("cpu", dtype).contiguous()
    if target_ids is not None:
        ids = target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))  # offsets, not ids
        tensors["t2d"] = torch.zeros(model.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _fields(model: BlockModel, verifier: str) -> dict[str, Any]:
    config = model.config
    spark = isinstance(model, DSparkModel)
    name = "dspark" if spark else "dflash"
    slides = {causal for window, causal in zip(config.windows, config.causal, strict=True) if window is not None}
    scales = (config.embedding_scale, config.logit_scale, config.logit_cap, config.attention_scale)
    full_is_causal = any(c for w, c in zip(config.windows, config.causal, strict=True) if w is None)
    if scales != (1.0, 1.0, None, None) or len(slides) > 1 or full_is_causal:
        raise ValueError("the format has no field for scales, caps, or causal layers without a window.")
    if slides and not config.windows_from_anchor:
        raise ValueError("the format counts windows from the anchor, and this drafter from each row.")
    fields: dict[str, Any] = {
        "architectures": ["DSparkDraftModel" if spark else "DFlashDraftModel"],
        "speculators_model_type": name,
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_drafts}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": _layer_fields(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "block_size": config.block_size,
        "sample_from_anchor": config.first_slot == 0,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": list(config.aux_layers),
        "sliding_window_non_causal": slides != {True},
    }
    if isinstance(model, DSparkModel):
        heads = model.heads
        fields["markov_rank"], fields["markov_head_type"] = heads.markov_rank, heads.markov_kind
        fields["enable_confidence_head"] = heads.confidence
        fields["confidence_head_with_markov"] = heads.confidence and heads.confidence_reads_markov
    return fields


def _layer_fields(config: BlockConfig) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta", 10000.0)
    windows = {window for window in config.windows if window is not None}
    if len(windows) > 1:
        raise ValueError(f"windows: {config.windows} are of several sizes, and the format has one for all layers.")
    return {
        "model_type": "qwen3",
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
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "sliding_window": windows.pop() if windows else None,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.windows],
    }
