"""Gemma 4 assistants as Google publishes them, and as transformers has loaded them.

`gemma4_assistant` (E2B, E4B, 26B-A4B, 31B) and `gemma4_unified_assistant` (12B) are one network.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4UnifiedAssistantConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..auto import DrafterFormat, Repository
from ..common.checkpoints import compare, read_tensors, rename
from ..common.config_files import refuse_quantised
from ..common.fields import Fields
from .configuration import Gemma4Config
from .modeling import Gemma4Assistant
from .session import Gemma4Drafter

_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "gemma4_assistant": Gemma4AssistantConfig,
    "gemma4_unified_assistant": Gemma4UnifiedAssistantConfig,
}
_RENAMED = (("model.", ""),)
_UNUSED = re.compile(r"layers\.\d+\.self_attn\.[kv]_(proj|norm)\.|rotary_emb\.")  # keys and values are the target's
_ORDERING = "masked_embedding.token_ordering"


def detect(repository: Repository) -> DrafterFormat | None:
    """By `model_type`."""
    kind = repository.config.get("model_type")
    if kind not in _CONFIGS:
        return None
    return DrafterFormat("gemma4", "transformers", f"config.json has model_type {kind}")


def load(
    repository: Repository,
    *,
    target: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device | str,
    draft_position: str = "last_token",
    **overrides: Any,
) -> Gemma4Drafter:
    """Read an assistant.

    Args:
        repository: the folder.
        target: the model that it was trained for.
        dtype, device: of the weights.
        draft_position: where a round's queries stand, as in Gemma4Drafter.
        overrides: fields of SpecConfig.

    Raises:
        ValueError: the config is not an assistant's, or tensors are missing, surplus, packed or of a wrong shape.
    """
    Gemma4Drafter.check_options(**overrides)
    Gemma4Drafter.check_position(draft_position)
    try:
        config = _CONFIGS[repository.config["model_type"]].from_dict(repository.config)
    except Exception as error:  # its validators raise all kinds
        reason = " ".join(str(error).split())
        raise ValueError(f"config.json in {repository.path} is no Gemma 4 assistant's: {reason}") from error
    model = _network(repository, config, read_tensors(repository, _RENAMED), dtype).to(device).eval()
    length = _recommended_length(repository.path / "generation_config.json")
    return Gemma4Drafter(model, draft_position, length, **overrides)


def from_model(model: Any) -> Gemma4Drafter | None:
    """The drafter over the weights of an assistant that transformers has loaded; None for any other model.

    Raises:
        ValueError: its weights are not all there (offloaded), or are packed (quantised).
    """
    if not isinstance(model, PreTrainedModel) or model.config.model_type not in _CONFIGS:
        return None
    tensors = {rename(name, _RENAMED): tensor for name, tensor in model.state_dict().items()}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ValueError(f"`assistant_model` is a {type(model).__name__} that is offloaded in part; load it whole.")
    repository = Repository(Path(model.name_or_path or type(model).__name__), {}, None)
    network = _network(repository, model.config, tensors, model.dtype).to(model.device).eval()
    return Gemma4Drafter(network, recommended_length=_length(model.generation_config.num_assistant_tokens))


def read_config(config: PreTrainedConfig) -> Gemma4Config:
    """What transformers' config says."""
    text = config.get_text_config()
    of_kind = dict(zip(text.layer_types, text.per_layer_config, strict=True))
    return Gemma4Config(
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size * (2 if text.use_double_wide_mlp else 1),
        num_attention_heads=text.num_attention_heads,
        vocab_size=text.vocab_size,
        target_hidden_size=config.backbone_hidden_size,
        kinds=tuple(text.layer_types),
        head_dims={kind: layer.head_dim for kind, layer in of_kind.items()},
        num_key_value_heads={kind: layer.num_key_value_heads for kind, layer in of_kind.items()},
        window=text.sliding_window,
        num_centroids=config.num_centroids if config.use_ordered_embeddings else None,
        num_active_centroids=config.centroid_intermediate_top_k,
        rms_norm_eps=text.rms_norm_eps,
        hidden_act=text.hidden_activation,
        attention_bias=text.attention_bias,
        rope_config=text,
    )


def _network(
    repository: Repository, config: PreTrainedConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> Gemma4Assistant:
    """The network over tensors under our names; those that are of its dtype are not copied."""
    ours = read_config(config)
    ordering = tensors.pop(_ORDERING, None)
    refuse_quantised(repository, tensors, Fields(repository.path, repository.config))
    tensors = {name: tensor for name, tensor in tensors.items() if not _UNUSED.match(name)}
    embedding = tensors.pop("embed_tokens.weight", None)  # tokens enter by the target's
    if embedding is not None and config.tie_word_embeddings:
        tensors["lm_head.weight"] = embedding
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if ordering is not None:
        tensors[_ORDERING] = ordering.long()
    if ours.num_centroids is not None:
        _check_clusters(repository, ours, ours.num_centroids, ordering)
    with torch.device("meta"):
        model = Gemma4Assistant(ours)
    compare(repository, model.state_dict(), tensors)
    model.load_state_dict(tensors, assign=True)
    return model


def _check_clusters(
    repository: Repository, config: Gemma4Config, num_centroids: int, ordering: torch.Tensor | None
) -> None:
    """Refuse clusters that are not of one size, and an ordering that is none."""
    size, path = config.vocab_size, repository.path
    if size % num_centroids or not 0 < config.num_active_centroids <= num_centroids:
        raise ValueError(
            f"config.json in {path} scores {config.num_active_centroids} of {num_centroids} clusters of a vocabulary "
            f"of {size}, which do not fit each other."
        )
    if ordering is not None and not torch.equal(
        ordering.flatten().long().sort().values, torch.arange(size, device=ordering.device)
    ):
        raise ValueError(f"{path} has a {_ORDERING} that does not name every token once; the file is damaged.")


def _recommended_length(file: Path) -> int | None:
    """`num_assistant_tokens` of a generation_config.json, None where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _length(content.get("num_assistant_tokens")) if isinstance(content, dict) else None


def _length(value: Any) -> int | None:
    """A draft length, None where the value is none."""
    return value if isinstance(value, int) and 0 < value < 1024 else None
