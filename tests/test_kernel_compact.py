"""`compact` moves the accepted nodes of a tree, all of them, and nothing else."""

import pytest
import torch
from kernel_cases import DEVICE, counted, interpreted, quietly

pytest.importorskip("triton")

from hf_specdec._kernels import cache_table, compact, reference

pytestmark = quietly

PATHS = (
    [0, 1, 2, 3, -1, -1],
    [1, 2, 3, 4, 5, -1],  # each place is the next one's source: any other order than the ascending one fails
    [0, 2, 5, -1, -1, -1],
    [5, -1, -1, -1, -1, -1],
    [-1, -1, -1, -1, -1, -1],
)


def caches(count: int, shape: tuple, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("num_heads", "width"), [(2, 64), (3, 80), (40, 128), (1, 1)])
def test_accepted_nodes_move_to_the_front_and_the_rest_stays(dtype, num_heads, width):
    path = torch.tensor(PATHS, device=DEVICE)
    starts = torch.tensor([0, 3, 4, 1, 2], device=DEVICE)  # the last node of the third row is the cache's last place
    tensors = caches(2, (5, num_heads, 10, width), dtype)
    expected = reference.compact(tensors, path, starts)
    compact(cache_table(tensors), path, starts)
    for found, right in zip(tensors, expected, strict=True):
        assert torch.equal(found.float(), right.float())


def test_descending_order_would_be_found_out():
    tensors, starts = caches(1, (5, 1, 12, 8), torch.float32), torch.zeros(5, dtype=torch.long, device=DEVICE)
    path = torch.tensor(PATHS, device=DEVICE)
    expected = reference.compact(tensors, path, starts)[0]
    for b in range(5):
        for place, node in reversed(list(enumerate(node for node in PATHS[b] if node >= 0))):
            tensors[0][b, :, place] = tensors[0][b, :, node]
    assert not torch.equal(tensors[0], expected)


def test_strides_and_what_lies_around_the_caches_are_honoured():
    # A layer's keys as a view [B, H, S, D] of [B, S, H, D], inside a larger buffer; an offset view of the path.
    buffers = caches(2, (4, 14, 5, 40), torch.bfloat16)
    before = [buffer.clone() for buffer in buffers]
    views = [buffer[1:3, 2:12, 1:4, 3:27].transpose(1, 2) for buffer in buffers]
    around = torch.full((2, 12), 9, device=DEVICE)
    around[:, 4:10] = torch.tensor(PATHS[1:3])
    starts = torch.tensor([3, 4], device=DEVICE)
    expected = reference.compact(views, around[:, 4:10], starts)
    compact(cache_table(views), around[:, 4:10], starts)
    for buffer, old, view, right in zip(buffers, before, views, expected, strict=True):
        assert torch.equal(view, right)
        view.copy_(old[1:3, 2:12, 1:4, 3:27].transpose(1, 2))
        assert torch.equal(buffer, old)


def test_a_node_past_the_cache_is_not_read():
    tensors = caches(1, (1, 1, 4, 8), torch.float32)
    before = tensors[0].clone()
    compact(cache_table(tensors), torch.tensor([[7, 9]], device=DEVICE), torch.tensor([0], device=DEVICE))
    assert torch.equal(tensors[0], before)


@pytest.mark.parametrize(
    ("dtype", "width", "offset", "word"),
    [(torch.bfloat16, 128, 0, 8), (torch.bfloat16, 128, 2, 4), (torch.bfloat16, 128, 1, 2), (torch.bfloat16, 66, 0, 4)],
)
def test_the_widest_words_that_fit_are_moved(dtype, width, offset, word):
    buffers = [torch.randn(2 * 3 * 9 * width + 8).to(dtype).to(DEVICE) for _ in range(2)]
    tensors = [buffer[offset : offset + 2 * 3 * 9 * width].view(2, 3, 9, width) for buffer in buffers]
    table = cache_table(tensors)
    assert table.word == word
    path, starts = torch.tensor(PATHS[1:3], device=DEVICE), torch.tensor([2, 0], device=DEVICE)
    expected = reference.compact(tensors, path, starts)
    compact(table, path, starts)
    assert all(torch.equal(found, right) for found, right in zip(tensors, expected, strict=True))


@interpreted
def test_one_launch_reads_and_writes_what_moves():
    tensors = caches(6, (3, 4, 12, 64), torch.bfloat16)
    table, path = cache_table(tensors), torch.tensor(PATHS[:3])
    with counted() as counts:
        compact(table, path, torch.zeros(3, dtype=torch.long))
    moved = 5 + 2  # of the second row all, of the third row two
    bound = 2 * 6 * moved * 4 * 64 * 2
    assert counts.launches == 1
    assert bound <= counts.read + counts.written <= 1.1 * bound


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(2, 3, 4)], r"shape \(2, 3, 4\); give \[B, H, S, D\]"),
        ([torch.zeros(2, 3, 4, 5).mT], "contiguous along D"),
        ([torch.zeros(2, 3, 4, 5).to(torch.complex128)], "elements of 1, 2, 4 or 8 bytes"),
        ([torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 6, 5)], "differ in shape"),
        ([torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 3, 5).transpose(1, 2)], "differ in shape, dtype"),
    ],
)
def test_tensors_of_another_form_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        cache_table(tensors)


@pytest.mark.parametrize(
    ("path", "starts", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2).long(), "`path` is torch.float32"),
        (torch.zeros(3, 3).long(), torch.zeros(2).long(), r"give int64 \[2, 3\]"),
        (torch.zeros(3).long(), torch.zeros(2).long(), r"`path` has shape \(3,\)"),
        (torch.zeros(2, 3).long(), torch.zeros(2).int(), "`starts` is torch.int32"),
    ],
)
def test_paths_of_another_form_are_refused(path, starts, message):
    table = cache_table([torch.zeros(2, 3, 4, 5, device=DEVICE)])
    with pytest.raises(ValueError, match=message):
        compact(table, path.to(DEVICE), starts.to(DEVICE))
