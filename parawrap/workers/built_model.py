"""A target that each worker builds itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from parawrap._public import public
from parawrap.errors import SessionError


class Build(NamedTuple):
    """A function that returns the model, and its arguments."""

    load_model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a plain call: this process has no model."""
        msg = 'only worker processes have this model: give parallel(..., workers="process"), and call the block'
        raise SessionError(msg)


@public
def build(load_model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Build:
    """Let each worker of a parallel block build its own model: ``load_model(*args, **kwargs)``.

    For models that cannot be sent, that take long to send, or that are compiled or quantized in the process that uses them.

    Example:
        >>> import torch
        >>> from parawrap import build, parallel
        >>> model = build(torch.nn.Linear, 3, 2)
        >>> with torch.no_grad(), parallel(model, ["cpu", "cpu"], workers="process") as p:
        ...     tuple(p(torch.ones(9, 3)).shape)
        (9, 2)
    """
    return Build(load_model, args, kwargs)
