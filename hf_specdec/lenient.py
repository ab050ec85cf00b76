"""The lenient rules, for `SpecConfig(lenience=...)`: more drafted tokens are kept than the target's law allows.

from hf_specdec import SpecConfig, lenient

SpecConfig(lenience=0.7)                             # lenient.Lenience(0.7)
SpecConfig(lenience=lenient.Mentored(max_kl=0.1))
"""

from .verification.lenient import Ensemble, Lenience, Margin, Mentored, TopK, Typical
from .verification.lenient_rule import LenientRule

__all__ = ["Ensemble", "Lenience", "LenientRule", "Margin", "Mentored", "TopK", "Typical"]
