"""Kernels for the verification of speculative decoding: torch and Triton only."""

from triton.runtime.jit import JITFunction

from ._block_mass import block_mass
from ._compact import CacheTable, cache_table, compact
from ._config import Config, choose
from ._law import DraftLaw, candidate_positions
from ._processed_sample import processed_sample
from ._residual import residual
from ._row_sample import HAS_NAN, INFINITE, METHODS, NOTHING, OK, RowSample, row_blocks, row_sample
from ._walk import Verified, walk

INTERPRETED = not isinstance(row_blocks, JITFunction)
"""Whether Triton interprets the kernels: TRITON_INTERPRET=1 was set when they were imported."""

__all__ = [
    "HAS_NAN",
    "INFINITE",
    "INTERPRETED",
    "METHODS",
    "NOTHING",
    "OK",
    "CacheTable",
    "Config",
    "DraftLaw",
    "RowSample",
    "Verified",
    "block_mass",
    "cache_table",
    "candidate_positions",
    "choose",
    "compact",
    "processed_sample",
    "residual",
    "row_sample",
    "walk",
]
