"""The cache of MTP layers: keys and values, and what short convolutions have read, a slot for each entry."""

from __future__ import annotations

import torch
from transformers import LlamaConfig

from ...decoding.cache import RaggedCache


class MtpCache(RaggedCache):
    """A ragged cache whose convolutions, too, forget rejected entries by writing over them.

    Args:
        num_blocks: the target's layers, whose places stay empty, and the decoder layers of the MTP layers.
        max_slots: most slots that a row will need.
        first: [B] the first slot of each row that holds an entry.
    """

    def __init__(self, num_blocks: int, max_slots: int, first: torch.Tensor) -> None:
        super().__init__(LlamaConfig(num_hidden_layers=num_blocks), max_slots)
        self.first = first
        self.inputs: dict[tuple[int, int], torch.Tensor] = {}  # (layer, convolution) -> [B, channels, slots]
        self.begin_rows()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: a convolution goes by what `update_conv_state` gives it."""
        return None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 1, **kwargs: object
    ) -> torch.Tensor:
        """[B, channels, conv_kernel_size - 1 + m] inputs of a convolution from the first that it reads.

        Args:
            conv_states: [B, channels, m] its inputs at the entries of this forward.
        """
        batch_size, channels, num_entries = conv_states.shape
        place = layer_idx, state_idx
        stored = self.inputs.get(place, conv_states.new_zeros(batch_size, channels, 0))
        if (missing := self.capacity - stored.shape[-1]) > 0:
            stored = torch.nn.functional.pad(stored, (0, missing))
        assert self.offsets is not None
        slots = self.offsets[:, None] + torch.arange(1 - conv_kernel_size, num_entries, device=stored.device)
        written = slots[:, None, conv_kernel_size - 1 :].expand(-1, channels, -1)
        self.inputs[place] = stored.scatter_(-1, written, conv_states)
        read = stored.gather(-1, slots.clamp_min(0)[:, None].expand(-1, channels, -1))
        return read.masked_fill(slots[:, None] < self.first[:, None, None], 0.0)
