"""Every published EAGLE-3 format, read into one network.

SafeAILab (`midlayer.*`, also `.bin`), SpecForge and AngelSlim (the same names, safetensors), speculators (a
`transformer_layer_config` inside), NVIDIA ModelOpt (`eagle_config`, no embedding); each also as P-EAGLE
(`mask_hidden`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..auto import DrafterFormat, Repository
from ..base import check_decoder_only
from ..common.checkpoints import check_head, drafts_with_own_embedding, filled, read_tensors, rename, target_ids_of
from .config_files import is_parallel, read_config
from .modeling import Eagle3Model
from .session import Eagle3Drafter

_RENAMED = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
_IGNORED = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.", "layers.0.self_attn.rotary_emb.")


def detect(repository: Repository) -> DrafterFormat | None:
    """By tensors: a norm of the hidden state in the first layer, which nothing else has; for `.bin` files by config."""
    config = repository.config
    if repository.tensors is None:
        if "draft_vocab_size" not in config or not any(repository.path.glob("*.bin")):
            return None
        return DrafterFormat("eagle3", "SafeAILab", "config.json has draft_vocab_size, and the weights are a .bin file")
    names = {rename(name, _RENAMED) for name in repository.tensors}
    has_norm = "layers.0.hidden_norm.weight" in names
    told_by = "tensors have layers.0.hidden_norm" if has_norm else "config.json has an eagle_config without aux states"
    eagle = config.get("eagle_config")
    if not has_norm and not (isinstance(eagle, dict) and eagle.get("use_aux_hidden_state") is False):
        return None
    if names.isdisjoint({"layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_a_proj.weight"}):
        return None
    if config.get("speculators_model_type"):
        variant, reason = "speculators", f"config.json has speculators_model_type, and {told_by}"
    elif any(name.removeprefix("model.").startswith("midlayer.") for name in repository.tensors):
        variant, reason = "SafeAILab or SpecForge", "tensors are named midlayer.*"
    else:
        variant, reason = "ModelOpt", f"{told_by}, without speculators fields"
    if is_parallel(config, names):
        told_by = "tensors have mask_hidden" if "mask_hidden" in names else "speculators_model_type is peagle"
        variant, reason = f"P-EAGLE, {variant}", f"{reason}, and {told_by}"
    return DrafterFormat("eagle3", variant, reason)


def load(
    repository: Repository,
    *,
    target: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device | str,
    aux_layers: Sequence[int] | None = None,
    own_embedding: bool | None = None,
    norm_output: bool | None = None,
    **overrides: Any,
) -> Eagle3Drafter:
    """Read a head.

    Args:
        repository: the folder.
        target: the model that it was trained for.
        dtype, device: of the weights.
        aux_layers: hidden states that it reads (index e enters layer e), where the files are wrong or unclear.
        own_embedding: force its own embedding (True) or the target's (False).
        norm_output: force what is fed back while drafting; formats disagree about this field.
        overrides: fields of SpecConfig.

    Raises:
        ValueError: tensors are missing, surplus or of a wrong shape, or the target is another one.
    """
    check_decoder_only(target, Eagle3Drafter.method)
    Eagle3Drafter.check_options(**overrides)
    tensors = read_tensors(repository, _RENAMED, _IGNORED)
    config, guessed = read_config(repository, tensors, target, aux_layers, norm_output)
    if config.mask_token_id is not None and own_embedding is None:
        own_embedding = "embed_tokens.weight" in tensors  # its row of the mask was trained, the target's was not
    target_ids = target_ids_of(repository, tensors, config.draft_vocab_size, config.vocab_size)
    has_embedding = drafts_with_own_embedding(repository, tensors, target, own_embedding)
    if not has_embedding:
        tensors.pop("embed_tokens.weight", None)
    check_head(repository, tensors, config.draft_vocab_size, config.vocab_size)
    with torch.device("meta"):
        model = Eagle3Model(config, has_embedding, own_head="lm_head.weight" in tensors)
    model = filled(repository, model, tensors, dtype, device)
    return Eagle3Drafter(model, target_ids, layers_guessed=guessed, **overrides)
