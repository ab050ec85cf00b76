"""Every published DFlash format, read into one network.

- z-lab (`dflash_config`, or its fields at the top level of config.json), and SpecForge, which writes the same
- ModelOpt (the same, with `causal`, `use_swa` and copies of the target's embedding and head)
- speculators (`transformer_layer_config`, a reduced vocabulary, an embedding and a head that may be there)
- transformers' own class (`muse_glimmer_assistant`)
- DFlash 2 of z-lab and of speculators (`candidate_selector.*`, `layers.*.attention_conv.*`)

Domino, GGUF files and quantised weights are recognised and refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..auto import DrafterFormat, Repository
from ..common.block_model import BlockModel
from ..common.checkpoints import drafts_with_own_embedding, filled, own_head, read_tensors, rename, target_ids_of
from .config_files import NATIVE, read_config
from .modeling import DFlash2Model
from .session import DFlashDrafter

_RENAMED = (
    ("dflash_module.", ""),
    ("model.", ""),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("candidate_selector.predecessor_codebook.weight", "candidate_selector.predecessor_codebook"),
    ("candidate_selector.successor_codebook.weight", "candidate_selector.successor_codebook"),
)
_IGNORED = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")
_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator")
_TELLING_TENSORS = frozenset({"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"})


def detect(repository: Repository) -> DrafterFormat | None:
    """By fields of config.json; without any, by tensors: a norm behind `fc`, which EAGLE-3 has in its first layer."""
    if _is_gguf(repository):
        return DrafterFormat("dflash", "GGUF", "a .gguf file whose general.architecture is dflash")
    if repository.tensors is None and not any(repository.path.glob("*.bin")):
        return None
    config = repository.config
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    names = {rename(name, _RENAMED) for name in repository.tensors or ()}
    kind, projector = config.get("speculators_model_type"), nested.get("projector_type", config.get("projector_type"))
    architectures = config.get("architectures")
    architectures = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if _is_dspark(config, nested, names, architectures) or kind not in (None, "dflash", "dflash2"):
        return None
    found = next((name for name in architectures if name in _ARCHITECTURES), None)
    if kind:
        variant, reason = "speculators", f"config.json has speculators_model_type {kind!r}"
    elif config.get("model_type") == NATIVE:
        variant, reason = "transformers", f"config.json has model_type {NATIVE!r}"
    elif nested:
        variant, reason = "ModelOpt" if "causal" in nested else "z-lab", "config.json has a dflash_config"
    elif found:
        variant, reason = "z-lab", f"config.json names {found}"
    elif names >= _TELLING_TENSORS:
        variant, reason = "z-lab", "tensors have fc and hidden_norm, and none of another method"
    else:
        return None
    if projector == "domino":
        return DrafterFormat("dflash", "Domino", "config.json has projector_type 'domino'")
    if any(name.startswith("candidate_selector.") for name in names) or found == "DFlash2DraftModel":
        variant += ", DFlash 2"
    return DrafterFormat("dflash", variant, reason)


def load(
    repository: Repository,
    *,
    target: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device | str,
    aux_layers: Sequence[int] | None = None,
    own_embedding: bool | None = None,
    **overrides: Any,
) -> DFlashDrafter:
    """Read a drafter.

    Args:
        repository: the folder.
        target: the model that it was trained for.
        dtype, device: of the weights.
        aux_layers: hidden states that it reads (index e enters layer e), where the files are wrong.
        own_embedding: force its own embedding (True) or the target's (False).
        overrides: fields of SpecConfig.

    Raises:
        ValueError: tensors are missing, surplus or of a wrong shape, or the target is another one.
    """
    DFlashDrafter.check_options(**overrides)
    if _is_gguf(repository):
        raise ValueError(
            f"{repository.path} holds a GGUF file, which is not served yet; take the safetensors that it was made from."
        )
    tensors = read_tensors(repository, _RENAMED, _IGNORED)
    config, parts = read_config(repository, tensors, target, aux_layers)
    target_ids = target_ids_of(repository, tensors, config.draft_vocab_size, config.vocab_size)
    has_embedding = drafts_with_own_embedding(repository, tensors, target, own_embedding)
    if not has_embedding:
        tensors.pop("embed_tokens.weight", None)
    if not has_embedding and "speculators_model_type" not in repository.config:
        # speculators trains on the bare rows of the table. Everyone else calls a target's embedding that scales its
        # rows (Gemma) as it is: transformers' own class does, and z-lab's MLX code, the one that serves such targets.
        config = replace(config, embedding_scale=config.embedding_scale * _scale_of(target.get_input_embeddings()))
    head = own_head(repository, tensors, target, config)
    with torch.device("meta"):
        model = DFlash2Model(config, parts, has_embedding) if parts else BlockModel(config, has_embedding)
    model, head = filled(repository, model, tensors, dtype, device), None if head is None else head.to(device, dtype)
    return DFlashDrafter(model, head, target_ids, **overrides)


def _scale_of(embedding: nn.Module) -> float:
    """What an embedding of the target multiplies its rows with, as rounded as it does."""
    scale = getattr(embedding, "embed_scale", 1.0)
    weight: Any = embedding.weight
    return float(torch.as_tensor(scale).to(weight.dtype))


def _is_dspark(config: dict[str, Any], nested: dict[str, Any], names: set[str], architectures: list[str]) -> bool:
    """Whether a Markov or a confidence head stands behind the network, or it is DeepSpec's, a row ahead of others."""
    return (
        "dspark" in (nested.get("projector_type"), config.get("projector_type"))
        or any("markov" in name or "confidence" in name for name in names)
        or any("DSpark" in name for name in architectures)
        or "markov_rank" in config
        or "markov_rank" in nested
    )


def _is_gguf(repository: Repository) -> bool:
    """Whether a GGUF file of a DFlash drafter is all there is. A string is its length in 8 bytes, then its text."""
    if repository.tensors is not None:
        return False
    for file in repository.path.glob("*.gguf"):
        with file.open("rb") as stream:
            start = stream.read(1 << 16)
        key, _, value = start.partition(b"general.architecture")
        if key.startswith(b"GGUF") and value[4:18] == (6).to_bytes(8, "little") + b"dflash":
            return True
    return False
