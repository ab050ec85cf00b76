"""A drafter's config.json, read without trusting it: trainers leave nulls, copies of the target's fields, and typos."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Fields:
    """Typed access to JSON objects.

    Args:
        path: of the repository, for error messages.
        objects: merged, the later ones winning; nulls count as absent.

    Raises:
        ValueError: a field that is asked for has another type than it must have.
    """

    def __init__(self, path: Path, *objects: dict[str, Any]) -> None:
        self.path = path
        self.content = {key: value for one in objects for key, value in one.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def integer(self, name: str, default: int, least: int = 1) -> int:
        """An integer from `least` on."""
        value = self.content.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._wrong(name, "a positive integer" if least == 1 else f"an integer from {least} on")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.content.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._wrong(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.content.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.content.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def layer_ids(self, name: str) -> tuple[int, ...]:
        """A list of layer ids; empty where there is none."""
        value = self.content.get(name, [])
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise self._wrong(name, "a list of integers")
        return tuple(value)

    def objects(self, name: str) -> list[dict[str, Any]]:
        """A list of objects; empty where there is none."""
        value = self.content.get(name, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self._wrong(name, "a list of objects")
        return value

    def texts(self, name: str) -> list[str]:
        value = self.content.get(name, [])
        if not isinstance(value, list) or not all(isinstance(i, str) for i in value):
            raise self._wrong(name, "a list of strings")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive numbers; empty where there is none."""
        value = self.content.get(name, [])
        if not isinstance(value, list) or not all(
            isinstance(i, int | float) and not isinstance(i, bool) and 0 < i < float("inf") for i in value
        ):
            raise self._wrong(name, "a list of positive numbers")
        return tuple(map(float, value))

    def inner(self, name: str) -> dict[str, Any]:
        """An object; empty where there is none."""
        value = self.content.get(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def _wrong(self, name: str, wanted: str) -> ValueError:
        return ValueError(f"config.json in {self.path} has {name} {self.content[name]!r} where {wanted} belongs.")
