"""What `gpu_check.py` checks and measures, as lists of titled cases; a case returns its row of the table."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernel_ops import TOLERANCE, DraftOp, MoveOp, RowOp, Shape

from hf_specdec.verification import Draft, Noise, OneHot, RoundNoise, Sampled, implementation, verify

Case = tuple[str, Callable[[], dict[str, Any]]]
Op = RowOp | MoveOp
Cases = Callable[[torch.device, list[Op]], Iterator[Case]]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SURELY_WRONG = 1e-6
LAW = (1.0, -0.5, 0.3, float("-inf"), 2.0)
VOCAB_SIZES, BATCH_SIZES, DRAFT_LENGTHS = (151936, 32000, 262144), (1, 8, 64), (7, 4, 15)

SHAPES = [
    Shape(3, 4, 151936, BF16, padding=16),
    Shape(8, 5, 8193, FP32, broken=True),
    Shape(1, 7, 262144, BF16),
    Shape(2, 0, 97, FP32, padding=3),
    Shape(8, 15, 32000, FP16),
    Shape(5, 2, 10000, BF16, padding=7, broken=True),
    Shape(1, 4, 8192, FP32),
    Shape(2, 3, 2, FP32),
    Shape(64, 4, 32000, BF16, padding=48),
    Shape(4, 1, 128256, FP32, padding=1),
]
SMALL_SHAPES = [
    Shape(2, 2, 1025, BF16, padding=7),
    Shape(3, 3, 97, FP32, padding=3, broken=True),
    Shape(1, 0, 8193, FP32),
]
FAR_SHAPES = [Shape(2, 4, 151936, BF16, far=True), Shape(3, 2, 32000, FP32, far=True)]


# Right numbers


def numbers(device: torch.device, ops: list[Op], shapes: list[Shape]) -> Iterator[Case]:
    """Every op against its fp64 reference, a shape at a time, so that a short run has seen every op."""
    for shape, op in itertools.product(shapes, ops):
        yield title(op, shape), lambda op=op, shape=shape: numeric(op, shape, device)  # type: ignore[misc]


def title(op: Op, what: object) -> str:
    return f"{op.name} {op.variant}: {what}"


def numeric(op: Op, shape: Shape, device: torch.device) -> dict[str, Any]:
    needed = 1.5 * shape.elements_allocated() * shape.dtype.itemsize
    if device.type == "cuda" and needed > torch.cuda.mem_get_info()[0]:
        return {"ok": True, "note": "not enough free memory"}
    arguments = op.arguments(shape.logits(device), seed=1)
    loss = op.loss(arguments, op.run(arguments))
    return {"ok": loss <= TOLERANCE, "loss": loss}


def draws(device: torch.device, ops: list[Op], count: int) -> Iterator[Case]:
    """The law of the tokens, and that it is not another; one seed repeats itself, two differ."""
    for op in (op for op in ops if isinstance(op, RowOp) and op.drawn):
        yield title(op, "law"), lambda op=op: law(op, device, count)  # type: ignore[misc]
        yield title(op, "seeds"), lambda op=op: seeds(op, device, count)  # type: ignore[misc]


def law(op: RowOp, device: torch.device, count: int) -> dict[str, Any]:
    """Chi-square of the tokens against their law, and against that of other logits, which must be refuted."""
    row = torch.tensor(LAW, device=device)
    slots = 1 if isinstance(op, DraftOp) else 8
    batch_size = count if isinstance(op, DraftOp) else count // slots
    arguments = op.arguments(row.expand(batch_size, slots if slots > 1 else 2, -1), seed=3)
    tokens = op.tokens(op.run(arguments))
    right, wrong = (chi_square(tokens, op.probabilities(scale * row)) for scale in (1.0, 0.3))
    return {"ok": right > SURELY_WRONG > wrong, "p_value": right, "control": wrong, "tokens": len(tokens)}


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The p-value of Pearson's test; 0 where a token without probability was drawn, or none at all (-1)."""
    if int(tokens.min()) < 0:
        return 0.0
    observed = tokens.bincount(minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    if bool(observed[expected == 0.0].any()):
        return 0.0
    kept = expected > 0.0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    return float(torch.special.gammaincc((kept.sum() - 1).double() / 2, statistic / 2))


def seeds(op: RowOp, device: torch.device, count: int) -> dict[str, Any]:
    logits = Shape(min(64, count // 40), 4, 999).logits(device) / 3
    first, again, other = (op.tokens(op.run(op.arguments(logits, seed))) for seed in (1, 1, 2))
    differ = float((first != other).double().mean())
    return {"ok": torch.equal(first, again) and differ > 0.1, "differ": differ}


# Times


def times(device: torch.device, ops: list[Op]) -> Iterator[Case]:
    """Every op at every size; bf16."""
    bandwidth: list[float] = []

    def copied() -> dict[str, Any]:
        size = min(1 << 30, torch.cuda.mem_get_info()[0] // 4)
        source = torch.empty(size, dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        bandwidth.append(2 * size / seconds(lambda: target.copy_(source)))
        return {"ok": True, "bytes_per_second": bandwidth[0]}

    yield "copy", copied
    for batch_size, vocab_size, num_drafted in itertools.product(BATCH_SIZES, VOCAB_SIZES, DRAFT_LENGTHS):
        shape = Shape(batch_size, num_drafted, vocab_size, BF16)
        for op in ops:
            yield title(op, shape), lambda op=op, shape=shape: timed(op, shape, device, bandwidth[0])  # type: ignore[misc]


def timed(op: Op, shape: Shape, device: torch.device, bandwidth: float) -> dict[str, Any]:
    arguments = op.arguments(shape.logits(device), seed=1)
    taken = seconds(lambda: op.run(arguments))
    return {
        "ok": True,
        "seconds": taken,
        "fraction": op.bytes(shape) / taken / bandwidth,
        "launches": launches(lambda: op.run(arguments)),
    }


def seconds(function: Callable[[], Any]) -> float:
    """Median time, with a cold cache."""
    from triton.testing import do_bench

    return 1e-3 * statistics.median(do_bench(function, warmup=10, rep=40, return_mode="all"))


def launches(function: Callable[[], Any]) -> int | None:
    """Kernels, copies and fills that the device ran; None where the profiler sees nothing."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events()) or None


def verification(device: torch.device, _ops: list[Op]) -> Iterator[Case]:
    """`hf_specdec.verification.verify` by torch and by the kernels, which must decide alike."""
    rules = [("match", False), *((rule, True) for rule in ("match", "rejection", "block"))]
    rules = [(rule, drawn) for rule, drawn in rules if implementation("auto", rule, device) == "triton"]
    for batch_size, vocab_size, num_drafted in itertools.product(BATCH_SIZES, VOCAB_SIZES, DRAFT_LENGTHS):
        shape = Shape(batch_size, num_drafted, vocab_size, BF16)
        for rule, drawn in rules:
            name = f"{rule} {'sampled' if drawn else 'greedy'}: {shape}"
            yield name, lambda rule=rule, drawn=drawn, shape=shape: compared(rule, drawn, shape, device)  # type: ignore[misc]


def compared(rule: str, drawn: bool, shape: Shape, device: torch.device) -> dict[str, Any]:
    logits = shape.logits(device)
    draft, noise = drafted(rule, logits), None
    if drawn:
        positions = torch.arange(len(logits), device=device)
        noise = RoundNoise(Noise.from_seed(1, len(logits), device), positions, 2)
    verdicts, taken, launched = {}, {}, {}
    for by in ("torch", "triton"):

        def run(by: str = by) -> Any:
            return verify(draft, logits, rule, noise, by)

        verdicts[by], taken[by], launched[by] = run(), seconds(run), launches(run)
    # Scores that nearly tie may be decided otherwise by rounding: a row in a hundred, never most.
    alike = (verdicts["torch"].num_accepted == verdicts["triton"].num_accepted).double().mean()
    return {
        "ok": float(alike) >= 0.95 - (len(logits) < 20) * 0.15,
        "seconds_torch": taken["torch"],
        "seconds_triton": taken["triton"],
        "times_faster": taken["torch"] / taken["triton"],
        "launches_torch": launched["torch"],
        "launches_triton": launched["triton"],
        "alike": float(alike),
    }


def drafted(rule: str, logits: torch.Tensor) -> Draft:
    """The target's best tokens for `match`; otherwise tokens drawn from a law that resembles the target's."""
    batch_size, m, _ = logits.shape
    lengths = torch.full((batch_size,), m - 1, device=logits.device)
    if rule == "match":
        return Draft(logits[:, :-1].argmax(dim=-1), lengths, OneHot())
    generator = torch.Generator(logits.device).manual_seed(7)
    q = logits[:, :-1].float()
    q = q + torch.randn(q.shape, generator=generator, device=q.device)
    tokens = (q - (-torch.rand(q.shape, generator=generator, device=q.device).clamp_min(1e-30).log()).log()).argmax(-1)
    return Draft(tokens, lengths, Sampled(q))


SECTIONS: dict[str, Cases] = {
    "numbers": lambda device, ops: numbers(device, ops, SHAPES),
    "offsets": lambda device, ops: numbers(device, ops, FAR_SHAPES),
    "draws": lambda device, ops: draws(device, ops, 200_000),
    "times": times,
    "verification": verification,
}
SMALL_SECTIONS: dict[str, Cases] = {
    "numbers": lambda device, ops: numbers(device, ops, SMALL_SHAPES),
    "draws": lambda device, ops: draws(device, ops, 160),
}
