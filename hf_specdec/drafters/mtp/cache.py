"""The cache of MTP layers: keys and values, what short convolutions have read, and indexers' keys, by entries."""

from __future__ import annotations

import torch
from transformers import LlamaConfig

from ...decoding.cache import RaggedCache

_INDEXER = -1  # in the place of a convolution's number


class MtpCache(RaggedCache):
    """A ragged cache whose convolutions and indexers, too, forget rejected entries by writing over them.

    Args:
        num_blocks: the target's layers, whose places stay empty, and the decoder layers of the MTP layers.
        max_slots: most slots that a row will need.
        first: [B] the first slot of each row that holds an entry.
    """

    def __init__(self, num_blocks: int, max_slots: int, first: torch.Tensor) -> None:
        super().__init__(LlamaConfig(num_hidden_layers=num_blocks), max_slots)
        self.first = first
        self.inputs: dict[tuple[int, int], torch.Tensor] = {}  # (layer, convolution or indexer) -> [B, channels, slots]
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
        num_entries = conv_states.shape[-1]
        stored = self._written((layer_idx, state_idx), conv_states)
        slots = self._slots(1 - conv_kernel_size, num_entries, conv_states.device)
        read = stored.gather(-1, slots.clamp_min(0)[:, None].expand(-1, stored.shape[1], -1))
        return read.masked_fill(slots[:, None] < self.first[:, None, None], 0.0)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """[B, view, D] keys by which a layer of sparse attention chooses what it attends to.

        Args:
            indexer_key_states: [B, m, D] those of this forward.
        """
        stored = self._written((layer_idx, _INDEXER), indexer_key_states.transpose(1, 2))
        return stored[..., : self.view].transpose(1, 2)

    def _written(self, place: tuple[int, int], values: torch.Tensor) -> torch.Tensor:
        """[B, channels, slots] what is kept at a place, with `values` [B, channels, m] at this forward's slots."""
        batch_size, channels, num_entries = values.shape
        stored = self.inputs.get(place, values.new_zeros(batch_size, channels, 0))
        if (missing := self.capacity - stored.shape[-1]) > 0:
            stored = torch.nn.functional.pad(stored, (0, missing))
        slots = self._slots(0, num_entries, values.device)
        self.inputs[place] = stored.scatter_(-1, slots[:, None].expand(-1, channels, -1), values)
        return stored

    def _slots(self, first: int, end: int, device: torch.device) -> torch.Tensor:
        """[B, end - first] slots counted from where this forward writes."""
        assert self.offsets is not None
        return self.offsets[:, None] + torch.arange(first, end, device=device)
