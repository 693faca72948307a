"""Typed look-ups in a model's description that name the file and the key when a value is missing or impossible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkv.errors import ModelFileError

MAX_SIZE = 1 << 24  # no dimension of a known decoder comes near it; a damaged file's easily does


class Keys:
    """The values of a config.json, of a block inside one, or of GGUF metadata; keys are looked up behind `prefix`.

    A key that is null counts as missing. `assumed` collects a line for each default that was used.
    """

    def __init__(
        self, values: Mapping[str, Any], source: str, prefix: str = "", assumed: list[str] | None = None
    ) -> None:
        self.values, self.source, self.prefix = values, source, prefix
        self.assumed: list[str] = [] if assumed is None else assumed

    def inside(self, name: str, block: Mapping[str, Any]) -> Keys:
        """The keys of an object that is the value of `name`."""
        prefix = f"{self.prefix}{name}."
        return Keys({prefix + key: value for key, value in block.items()}, self.source, prefix, self.assumed)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def size(self, key: str, default: int | None = None, at_most: int = MAX_SIZE) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
            raise self.wrong(key, f"a whole number from 1 to {at_most:,}")
        return value

    def real(self, key: str, default: float | None = None, *, at_least: float = 0.0, at_most: float = 1e12) -> float:
        """A number above 0, from `at_least` to `at_most`."""
        value = self._get(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= at_most or value < at_least:
            raise self.wrong(key, f"a number from {at_least:g} to {at_most:g}" if at_least else "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if not isinstance(value, (bool, type(None))):
            raise self.wrong(key, "true or false")
        return default if value is None else value

    def get(self, key: str) -> Any:
        """The value as it is, None where it is missing."""
        return self.values.get(self.prefix + key)

    def wrong(self, key: str, wanted: str) -> ModelFileError:
        """The error for a value that is not what is wanted."""
        return ModelFileError(f"{self.source}: {self.prefix + key} must be {wanted}, got {short(self.get(key))}")

    def refused(self, key: str) -> ModelFileError:
        """The error for a value that qkv does not implement."""
        return ModelFileError(f"{self.source}: {self.prefix + key} {short(self.get(key))} is not supported")

    def _get(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelFileError(f"{self.source}: the key {self.prefix + key!r} is missing")
        self.assumed.append(f"{self.prefix}{key} is missing; using {default}")
        return default


def label(name: str) -> str:
    """A name from a file as a message may have it: quoted where it is long or not plain text."""
    return name if name.isprintable() and len(name) <= 60 else short(name)


def short(value: object) -> str:
    """`repr` of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
