"""Moves a tree's accepted keys and values together, in place, for all layers in one launch.

The nodes of a tree lie in the cache in the order in which they were verified. Of the accepted path, node path[i] moves
to place i. A path rises strictly, so path[i] >= i, and copying in ascending order never overwrites what is still to be
read. One program holds all copies of its heads, and each lane the same columns in all of them: no order between lanes
or programs is needed. Grid (tensors * B * groups of heads,).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ._checks import check_tensor


class CacheTable(NamedTuple):
    """Tensors of one shape and layout, by their addresses: valid as long as these tensors are (`cache_table`).

    Args:
        addresses: [T] int64, on the tensors' device.
        tensors: the tensors, which this keeps alive.
        word: bytes that are moved at once; rows, strides and addresses are multiples of it.
    """

    addresses: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    word: int


def cache_table(tensors: Sequence[torch.Tensor]) -> CacheTable:
    """Collect the keys and values of all layers, once for a cache.

    Args:
        tensors: [B, H, S, D] each, of one shape, dtype, device and strides; the last dimension is contiguous.

    Raises:
        ValueError: they differ, or have another form.
    """
    first = tensors[0]
    if first.dim() != 4 or (first.shape[-1] > 1 and first.stride(-1) != 1):
        raise ValueError(f"`tensors` have shape {tuple(first.shape)}; give [B, H, S, D], contiguous along D.")
    if first.element_size() not in (1, 2, 4, 8):
        raise ValueError(f"`tensors` are {first.dtype}; give elements of 1, 2, 4 or 8 bytes.")
    for tensor in tensors:
        same = tensor.shape == first.shape and tensor.dtype == first.dtype and tensor.device == first.device
        if not same or tensor.stride() != first.stride():
            raise ValueError("`tensors` differ in shape, dtype, device or strides; make one table for each kind.")
    addresses = [tensor.data_ptr() for tensor in tensors]
    sizes = [number * first.element_size() for number in (first.shape[-1], *first.stride()[:3])]
    word = math.gcd(8, *sizes, *addresses)
    return CacheTable(torch.tensor(addresses, dtype=torch.int64, device=first.device), tuple(tensors), word)


@triton.jit
def compact_heads(
    addresses_ptr,
    path_ptr,
    starts_ptr,
    batch_size,
    H,
    S,
    D,
    n,
    stride_b,
    stride_h,
    stride_s,
    path_stride,
    WORD: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Move a batch row's accepted nodes in some heads of one tensor; D and the strides count words."""
    groups = tl.cdiv(H, HEADS)
    program = tl.program_id(0)
    group, row = program % groups, program // groups
    tensor, batch_row = row // batch_size, row % batch_size
    heads, columns = group * HEADS + tl.arange(0, HEADS), tl.arange(0, COLUMNS)
    here = (heads < H)[:, None] & (columns < D)[None, :]
    base = tl.load(addresses_ptr + tensor).to(tl.pointer_type(WORD)) + batch_row.to(tl.int64) * stride_b
    pointers = base + heads.to(tl.int64)[:, None] * stride_h + columns[None, :]
    start = tl.load(starts_ptr + batch_row)
    path = path_ptr + batch_row.to(tl.int64) * path_stride
    place = tl.full([], 0, tl.int32)
    node = tl.load(path, mask=n > 0, other=-1)
    while node >= 0:
        if (node > place) & (start + node < S):
            moved = tl.load(pointers + (start + node).to(tl.int64) * stride_s, mask=here)
            tl.store(pointers + (start + place).to(tl.int64) * stride_s, moved, mask=here)
        place += 1
        node = tl.load(path + place, mask=place < n, other=-1)


def compact(table: CacheTable, path: torch.Tensor, starts: torch.Tensor) -> None:
    """Move accepted nodes to the front of their tree, in place.

    Args:
        table: what `cache_table` made of the caches' tensors [B, H, S, D].
        path: [B, n] int64, a row's accepted nodes in order, rising; -1 pads. Rows of -1 keep everything.
        starts: [B] int64, the place in S of each row's node 0.

    Raises:
        ValueError: an argument has the wrong shape or dtype.
    """
    first = table.tensors[0]
    batch_size, num_heads, size, width = first.shape
    if path.dim() != 2:
        raise ValueError(f"`path` has shape {tuple(path.shape)}; give [B, n].")
    check_tensor("path", path, (batch_size, path.shape[1]), torch.int64, first.device)
    check_tensor("starts", starts, (batch_size,), torch.int64, first.device)
    width, *strides = (number * first.element_size() // table.word for number in (width, *first.stride()[:3]))
    columns = triton.next_power_of_2(max(width, 1))
    heads = min(triton.next_power_of_2(max(num_heads, 1)), max(1, 512 // columns))
    programs = len(table.tensors) * batch_size * triton.cdiv(num_heads, heads)
    if programs == 0 or path.shape[1] == 0:
        return
    compact_heads[(programs,)](
        table.addresses,
        path,
        starts,
        batch_size,
        num_heads,
        size,
        width,
        path.shape[1],
        *strides,
        path.stride(0),
        WORD={1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[table.word],
        HEADS=heads,
        COLUMNS=columns,
        num_warps=4,
    )
