"""Speculative decoding for transformers: faster generation, the same text.

    import hf_specdec
    from hf_specdec import AutoDrafter

    drafter = AutoDrafter.for_target(model, "lookup")
    model.generate(**inputs, assistant_model=drafter)

Importing the package lets `generate` and pipelines take drafters (`install()`); HF_SPECDEC_NO_INSTALL=1 forbids that.
"""

import os
import warnings
from typing import TYPE_CHECKING, Any

from . import lenient
from .config import SpecConfig
from .drafters import AutoDrafter, Drafter, DrafterFormat
from .integration import SpecGenerate, enable, install, pipeline, uninstall
from .metrics import SpecStats
from .scheduling import SLAController

if TYPE_CHECKING:
    from .tuning import pareto

__version__ = "0.1.0"
__all__ = [
    "AutoDrafter",
    "Drafter",
    "DrafterFormat",
    "SLAController",
    "SpecConfig",
    "SpecGenerate",
    "SpecStats",
    "enable",
    "install",
    "lenient",
    "pareto",
    "pipeline",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name == "pareto":  # few programs measure, so its modules are loaded by those only
        from .tuning import pareto

        return pareto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if os.environ.get("HF_SPECDEC_NO_INSTALL", "").lower() in ("", "0", "false", "no", "off"):
    try:
        install()
    except RuntimeError as error:  # the package stays importable, so that `hf-specdec env` can tell
        warnings.warn(f"drafters are not installed in generate(): {error}", RuntimeWarning, stacklevel=2)
