"""What a sweep has measured so far: JSON lines in its folder, so that a stopped sweep goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Store:
    """Records by key, on disk as soon as they are put.

    Args:
        path: the file; made where there is none.
        asked: what all records depend on (models, prompts, options).

    Raises:
        ValueError: the file holds records of something else.
    """

    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        self.path = path
        self._records: dict[str, Any] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole, _, broken = text.rpartition("\n")
        for number, line in enumerate(whole.split("\n") if whole else (), start=1):
            try:
                key, record = json.loads(line)
            except (ValueError, TypeError) as error:
                raise ValueError(f"line {number} of {path} is not a record ({error}); delete the file.") from error
            self._records[key] = record
        if broken:  # a sweep was killed while it wrote
            os.truncate(path, len(f"{whole}\n".encode()) if whole else 0)
        asked = json.loads(json.dumps(asked))
        before = self._records.setdefault("asked", asked)
        differing = [name for name in {**before, **asked} if before.get(name) != asked.get(name)]
        if differing:
            names = ", ".join(differing)
            raise ValueError(
                f"{path} holds measurements of a sweep that differs in {names}; choose another `out` or delete it."
            )
        if not whole:
            self.put("asked", asked)

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> Any:
        return self._records[key]

    def put(self, key: str, record: Any) -> None:
        """Keep a record."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, record]) + "\n")
        self._records[key] = record
