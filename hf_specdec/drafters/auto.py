"""One door to every drafter: the registry of methods, and detection of what a repository holds."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..decoding.placement import input_device
from .base import Drafter

_METHOD_MODULES = (
    "none",
    "lookup",
    "draft_model",
    "eagle3",
    "dflash",
    "dspark",
    "gemma4",
    "mtp",
    "diffusion",
)  # one line per method; each registers itself when imported
_CONFIG_FILES = ("*.json", "*.txt", "*.model")
_TELLING_FIELDS = (
    "architectures",
    "model_type",
    "draft_vocab_size",
    "eagle_config",
    "dflash_config",
    "speculators_model_type",
    "markov_rank",
)
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class DrafterFormat:
    """What a repository holds.

    Args:
        method: the method that loads it.
        variant: which of the method's published formats it is.
        reason: the files and fields that say so.
    """

    method: str
    variant: str
    reason: str


@dataclass(frozen=True)
class Repository:
    """A drafter's folder as detection sees it; reading it never executes anything.

    Args:
        path: the local folder (with the subfolder applied).
        config: the content of config.json, {} where there is none.
        tensors: names of the tensors, read from safetensors headers; None where no safetensors file is present.
    """

    path: Path
    config: dict[str, Any]
    tensors: frozenset[str] | None

    @classmethod
    def read(cls, path: Path) -> Repository:
        config_file = path / "config.json"
        config = {}
        if config_file.is_file():
            try:
                config = json.loads(config_file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{config_file} is not readable JSON: {error}.") from error
            if not isinstance(config, dict):
                raise ValueError(f"{config_file} holds a JSON {type(config).__name__}, not an object.")
        files = sorted(path.glob("*.safetensors"))
        names = frozenset().union(*map(_tensor_names, files)) if files else None
        return cls(path, config, names)

    def describe(self) -> str:
        """What was found, for error messages."""
        files = sorted(file.name for file in self.path.iterdir()) if self.path.is_dir() else []
        fields = {key: self.config[key] for key in _TELLING_FIELDS if key in self.config}
        tensors = sorted(self.tensors or ())
        shown = ", ".join(tensors[:5]) + (f", ... ({len(tensors)} in all)" if len(tensors) > 5 else "")
        return f"files: {', '.join(files) or 'none'}; config: {fields or 'none'}; tensors: {shown or 'none'}"


@dataclass(frozen=True)
class Method:
    """A registry entry.

    Args:
        name: the method's name.
        detect: (repository) -> its format if this method loads it, else None.
        from_repository: (repository, target, dtype, device, overrides) -> drafter, for methods with checkpoints.
        for_target: (target, **options) -> drafter, for methods that live inside the target or need no weights.
        from_model: (what `generate` was given as its assistant) -> drafter, None where it is no model of the method's;
            for methods whose checkpoints transformers loads as models, too.
    """

    name: str
    detect: Callable[[Repository], DrafterFormat | None] | None = None
    from_repository: Callable[..., Drafter] | None = None
    for_target: Callable[..., Drafter] | None = None
    from_model: Callable[[Any], Drafter | None] | None = None


_METHODS: dict[str, Method] = {}


def register(method: Method) -> None:
    """Add a method to the registry; called by the method's own `__init__`."""
    _METHODS[method.name] = method


def methods() -> dict[str, Method]:
    """All methods by name."""
    for name in _METHOD_MODULES:
        import_module(f".{name}", __package__)
    return _METHODS


class AutoDrafter:
    """Finds, loads and binds drafters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("AutoDrafter has no instances; use AutoDrafter.from_pretrained or AutoDrafter.for_target.")

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        target: PreTrainedModel,
        revision: str | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        local_files_only: bool = False,
        **overrides: Any,
    ) -> Drafter:
        """Load a drafter from a Hub repository or a local folder and bind it to its target.

        Args:
            name_or_path: "org/name" or a folder.
            target: the model that it will draft for.
            revision, subfolder, token, local_files_only: as in transformers.
            dtype, device: of the drafter's weights; the target's by default.
            overrides: `spec_config=SpecConfig(...)`, single fields of it, and options of the method (`aux_layers`,
                `own_embedding` and `norm_output` of EAGLE-3, the first two of DFlash, these and
                `first_slot` of DSpark, `draft_position` of Gemma 4 assistants, those of DiffusionDrafter and its
                loader).

        Raises:
            ValueError: the format is unknown (the sentence lists what was found), or does not fit the target.
            OSError: the repository cannot be found or downloaded.
        """
        _check_is_target(target)
        repository = Repository.read(_fetch(name_or_path, revision, subfolder, token, local_files_only))
        detected = _detect(repository, name_or_path)
        load = methods()[detected.method].from_repository
        assert load is not None  # a method that detects also loads
        dtype = dtype if dtype is not None else target.dtype
        device = device if device is not None else input_device(target)
        return load(repository, target=target, dtype=dtype, device=device, **overrides).bind(target)

    @classmethod
    def for_target(cls, target: PreTrainedModel, method: str, **options: Any) -> Drafter:
        """A drafter that comes with the target: "lookup", "none" for plain decoding, "mtp" where its checkpoint holds
        multi-token prediction layers, or "dspark" where its repository holds a DSpark drafter.

        Args:
            target: the model that it will draft for.
            method: the method's name.
            options: `spec_config=SpecConfig(...)`, single fields of it, and options of the method (`min_ngram`,
                `max_ngram` and `max_candidates` of lookup; `repository`, `revision`, `subfolder`, `token`,
                `local_files_only`, `dtype` and `device` of MTP).
        """
        _check_is_target(target)
        known = {name: entry for name, entry in methods().items() if entry.for_target is not None}
        if not isinstance(method, str) or method not in known:
            names = ", ".join(map(repr, sorted(known)))
            raise ValueError(
                f"`method` is {method!r}; drafters that come with the target are {names}. "
                "Drafters with weights of their own are loaded by AutoDrafter.from_pretrained."
            )
        build = known[method].for_target
        assert build is not None
        return build(target, **options)

    @classmethod
    def detect(
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> DrafterFormat:
        """Say which method loads a repository, and which files and fields tell.

        Raises:
            ValueError: no method does; the sentence lists what was found.
        """
        return _detect(
            Repository.read(_fetch(name_or_path, revision, subfolder, token, local_files_only)), name_or_path
        )


def drafter_of_model(assistant_model: Any, target: PreTrainedModel) -> Drafter | None:
    """A drafter over the weights of a model that transformers has loaded; None where it is a model like any other.

    Raises:
        ValueError: it does not fit the target.
    """
    makers = (method.from_model for method in methods().values() if method.from_model is not None)
    drafter = next((drafter for make in makers if (drafter := make(assistant_model)) is not None), None)
    return None if drafter is None else drafter.bind(target)


def _detect(repository: Repository, name: str | Path) -> DrafterFormat:
    found = [
        detected
        for method in methods().values()
        if method.detect is not None and (detected := method.detect(repository)) is not None
    ]
    if len(found) != 1:
        claims = "; ".join(f"{detected.method}: {detected.reason}" for detected in found)
        problem = f"several formats claim it ({claims})" if found else "no known drafter format matches"
        raise ValueError(f"{name} is not a drafter that hf_specdec can load: {problem}. Found {repository.describe()}.")
    return found[0]


def _fetch(
    name_or_path: str | Path, revision: str | None, subfolder: str, token: str | bool | None, local_files_only: bool
) -> Path:
    """The local folder of a repository, downloaded where it has to be."""
    if not str(name_or_path):
        raise ValueError("the drafter's name is ''; give a folder, '.' for this one, or a repository 'org/name'.")
    folder = Path(name_or_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError

        prefix = f"{subfolder}/" if subfolder else ""
        where = dict(revision=revision, token=token, local_files_only=local_files_only)
        ignored = [f"{prefix}*/*", f"{prefix}consolidated*"]  # folders below, and the same weights once more

        def download(*patterns: str) -> Path:
            try:
                wanted = [prefix + pattern for pattern in patterns]
                return Path(
                    snapshot_download(str(name_or_path), allow_patterns=wanted, ignore_patterns=ignored, **where)
                )
            except HFValidationError as error:
                raise ValueError(
                    f"`name_or_path` is {str(name_or_path)!r}, which is neither a folder nor a repository 'org/name'."
                ) from error
            except OSError as error:
                at = f" at revision {revision!r}" if revision else ""
                raise OSError(f"{name_or_path}{at} cannot be found or downloaded: {error}") from error

        folder = download(*_CONFIG_FILES, "*.safetensors")
        if not any((folder / subfolder).glob("*.safetensors")):
            folder = download(*_CONFIG_FILES, "*.bin")
    folder = folder / subfolder
    if not folder.is_dir():
        raise ValueError(f"`subfolder` is {subfolder!r}; {name_or_path} has no such folder.")
    return folder


def _tensor_names(file: Path) -> frozenset[str]:
    """Names in the header of a safetensors file (8 bytes of little-endian length, JSON, then the tensors' bytes)."""
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        header = stream.read(length) if 0 < length <= _MAX_HEADER_BYTES else b""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{file} is not a readable safetensors file (truncated or corrupt).") from error
    if file.stat().st_size != end:
        raise ValueError(
            f"{file} is not a readable safetensors file (truncated or corrupt): it has {file.stat().st_size} bytes and "
            f"its header speaks of {end}."
        )
    return frozenset(tensors)


def _check_is_target(target: Any) -> None:
    if not hasattr(target, "generate") or not hasattr(target, "config"):
        raise ValueError(
            f"`target` is a {type(target).__name__}; give the transformers model whose generate() will use the drafter."
        )
