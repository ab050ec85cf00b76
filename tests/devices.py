"""Several devices on one: tensors carry the name of a device that they might be on, and mixing devices fails.

Data and arithmetic stay on the CPU, so whole texts can be compared; what fails here would fail on real devices.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

CPU = torch.device("cpu")
_GET_DEVICE = torch.Tensor.device.__get__
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class MixedDevices(RuntimeError):
    """An operation over tensors of several devices."""


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor.simulated_device = device
    return tensor


def device_of(tensor: torch.Tensor) -> torch.device:
    return getattr(tensor, "simulated_device", CPU)


class SimulatedDevices(TorchFunctionMode):
    """Inside, `device=...`, `.to(...)` and `.device` speak of simulated devices.

    Attributes:
        copies: how often something went from one device to another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == _GET_DEVICE:
            return device_of(args[0])
        if func is torch.Tensor.cpu:
            return self._move(args[0], func(args[0]), CPU)
        if func is torch.Tensor.to:
            wanted, args, kwargs = _without_device(args, kwargs)
            return self._move(args[0], func(*args, **kwargs) if args[1:] or kwargs else args[0], wanted)
        wanted = kwargs.pop("device", None)
        found = self._common_device(func, args, kwargs)
        output = func(*args, **kwargs)
        if wanted is None and func is torch.Tensor.copy_:
            wanted = device_of(args[0])
        device = found if wanted is None else torch.device(wanted)
        return tree_map(lambda leaf: place(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, output)

    def _move(self, old, new, wanted):
        wanted = device_of(old) if wanted is None else wanted
        self.copies += wanted != device_of(old)
        if new is old and wanted != device_of(old):
            new = old.detach()
        return place(new, wanted)

    def _common_device(self, func, args, kwargs) -> torch.device:
        """Numbers may come from the CPU, and so may what indexes; a copy may come from anywhere."""
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return CPU
        if func is torch.Tensor.copy_:
            return device_of(tensors[0])
        if func is torch.Tensor.__setitem__ and not any(isinstance(leaf, torch.Tensor) for leaf in _leaves(args[1])):
            return device_of(tensors[0])
        free = [t for t in tensors if t.dim() == 0 and device_of(t) == CPU]
        if func in _INDEXING:
            free += [t for t in tensors[1:] if device_of(t) == CPU]
        devices = {device_of(t) for t in tensors if not any(t is other for other in free)}
        if len(devices) > 1:
            raise MixedDevices(f"{getattr(func, '__name__', func)} over {sorted(map(str, devices))}")
        return devices.pop() if devices else CPU


def _leaves(index):
    return index if isinstance(index, tuple) else (index,)


def _without_device(args, kwargs):
    """(device of a call of `.to` or None, its arguments without it)."""
    wanted = kwargs.pop("device", None)
    kwargs.pop("non_blocking", None)
    rest = [args[0]]
    for value in args[1:]:
        if isinstance(value, torch.Tensor):
            wanted = device_of(value)
            rest.append(value.dtype)
        elif isinstance(value, torch.dtype):
            rest.append(value)
        elif isinstance(value, (str, torch.device, int)) and not isinstance(value, bool):
            wanted = value
    return None if wanted is None else torch.device(wanted), tuple(rest), kwargs


def put(module: torch.nn.Module, device: str) -> torch.nn.Module:
    """Put a whole module on a device."""
    for tensor in [*module.parameters(), *module.buffers()]:
        place(tensor, torch.device(device))
    return module


def split(model: torch.nn.Module, devices: dict[str, str]) -> torch.nn.Module:
    """Put parts of a model on devices, each with a hook that brings its inputs there, as accelerate's do."""
    for name, device in devices.items():

        def bring(module, args, kwargs, device=device):
            def move(leaf):
                return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

            return tree_map(move, args), tree_map(move, kwargs)

        put(model.get_submodule(name), device).register_forward_pre_hook(bring, with_kwargs=True)
    return model
