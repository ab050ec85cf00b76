"""One token for each row of logits, with keyed noise. Wants a GPU."""

import torch

from kernels import get_kernel

verify = get_kernel("hf-specdec/specdec-verify", version=0)
logits = torch.randn(1, 5, 151936, dtype=torch.bfloat16, device="cuda")
keys = torch.tensor([[42, 0]], dtype=torch.int32, device="cuda")
counters = torch.tensor([100], dtype=torch.int32, device="cuda")
print(verify.row_sample(logits, "gumbel", inv_temperature=1 / 0.7, keys=keys, counters=counters))
