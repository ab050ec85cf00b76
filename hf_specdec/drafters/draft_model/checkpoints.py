"""Which repositories are ordinary language models, causal or encoder-decoders, and loading one as a drafter.

Many drafters of other methods call themselves `LlamaForCausalLM` and the like. Taken for a whole model they would load
with random weights in the places that are missing, so every tensor has to be accounted for.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from ..auto import DrafterFormat, Repository
from ..base import UnfitDraftModel
from ..common.tokenizers import differing_tokens, is_masked_qwen2
from .drafter import DraftModelDrafter

# Tensors of EAGLE, MTP, DFlash and DSpark heads and of Gemma 4 assistants; no whole language model has them at its top.
_HEAD_TENSORS = (
    "d2t",
    "t2d",
    "fc.weight",
    "midlayer.",
    "model.fc.",
    "enorm.",
    "hnorm.",
    "markov",
    "mask_embedding",
    "pre_projection.",
)
_HEAD_FIELDS = ("eagle_config", "dflash_config", "draft_vocab_size", "speculators_model_type", "markov_rank")


# (what it is, class that loads it, the classes that it knows); a type may be among several
_KINDS = (
    ("causal LM", AutoModelForCausalLM, set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())),
    ("encoder-decoder", AutoModelForSeq2SeqLM, set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values())),
    ("speech encoder-decoder", AutoModelForSpeechSeq2Seq, set(MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.values())),
)


def _kind(architectures: Any) -> tuple[str, Any] | None:
    """(what it is, class that loads it) of a config's `architectures`; None for what is no language model."""
    if not (isinstance(architectures, list) and len(architectures) == 1 and isinstance(architectures[0], str)):
        return None
    return next((kind[:2] for kind in _KINDS if architectures[0] in kind[2]), None)


def detect(repository: Repository) -> DrafterFormat | None:
    """A language model of transformers, with an embedding and without any tensor of a drafter head."""
    architectures = repository.config.get("architectures")
    kind = _kind(architectures)
    if architectures is None or kind is None:
        return None
    if any(field in repository.config for field in _HEAD_FIELDS) or is_masked_qwen2(repository):
        return None
    if repository.tensors is not None:
        if any(name.startswith(_HEAD_TENSORS) for name in repository.tensors):
            return None
    elif not any(repository.path.glob("*.bin")):
        return None
    return DrafterFormat(
        method="draft_model",
        variant=f"transformers {kind[0]}",
        reason=f"config.json names {architectures[0]}, and no tensor or field belongs to a drafter head",
    )


def load(
    repository: Repository, *, target: PreTrainedModel, dtype: torch.dtype, device: torch.device | str, **overrides: Any
) -> DraftModelDrafter:
    """Load the model.

    Raises:
        UnfitDraftModel: the tokenizers differ, or the model cannot draft.
        ValueError: tensors are missing, surplus or of another shape.
    """
    differing = differing_tokens(repository.path, target)
    if differing:
        raise UnfitDraftModel(
            f"the draft model in {repository.path} has another tokenizer than the target: {len(differing)} tokens "
            f"differ (for example {differing[0]!r}). Take a draft model of the target's own family."
        )
    DraftModelDrafter.check_options(**overrides)
    try:
        kind = _kind(repository.config.get("architectures"))
        assert kind is not None  # detected
        model, info = kind[1].from_pretrained(
            repository.path,
            dtype=dtype,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except Exception as error:  # unpicklers and validators raise all kinds
        raise ValueError(
            f"{repository.path} does not load as {repository.config['architectures'][0]}: "
            f"{type(error).__name__}: {error}"
        ) from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(problem):
            names = ", ".join(sorted(map(_described, info[problem]))[:5])
            raise ValueError(
                f"{repository.path} is not a complete {type(model).__name__}: {problem.replace('_keys', '')} "
                f"tensors {names}. Found {repository.describe()}."
            )
    return DraftModelDrafter(model.to(device), **overrides)


def _described(key: str | tuple) -> str:
    """A tensor's name, with its shapes where they are the problem."""
    return key if isinstance(key, str) else f"{key[0]} {list(key[1])} (the model's is {list(key[2])})"
