"""Tiny Gemma 4 targets and assistants in the layouts of the five published pairs."""

import functools
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tiny import PAD
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    PreTrainedModel,
)

VOCAB, WINDOW, HIDDEN = 96, 8, 48
S, F = "sliding_attention", "full_attention"
_CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 5}
_TARGET = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "layer_types": [S, F, S, S, F],
    "tie_word_embeddings": False,  # a tied random model repeats its last token
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PER_LAYER = {"hidden_size_per_layer_input": 8}
_NO_PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_SHARING = {**_PER_LAYER, "num_kv_shared_layers": 2, "layer_types": [S, F, S, S, F, S, F]}
_KEYS_ARE_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
# (changes to the target's config, to the assistant's)
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "E2B": ({**_SHARING, "use_double_wide_mlp": True}, _CENTROIDS),
    "E4B": (_SHARING, _CENTROIDS),
    "12B": (_KEYS_ARE_VALUES, {}),
    "26B-A4B": ({**_NO_PER_LAYER, **_KEYS_ARE_VALUES, **_EXPERTS}, {}),
    "31B": ({**_NO_PER_LAYER, **_KEYS_ARE_VALUES}, {}),
}
SHARED = {S: 3, F: 4}  # the target's layers that an assistant reads, in every layout


def target_config(
    layout: str, vocab_size: int = VOCAB, layer_types: tuple[str, ...] = ()
) -> Gemma4TextConfig | Gemma4UnifiedTextConfig:
    fields = {**_TARGET, "vocab_size": vocab_size, **deepcopy(LAYOUTS[layout][0])}
    fields["layer_types"] = list(layer_types or fields["layer_types"])
    fields["num_hidden_layers"] = len(fields["layer_types"])
    if layout == "12B":
        return Gemma4UnifiedTextConfig(**fields)
    if fields.get("vocab_size_per_layer_input") is None:
        fields["vocab_size_per_layer_input"] = vocab_size
    return Gemma4TextConfig(**fields)


def randomise(model: torch.nn.Module, seed: int, std: float) -> None:
    """Every weight random, norms and layer scalars too, so that none could be swapped for another unseen."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("layer_scalar"):
                tensor.copy_(0.7 + 0.1 * noise(tensor))
            elif name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(len(tensor), generator=generator))
            elif name.endswith(("q_norm.weight", "k_norm.weight")):  # products are not scaled
                tensor.copy_(0.4 + 0.1 * noise(tensor))
            elif "norm" in name:
                tensor.copy_(1.0 + 0.2 * noise(tensor))
            elif isinstance(tensor, torch.nn.Parameter) and tensor.dim() > 1:
                tensor.copy_(std * noise(tensor))


@functools.cache
def tiny_gemma4(layout: str, vocab_size: int = VOCAB, layer_types: tuple[str, ...] = ()) -> PreTrainedModel:
    """A random fp32 target. Shared between tests: leave it as it is."""
    config = target_config(layout, vocab_size, layer_types)
    model = (Gemma4UnifiedForCausalLM if layout == "12B" else Gemma4ForCausalLM)(config).float().eval()
    randomise(model, seed=3, std=0.12)
    return model


def assistant_config(layout: str, vocab_size: int = VOCAB, **changes: Any) -> dict[str, Any]:
    """Arguments of the assistant's config: three sliding layers and a full one, as published."""
    of_target, of_assistant = LAYOUTS[layout]
    text = {
        **_TARGET,
        **{key: value for key, value in of_target.items() if key in _KEYS_ARE_VALUES},
        "model_type": "gemma4_unified_text" if layout == "12B" else "gemma4_text",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": [S, S, S, F],
        "tie_word_embeddings": True,
    }
    if layout != "12B":
        text.update(_NO_PER_LAYER)
    text.update({key: value for key, value in changes.items() if key in text})
    text["num_hidden_layers"] = text["num_kv_shared_layers"] = len(text["layer_types"])
    rest = {key: value for key, value in changes.items() if key not in text}
    return {"text_config": text, "backbone_hidden_size": HIDDEN, **of_assistant, **rest}


def tiny_assistant(layout: str, vocab_size: int = VOCAB, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """transformers' own model of an assistant, with random weights."""
    fields = assistant_config(layout, vocab_size, **changes)
    model: PreTrainedModel
    if layout == "12B":
        model = Gemma4UnifiedAssistantForCausalLM(Gemma4UnifiedAssistantConfig(**fields))
    else:
        model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**fields))
    randomise(model, seed, std=0.25)
    model.generation_config.num_assistant_tokens = 3
    return model.float().eval()


@functools.cache
def assistant_of(layout: str, vocab_size: int = VOCAB) -> PreTrainedModel:
    """The assistant of most tests. Shared between them: leave it as it is."""
    return tiny_assistant(layout, vocab_size)


def write_assistant(folder: Path, model: PreTrainedModel) -> Path:
    """The assistant as it is published."""
    model.save_pretrained(folder)
    return folder
