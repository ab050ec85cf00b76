"""What tests of kernels share: cases that cover all pairs, logits, and counts of launches and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from hf_specdec._kernels import Config  # noqa: E402
from hf_specdec.verification import Noise  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
quietly = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about masked lanes
interpreted = pytest.mark.skipif(DEVICE.type != "cpu", reason="looks into Triton's interpreter")

VOCAB_SIZES = (97, 8192, 8193, 10000, 32000, 151936, 262144)
BATCH_SIZES = (1, 2, 8)
DRAFT_LENGTHS = (0, 1, 4, 16)


def _quicken_interpreter() -> None:
    """Halve the interpreter's time, which is what these tests take.

    It patches Triton's language again at every call of a device function, although the launch has done so, and it
    works every integer addition out in 64 bits for an overflow check that only debug mode reports.
    """
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    function = interpreter.InterpretedFunction
    patching_call, patched = function.__call__, set()

    def call(self, *arguments, **options):
        module = self.fn.__module__
        if module.startswith("triton.") and module not in patched:  # these see the language by another name
            patched.add(module)
            return patching_call(self, *arguments, **options)
        return self.rewrite()(*arguments, **options)

    function.__call__ = call


if DEVICE.type == "cpu":
    _quicken_interpreter()


def pairwise(*factors: Sequence[Any]) -> list[tuple]:
    """Few combinations of the factors' values in which every pair of two values occurs (greedy)."""
    pairs = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(factors)), 2)
        for a in factors[i]
        for b in factors[j]
    }
    every, chosen = list(itertools.product(*factors)), []
    while pairs:
        case = max(every, key=lambda case: len(pairs & _pairs_of(case)))
        chosen.append(case)
        pairs -= _pairs_of(case)
    return chosen


def _pairs_of(case: tuple) -> set:
    return set(itertools.combinations(enumerate(case), 2))


def config_for(vocab_size: int) -> Config | None:
    """Few large blocks for the interpreter, whose time goes by the operation; the launcher's choice on a GPU."""
    if DEVICE.type != "cpu":
        return None
    return Config(min(65536, max(1024, triton.next_power_of_2(vocab_size) // 4)), 4)


def random_logits(*shape: int, dtype: torch.dtype, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(*shape, generator=generator)).to(dtype).to(DEVICE)


def noise_arguments(batch_size: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """`keys` and `counters` of a batch whose rows stand at different positions."""
    keys = Noise.from_seed(seed, batch_size, DEVICE).keys
    return {"keys": keys, "counters": torch.arange(batch_size, dtype=torch.int32, device=DEVICE) * 37 + 5}


@dataclass
class Counts:
    """What kernels did: launches, and bytes read and written by lanes that were not masked."""

    launches: int = 0
    read: int = 0
    written: int = 0


@contextmanager
def counted() -> Iterator[Counts]:
    """Count launches and bytes of interpreted kernels."""
    from triton.runtime import interpreter

    counts = Counts()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, launch = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def counting_load(self, ptrs, mask, *rest):
        loaded = load(self, ptrs, mask, *rest)
        counts.read += int(np.count_nonzero(mask.data)) * loaded.data.dtype.itemsize
        return loaded

    def counting_store(self, ptrs, value, mask, *rest):
        counts.written += int(np.count_nonzero(mask.data)) * value.data.dtype.itemsize
        return store(self, ptrs, value, mask, *rest)

    def counting_launch(self, *arguments, **options):
        counts.launches += 1
        return launch(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", counting_load)
        patch.setattr(builder, "create_masked_store", counting_store)
        patch.setattr(executor, "__call__", counting_launch)
        yield counts
