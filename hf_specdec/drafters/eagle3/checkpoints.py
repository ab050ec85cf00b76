"""Every published EAGLE-3 format, read into one network.

SafeAILab (`midlayer.*`, also `.bin`), SpecForge and AngelSlim (the same names, safetensors), speculators (a
`transformer_layer_config` inside), NVIDIA ModelOpt (`eagle_config`, no embedding). Nothing is executed: `.bin` files
are read with `weights_only=True`.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..auto import DrafterFormat, Repository
from ..base import check_decoder_only
from ..common.embedding import stored_embeddings
from .config_files import read_config
from .configuration import Eagle3Config
from .fields import Fields
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
_SAME_EMBEDDING, _RELATED_EMBEDDING = 0.999, 0.1  # mean cosine with the target's


def detect(repository: Repository) -> DrafterFormat | None:
    """By tensors: a norm of the hidden state in the first layer, which nothing else has; for `.bin` files by config."""
    config = repository.config
    if repository.tensors is None:
        if "draft_vocab_size" not in config or not any(repository.path.glob("*.bin")):
            return None
        return DrafterFormat("eagle3", "SafeAILab", "config.json has draft_vocab_size, and the weights are a .bin file")
    names = {_rename(name) for name in repository.tensors}
    has_norm = "layers.0.hidden_norm.weight" in names
    told_by = "tensors have layers.0.hidden_norm" if has_norm else "config.json has an eagle_config without aux states"
    eagle = config.get("eagle_config")
    if not has_norm and not (isinstance(eagle, dict) and eagle.get("use_aux_hidden_state") is False):
        return None
    if names.isdisjoint({"layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_a_proj.weight"}):
        return None
    if config.get("speculators_model_type"):
        return DrafterFormat("eagle3", "speculators", f"config.json has speculators_model_type, and {told_by}")
    if any(name.removeprefix("model.").startswith("midlayer.") for name in repository.tensors):
        return DrafterFormat("eagle3", "SafeAILab or SpecForge", "tensors are named midlayer.*")
    return DrafterFormat("eagle3", "ModelOpt", f"{told_by}, without speculators fields")


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
    tensors = read_tensors(repository)
    config, guessed = read_config(repository, tensors, target, aux_layers, norm_output)
    target_ids = _target_ids(repository, tensors, config)
    if not _drafts_with_own_embedding(repository, tensors, target, own_embedding):
        tensors.pop("embed_tokens.weight", None)
    has_head = "lm_head.weight" in tensors
    if not has_head and config.draft_vocab_size != config.vocab_size:
        raise ValueError(
            f"{repository.path} has no lm_head.weight, and the target's cannot serve its reduced vocabulary "
            f"({config.draft_vocab_size} of {config.vocab_size})."
        )
    with torch.device("meta"):
        model = Eagle3Model(config, own_embedding="embed_tokens.weight" in tensors, own_head=has_head)
    _compare(repository, model.state_dict(), tensors)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
    return Eagle3Drafter(model.to(device).eval(), target_ids, layers_guessed=guessed, **overrides)


def read_tensors(repository: Repository) -> dict[str, torch.Tensor]:
    """All tensors of a head under our names.

    Raises:
        ValueError: a file holds something else than plain floating-point tensors and vocabulary maps.
    """
    raw: dict[str, torch.Tensor] = {}
    for file in sorted(repository.path.glob("*.safetensors")):
        raw.update(load_file(file))
    if repository.tensors is None:
        # Trainers leave other pickles beside the weights (training_args.bin).
        named, others = (sorted(repository.path.glob(pattern)) for pattern in ("pytorch_model*.bin", "*.bin"))
        for file in named or others:
            try:
                content = torch.load(file, map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, TypeError) as error:
                reason = str(error).partition("\n")[0]
                raise ValueError(f"{file} is not a file of plain tensors, so it is not read: {reason}") from error
            if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
                raise ValueError(f"{file} holds more than plain tensors, so it is not read.")
            raw.update(content)
    renamed = {_rename(name): tensor for name, tensor in raw.items()}
    return {name: tensor for name, tensor in renamed.items() if not name.startswith(_IGNORED)}


def _target_ids(repository: Repository, tensors: dict[str, torch.Tensor], config: Eagle3Config) -> torch.Tensor | None:
    """[Vd] target id of each draft id; None where they are the same. d2t holds offsets, not ids."""
    offsets, kept = tensors.pop("d2t", None), tensors.pop("t2d", None)
    size, path = config.draft_vocab_size, repository.path
    if offsets is None:
        if size == config.vocab_size:
            return None
        raise ValueError(
            f"{path} drafts {size} of {config.vocab_size} tokens and has no d2t to say which; it may have been trained "
            "for another target."
        )
    if offsets.shape != (size,):
        raise ValueError(f"{path} has a d2t of shape {list(offsets.shape)} for {size} draft tokens.")
    ids = torch.arange(size) + offsets.long()
    if not size or int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or not bool((ids.diff() > 0).all()):
        raise ValueError(
            f"{path} has a d2t whose ids leave the target's vocabulary of {config.vocab_size} or do not increase; it "
            "was made for another target, or is damaged."
        )
    if kept is not None and kept.bool().nonzero().flatten().tolist() != ids.tolist():
        raise ValueError(f"{path} has a d2t and a t2d that name different tokens; one of the two is damaged.")
    return None if size == config.vocab_size else ids


def _drafts_with_own_embedding(
    repository: Repository, tensors: dict[str, torch.Tensor], target: PreTrainedModel, forced: bool | None
) -> bool:
    """Whether the head's own embedding is taken. Most heads were trained with the target's; files may hold a copy of
    it, one that was trained on, or a random one that nobody used."""
    ours = tensors.get("embed_tokens.weight")
    if ours is None:
        if forced:
            raise ValueError(
                f"{repository.path} has no embed_tokens.weight, so it cannot draft with its own embedding."
            )
        return False
    if forced is not None:
        return forced
    theirs = stored_embeddings(target.get_input_embeddings(), torch.arange(target.config.get_text_config().vocab_size))
    if ours.shape != theirs.shape or Fields(repository.path, repository.config).flag("embed_requires_grad", False):
        return True
    cosine = float(F.cosine_similarity(ours.float(), theirs.detach().float().to(ours.device), dim=-1).mean())
    if cosine < _RELATED_EMBEDDING:
        warnings.warn(
            f"{repository.path} has an embedding that has nothing to do with the target's (mean cosine {cosine:.2f}), "
            "so the target's is taken; own_embedding=True takes the head's.",
            stacklevel=2,
        )
    return _RELATED_EMBEDDING <= cosine < _SAME_EMBEDDING


def _compare(repository: Repository, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Refuse missing and surplus tensors, and wrong shapes."""
    for title, names in (
        ("lacks the tensors", expected.keys() - found.keys()),
        ("has tensors that its config does not call for:", found.keys() - expected.keys()),
    ):
        if names:
            raise ValueError(f"{repository.path} {title} {', '.join(sorted(names)[:5])}.")
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise ValueError(
                f"{repository.path} has {name} of shape {list(found[name].shape)} where {list(tensor.shape)} is "
                "expected for this target; it may have been trained for another one."
            )


def _rename(name: str) -> str:
    for old, new in _RENAMED:
        if name.startswith(old):
            name = new + name[len(old) :]
    return name
