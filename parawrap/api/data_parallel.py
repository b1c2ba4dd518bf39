"""`DataParallel` and `data_parallel`: drop-in replacements for torch's, on persistent lanes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch

from parawrap._public import public
from parawrap.api.scatter_gather import (
    as_calls,
    device_named,
    gather,
    gather_shards,
    parallel_apply,
    replicate,
    scatter_kwargs,
    torch_rules,
)
from parawrap.backends import DeviceLike, best_backend, names_cores, resolve_devices
from parawrap.engine.call import Entry
from parawrap.engine.cut import Cutter
from parawrap.engine.in_dims import Parameters
from parawrap.engine.lanes import here
from parawrap.engine.session import Session
from parawrap.errors import DeviceUnavailableError
from parawrap.tree import flatten

T = TypeVar("T", bound=torch.nn.Module)

# The methods that a subclass of torch.nn.DataParallel may override
_STEPS = ("scatter", "replicate", "parallel_apply", "gather")


class WrappedAttributes(torch.nn.Module):
    """A base of modules that look up missing attributes on the module that they wrap.

    Names like ``__deepcopy__`` are not looked up. Otherwise a copy of the wrapper would be a copy
    of the wrapped module.
    """

    def _inner(self) -> Any:
        """Return the wrapped module; None before ``__init__`` or unpickling has set it."""
        return submodule(self, "module")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            is_protocol = name.startswith("__") and name.endswith("__")
            if is_protocol or self._inner() is None:
                raise
        if hasattr(type(self), name):
            # A property raised AttributeError, and Python dropped it: reading it again shows it
            return object.__getattribute__(self, name)
        return getattr(self._inner(), name)


def submodule(module: Any, name: str) -> Any:
    """Return a submodule by its name; None before the module has it."""
    try:
        # Not `getattr`, which comes back to `WrappedAttributes.__getattr__`
        return torch.nn.Module.__getattr__(module, name)
    except AttributeError:
        return None


class _OpenSession(NamedTuple):
    """The session of a `DataParallel`, and the settings that it was made for.

    They are one object, so that both are read, and replaced, in one step.
    """

    settings: tuple[Any, ...]
    session: Session


@public
class DataParallel(WrappedAttributes, torch.nn.DataParallel[T]):
    """Split each batch over several devices: a subclass of torch.nn.DataParallel with the same API.

    Each call cuts the inputs into one shard per lane, runs the shards on replicas of `module`, and
    joins the outputs on `output_device`. Gradients accumulate in the parameters of `module`.

    As in torch, 0-d outputs become a vector with one value per device (with a warning), values
    without tensors go to every device, and subclasses may override `scatter`, `replicate`,
    `parallel_apply`, and `gather`. The differences from torch:

    - Missing attributes and methods are looked up on `module`. Setting an attribute sets it on the
      `DataParallel`.
    - Shards are balanced: their sizes differ by at most one, and none is dropped.
    - Keyword arguments are cut like positional ones.
    - Replicas persist between calls, and are refreshed only if `module` changed. The method
      `replicate` makes new ones.
    - Autocast and all other modes apply in the lanes.
    - ``device_ids=["cpu", "cpu"]`` creates lanes on the CPU.

    Lanes start at the first call, and end when the `DataParallel` is deleted or closed. A
    `DataParallel` is thread-safe.

    Args:
        module: The module to replicate, with its parameters and buffers on ``device_ids[0]``.
        device_ids: One entry per lane: indices, strings, or torch devices, all of one type. By
            default every visible accelerator. On a machine without an accelerator, calls run
            `module` directly unless `device_ids` names the CPU.
        output_device: The device of joined outputs; ``device_ids[0]`` by default.
        dim: The dim that the rows lie on.

    Attributes:
        module: The wrapped module.

    Raises:
        DeviceListError: If `device_ids` is empty, mixes types, or has an entry that is not a
            device.
        DeviceUnavailableError: If this machine does not have one of the devices.

    Example:
        >>> import torch
        >>> from parawrap import DataParallel
        >>> net = DataParallel(torch.nn.Linear(10, 5), device_ids=["cpu", "cpu"])
        >>> net(torch.randn(30, 10)).shape, list(net.state_dict())
        (torch.Size([30, 5]), ['module.weight', 'module.bias'])
    """

    _opened: _OpenSession | None = None

    def __init__(
        self,
        module: T,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
    ) -> None:
        # torch.nn.DataParallel.__init__ takes only indices of accelerators
        torch.nn.Module.__init__(self)
        self.module = module
        self.dim = dim
        # Held while a session replaces another one: threads that call at the same time make one
        # session. Reentrant, because `_session` calls `close` with the lock held
        self._changing = threading.RLock()
        self._lanes = _resolve_lanes(device_ids)
        self.device_ids = [_as_id(device) for device in self._lanes]
        if not self._lanes:
            return
        self.src_device_obj = self._lanes[0]
        output = self._lanes[0] if output_device is None else device_named(output_device)
        self.output_device = _as_id(output)
        if len(self._lanes) == 1:  # as in torch, which moves the module only then
            self.module.to(self.src_device_obj)

    def close(self) -> None:
        """End the lanes and free the replicas. The next call starts them again."""
        with self._changing:
            opened, self._opened = self._opened, None
        # Closed without the lock, so that another thread may call meanwhile, in lanes of its own
        if opened is not None:
            opened.session.close()

    def __getstate__(self) -> dict[str, Any]:
        # Copies and unpickled instances start their own lanes
        own = ("_opened", "_changing")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        with_lock = {**state, "_changing": threading.RLock()}
        super().__setstate__(with_lock)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Scatter the inputs, replicate the module, apply the replicas, and gather the outputs.

        Without lanes, and inside a lane, the call runs plainly.

        Raises:
            RuntimeError: If a parameter or buffer is not on ``device_ids[0]``.
            ShardError: If an input cannot be cut.
            GatherError: If the outputs cannot be joined.
        """
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            if not self.device_ids or here.lane is not None or not self._session().is_ready():
                return self.module(*inputs, **kwargs)
            self._check_placement()
            has_rows = len(self.device_ids) > 1 and _have_rows(inputs, kwargs)
            # The usual call: the engine does the four steps at once
            if has_rows and all(map(self._inherits, _STEPS)):
                return self._session().call(Entry(self.module), inputs, kwargs)

            # Step by step, for a subclass that overrides one, and for a call without rows, which
            # goes to every device as in torch
            args, module_kwargs = self.scatter(inputs, kwargs, self.device_ids)
            # An overridden scatter may return nothing for a call without arguments
            if not args and not module_kwargs:
                args, module_kwargs = ((),), ({},)
            if len(self.device_ids) == 1:
                return self.module(*args[0], **module_kwargs[0])
            # Only the shards of this class's own `scatter` have the sizes of the plan below
            knows_rows = has_rows and self._inherits("scatter") and self._inherits("gather")
            if not knows_rows:
                return self.gather(self._run_shards(args, module_kwargs), self.output_device)
            # Planned before the call, which may change the inputs
            cutter = self._session().cutters[None]
            plan = cutter.plan(cutter.flatten(inputs, kwargs), len(self.device_ids))
            outputs = self._run_shards(args, module_kwargs)
            return gather_shards(outputs, plan.sizes, self.output_device, self.dim)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> Any:
        """Return a tuple of args and a tuple of kwargs, with one entry per shard.

        A call without rows has one shard per device, and a call without arguments has one shard.
        """
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def replicate(self, module: T, device_ids: Sequence[Any]) -> list[T]:
        """Return new replicas of `module`, one per device. You may change them."""
        return replicate(module, device_ids, detach=not torch.is_grad_enabled())

    def parallel_apply(
        self, replicas: Sequence[T], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call replica i with args i and kwargs i in lane i, and return the outputs in lane order.

        Lanes that share a device run one after another if gradients are enabled, so that a seed
        gives the same numbers.
        """
        if not self.device_ids:
            return parallel_apply(replicas, inputs, kwargs)
        calls = as_calls(replicas, inputs, kwargs, self.device_ids[: len(replicas)])
        leaves = [leaf for call in calls for leaf in flatten((call.args, call.keywords))[0]]
        return self._session().apply(calls, leaves) if calls else []

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join outputs along `dim` on `output_device`. 0-d outputs become a vector of the lanes."""
        return gather(outputs, output_device, self.dim)

    def _run_shards(self, args: Sequence[Any], kwargs: Any) -> list[Any]:
        """Return the outputs of all shards.

        The replicas of the session run the shards, unless a subclass overrides that step.
        """
        if not (self._inherits("replicate") and self._inherits("parallel_apply")):
            replicas = self.replicate(self.module, self.device_ids[: len(args)])
            return self.parallel_apply(replicas, args, kwargs)
        # With more parts than devices there are fewer modules than parts, which `as_calls` refuses
        modules = [self.module] * min(len(args), len(self.device_ids))
        calls = as_calls(modules, args, kwargs)
        if not calls:
            return []
        positional = [call.args for call in calls]
        named = [call.keywords for call in calls]
        # An entry without a method: lanes call the replica itself, which runs all its hooks
        entry = Entry(self.module)
        return self._session().apply_replicas(entry, positional, named)

    def _inherits(self, step: str) -> bool:
        """True if neither a subclass nor an attribute of this object overrides the method."""
        method = getattr(self, step)
        return getattr(method, "__func__", None) is getattr(DataParallel, step)

    def _session(self) -> Session:
        """Return the session for the current `module` and options."""
        module = self.module
        settings = (self.dim, tuple(self.device_ids), self.output_device)
        # Read without the lock: an `_OpenSession` is complete when it is stored, and never changes
        opened = self._opened
        if opened and opened.session.target is module and opened.settings == settings:
            return opened.session
        with self._changing:
            opened = self._opened  # another thread may have opened it meanwhile
            if opened and opened.session.target is module and opened.settings == settings:
                return opened.session
            self.close()
            session = self._new_session()
            self._opened = _OpenSession(settings, session)
            return session

    def _new_session(self) -> Session:
        """Make a session. Read the attributes that users may change between calls, as in torch."""
        self._lanes = tuple(device_named(device_id) for device_id in self.device_ids)
        self.src_device_obj = self._lanes[0]
        self._check_placement()
        parameters = Parameters(self.module.forward)
        # As in torch: tensors in a list are cut, and a list of other values goes to every lane
        cutter = Cutter(self.dim, parameters=parameters, lists_are_shared=True)
        return Session(
            self.module,
            self._lanes,
            cutters={None: cutter},
            rules=torch_rules(self.dim),
            output_device=device_named(self.output_device),
            shares_hooks=True,
        )

    def _check_placement(self) -> None:
        """Refuse a module that is on another device than the first lane, with torch's message."""
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            if tensor.device != self.src_device_obj:
                msg = (
                    f"module must have its parameters and buffers on device {self.src_device_obj} "
                    f"(device_ids[0]) but found one of them on device: {tensor.device}"
                )
                raise RuntimeError(msg)


@public
def data_parallel(
    module: torch.nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Evaluate a module once over several devices, like torch.nn.parallel.data_parallel.

    The lanes end with the call. For many calls, keep a `DataParallel`, or open a `parallel` block.

    Args:
        module: The module, as in `DataParallel`.
        inputs: A tuple of positional inputs, a single input, or None.
        device_ids: The devices of the lanes, as in `DataParallel`.
        output_device: The device of the joined output; -1 is the CPU.
        dim: The dim that the rows lie on.
        module_kwargs: Keyword inputs. They are cut like positional ones.

    Raises:
        DeviceListError, DeviceUnavailableError, ShardError, GatherError: As for `DataParallel`.

    Example:
        >>> import torch
        >>> from parawrap import data_parallel
        >>> data_parallel(torch.nn.Linear(10, 5), torch.randn(30, 10), ["cpu", "cpu"]).shape
        torch.Size([30, 5])
    """
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    if inputs is None:
        args = ()
    net = DataParallel(module, device_ids, output_device, dim)
    try:
        return net(*args, **(module_kwargs or {}))
    finally:
        net.close()


def _have_rows(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the arguments hold a tensor that is not 0-d."""
    # Most inputs are tensors, which need no flattening
    if any(map(_is_tensor_with_rows, inputs)):
        return True
    leaves, _ = flatten((inputs, kwargs))
    return any(map(_is_tensor_with_rows, leaves))


def _is_tensor_with_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _resolve_lanes(device_ids: Sequence[DeviceLike] | None) -> tuple[torch.device, ...]:
    """Return the device of each lane.

    On a machine without an accelerator there are no lanes, and calls run the module directly, as in
    torch. Only devices of the CPU make lanes there.
    """
    if best_backend().type != "cpu":
        return resolve_devices(device_ids)
    if device_ids is None:
        return ()
    try:
        return resolve_devices(device_ids)
    except DeviceUnavailableError:
        # NeuronCores of compiled models are not torch devices on any machine
        if names_cores(device_ids):
            raise
        return ()


def _as_id(device: torch.device) -> Any:
    """Return an entry of `device_ids`: as in torch, the index of a device of the best kind.

    Any other device is an entry itself.
    """
    has_index = device.type == best_backend().type and device.index is not None
    return device.index if has_index else device
