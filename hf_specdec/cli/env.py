"""Print what is installed, on which device it runs and what hf_specdec will use: the first lines of any bug report."""

import argparse
import importlib.metadata
import platform

PACKAGES = ("transformers", "torch", "triton", "optimum", "accelerate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`env` takes none."""


def run(arguments: argparse.Namespace) -> int:
    """Print one `name: value` line a fact."""
    from .. import __version__

    facts = {"hf_specdec": __version__} | {package: _version(package) for package in PACKAGES}
    facts |= {"python": platform.python_version(), "platform": platform.platform()}
    facts |= {"device": _device(), "verification": _verification(), "dispatcher": _dispatcher()}
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name + ':':<{width + 1}} {value}")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"CPU, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        kind, architecture = f"ROCm {torch.version.hip}", properties.gcnArchName
    else:
        kind, architecture = f"CUDA {torch.version.cuda}", f"sm_{properties.major}{properties.minor}"
    return f"{kind}, {torch.cuda.device_count()} x {properties.name} ({architecture})"


def _verification() -> str:
    import torch

    from ..verification import implementation

    if not torch.cuda.is_available():
        return "torch: no GPU found"
    try:
        return implementation("triton", "match", torch.device("cuda"))
    except ValueError as error:
        return f"torch: {error}"


def _dispatcher() -> str:
    import transformers

    from ..integration import is_installed

    if is_installed():
        return f"installed in transformers {transformers.__version__}"
    remedy = "unset HF_SPECDEC_NO_INSTALL or call hf_specdec.install()"
    return f"not installed in transformers {transformers.__version__}: {remedy}"
