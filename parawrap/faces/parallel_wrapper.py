"""`ParallelWrapper`: a model that knows its device and uses every GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from parawrap.backends import DeviceLike, best_backend, resolve_device
from parawrap.faces.data_parallel import DataParallel

__all__ = ["ParallelWrapper"]

# torch.nn.Module.to reads its arguments with this; it has no public name.
_parse_to: Any = getattr(torch._C, "_nn")._parse_to  # noqa: B009
_OWN = frozenset({"device", "use_data_parallel", "training", "model"})


class ParallelWrapper(torch.nn.Module):
    """Moves a model to a device and, where several GPUs are visible, spreads its calls over them with `DataParallel`.

    Attributes are the model's own, to read and to set, and so are ``len``, ``iter`` and indexing where the model has
    them. Pickle and deepcopy work. Lives as long as the model; may be called by any number of threads.

    Args:
        model: any module.
        device: a string such as "cuda" or "cuda:1", a torch device, or "auto" for the best that is there.
        use_data_parallel: spread calls over all GPUs where the device is a GPU and there are several.

    Attributes:
        model: the model; inside a `DataParallel` where there are several GPUs.
        device: the device as it was given, "auto" resolved.

    Raises:
        DeviceUnavailableError: the device is not there; the message names those that are.

    Example:
        >>> import torch
        >>> from parawrap import ParallelWrapper
        >>> net = ParallelWrapper(torch.nn.Linear(4, 2), device="cpu")
        >>> net(torch.zeros(3, 4)).shape, net.in_features, net.to("cpu") is net
        (torch.Size([3, 2]), 4, True)
    """

    def __init__(self, model: torch.nn.Module, device: DeviceLike = "cuda", use_data_parallel: bool = True) -> None:
        super().__init__()
        self.use_data_parallel = use_data_parallel
        self._place(model, device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> ParallelWrapper:
        """Move the model, with the arguments of ``torch.nn.Module.to``; update `device`; return self.

        Raises:
            DeviceUnavailableError: the device is not there; nothing has moved then.
        """
        asked = kwargs.pop("device", None)
        if asked is None and args and isinstance(args[0], (int, str, torch.device)):
            asked, args = args[0], args[1:]
        if asked is not None and asked != "auto":
            resolve_device(asked)  # refused before anything has changed
        if args or kwargs:
            device, *_ = _parse_to(*args, **kwargs)
            asked = device if asked is None else asked
            kwargs.pop("device", None)
            self._inner().to(*args, **kwargs)
        if asked is not None:
            self._place(self._inner(), asked)
        return self

    def _place(self, model: torch.nn.Module, device: DeviceLike) -> None:
        device = str(best_backend().device(None)) if device == "auto" else device
        there = resolve_device(device)
        model.to(there)
        spread = self.use_data_parallel and there.type == "cuda" and torch.cuda.device_count() > 1
        # The lanes begin with the model's own device, which is where DataParallel wants the parameters.
        others = [torch.device("cuda", index) for index in range(torch.cuda.device_count()) if index != there.index]
        self.model = DataParallel(model, [there, *others]) if spread else model
        self.device = device

    def _inner(self) -> torch.nn.Module:
        model = self.__dict__["_modules"]["model"]
        inner = model.module if isinstance(model, DataParallel) else model
        assert isinstance(inner, torch.nn.Module)
        return inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "model" not in self.__dict__.get("_modules", {}):  # before __init__, as in unpickling: nothing to ask
                raise
            return getattr(self._inner(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or "model" not in self.__dict__.get("_modules", {}) or name in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._inner(), name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in _OWN:
            super().__delattr__(name)
        else:
            delattr(self._inner(), name)

    def __len__(self) -> int:
        return len(self._inner())  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner())  # type: ignore[call-overload, no-any-return]

    def __getitem__(self, key: Any) -> Any:
        return self._inner()[key]  # type: ignore[index]

    def __bool__(self) -> bool:
        return bool(self._inner()) if hasattr(type(self._inner()), "__len__") else True
