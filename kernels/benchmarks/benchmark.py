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


class Walk(RowSample):
    def setup(self) -> None:
        super().setup()
        self.draft = self.logits[:, :-1].argmax(dim=-1)
        self.lengths = torch.full((8,), 7, device=self.device)

    def benchmark_chain(self) -> None:
        self.out = self.kernel.walk(self.logits, "greedy", self.draft, self.lengths).tokens

    def verify_chain(self) -> torch.Tensor:
        return self.logits.argmax(dim=-1)

    def benchmark_chain_gumbel(self) -> None:
        noise = {"keys": self.keys, "counters": self.counters}
        self.kernel.walk(self.logits, "gumbel", self.draft, self.lengths, **noise)


class Residual(Walk):
    def setup(self) -> None:
        super().setup()
        q = self.logits[:, :-1] + torch.randn_like(self.logits[:, :-1])
        self.law = self.kernel.DraftLaw(q)
        self.law_with_lse = self.kernel.DraftLaw(q, lse=q.float().logsumexp(dim=-1))
        self.noise = {"keys": self.keys, "counters": self.counters}

    def benchmark_law(self) -> None:
        self.kernel.residual(self.logits, self.draft, self.lengths, self.law, **self.noise)

    def benchmark_law_with_lse(self) -> None:
        self.kernel.residual(self.logits, self.draft, self.lengths, self.law_with_lse, **self.noise)


class BlockMass(Residual):
    def benchmark_law(self) -> None:
        self.kernel.block_mass(self.logits, self.draft, self.lengths, self.law, **self.noise)

    def benchmark_law_with_lse(self) -> None:
        self.kernel.block_mass(self.logits, self.draft, self.lengths, self.law_with_lse, **self.noise)


class Compact(Benchmark):
    seed = 0

    def setup(self) -> None:
        caches = [torch.randn(8, 8, 4096, 128, dtype=torch.bfloat16, device=self.device) for _ in range(64)]
        self.table = self.kernel.cache_table(caches)
        self.path = torch.tensor([[1, 3, 5, 8, -1, -1, -1, -1]] * 8, device=self.device)
        self.starts = torch.full((8,), 4000, device=self.device)

    def benchmark_path(self) -> None:
        self.kernel.compact(self.table, self.path, self.starts)
