"""Drafting for encoder-decoders with a smaller one of their kind, or with the decoder of one.

The draft model's encoder runs once a call, on what the target's encoder has read, unless both are the same: then, and
for a decoder alone, the target's encoder output serves (DistilWhisper keeps Whisper's encoder; Gandhi, von Platen, Rush
2023). Its cache is cropped after a rejection. Targets of this kind run row by row, so a session has one row.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from ..base import UnfitDraftModel
from ..request import DraftRequest
from .session import DraftModelSession

_INPUT_SIZES = ("num_mel_bins", "input_feat_per_channel", "num_channels")  # of what encoders read besides tokens


def reads_source(model: PreTrainedModel) -> bool:
    """Whether a model's text depends on an encoder's output."""
    return model.config.is_encoder_decoder or "encoder_outputs" in inspect.signature(model.forward).parameters


def why_not_cropped(model: PreTrainedModel) -> str | None:
    """Why such a model cannot draft; None where nothing speaks against it."""
    return None if "cache" in inspect.signature(model.forward).parameters else "its forward takes no `cache`"


def check_source(model: PreTrainedModel, target: PreTrainedModel) -> None:
    """Refuse a target whose encoder reads something else than the draft model's.

    Raises:
        UnfitDraftModel: it does, or there is none.
    """
    name, theirs = type(model).__name__, type(target).__name__
    if not target.config.is_encoder_decoder:
        raise UnfitDraftModel(f"the draft model is a {name}, which needs an encoder, and {theirs} has none.")
    if not model.config.is_encoder_decoder:
        width = _hidden_size(target.get_encoder())
        if _hidden_size(model) != width:
            raise UnfitDraftModel(f"{name} reads encoder outputs of {_hidden_size(model)} and {theirs} gives {width}.")
        return
    if model.main_input_name != target.main_input_name:
        raise UnfitDraftModel(f"{name} reads {model.main_input_name!r} and {theirs} {target.main_input_name!r}.")
    for size in _INPUT_SIZES:
        a, b = getattr(model.config, size, None), getattr(target.config, size, None)
        if a != b:
            raise UnfitDraftModel(f"{size} of the draft model is {a} and of {theirs} {b}; both read the same inputs.")


def has_same_encoder(model: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Whether the target's encoder gives what the draft model's would: the same class, device and weights."""
    ours, theirs = model.get_encoder(), target.get_encoder()
    if type(ours) is not type(theirs):
        return False
    ours, theirs = ours.state_dict(), theirs.state_dict()
    return ours.keys() == theirs.keys() and all(
        (weight.device, weight.dtype, weight.shape) == (theirs[name].device, theirs[name].dtype, theirs[name].shape)
        and torch.equal(weight, theirs[name])
        for name, weight in ours.items()
    )


def _hidden_size(model: PreTrainedModel) -> int | None:
    return getattr(model.config, "hidden_size", None)


class EncoderDecoderSession(DraftModelSession):
    """A session over the model's own cache.

    Args:
        model: the draft model.
        request: the call.
        shares_encoder: whether the target's encoder output is taken.
    """

    def __init__(self, model: PreTrainedModel, request: DraftRequest, shares_encoder: bool) -> None:
        super().__init__(model, request)
        self.ids_name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
        self.num_padding = int(self.padding[0])
        self.inputs = self._encoded(shares_encoder)
        text = DynamicCache(config=model.config.get_text_config(decoder=True))
        self.cache = EncoderDecoderCache(text, DynamicCache())

    def _encoded(self, shares_encoder: bool) -> dict[str, Any]:
        """The inputs of every forward that come from an encoder."""
        source, device = self.request.source, self.device
        assert source is not None
        if not self.model.config.is_encoder_decoder:  # whose mask would be the text's
            return {"encoder_outputs": (source.outputs.last_hidden_state.to(device, self.model.dtype),)}
        inputs: dict[str, Any] = {}
        if source.attention_mask is not None:
            inputs["attention_mask"] = source.attention_mask.to(device)
        if shares_encoder:
            return {**inputs, "encoder_outputs": source.outputs}
        if source.inputs is None:
            raise ValueError(
                f"`{self.model.main_input_name}` is needed with this draft model, which has an encoder of its own; "
                "`encoder_outputs` or `inputs_embeds` are not enough."
            )
        encoder = self.model.get_encoder()
        taken = inputs if "attention_mask" in inspect.signature(encoder.forward).parameters else {}
        read = source.inputs
        read = read.to(device, self.model.dtype) if read.is_floating_point() else self._known(read)
        return {**inputs, "encoder_outputs": encoder(read, **taken, return_dict=True)}

    def _prefill(self) -> torch.Tensor:
        logits = self._run(self._known(self.rows.ids[:, self.num_padding : self.rows.widths[0]]))
        self.cache.activate_past_recording()  # sliding layers keep what they might go back to
        return logits

    def _forward(self, tokens: torch.Tensor, offsets: torch.Tensor, host_offsets: list[int]) -> torch.Tensor:
        num_rejected = self.cache.get_seq_length() - (host_offsets[0] - self.num_padding)
        if num_rejected > 0:  # crop(0) would drop what sliding layers keep for the next rejection
            self.cache.crop(-num_rejected)
        return self._run(self._known(tokens))

    def _run(self, tokens: torch.Tensor) -> torch.Tensor:
        """[1, m, V'] logits after each of the tokens [1, m]."""
        inputs = {**self.inputs, self.ids_name: tokens, "cache": self.cache}
        return self.model(**inputs, use_cache=True, return_dict=True).logits
