"""What every launcher refuses: shapes, dtypes and values that a kernel would read wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ._law import DraftLaw

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_rows(
    logits: torch.Tensor,
    inv_temperature: float,
    keys: torch.Tensor | None,
    counters: torch.Tensor | None,
    slots: torch.Tensor | None,
    stream: int,
    drawn: bool,
) -> None:
    """Refuse rows of logits, or their noise, that no kernel serves."""
    if logits.dim() != 3 or logits.shape[-1] == 0:
        raise ValueError(f"`logits` has shape {tuple(logits.shape)}; give [B, m, V] with at least one token.")
    if logits.dtype not in DTYPES:
        raise ValueError(f"`logits` is {logits.dtype}; give float32, bfloat16 or float16.")
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        raise ValueError(f"`logits` has stride {logits.stride(-1)} along the vocabulary; give contiguous rows.")
    if logits.shape[-1] > 1 << 27:
        raise ValueError(f"`logits` has {logits.shape[-1]} tokens; noise is keyed by token ids below 2^27.")
    if not 0.0 < inv_temperature < float("inf"):
        raise ValueError(f"`inv_temperature` is {inv_temperature!r}; give a positive number.")
    if not 0 <= stream < 64:
        raise ValueError(f"`stream` is {stream!r}; streams are numbered 0 to 63.")
    if not drawn:
        return
    batch_size, m = logits.shape[:2]
    check_int32("keys", keys, (batch_size, 2), logits.device)
    check_int32("counters", counters, (batch_size,), logits.device)
    if slots is not None:
        check_int32("slots", slots, (batch_size, m), logits.device)


def check_filters(top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    """Refuse filters that keep nothing or are none."""
    if top_k is not None and top_k < 1:
        raise ValueError(f"`top_k` is {top_k!r}; give an integer from 1, or None.")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and not 0.0 <= value <= 1.0:
            raise ValueError(f"`{name}` is {value!r}; give a number from 0 to 1, or None.")


def check_int32(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse anything but a contiguous int32 tensor of this shape on this device."""
    if tensor is None:
        raise ValueError(f"`{name}` is None; a draw needs int32 {list(shape)}.")
    if tuple(tensor.shape) != shape or tensor.dtype != torch.int32:
        raise ValueError(f"`{name}` is {tensor.dtype} {list(tensor.shape)}; give int32 {list(shape)}.")
    if not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(f"`{name}` must be contiguous and on {device}; it is on {tensor.device}.")


def check_draft(logits: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
    """Refuse drafted tokens and lengths that do not belong to these rows."""
    if logits.dim() != 3 or logits.shape[1] == 0:
        raise ValueError(f"`logits` has shape {tuple(logits.shape)}; give [B, n + 1, V].")
    batch_size, m = logits.shape[:2]
    check_tensor("tokens", tokens, (batch_size, m - 1), torch.int64, logits.device)
    check_tensor("lengths", lengths, (batch_size,), torch.int64, logits.device)


def check_parents(parents: torch.Tensor, tokens: torch.Tensor) -> None:
    """Refuse parents that do not belong to these nodes."""
    shape = tuple(tokens.shape)[1:] if parents.dim() == 1 else tuple(tokens.shape)
    check_tensor("parents", parents, shape, torch.int64, tokens.device)


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse anything but such a tensor on this device, its last dimension contiguous."""
    wanted = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"`{name}` is {tensor.dtype} {list(tensor.shape)}; give {wanted}.")
    if (tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1) or tensor.device != device:
        raise ValueError(f"`{name}` must be contiguous along its last dimension and on {device}.")


def check_verification(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    law: DraftLaw | None,
    keys: torch.Tensor,
    counters: torch.Tensor,
    inv_temperature: float,
) -> None:
    """Refuse what neither `residual` nor `block_mass` serves."""
    check_rows(logits, inv_temperature, keys, counters, None, 0, drawn=True)
    check_draft(logits, tokens, lengths)
    if tokens.shape[1] > 1 << 10:
        raise ValueError(f"`tokens` has {tokens.shape[1]} slots; noise is keyed by slots below 1024.")
    if law is not None:
        check_law(logits, tokens, law)


def check_law(logits: torch.Tensor, tokens: torch.Tensor, law: DraftLaw) -> None:
    """Refuse a law that does not belong to these rows and drafted tokens."""
    batch_size, n, vocab_size = *tokens.shape, logits.shape[-1]
    q, device = law.logits, logits.device
    if q.dim() != 3 or tuple(q.shape[:2]) != (batch_size, n) or not 0 < q.shape[2] <= vocab_size:
        raise ValueError(f"`law.logits` has shape {tuple(q.shape)}; give [{batch_size}, {n}, C] with C in 1..V.")
    if q.dtype not in DTYPES or (q.shape[2] > 1 and q.stride(-1) != 1) or q.device != device:
        raise ValueError("`law.logits` must be float32, bfloat16 or float16, contiguous along C, where `logits` is.")
    if law.positions is not None and law.ids is not None:
        raise ValueError("`law` has `positions` and `ids`; give one of them, or none.")
    if law.positions is None and law.ids is None and q.shape[2] != vocab_size:
        raise ValueError(f"`law.logits` has {q.shape[2]} candidates of {vocab_size}; say which: `positions` or `ids`.")
    if law.positions is not None:
        check_tensor("law.positions", law.positions, (vocab_size,), torch.int32, device)
    if law.ids is not None:
        check_tensor("law.ids", law.ids, tuple(q.shape), torch.int64, device)
    if law.one_hot is not None:
        check_tensor("law.one_hot", law.one_hot, (batch_size, n), torch.bool, device)
    if law.lse is not None:
        check_tensor("law.lse", law.lse, (batch_size, n), torch.float32, device)
