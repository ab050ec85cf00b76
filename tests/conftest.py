"""One torch thread per test process: tiny models gain nothing from more, and workers would fight over the cores.

Where there is no GPU, Triton's kernels are interpreted. That is decided when they are imported, hence here.
"""

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def not_installed():
    """Without the patch of transformers."""
    import hf_specdec

    hf_specdec.uninstall()
    yield
    hf_specdec.uninstall()  # a test may have installed a part
    hf_specdec.install()
