"""Keys of a model's file, looked up and checked one by one.

Knows types, ranges and how to say what is wrong. Knows no key by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jitllm.errors import shown

Value = int | float | str | bool | Sequence[object]
Config = Mapping[str, Value]


class BadModel(ValueError):
    """Keys or tensors that make no model; the message names the key or the tensor."""


class Keys:
    """Looks a key up, checks it, and says what is wrong with it by name."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def value(self, key: str) -> Value | None:
        """The raw value. A list of one value per block counts as that value if all are equal."""
        found = self.config.get(key)
        if not isinstance(found, Sequence) or isinstance(found, str):
            return found
        first = found[0] if found else None
        if isinstance(first, bool | int | float) and all(item == first for item in found):
            return first
        raise BadModel(f"{key} differs from block to block, which no graph supports")

    def count(self, key: str, most: int, default: int | None = None, least: int = 1) -> int:
        """An integer in [least, most]."""
        value = self.value(key)
        if value is None:
            value = default
        if value is None:
            raise BadModel(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadModel(f"{key} is {shown(value)}, not a whole number")
        if not least <= value <= most:
            raise BadModel(f"{key} is {value}, not between {least} and {most}")
        return value

    def optional(self, key: str, least: float, most: float) -> float | None:
        """A number in [least, most], or None where the file is silent."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadModel(f"{key} is {shown(value)}, not a number")
        if not (math.isfinite(value) and least <= value <= most):
            raise BadModel(f"{key} is {value:g}, not between {least:g} and {most:g}")
        return float(value)

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        """A number in [least, most]."""
        value = self.optional(key, least, most)
        if value is None:
            value = default
        if value is None:
            raise BadModel(f"{key} is missing")
        return value

    def truth(self, key: str) -> bool | None:
        """A truth value, or None where the file is silent."""
        value = self.value(key)
        if value is None or isinstance(value, bool):
            return value
        raise BadModel(f"{key} is {shown(value)}, not true or false")

    def word(self, key: str, default: str) -> str:
        """A string."""
        value = self.config.get(key, default)
        if not isinstance(value, str):
            raise BadModel(f"{key} is {shown(value)}, not a word")
        return value

    def refuse_nonzero(self, *names: str) -> None:
        """Features that would change every logit and that no graph has."""
        for key in names:
            if self.value(key):
                raise BadModel(f"{key} is {shown(self.value(key))}, which no graph supports")

    def scale(self, key: str) -> float:
        """A factor; zero, as in files that only name it, is none."""
        value = self.number(key, 0.0, 1e6, default=0.0) or 1.0
        return at_least(value, 1e-6, key)


def at_least(value: float, least: float, key: str) -> float:
    """`value`, if it is not below `least`."""
    if value < least:
        raise BadModel(f"{key} is {value:g}, less than {least:g}")
    return value
