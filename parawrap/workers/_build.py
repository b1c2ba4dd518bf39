"""A target that each worker builds itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from parawrap.errors import SessionError

__all__ = ["Build", "build"]


class Build(NamedTuple):
    """A function that returns the model, and its arguments."""

    load_model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a plain call: this process has no model."""
        msg = "the model is built in the workers, and this process has none. Call it inside the block, not inside a lane"
        raise SessionError(msg)


def build(load_model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Build:
    """Let each worker of a parallel block build its own model: ``load_model(*args, **kwargs)``.

    For models that cannot be sent, that take long to send, or that are compiled or quantized in the process that uses them.
    """
    return Build(load_model, args, kwargs)
