"""Every published DSpark format, read into one network.

DeepSpec (flat fields, also its DFlash drafters, which are DSpark drafters without heads: they guess from the anchor),
speculators (a `transformer_layer_config` inside), SpecForge (`dflash_config` with projector_type "dspark", heads under
`logit_head.` in early files), ModelOpt (the same, heads without a prefix).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..auto import AutoDrafter, DrafterFormat, Repository
from ..base import Drafter
from ..common.checkpoints import drafts_with_own_embedding, filled, own_head, read_tensors, rename, target_ids_of
from .config_files import is_gemma4, read_config
from .gemma4 import Gemma4DSparkModel
from .modeling import DSparkModel
from .session import DSparkDrafter

_RENAMED = (
    ("model.", ""),
    ("logit_head.", ""),
    ("markov_w1.", "markov_head.markov_w1."),
    ("markov_w2.", "markov_head.markov_w2."),
    ("gate_proj.", "markov_head.gate_proj."),
    ("joint_proj.", "markov_head.joint_proj."),
    ("confidence_proj.", "confidence_head.proj."),
)
_IGNORED = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")
_DEEPSPEC = ("Qwen3DSparkModel", "Gemma4DSparkModel")
_OTHERS = ("Lfm2DSparkDraftModel",)
_FOLDER = "dspark"  # where a target's repository may keep its drafter


def detect(repository: Repository) -> DrafterFormat | None:
    """By `speculators_model_type`, else by `projector_type`, else by the Markov head or the fields that come with it.

    Class names decide last: servers want other names for the same files.
    """
    config, tensors = repository.config, repository.tensors
    if tensors is None:
        return None
    names = {rename(name, _RENAMED) for name in tensors}
    if "fc.weight" not in names or "layers.0.hidden_norm.weight" in names:
        return None
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    if kind := config.get("speculators_model_type"):
        reason = "config.json has speculators_model_type dspark"
        return DrafterFormat("dspark", "speculators", reason) if kind == "dspark" else None
    if projector := nested.get("projector_type", config.get("projector_type")):
        if projector != "dspark":
            return None
        flat = "markov_w1.weight" in tensors or "shift_label" in nested
        return DrafterFormat("dspark", "ModelOpt" if flat else "SpecForge", "config.json has projector_type dspark")
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    for told, reason in (
        ("markov_head.markov_w1.weight" in names, "tensors have a markov_head"),
        ("markov_rank" in config, "config.json has markov_rank"),
        (architecture in (*_DEEPSPEC, *_OTHERS), f"config.json names {architecture}"),
    ):
        if told:
            variant = "DeepSpec" if "target_layer_ids" in config else "DSpark over dflash_config"
            return DrafterFormat("dspark", variant, reason)
    return None


def load(
    repository: Repository,
    *,
    target: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device | str,
    aux_layers: Sequence[int] | None = None,
    own_embedding: bool | None = None,
    first_slot: int | None = None,
    **overrides: Any,
) -> DSparkDrafter:
    """Read a drafter.

    Args:
        repository: the folder.
        target: the model that it was trained for.
        dtype, device: of the weights.
        aux_layers: hidden states that it reads (index e enters layer e), where the files are wrong or unclear.
        own_embedding: force its own embedding (True) or the target's (False).
        first_slot: the first row of a block that guesses (0 or 1), where the files are wrong or unclear.
        overrides: fields of SpecConfig.

    Raises:
        ValueError: tensors are missing, surplus or of a wrong shape, or the target is another one.
    """
    DSparkDrafter.check_options(**overrides)
    tensors = read_tensors(repository, _RENAMED, _IGNORED)
    config, heads = read_config(repository, tensors, target, aux_layers, first_slot)
    target_ids = target_ids_of(repository, tensors, config.draft_vocab_size, config.vocab_size)
    has_embedding = drafts_with_own_embedding(repository, tensors, target, own_embedding)
    if not has_embedding:
        tensors.pop("embed_tokens.weight", None)
    head = own_head(repository, tensors, target, config)
    with torch.device("meta"):
        if is_gemma4(tensors):
            values_are_keys = "layers.0.self_attn.v_proj.weight" not in tensors
            model: DSparkModel = Gemma4DSparkModel(config, heads, has_embedding, values_are_keys)
        else:
            model = DSparkModel(config, heads, has_embedding)
    model, head = filled(repository, model, tensors, dtype, device), None if head is None else head.to(device, dtype)
    return DSparkDrafter(model, head, target_ids, **overrides)


def load_beside(target: PreTrainedModel, **options: Any) -> Drafter:
    """The drafter that the target's own repository keeps in its folder `dspark` (MiniMax-M3.1 does).

    Raises:
        ValueError: there is none, or it lives among the target's own weights.
    """
    if any(name.startswith("dspark_") for name in vars(target.config.get_text_config())):
        raise ValueError(
            f"{type(target).__name__} keeps its DSpark drafter among its own weights (mtp.*, said by the dspark_* "
            "fields of its config), which transformers does not load; it is not served yet. Take a drafter with a "
            "repository of its own: AutoDrafter.from_pretrained(name, target=model)."
        )
    name = target.name_or_path
    if not name or (Path(name).is_dir() and not (Path(name) / _FOLDER).is_dir()):
        where = f"{name} has no folder {_FOLDER!r}" if name else "the target was not loaded from a repository"
        raise ValueError(
            f"`method` is 'dspark' and {where}; load a drafter with a repository of its own: "
            "AutoDrafter.from_pretrained(name, target=model)."
        )
    return AutoDrafter.from_pretrained(name, target=target, subfolder=_FOLDER, **options)
