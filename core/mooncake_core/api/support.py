"""Rules for what the API names and the product does not do yet.

Such a value is refused with "not yet supported" by the command line and by the API server alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mooncake_core.api.base import Rule


def not_yet(field: str, attribute: str, remedy: str) -> Rule:
    """A field that must be left out for now."""

    def absent(model: Any) -> bool:
        return getattr(model, attribute) is None

    return Rule(absent, f"!has(self.{field})", f"not yet supported; {remedy}", at=field)


def not_yet_value(field: str, holds: Callable[[Any], bool], cel: str, value: str, remedy: str) -> Rule:
    """Values of a field that must not be chosen for now."""
    return Rule(holds, cel, f"{value} is not yet supported; {remedy}", at=field)
