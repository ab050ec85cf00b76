"""What is special about encoder-decoder targets.

transformers runs the encoder before it hands over to a decoding loop, so what is left is a text as any other, with
names of its own for the text's inputs, inputs of every forward that come from the encoder, and another dictionary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerateEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput

from ..decoding.outputs import Recorder
from ..drafters.request import Source


def text_name(model: PreTrainedModel, name: str) -> str:
    """What an input or output of the generated text is called: `attention_mask` may be the encoder's."""
    return f"decoder_{name}" if model.config.is_encoder_decoder else name


def text_layers(cache: Any) -> list[Any]:
    """The layers of a cache that grow with the text."""
    return getattr(cache, "self_attention_cache", cache).layers


def row_of_inputs(model_kwargs: dict[str, Any], row: int, batch_size: int) -> dict[str, Any]:
    """What `generate` prepared for one row of a batch.

    As `_expand_inputs_for_generation` does, every tensor is taken to have the rows in its first dimension; one that
    has not serves all rows.
    """

    def of_row(value: Any) -> Any:
        has_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == batch_size
        return value[row : row + 1] if has_rows else value

    kwargs = {name: of_row(value) for name, value in model_kwargs.items()}
    if (encoded := kwargs.get("encoder_outputs")) is not None:
        kwargs["encoder_outputs"] = copy.copy(encoded)
        for name, value in encoded.items():
            kwargs["encoder_outputs"][name] = of_row(value)
    return kwargs


def with_named_outputs(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs with the encoder's output by names, where the caller has given it as a tuple."""
    encoded = model_kwargs.get("encoder_outputs")
    if not isinstance(encoded, tuple):
        return model_kwargs
    names = ("last_hidden_state", "hidden_states", "attentions")
    return {**model_kwargs, "encoder_outputs": BaseModelOutput(**dict(zip(names, encoded, strict=False)))}


def from_encoder(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of one row's forwards that any text may be given with."""
    return {name: model_kwargs[name] for name in ("encoder_outputs", "attention_mask") if name in model_kwargs}


def encoder_inputs(model: PreTrainedModel, inputs: torch.Tensor | None, batch_size: int) -> torch.Tensor | None:
    """[B, ...] what the encoder was given, once for each row of `num_return_sequences`; None without an encoder."""
    if inputs is None or not model.config.is_encoder_decoder:
        return None
    copies = batch_size // len(inputs)
    return inputs if copies == 1 else inputs.repeat_interleave(copies, dim=0)


def source_of(inputs: torch.Tensor | None, model_kwargs: dict[str, Any], vocab_size: int) -> Source:
    """What the encoder read and gave.

    Args:
        inputs: [B, ...] what the encoder was given, as far as that is known.
        model_kwargs: what `generate` prepared.
        vocab_size: of the target's texts.
    """
    mask, ids = model_kwargs.get("attention_mask"), None
    if model_kwargs.get("inputs_embeds") is not None:
        inputs = None
    if inputs is not None and inputs.dim() == 2 and not inputs.is_floating_point() and inputs.numel() > 0:
        if int(inputs.min()) < 0:  # -100 stands for an encoder that has run before
            inputs = None
        elif int(inputs.max()) < vocab_size and (mask is None or mask.shape == inputs.shape):
            kept = torch.ones_like(inputs) if mask is None else mask
            ids = [row[keep.bool()].tolist() for row, keep in zip(inputs, kept, strict=True)]
    return Source(ids, inputs, mask, model_kwargs["encoder_outputs"])


def dictionary(
    sequences: torch.Tensor, recorder: Recorder, cache: Any, encoded: Any, returned: frozenset[str]
) -> GenerateEncoderDecoderOutput:
    """What plain decoding returns with `return_dict_in_generate`.

    Args:
        encoded: the encoder's output, for the whole batch.
        returned: which of RETURNED are.
    """
    return GenerateEncoderDecoderOutput(
        sequences=sequences,
        scores=recorder.scores,
        logits=recorder.logits,
        encoder_hidden_states=encoded.get("hidden_states") if "hidden_states" in returned else None,
        decoder_hidden_states=recorder.hidden_states,
        cache=cache,
    )
