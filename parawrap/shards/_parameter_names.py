"""Under which names a target takes its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["Parameters"]


class Parameters:
    """The names under which a target takes its arguments. Immutable."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self._positional: list[str] = []
        self._rest: str | None = None
        self._keywords: set[str] | None = set()  # None: any keyword will do
        self._named: set[str] = set()
        self._all_keywords: str | None = None  # the name of **kwargs
        self._read(target)

    def _read(self, target: Callable[..., Any]) -> None:
        schema = getattr(target, "schema", None)  # a TorchScript method
        if schema is not None:
            self._positional = [argument.name for argument in schema.arguments if argument.name != "self"]
            self._keywords = self._named = set(self._positional)
            return
        try:
            parameters = inspect.signature(target).parameters.values()
        except (TypeError, ValueError):  # a builtin without a signature
            self._keywords = None
            return
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        self._all_keywords = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._keywords = self._named if self._all_keywords is None else None

    def takes(self, name: str) -> bool:
        """True if the target has a parameter of that name, or takes any keyword."""
        return name != self._all_keywords and (self._keywords is None or name in self._keywords)

    def names(self, name: str) -> bool:
        """True if the signature has a parameter of that name."""
        return name in self._named

    def at(self, position: int) -> str | None:
        """The name of the positional argument at that place; None if the signature is not known."""
        return self._positional[position] if position < len(self._positional) else self._rest

    def __str__(self) -> str:
        return ", ".join(self._positional + ([f"*{self._rest}"] if self._rest else [])) or "none"
