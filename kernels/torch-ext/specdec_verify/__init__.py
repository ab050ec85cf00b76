"""Kernels for the verification of speculative decoding: torch and Triton only."""

from triton.runtime.jit import JITFunction

from ._config import Config, choose
from ._processed_sample import processed_sample
from ._row_sample import HAS_NAN, INFINITE, METHODS, NOTHING, OK, RowSample, row_blocks, row_sample

INTERPRETED = not isinstance(row_blocks, JITFunction)
"""Whether Triton interprets the kernels: TRITON_INTERPRET=1 was set when they were imported."""

__all__ = [
    "HAS_NAN",
    "INFINITE",
    "INTERPRETED",
    "METHODS",
    "NOTHING",
    "OK",
    "Config",
    "RowSample",
    "choose",
    "processed_sample",
    "row_sample",
]
