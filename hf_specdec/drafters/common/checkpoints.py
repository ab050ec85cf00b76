"""What the weights of drafters' checkpoints have in common: reading them, vocabulary maps, embeddings, output heads.

Nothing is executed: `.bin` files are read with `weights_only=True`.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..auto import Repository
from .block_config import BlockConfig
from .embedding import stored_embeddings
from .fields import Fields

_Model = TypeVar("_Model", bound=nn.Module)
_SAME_EMBEDDING, _RELATED_EMBEDDING = 0.999, 0.1  # mean cosine with the target's


def read_tensors(
    repository: Repository, renamed: Sequence[tuple[str, str]] = (), ignored: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """All tensors of a drafter under our names.

    Args:
        repository: the folder.
        renamed: (prefix, what it becomes), applied in this order.
        ignored: prefixes, after renaming, of tensors that are left out.

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
    ours = {rename(name, renamed): tensor for name, tensor in raw.items()}
    return {name: tensor for name, tensor in ours.items() if not name.startswith(ignored)}


def target_ids_of(
    repository: Repository, tensors: dict[str, torch.Tensor], size: int, vocab_size: int
) -> torch.Tensor | None:
    """[Vd] target id of each draft id; None where they are the same. d2t holds offsets, not ids."""
    offsets, kept = tensors.pop("d2t", None), tensors.pop("t2d", None)
    path = repository.path
    if offsets is None:
        if size == vocab_size:
            return None
        raise ValueError(
            f"{path} drafts {size} of {vocab_size} tokens and has no d2t to say which; it may have been trained "
            "for another target."
        )
    if offsets.shape != (size,):
        raise ValueError(f"{path} has a d2t of shape {list(offsets.shape)} for {size} draft tokens.")
    ids = torch.arange(size) + offsets.long()
    if not size or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or not bool((ids.diff() > 0).all()):
        raise ValueError(
            f"{path} has a d2t whose ids leave the target's vocabulary of {vocab_size} or do not increase; it "
            "was made for another target, or is damaged."
        )
    if kept is not None and kept.bool().nonzero().flatten().tolist() != ids.tolist():
        raise ValueError(f"{path} has a d2t and a t2d that name different tokens; one of the two is damaged.")
    return None if size == vocab_size else ids


def drafts_with_own_embedding(
    repository: Repository, tensors: dict[str, torch.Tensor], target: PreTrainedModel, forced: bool | None
) -> bool:
    """Whether the drafter's own embedding is taken. Most drafters were trained with the target's; files may hold a copy
    of it, one that was trained on, or a random one that nobody used.

    Args:
        forced: what the user asked for, None where the files decide.
    """
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
            "so the target's is taken; own_embedding=True takes its own.",
            stacklevel=2,
        )
    return _RELATED_EMBEDDING <= cosine < _SAME_EMBEDDING


def own_head(
    repository: Repository, tensors: dict[str, torch.Tensor], target: PreTrainedModel, config: BlockConfig
) -> nn.Linear | None:
    """The output head that the files bring, taken out of the tensors; None where it is the target's or a copy of it."""
    check_head(repository, tensors, config.draft_vocab_size, config.vocab_size)
    weight = tensors.pop("lm_head.weight", None)
    if weight is None:
        return None
    _check_shape(repository, "lm_head.weight", weight, (config.draft_vocab_size, config.hidden_size))
    theirs: Any = target.get_output_embeddings()
    alike = theirs is not None and getattr(theirs, "bias", None) is None and theirs.weight.shape == weight.shape
    if alike and torch.equal(theirs.weight.detach().float().to(weight.device), weight.float()):
        return None
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.load_state_dict({"weight": weight}, assign=True)
    return head


def check_head(
    repository: Repository, tensors: dict[str, torch.Tensor], draft_vocab_size: int, vocab_size: int
) -> None:
    """Refuse a reduced vocabulary without a head for it."""
    if "lm_head.weight" not in tensors and draft_vocab_size != vocab_size:
        raise ValueError(
            f"{repository.path} has no lm_head.weight, and the target's cannot serve its reduced vocabulary "
            f"({draft_vocab_size} of {vocab_size})."
        )


def filled(
    repository: Repository,
    model: _Model,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
) -> _Model:
    """A module that was made without storage, with these tensors as its weights.

    Raises:
        ValueError: they are missing, surplus, or of a wrong shape.
    """
    compare(repository, model.state_dict(), tensors)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
    return model.to(device).eval()


def compare(repository: Repository, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Refuse missing and surplus tensors, and wrong shapes."""
    for title, names in (
        ("lacks the tensors", expected.keys() - found.keys()),
        ("has tensors that its config does not call for:", found.keys() - expected.keys()),
    ):
        if names:
            raise ValueError(f"{repository.path} {title} {', '.join(sorted(names)[:5])}.")
    for name, tensor in expected.items():
        _check_shape(repository, name, found[name], tensor.shape)


def _check_shape(repository: Repository, name: str, tensor: torch.Tensor, expected: Sequence[int]) -> None:
    if list(tensor.shape) != list(expected):
        raise ValueError(
            f"{repository.path} has {name} of shape {list(tensor.shape)} where {list(expected)} is expected for this "
            "target; it may have been trained for another one."
        )


def rename(name: str, renamed: Sequence[tuple[str, str]]) -> str:
    """A tensor's name with its prefixes replaced."""
    for old, new in renamed:
        if name.startswith(old):
            name = new + name[len(old) :]
    return name
