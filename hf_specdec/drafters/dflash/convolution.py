"""The short convolutions of DFlash 2: each row of a block is mixed with the rows just before it.

y_i = sum_t (base[t] + dynamic_i[t]) x_{i - t}      t = 0 .. taps - 1, x before the block is zero

The dynamic part is made from the sublayer's input, one number for each group of channels. A sublayer is convolved
twice, before it and after it, both times with kernels made from its input.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class DynamicConvolution(nn.Module):
    """Kernels around one sublayer; a new one is the identity.

    Args:
        hidden_size: channels H.
        num_taps: rows that a row sees, itself among them.
        group_size: channels that share a dynamic kernel.
    """

    def __init__(self, hidden_size: int, num_taps: int, group_size: int) -> None:
        super().__init__()
        self.num_taps, self.group_size = num_taps, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, num_taps, hidden_size))  # before and after the sublayer
        self.kernel_projection = nn.Linear(hidden_size, 2 * num_taps * hidden_size // group_size, bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., n, taps, H] before and after the sublayer, from its input [..., n, H]."""
        dynamic = self.kernel_projection(rows).unflatten(-1, (2, self.num_taps, -1))
        before, after = (self.base_kernel + dynamic.repeat_interleave(self.group_size, dim=-1)).unbind(dim=-3)
        return before, after


def convolve(rows: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """[..., n, H] rows [..., n, H] of blocks mixed by a kernel [..., n, taps, H]; no row sees another block."""
    num_rows, mixed = rows.shape[-2], rows * kernel[..., 0, :]
    for tap in range(1, kernel.shape[-2]):
        mixed = mixed + F.pad(rows, (0, 0, tap, 0))[..., :num_rows, :] * kernel[..., tap, :]
    return mixed
