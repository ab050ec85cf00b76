"""The built kernel on a GPU; the whole set of tests is in the repository's tests/test_kernel_*.py."""

import pytest
import torch

from kernels import get_local_kernel


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_the_argmax(device, dtype):
    verify = get_local_kernel("build")
    logits = torch.randn(2, 5, 32000, device=device).to(dtype)
    assert torch.equal(verify.row_sample(logits, "greedy").token, logits.argmax(dim=-1))
