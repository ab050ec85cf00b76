"""Where a target's checkpoint is, and reading some of its tensors without touching the files of the others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from transformers import PreTrainedModel

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class TensorSource:
    """The safetensors files of a repository.

    Args:
        name: "org/name" or a folder.
        where: revision, subfolder, token and local_files_only, as in transformers.

    Attributes:
        files: tensor -> name of the file that holds it.

    Raises:
        ValueError: it has no safetensors weights.
        OSError: it cannot be found or downloaded.
    """

    def __init__(self, name: str, **where: Any) -> None:
        self.name, self.where = name, where
        self.folder = Path(name) / where["subfolder"] if Path(name).is_dir() else None
        if (index := self._local(_INDEX)) is not None:
            try:
                self.files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{index} is not a readable index of tensors: {error!r}.") from error
            return
        singles = [_SINGLE] if self.folder is None else sorted(file.name for file in self.folder.glob("*.safetensors"))
        self.files = {}
        for file in singles:
            if (path := self._local(file)) is None:
                continue
            with safe_open(path, framework="pt") as tensors:
                self.files.update(dict.fromkeys(tensors.keys(), file))
        if not self.files:
            raise ValueError(f"{name} has neither {_INDEX} nor {_SINGLE}; MTP layers are read from safetensors files.")

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """These tensors, from the files that hold them."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        tensors = {}
        for file, wanted in sorted(by_file.items()):
            path = self._local(file)
            if path is None:
                raise OSError(f"{self.name} lacks {file}, which its index names.")
            with safe_open(path, framework="pt") as content:
                tensors.update({name: content.get_tensor(name) for name in wanted})
        return tensors

    def _local(self, file: str) -> Path | None:
        """A file's local path, downloaded where it has to be; None where the repository has no such file."""
        if self.folder is not None:
            path = self.folder / file
            return path if path.is_file() else None
        where = {**self.where, "subfolder": self.where["subfolder"] or None}
        try:
            return Path(hf_hub_download(self.name, file, **where))
        except LocalEntryNotFoundError:
            if self.where["local_files_only"] and file in (_INDEX, _SINGLE):
                return None
            raise
        except EntryNotFoundError:
            return None
        except HFValidationError as error:
            raise ValueError(f"`repository` is {self.name!r}, neither a folder nor a repository 'org/name'.") from error


def source_of(
    target: PreTrainedModel,
    repository: str | Path | None,
    revision: str | None,
    subfolder: str,
    token: str | bool | None,
    local_files_only: bool,
) -> TensorSource:
    """The checkpoint that a target was loaded from, at the commit of then, or the one that the caller names.

    Raises:
        ValueError: the target was not loaded from a repository.
    """
    name = str(repository or target.name_or_path or "")
    if not name:
        raise ValueError(
            "the target was not loaded from a repository, so its MTP layers cannot be found; name theirs: "
            "AutoDrafter.for_target(model, 'mtp', repository=...)."
        )
    if repository is None and revision is None:
        revision = getattr(target.config, "_commit_hash", None)
    return TensorSource(name, revision=revision, subfolder=subfolder, token=token, local_files_only=local_files_only)
