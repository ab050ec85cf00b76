"""A masked diffusion language model as the drafter: what it may be told, and whether it fits a target."""

from __future__ import annotations

from typing import Any

from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedModel

from ...config import SpecConfig
from ..base import Drafter, DraftSession
from ..common.vocabulary import same_but_for_padding
from ..request import DraftRequest
from .canvas import Canvases
from .config_files import CanvasConfig
from .gemma import GemmaCanvases
from .reveal import ORDERS
from .session import DiffusionSession

_DEFAULT_LENGTH = 8


class DiffusionDrafter(Drafter):
    """Fills masks behind the text, in `effort` passes.

    Args:
        model: the network, in its native class.
        canvas: how it reads a canvas.
        reveal_order: what each pass but the last reveals: "confidence", "entropy" or "left_to_right"; "parallel" is one
            pass for everything. "auto" is "parallel" with one revealing pass and "confidence" with several.
        final_resample: use all passes but the last for a canvas of likeliest tokens, and draw every token in the last.
        options: fields of SpecConfig.
    """

    method = "diffusion"
    option_names = (
        "attention",
        "block_size",
        "mask_token_id",
        "separator_token_id",
        "reveal_order",
        "final_resample",
    )
    takes_effort = True

    def __init__(
        self,
        model: PreTrainedModel,
        canvas: CanvasConfig,
        reveal_order: str = "auto",
        final_resample: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_order(reveal_order, final_resample)
        self.model, self.canvas = model, canvas
        self.reveal_order, self.final_resample = reveal_order, final_resample
        self.default_num_draft_tokens = min(_DEFAULT_LENGTH, canvas.block_size)
        self.max_num_draft_tokens = canvas.block_size if canvas.full_attention else None

    @classmethod
    def check_options(cls, spec_config: SpecConfig | None = None, **options: Any) -> SpecConfig:
        check_order(options.pop("reveal_order", "auto"), options.pop("final_resample", False))
        return super().check_options(spec_config, **options)

    def check_target(self, target: PreTrainedModel) -> None:
        if target.config.is_encoder_decoder:
            raise ValueError(
                f"{type(target).__name__} is an encoder-decoder, and a diffusion drafter fills masks behind the text "
                "of decoder-only targets; take AutoDrafter.for_target(model, 'lookup') or a smaller model."
            )
        if self.model.get_input_embeddings() is None:
            self._check_sharing(target)
        ours, theirs = self.model.config.get_text_config().vocab_size, target.config.get_text_config().vocab_size
        if not same_but_for_padding(ours, theirs):
            raise ValueError(
                f"this diffusion drafter has a vocabulary of {ours} and the target one of {theirs}; a drafter needs "
                "the target's tokenizer (sizes may differ by padding only)."
            )

    def _check_sharing(self, target: PreTrainedModel) -> None:
        """Refuse a target whose embedding and output head are not those that the layers were trained with."""
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(self.model.config, name), getattr(target.config.get_text_config(), name)
            if ours != theirs:
                raise ValueError(
                    f"this diffusion drafter shares its target's embedding and output head, and was made for a "
                    f"{name} of {ours}; {type(target).__name__} has {theirs}. It belongs to another target."
                )

    def start(self, request: DraftRequest) -> DraftSession:
        revealing = request.config.effort - (self.final_resample and request.config.effort > 1)
        if self.reveal_order == "parallel" and revealing > 1:
            raise ValueError(
                f"`effort` is {request.config.effort} and `reveal_order` 'parallel' reveals everything in one pass; "
                f"take {', '.join(map(repr, ORDERS))} or 'auto'."
            )
        order = ORDERS.get(self.reveal_order, ORDERS["confidence"])
        return DiffusionSession(self.canvases(request), request, order, self.final_resample)

    def canvases(self, request: DraftRequest) -> Canvases | GemmaCanvases:
        """The canvases of a call."""
        if isinstance(self.model, DiffusionGemmaForBlockDiffusion):
            return GemmaCanvases(self.model, self.canvas, request)
        return Canvases(self.model, self.canvas, request)


def check_order(reveal_order: Any, final_resample: Any) -> None:
    """Refuse options of `reveal` that are none."""
    names = ("auto", "parallel", *ORDERS)
    if reveal_order not in names:
        raise ValueError(f"`reveal_order` is {reveal_order!r}; it must be one of {', '.join(map(repr, names))}.")
    if not isinstance(final_resample, bool):
        raise ValueError(f"`final_resample` is {final_resample!r}; give True or False.")
