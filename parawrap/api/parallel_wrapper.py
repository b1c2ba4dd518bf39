"""`ParallelWrapper`: a model on one device, or on every device of a kind."""

from __future__ import annotations

from typing import Any, Self

import torch

from parawrap._public import public
from parawrap.api.data_parallel import DataParallel, WrappedAttributes, submodule
from parawrap.backends import DeviceLike, backend_of, best_backend, resolve_device

# Attributes of the wrapper itself. All others are the model's
_OWN = frozenset({"device", "use_data_parallel", "training", "model"})


@public
class ParallelWrapper(WrappedAttributes):
    """Move a model to a device, and split its calls over several devices with `DataParallel`.

    It splits them if "auto" or "cuda" finds several devices.

    Reading or setting an attribute reads or sets it on the model. A `ParallelWrapper` can be
    pickled and deep-copied. Calls are thread-safe.

    Args:
        model: Any module.
        device: "auto", a string such as "cuda" or "cuda:1", or a torch device. "auto" uses every
            accelerator of the best kind, or the CPU as one plain lane. A CUDA device uses every
            GPU, starting with that one. Any other device is used alone.
        use_data_parallel: False to use one device only.

    Attributes:
        model: The model, or the `DataParallel` around it.
        device: The given device. "auto" and names that torch does not know, such as "gpu", are
            replaced by the model's device.

    Raises:
        DeviceUnavailableError: If this machine does not have the device. The message names the
            devices that it has.

    Example:
        >>> import torch
        >>> from parawrap import ParallelWrapper
        >>> net = ParallelWrapper(torch.nn.Linear(4, 2), device="cpu")
        >>> net(torch.zeros(3, 4)).shape, net.in_features, net.to("cpu") is net
        (torch.Size([3, 2]), 4, True)
    """

    def __init__(
        self, model: torch.nn.Module, device: DeviceLike = "cuda", use_data_parallel: bool = True
    ) -> None:
        super().__init__()
        self.use_data_parallel = use_data_parallel
        self._place(model, device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the model as ``torch.nn.Module.to`` does, update `device`, and return self.

        Raises:
            DeviceUnavailableError: If this machine does not have the device. The model does not
                move then.
        """
        # torch takes a device by name, a device first, or a tensor with the device and the dtype
        given = kwargs.pop("device", None)
        if given is None and args and isinstance(args[0], (int, str, torch.device)):
            given, *others = args
            args = tuple(others)
        # The rest, such as a dtype, is for the model. The device is for `_place`
        if given is not None and given != "auto":
            resolve_device(given)  # raises before anything changes
        if args or kwargs:
            self._inner().to(*args, **kwargs)
            like = args[0] if args else kwargs.get("tensor")
            if given is None and isinstance(like, torch.Tensor):
                given = like.device
        if given is not None:
            self._place(self._inner(), given)
        return self

    def _place(self, model: torch.nn.Module, device: DeviceLike) -> None:
        is_auto = device == "auto"
        # None: the current device of that kind
        resolved = best_backend().device(None) if is_auto else resolve_device(device)
        model.to(resolved)
        spreads = self.use_data_parallel and (is_auto or resolved.type == "cuda")
        # The first lane is on the model's device, because DataParallel requires the parameters
        # there.
        devices = backend_of(resolved.type).every_device() if spreads else ()
        others = [device for device in devices if device != resolved]
        self.model = DataParallel(model, [resolved, *others]) if others else model
        # Other code passes `device` to torch, which does not know "auto" and "gpu"
        kind = device.partition(":")[0] if isinstance(device, str) else resolved.type
        self.device = device if kind == resolved.type else str(resolved)

    def _inner(self) -> Any:
        # Not `self.model`, which raises until `__init__` has set it
        model = submodule(self, "model")
        return model.module if isinstance(model, DataParallel) else model

    def __setattr__(self, name: str, value: Any) -> None:
        has_no_model_yet = self._inner() is None  # in `__init__`, and while it is unpickled
        # ``__dict__`` has what torch.nn.Module sets on each module, such as tables of hooks
        is_own = name in _OWN or name in self.__dict__
        if has_no_model_yet or is_own:
            super().__setattr__(name, value)
        else:
            setattr(self._inner(), name, value)

    def __delattr__(self, name: str) -> None:
        is_own = name in _OWN or name in self.__dict__
        if is_own:
            super().__delattr__(name)
        else:
            delattr(self._inner(), name)
