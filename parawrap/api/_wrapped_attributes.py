"""Attributes that a wrapper lacks and that the module in it may have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

_Base: Any = torch.nn.Module if TYPE_CHECKING else object


class WrappedAttributes(_Base):  # type: ignore[misc]
    """A base of modules that look up missing attributes on the module that they wrap.

    Names like ``__deepcopy__`` are not looked up: a copy of the wrapper would be a copy of the module.
    """

    def _inner(self) -> Any:
        """Return the wrapped module; None before the wrapper has it, as before ``__init__`` and during unpickling."""
        return submodule(self, "module")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (name.startswith("__") and name.endswith("__")) or self._inner() is None:
                raise
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # Python drops the error of a property before `__getattr__`
        return getattr(self._inner(), name)


def submodule(module: Any, name: str) -> Any:
    """Return a submodule by its name; None before the module has it."""
    try:
        return torch.nn.Module.__getattr__(module, name)
    except AttributeError:
        return None
