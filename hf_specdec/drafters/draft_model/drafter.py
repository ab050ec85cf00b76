"""A smaller model as the drafter: what it may be, and whether it fits a target."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ...decoding.ragged_model import why_not_ragged
from ..base import SPECIAL_TOKENS, Drafter, DraftSession, UnfitDraftModel
from ..common.vocabulary import same_but_for_padding
from ..request import DraftRequest
from .encoder_decoder import EncoderDecoderSession, check_source, has_same_encoder, reads_source, why_not_cropped
from .session import DraftModelSession


class DraftModelDrafter(Drafter):
    """A language model with the target's tokenizer.

    Args:
        model: the draft model, a causal one or, for an encoder-decoder, one of its kind or the decoder of one. Its
            vocabulary may be padded to another size than the target's.
        options: fields of SpecConfig.
    """

    method = "draft_model"
    default_num_draft_tokens = 5

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        super().__init__(**options)
        reason = why_not_cropped(model) if reads_source(model) else why_not_ragged(model)
        if reason is not None:
            raise UnfitDraftModel(f"{type(model).__name__} cannot be a draft model: {reason}.")
        self.model = model
        self._shares_encoder = False

    def check_target(self, target: PreTrainedModel) -> None:
        ours, theirs = self.model.config.get_text_config(), target.config.get_text_config()
        if not same_but_for_padding(ours.vocab_size, theirs.vocab_size):
            raise UnfitDraftModel(
                f"the draft model has a vocabulary of {ours.vocab_size} and the target one of {theirs.vocab_size}; "
                "a draft model needs the target's tokenizer (sizes may differ by padding only)."
            )
        for name in SPECIAL_TOKENS[:2]:  # padding is often set per use
            a, b = getattr(ours, name, None), getattr(theirs, name, None)
            if a is not None and b is not None and not set(_as_list(a)) & set(_as_list(b)):
                raise UnfitDraftModel(
                    f"the draft model's {name} is {a} and the target's {b}; a draft model needs the target's tokenizer."
                )
        if reads_source(self.model):
            check_source(self.model, target)
            self._shares_encoder = not self.model.config.is_encoder_decoder or has_same_encoder(self.model, target)

    def start(self, request: DraftRequest) -> DraftSession:
        if reads_source(self.model):
            return EncoderDecoderSession(self.model, request, self._shares_encoder)
        return DraftModelSession(self.model, request)


def _as_list(ids: int | list[int]) -> list[int]:
    return ids if isinstance(ids, list) else [ids]
