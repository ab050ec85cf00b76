"""Times of the kernels in kernel-builder's form: one class an operation, `setup` and `benchmark_*`."""

import torch
from kernels.benchmark import Benchmark


class RowSample(Benchmark):
    seed = 0

    def setup(self) -> None:
        self.logits = torch.randn(8, 8, 151936, dtype=torch.bfloat16, device=self.device)
        self.keys = torch.arange(16, dtype=torch.int32, device=self.device).view(8, 2)
        self.counters = torch.arange(8, dtype=torch.int32, device=self.device)

    def benchmark_greedy(self) -> None:
        self.out = self.kernel.row_sample(self.logits, "greedy").token

    def verify_greedy(self) -> torch.Tensor:
        return self.logits.argmax(dim=-1)

    def benchmark_gumbel(self) -> None:
        self.kernel.row_sample(self.logits, "gumbel", keys=self.keys, counters=self.counters)

    def benchmark_inverse_cdf(self) -> None:
        self.kernel.row_sample(self.logits, "inverse_cdf", keys=self.keys, counters=self.counters)
