"""One torch thread per test process: tiny models gain nothing from more, and workers would fight over the cores."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
