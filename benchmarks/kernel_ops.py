"""The kernel ops that `gpu_check.py` checks and times: an entry in OPS each.

Import this only after TRITON_INTERPRET is decided: the kernels of a process are either interpreted or compiled.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from hf_specdec.verification.kernels import load

kernels = load()
reference = importlib.import_module(f"{kernels.__name__}.reference")

INVERSE_TEMPERATURE = 1.0 / 0.7
TOLERANCE = 2e-5
"""How much worse than the reference's token, in log-weight or probability, rounding may make a token."""


@dataclass(frozen=True)
class Shape:
    """Logits [B, num_drafted + 1, V], and what is awkward about them.

    Args:
        padding: elements between two rows, all larger than any logit.
        far: two rows of the batch stand more than 2 GiB apart.
        broken: some rows hold NaN, +inf or nothing above -inf.
    """

    batch_size: int
    num_drafted: int
    vocab_size: int
    dtype: torch.dtype = torch.float32
    padding: int = 0
    far: bool = False
    broken: bool = False

    def __str__(self) -> str:
        size = f"B {self.batch_size}, k {self.num_drafted}, V {self.vocab_size}"
        marks = [f"rows {self.padding} apart"] * (self.padding > 0) + ["far"] * self.far + ["broken"] * self.broken
        return ", ".join([size, str(self.dtype).removeprefix("torch."), *marks])

    @property
    def far_stride(self) -> int:
        """Elements between two rows of the batch that are `far`."""
        return (1 << 31) // self.dtype.itemsize + 16 * self.vocab_size

    def elements_allocated(self) -> int:
        of_a_row = (self.num_drafted + 1) * (self.vocab_size + self.padding)
        return (self.batch_size - 1) * (self.far_stride if self.far else of_a_row) + of_a_row

    def logits(self, device: torch.device, seed: int = 0) -> torch.Tensor:
        """[B, k + 1, V] random logits of this kind."""
        size = (self.batch_size, self.num_drafted + 1, self.vocab_size)
        generator = torch.Generator(device).manual_seed(seed)
        values = (3.0 * torch.randn(size, generator=generator, device=device)).to(self.dtype)
        if self.broken:
            for row, (where, value) in enumerate(
                ((-1, math.nan), (slice(None), -math.inf), (0, math.inf), (slice(None), math.nan), (0, math.nan))
            ):
                if row < size[0] * size[1]:
                    values.view(-1, self.vocab_size)[row, where] = value
        if self.far:
            memory = torch.empty(self.elements_allocated(), dtype=self.dtype, device=device)
            return memory.as_strided(size, (self.far_stride, self.vocab_size, 1)).copy_(values)
        if self.padding:
            memory = torch.full((*size[:2], size[2] + self.padding), 1e4, dtype=self.dtype, device=device)
            return memory[..., : self.vocab_size].copy_(values)
        return values


def config_for(op: str, logits: torch.Tensor) -> Any:
    """What the launcher would choose; interpreted, few large blocks: that time goes by the operation."""
    batch_size, m, vocab_size = logits.shape
    if kernels.INTERPRETED:
        return kernels.Config(min(65536, max(1024, triton.next_power_of_2(vocab_size) // 4)), 4)
    return kernels.choose(op, batch_size * m, vocab_size, logits.device)


def noise_of(logits: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """`keys` and `counters`, another key for each row of the batch."""
    rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    keys = torch.stack([torch.full_like(rows, seed), rows * 7919 + 1], dim=1)
    return {"keys": keys, "counters": rows * 1024}


def row_of(arguments: dict[str, Any], b: int) -> dict[str, Any]:
    """The arguments of batch row b alone: references in fp64 of a whole batch take gigabytes."""
    return {
        name: value[b : b + 1] if isinstance(value, torch.Tensor) and name != "parents" else value
        for name, value in arguments.items()
        if name != "config"
    }


@dataclass(frozen=True)
class RowOp:
    """A token for each row of logits.

    Args:
        name: of the launcher and of its reference.
        options: the launcher's arguments beside logits, noise and config.
    """

    name: str
    variant: str
    options: dict[str, Any] = field(default_factory=dict)
    drawn: bool = True

    def arguments(self, logits: torch.Tensor, seed: int) -> dict[str, Any]:
        noise = noise_of(logits, seed) if self.drawn else {}
        scale = {"inv_temperature": INVERSE_TEMPERATURE}
        return {"logits": logits, **self.options, **scale, **noise, "config": config_for("row_sample", logits)}

    def run(self, arguments: dict[str, Any]) -> Any:
        return getattr(kernels, self.name)(**arguments)

    def loss(self, arguments: dict[str, Any], found: Any) -> float:
        """How much worse than the reference's the tokens are; inf where a status, or a row without token, differs."""
        worst, block = 0.0, {}
        if self.options.get("method") == "inverse_cdf":
            block = {"block": arguments["config"].block}
        for b, (token, status) in enumerate(zip(found.token, found.status, strict=True)):
            expected = getattr(reference, self.name)(**row_of(arguments, b), **block)
            if not torch.equal(status, expected.status[0]) or not torch.equal(token < 0, expected.token[0] < 0):
                return math.inf
            losses = expected.losses[0].gather(-1, token.clamp_min(0)[:, None])[:, 0]
            worst = max([worst, *losses[token >= 0].tolist()])
        return worst

    def tokens(self, found: Any) -> torch.Tensor:
        """Draws from the law of `probabilities`, where all rows of logits are the same."""
        return found.token.flatten()

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """[V] fp64 law that the tokens of a row [V] follow."""
        filters = {name: self.options[name] for name in ("top_k", "top_p", "min_p") if name in self.options}
        return reference.processed_scores(logits.double() * INVERSE_TEMPERATURE, **filters).softmax(dim=-1)

    def bytes(self, shape: Shape) -> int:
        """The least that must be read: every logit once."""
        return shape.batch_size * (shape.num_drafted + 1) * shape.vocab_size * shape.dtype.itemsize


@dataclass(frozen=True)
class DraftOp(RowOp):
    """The verification of a draft: an emitted prefix for each row of the batch.

    Args:
        law: "match" for ops that compare with the target's choices; otherwise the law that drafts are drawn from:
            "one-hot", "full", "reduced" (half of the vocabulary) or "candidates" (at most twenty for each slot).
        tree: two children for each node of the first branch.
        rows_read: a and b of the a k + b rows that must be read.
    """

    law: str = "match"
    tree: bool = False
    rows_read: tuple[float, float] = (1, 1)

    def arguments(self, logits: torch.Tensor, seed: int) -> dict[str, Any]:
        batch_size, m, _ = logits.shape
        n, device = m - 1, logits.device
        lengths = (n - torch.arange(batch_size, device=device) % 3).clamp_min(0)
        draft: dict[str, Any] = {"lengths": lengths, "tokens": logits[:, :n].float().nan_to_num().argmax(dim=-1)}
        if self.tree:
            nodes = torch.arange(n, device=device)
            parents = torch.where(nodes < 2, -1, 2 * (nodes // 2 - 1))
            of_parent = logits.float().nan_to_num()[:, parents + 1].topk(2, dim=-1).indices
            draft["tokens"] = of_parent[:, nodes, nodes % 2].contiguous()
            depths = torch.cat([nodes.new_zeros(1), nodes // 2 + 1]).to(torch.int32)
            draft |= {"parents": parents, "slots": depths.expand(batch_size, -1).contiguous()}
        elif self.law != "match":
            draft |= self._drawn(logits[:, :n])
        arguments = super().arguments(logits, seed)
        return {**arguments, **draft, "config": config_for(self.config_of, logits)}

    @property
    def config_of(self) -> str:
        return "row_sample" if self.law == "match" else self.name

    def _drawn(self, p: torch.Tensor) -> dict[str, Any]:
        """`law`, and `tokens` drawn from it; the law resembles p [B, n, V]."""
        if self.law == "one-hot":
            return {"law": None}
        generator = torch.Generator(p.device).manual_seed(5)
        vocab_size = p.shape[-1]
        noise = torch.randn(p.shape, generator=generator, device=p.device)
        q = (p.float().nan_to_num(posinf=0.0, neginf=0.0) + noise).to(p.dtype)
        ids, positions = None, None
        if self.law == "reduced":
            ids = torch.arange(0, vocab_size, 2, device=p.device)
            positions, q = kernels.candidate_positions(ids, vocab_size), q[..., ids].contiguous()
        elif self.law == "candidates":
            q, ids = q.topk(min(20, vocab_size), dim=-1)
        uniform = torch.rand(q.shape, generator=generator, device=p.device).clamp_min(1e-30)
        tokens = (q.float() - (-uniform.log()).log()).argmax(dim=-1)
        if ids is not None:
            tokens = ids.expand(q.shape).gather(-1, tokens[..., None])[..., 0]
        per_slot = ids if self.law == "candidates" else None
        return {"tokens": tokens, "law": kernels.DraftLaw(q, positions, per_slot)}

    def loss(self, arguments: dict[str, Any], found: Any) -> float:
        """The largest margin by which the reference decided a row otherwise; inf where the margin is none."""
        worst = 0.0
        for b in range(len(arguments["logits"])):
            own = row_of(arguments, b)
            if own.get("law") is not None:
                law = own["law"]
                own["law"] = law._replace(
                    logits=law.logits[b : b + 1], ids=None if law.ids is None else law.ids[b : b + 1]
                )
            expected = getattr(reference, self.name)(**own)
            same = int(found.num_accepted[b]) == int(expected.num_accepted[0])
            same = same and torch.equal(found.tokens[b], expected.tokens[0])
            if found.path is not None:
                same = same and torch.equal(found.path[b], expected.path[0])
            if not same:
                worst = max(worst, float(expected.margin[0]))
        return worst

    def tokens(self, found: Any) -> torch.Tensor:
        return found.tokens[:, 0]

    def bytes(self, shape: Shape) -> int:
        rows = self.rows_read[0] * shape.num_drafted + self.rows_read[1]
        return int(shape.batch_size * rows * shape.vocab_size * shape.dtype.itemsize)


@dataclass(frozen=True)
class MoveOp:
    """Keys and values of accepted nodes move to the front of their tree; the vocabulary plays no part."""

    name: str
    variant: str = "8 layers, 8 heads, width 128"
    drawn: bool = False

    def arguments(self, logits: torch.Tensor, seed: int) -> dict[str, Any]:
        batch_size, m, _ = logits.shape
        device, n = logits.device, max(m - 1, 1)
        generator = torch.Generator(device).manual_seed(seed)
        size = (16, batch_size, 8, n + 40, 128)
        tensors = list(torch.randn(size, generator=generator, device=device).to(logits.dtype))
        path = torch.arange(n, device=device).expand(batch_size, n).clone()
        path = torch.where(path * 2 + 1 < n, path * 2 + 1, -1)  # nodes 1, 3, 5, ...
        starts = torch.arange(batch_size, device=device) % 40
        expected = reference.compact(tensors, path, starts)
        return {"table": kernels.cache_table(tensors), "path": path, "starts": starts, "expected": expected}

    def run(self, arguments: dict[str, Any]) -> None:
        kernels.compact(arguments["table"], arguments["path"], arguments["starts"])

    def loss(self, arguments: dict[str, Any], found: None) -> float:
        pairs = zip(arguments["table"].tensors, arguments["expected"], strict=True)
        return 0.0 if all(torch.equal(moved, right) for moved, right in pairs) else math.inf

    def bytes(self, shape: Shape) -> int:
        """What moves, read and written."""
        return 2 * 16 * shape.batch_size * 8 * 128 * (shape.num_drafted // 2) * shape.dtype.itemsize


FILTERS = {"top_k": 50, "top_p": 0.9, "min_p": 0.02}
OPS = [
    RowOp("row_sample", "greedy", {"method": "greedy"}, drawn=False),
    RowOp("row_sample", "gumbel", {"method": "gumbel"}),
    RowOp("row_sample", "inverse_cdf", {"method": "inverse_cdf"}),
    RowOp("processed_sample", "top-k 50", {"top_k": 50}),
    RowOp("processed_sample", "top-k, top-p, min-p", FILTERS),
    DraftOp("walk", "greedy chain", {"method": "greedy"}, drawn=False),
    DraftOp("walk", "gumbel chain", {"method": "gumbel"}),
    DraftOp("walk", "gumbel tree", {"method": "gumbel"}, tree=True),
    DraftOp("residual", "full", law="full", rows_read=(2, 3)),
    DraftOp("residual", "one-hot", law="one-hot", rows_read=(1, 1)),
    DraftOp("residual", "reduced", law="reduced", rows_read=(1.5, 2.5)),
    DraftOp("residual", "candidates", law="candidates", rows_read=(1, 2)),
    DraftOp("block_mass", "full", law="full", rows_read=(4, 1)),
    DraftOp("block_mass", "one-hot", law="one-hot", rows_read=(1, 1)),
    MoveOp("compact"),
]


def served(names: list[str] | None = None) -> list[RowOp | MoveOp]:
    """The ops of these names, or all; a kernel package from the Hub may be older than this file and lack some."""
    return [op for op in OPS if hasattr(kernels, op.name) and (names is None or op.name in names)]
