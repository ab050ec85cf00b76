"""The way into transformers: the only code that knows how `generate` works inside.

The loop and the drafters never import it; the package's `__init__` and the command line do.
"""

from .dispatch import SpecGenerate, enable, install, is_installed, uninstall
from .pipelines import pipeline

__all__ = ["SpecGenerate", "enable", "install", "is_installed", "pipeline", "uninstall"]
