"""`ParallelWrapper`: a model on one device, or on every device of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from parawrap._public import public
from parawrap.api.data_parallel import DataParallel, WrappedAttributes, submodule
from parawrap.backends import DeviceLike, backend_of, best_backend, resolve_device

# Attributes of the wrapper itself. All other attributes are the model's
_OWN = frozenset({"device", "use_data_parallel", "training", "model"})


@public
class ParallelWrapper(WrappedAttributes):
    """Move a model to a device, and split its calls over several devices with `DataParallel`.

    The calls are split if `device` is "auto" or a CUDA device, and there are several devices.

    Reading or setting an attribute reads or sets it on the model. A `ParallelWrapper` can be
    pickled and deep-copied. Calls are thread-safe.

    Args:
        model: Any module.
        device: "auto", a string such as "cuda" or "cuda:1", or a torch device. "auto" uses every
            accelerator of the best kind; without one, calls run plainly on the CPU. A CUDA device
            uses every GPU, starting with that device. Any other device is used alone.
        use_data_parallel: False to use one device only.

    Attributes:
        model: The model, or the `DataParallel` around it.
        device: The given device. The model's device replaces "auto", and a name that torch does not
            know, such as "gpu".

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
        # As in torch, the device is a keyword, the first argument, or that of a tensor argument.
        # Other arguments, such as a dtype, are for the model alone
        given = kwargs.pop("device", None)
        if given is None and args and isinstance(args[0], (int, str, torch.device)):
            given, *others = args
            args = tuple(others)
        if given is not None and given != "auto":
            resolve_device(given)  # an unavailable device raises before the model changes
        if args or kwargs:
            self._inner().to(*args, **kwargs)
            like = args[0] if args else kwargs.get("tensor")
            if given is None and isinstance(like, torch.Tensor):
                given = like.device
        if given is not None:
            self._place(self._inner(), given)
        return self

    def _place(self, model: torch.nn.Module, device: DeviceLike) -> None:
        """Move the model, split its calls if there are other devices, and set `device`."""
        is_auto = device == "auto"
        # None stands for the current device of the best kind
        resolved = best_backend().device(None) if is_auto else resolve_device(device)
        model.to(resolved)
        may_spread = is_auto or resolved.type == "cuda"
        devices: Sequence[torch.device] = ()
        if may_spread and self.use_data_parallel:
            devices = backend_of(resolved.type).every_device()
        others = [each for each in devices if each != resolved]
        # DataParallel requires the parameters on the device of the first lane
        self.model = DataParallel(model, [resolved, *others]) if others else model
        # Other code passes `device` to torch, which does not know "auto" and "gpu"
        kind, _, _ = str(device).partition(":")
        is_known = not isinstance(device, str) or kind == resolved.type
        self.device = device if is_known else str(resolved)

    def _inner(self) -> Any:
        # Not `self.model`, which raises until `__init__` has set the model
        model = submodule(self, "model")
        return model.module if isinstance(model, DataParallel) else model

    def __setattr__(self, name: str, value: Any) -> None:
        model = self._inner()
        # There is no model yet in `__init__` and during unpickling
        if model is None or self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._inner(), name)

    def _is_own(self, name: str) -> bool:
        # `__dict__` has what torch.nn.Module sets on each module, such as tables of hooks
        return name in _OWN or name in self.__dict__
