"""Where a model runs, also where accelerate has split or offloaded it.

Offloaded weights are on the meta device between forwards, without data, and a hook of accelerate's brings them to the
device where the module runs. So weights are not read from outside: modules are called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


def input_device(model: PreTrainedModel) -> torch.device:
    """Where the model takes its inputs: `model.device`, or where its first offloaded module runs."""
    if model.device.type != "meta":
        return model.device
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for single in getattr(hook, "hooks", (hook,)):
            if (device := getattr(single, "execution_device", None)) is not None:
                return torch.device(device)
    return model.device


@contextmanager
def present_weight(module: Any) -> Iterator[torch.Tensor]:
    """The weight of a module, brought back for a while where it is offloaded."""
    if not module.weight.is_meta:
        yield module.weight
        return
    from accelerate.utils import align_module_device

    with align_module_device(module):
        yield module.weight
