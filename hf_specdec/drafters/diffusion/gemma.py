"""Passes of DiffusionGemma: an encoder keeps the text's keys and values, a decoder denoises a canvas behind it.

Encoder and decoder share their weights. The encoder is causal, so what it has read stays. The decoder sees all of a
canvas and the text before it, of which sliding layers hold the last tokens only, and it is told what it thought of the
canvas in the pass before (self-conditioning). There is no mask token: a slot without a token holds a random one. Those
come from a generator of their own, fixed and known before anything is drawn, so they are part of the drafter's law.
"""

from __future__ import annotations

import torch
from transformers import DiffusionGemmaForBlockDiffusion

from ...decoding.cache import RaggedCache
from ..common.vocabulary import over_target_vocabulary
from ..request import DraftRequest
from .config_files import CanvasConfig


class GemmaCanvases:
    """The canvases of a call's rows; the interface of Canvases.

    Args:
        model: the network.
        config: how long a canvas is.
        request: the call.
    """

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, config: CanvasConfig, request: DraftRequest) -> None:
        self.model, self.config, self.request, self.rows = model, config, request, request.rows
        self.device, self.text_config = model.device, model.config.text_config
        self.padding = (self.rows.lengths - self.rows.positions).to(self.device)  # [B]
        self.cache = RaggedCache(self.text_config, request.max_columns)
        self.cache.begin_rows()
        self.read = [0] * len(self.rows.widths)  # columns of each row that the encoder has read
        self.generator = torch.Generator().manual_seed(0)
        self.thought: torch.Tensor | None = None  # [B, canvas, V] logits of the pass before

    def begin(self, num_slots: int) -> tuple[torch.Tensor, int]:
        """Start a round: read what is new of the texts. ([B, n] the stage of each slot, how many), as Canvases does."""
        rows, device = self.rows, self.device
        unfinished = [b for b, done in enumerate(rows.finished) if not done]
        missing = max(rows.widths[b] - self.read[b] for b in unfinished)
        starts = [max(width - missing, 0) for width in rows.widths]
        count = max(rows.widths[b] - starts[b] for b in unfinished)
        offsets = torch.tensor(starts, device=device)
        self.cache.place(offsets, starts, count)
        columns = offsets[:, None] + torch.arange(count, device=device)
        ids = rows.ids.to(device).gather(1, columns.clamp_max(rows.ids.shape[1] - 1))
        keys = torch.arange(self.cache.view, device=device)
        distance = columns[..., None] - keys
        # Padding sees itself, for attention over nothing is NaN.
        seen = (distance >= 0) & (keys >= self.padding[:, None, None]) | (distance == 0)
        self.model.model.encoder.language_model(
            input_ids=ids.clamp_max(self.text_config.vocab_size - 1),
            attention_mask={
                "full_attention": seen[:, None],
                "sliding_attention": (seen & (distance < self.text_config.sliding_window))[:, None],
            },
            position_ids=(columns - self.padding[:, None]).clamp_min(0),
            cache=self.cache,
        )
        self.read, self.thought = list(rows.widths), None
        return torch.zeros(len(rows.widths), num_slots, dtype=torch.long, device=rows.ids.device), 1

    def run(self, tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """[B, n, V] fp32 logits of the slots over the target's vocabulary, on the device of the rows.

        Args:
            tokens: [B, n] in the slots.
            masked: [B, n] slots that hold a random token instead.
        """
        device, num_slots, vocab_size = self.device, tokens.shape[1], self.text_config.vocab_size
        length = max(num_slots, self.config.block_size)
        canvas = torch.randint(vocab_size, (tokens.shape[0], length), generator=self.generator).to(device)
        canvas[:, :num_slots] = torch.where(masked.to(device), canvas[:, :num_slots], tokens.to(device))
        ends = self.rows.lengths.to(device)[:, None]
        keys = torch.arange(self.cache.capacity, device=device)
        text = (keys >= self.padding[:, None]) & (keys < ends)
        recent = text & (keys >= ends - (self.text_config.sliding_window - 1))  # what a sliding cache would hold
        self.thought = self.model(
            decoder_input_ids=canvas,
            cache=self.cache,
            self_conditioning_logits=self.thought,
            decoder_attention_mask={
                "full_attention": _over_canvas(text, length),
                "sliding_attention": _over_canvas(recent, length),
            },
            decoder_position_ids=ends - self.padding[:, None] + torch.arange(length, device=device),
        ).logits
        return over_target_vocabulary(
            self.thought[:, :num_slots].clone(), None, self.request.vocab_size, self.rows.ids.device
        )


def _over_canvas(text: torch.Tensor, length: int) -> torch.Tensor:
    """[B, 1, length, slots + length] what each token of a canvas sees: the text's slots [B, slots], and all of it."""
    seen = torch.nn.functional.pad(text, (0, length), value=True)
    return seen[:, None, None].expand(-1, 1, length, -1)
