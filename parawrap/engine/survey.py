"""One walk over everything that a target leads to: its modules, tensors, containers, and functions.

A replica is `copy.deepcopy` of the target, so the walk follows what deepcopy copies. It refuses
what lanes could only share: modules behind globals, iterators, weak references to modules.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import datetime as dt
import enum
import functools
import io
import logging
import multiprocessing.process
import multiprocessing.synchronize
import numbers
import pathlib
import queue
import re
import socket
import string
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from parawrap._private_names import (
    BUFFERS,
    HOOK_TABLES,
    NOT_CALLED,
    compiled_original,
    is_compiled_function,
    is_compiled_module,
)
from parawrap.engine.called_code import find_writes, is_generator, list_captured
from parawrap.engine.places import LISTS, MOST_READS, TABLES, Place, read_items, read_slot
from parawrap.errors import ReplicaError
from parawrap.tree import ABSENT, PLAIN, names_of_slots

MODULE_TABLES = frozenset({*TABLES, *HOOK_TABLES, *NOT_CALLED})

_OF_TORCH = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    torch.finfo,
    torch.iinfo,
)
_OF_PYTHON = (
    types.BuiltinFunctionType,
    types.EllipsisType,
    types.NotImplementedType,
    types.CodeType,
    property,
    type,
    slice,
    range,
)
_DATES = (dt.date, dt.time, dt.timedelta, dt.tzinfo)
_TEXTS = (pathlib.PurePath, re.Pattern, string.Template)
# Values that lanes may share because they do not change. Subclasses count, such as np.float64
_IMMUTABLE = (*PLAIN, numbers.Number, enum.Enum, *_OF_TORCH, *_OF_PYTHON, *_DATES, *_TEXTS)

_CODE = (types.ModuleType, torch.jit.ScriptModule, torch.jit.ScriptFunction)
_FILES = (io.IOBase, socket.socket)
_REFERENCES = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
_LOGS = (logging.Logger, logging.LoggerAdapter, logging.Handler)
_LOCKS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Event,
    threading.Condition,
    threading.Semaphore,
    threading.Barrier,
    multiprocessing.synchronize.SemLock,
)
_TASKS = (
    threading.Thread,
    threading.local,
    contextvars.ContextVar,
    queue.Queue,
    queue.SimpleQueue,
    concurrent.futures.Executor,
    concurrent.futures.Future,
    asyncio.AbstractEventLoop,
    multiprocessing.process.BaseProcess,
)
# Objects with a life outside the model. All lanes use the same one
_SHARED = (*_CODE, *_FILES, *_REFERENCES, *_LOGS, *_LOCKS, *_TASKS)
# Types such as ``Optional[Tensor]`` are not instances of `type`. A copy of one comes from a cache,
# which has it still
_OF_TYPES = ("typing", "types", "typing_extensions")
# Their objects are handles: compiled code, operators, process groups, streams
_SHARED_BY_MODULE = ("torch._dynamo", "torch._C", "torch._ops", "torch.distributed", "torch.cuda")
# Levels of lists and dicts in a closure that are searched for modules; a guess that no test has
# contradicted, and it ends the search of a list that holds itself
_DEEPEST_LIST = 3


class Holder(NamedTuple):
    """A container that holds an object, and the key of the object in it."""

    place: Place
    key: Any


class _Visit(NamedTuple):
    """An object that the walk has found: the object, its path, and the container that holds it.

    `holder` is None if the container cannot change, such as a tuple.
    """

    value: Any
    path: str
    holder: Holder | None = None


class Survey:
    """All that a target leads to. The walk is iterative, so that depth costs no recursion.

    Attributes:
        owned: All objects that the walk has found, by their ids. They stay alive here, so that no
            other object gets one of these ids.
        paths: The paths of objects, by their ids.
        places: The containers that lanes get copies of.
        params: The parameters, and other tensors that learn or share memory with them. Lanes on
            their device share them.
        tensors: The other tensors. Each lane has its own copy.
        versioned: Those of the other tensors that have versions: all but inference tensors.
        modules: The modules, each before its submodules.
        generators: The generators of random numbers that the target holds, or its code names.
        shared: The objects that all lanes use.
        scripts: The TorchScript modules among these.
        opaque: The instances that only `copy.deepcopy` can copy.
        functions: The functions that are not compiled.
        twins: The functions with closures that hold parts of the model. Each lane gets its own.
        holders: By the id of a tensor or a function, the containers that hold it; None for a
            container that cannot change, such as a tuple.
        left_out: The attributes that copies of a module do not have, such as the trainer of a
            LightningModule.
        namespaces: The dicts that deepcopy would take apart wrongly, such as those with
            ``self.__dict__ = self``.
        is_lazy: True if a parameter waits for the first call to get a shape.
        writes_data: True if forward may write tensors without a new version.
        in_turns: True if lanes must run one after another, because forward writes shared weights or
            gradients.

    With `shares_hooks`, hooks are not among the twins: each keeps the cells of its closure, as in
    torch.nn.DataParallel.

    Raises:
        ReplicaError: If the target leads to something that cannot be copied. The message names the
            path and a cure.
    """

    def __init__(
        self, target: Any, methods: Iterable[str] = (), *, shares_hooks: bool = False
    ) -> None:
        self.target = target
        self._shares_hooks = shares_hooks
        self._shared_hooks: set[int] = set()
        self.owned: dict[int, Any] = {}
        self.paths: dict[int, str] = {}
        self.places: list[Place] = []
        self.params: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        self.modules: list[torch.nn.Module] = []
        self.generators: list[Any] = []
        self.shared: list[Any] = []
        self.scripts: list[torch.jit.ScriptModule] = []
        self.opaque: list[Any] = []
        self.functions: list[types.FunctionType] = []
        self.namespaces: list[Any] = []
        self.left_out: list[tuple[torch.nn.Module, str]] = []
        self.holders: dict[int, list[Holder | None]] = {}
        self._walk(target)
        self._share_aliases()
        self._buffers = {
            id(tensor)
            for tensor in self.tensors
            if any(place.kind == BUFFERS for place in self.places_of(tensor))
        }
        self.twins = self._find_twins()
        self._enter_cells()
        self.is_lazy = any(map(is_lazy, self.params))
        self.versioned: list[torch.Tensor] = []
        if not self.is_lazy:  # a tensor without a shape has no version
            self.versioned += [tensor for tensor in self.tensors if not tensor.is_inference()]
        owners = [*self.modules, *(place.owner for place in self.places if place.kind == "vars")]
        classes = {base for owner in owners for base in type(owner).__mro__}
        writes = find_writes(classes, self.functions, methods, self.paths)
        # Embeddings with `max_norm` write their weights in forward, in C++
        renormalizes = any(getattr(module, "max_norm", None) is not None for module in self.modules)
        self.writes_data = writes.weights or renormalizes
        self.in_turns = self.writes_data or writes.gradients

    def path_of(self, value: Any) -> str:
        """Return the path to a part of the target."""
        return self.paths.get(id(value)) or "the target"

    def places_of(self, tensor: torch.Tensor) -> list[Place]:
        """Return the containers that hold a tensor, without those that cannot change."""
        holders = self.holders.get(id(tensor), ())
        return [holder.place for holder in holders if holder is not None]

    def is_buffer(self, tensor: torch.Tensor) -> bool:
        """True for a buffer of a module."""
        return id(tensor) in self._buffers

    # The walk

    def _walk(self, target: Any) -> None:
        waiting = [_Visit(target, "")]
        while waiting:
            value, path, holder = waiting.pop()
            if isinstance(value, (torch.Tensor, types.FunctionType)):
                self.holders.setdefault(id(value), []).append(holder)
            if id(value) in self.owned or isinstance(value, _IMMUTABLE):
                continue
            self._own(value, path)
            # The last one is taken first, so objects are entered in the order of their paths
            waiting += reversed([*self._enter(value, path)])

    def _own(self, value: Any, path: str) -> None:
        """Note an object and its path."""
        self.owned[id(value)] = value
        self.paths[id(value)] = path

    def _enter(self, value: Any, path: str) -> Iterable[_Visit]:
        """Enter an object, and return each of its parts."""
        if isinstance(value, torch.Tensor):
            learns = isinstance(value, torch.nn.Parameter) or value.requires_grad
            found = self.params if learns else self.tensors
            found.append(value)
            return ()
        if isinstance(value, torch.jit.ScriptModule):
            self._enter_script(value, path)
            return ()
        if isinstance(value, torch.nn.Module):
            return self._enter_module(value, path)
        if isinstance(value, dict):
            return self._enter_dict(value, path)
        if isinstance(value, LISTS):
            items = self._enter_container(value, "list", path, enumerate(read_items(value)))
            return [*items, *self._enter_attributes(value, path)]
        if isinstance(value, (tuple, frozenset)):
            return [_Visit(part, f"{path}[{at}]") for at, part in enumerate(value)]
        if isinstance(value, functools.partial):
            arguments = (*value.args, *value.keywords.values())
            parts = [_Visit(part, f"{path}.args") for part in arguments]
            return [_Visit(value.func, f"{path}.func"), *parts]
        if isinstance(value, types.MethodType):
            return [_Visit(value.__self__, f"{path}.__self__"), _Visit(value.__func__, path)]
        if isinstance(value, types.FunctionType):
            return self._enter_function(value, path)
        return self._enter_instance(value, path)

    def _enter_dict(self, value: dict[Any, Any], path: str) -> Iterable[_Visit]:
        if vars_of(value) is value or not _has_plain_lookup(value):
            self.namespaces.append(value)
        # A list of the entries, here and below, is made in one step: other threads may write
        entries = [*dict.items(value)]
        keys = [key for key, _ in entries if not isinstance(key, _IMMUTABLE)]
        items = self._enter_container(value, "items", path, entries)
        attributes = self._enter_attributes(value, path)
        return [*(_Visit(key, f"{path} key") for key in keys), *items, *attributes]

    def _enter_module(self, module: torch.nn.Module, path: str) -> Iterable[_Visit]:
        names = {cls.__name__ for cls in type(module).__mro__}
        if names & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}:
            what = repr(path) if path else "the model"
            msg = (
                f"{what} is a {type(module).__name__}, which is parallel already. Give the module "
                "in it"
            )
            raise ReplicaError(msg)
        self.modules.append(module)
        if is_compiled_module(module):
            return [_Visit(compiled_original(module), f"{path}._orig_mod".lstrip("."))]
        state = _state_of(module)
        self.left_out += [(module, name) for name in [*vars(module)] if name not in state]
        own = [(name, part) for name, part in state.items() if name not in MODULE_TABLES]
        attributes = self._enter_container(module, "vars", path, own)
        parts: list[_Visit] = []
        for name, table in state.items():
            if name in NOT_CALLED:  # such as hooks of `state_dict`: lanes share the table as it is
                self.owned[id(table)] = table
                self.shared.append(table)
            elif name in MODULE_TABLES and isinstance(table, dict):
                self._own(table, path)
                # A table of hooks is an OrderedDict. Its own views are not read in one step
                entries = [*dict.items(table)]
                parts += self._enter_container(module, name, path, entries)
                if self._shares_hooks and name in HOOK_TABLES:
                    self._shared_hooks.update(id(hook) for _, hook in entries)
        return [*parts, *attributes]

    def _enter_function(self, function: types.FunctionType, path: str) -> Iterable[_Visit]:
        if is_compiled_function(function):
            self.shared.append(function)
            return ()
        self.functions.append(function)
        named = map(function.__globals__.get, function.__code__.co_names)
        self.generators += filter(is_generator, named)
        return [
            _Visit(part, f"{path} captures {name}")
            for name, part in list_captured(function)
            if _is_model(part)
        ]

    def _enter_instance(self, value: Any, path: str) -> Iterable[_Visit]:
        _refuse_weak_module(value, path)
        if isinstance(value, Iterator) and not isinstance(value, _SHARED):
            msg = (
                f"no replica can be made: {path!r} is an iterator ({type(value).__name__}). Keep "
                "its items in a list"
            )
            raise ReplicaError(msg)
        draws = is_generator(value)
        if draws:
            self.generators.append(value)
        if draws or _is_shared(value):
            self.shared.append(value)
            return ()
        if vars_of(value) is None and not names_of_slots(type(value)):
            self.opaque.append(value)
        return self._enter_attributes(value, path)

    def _enter_attributes(self, value: Any, path: str) -> Iterable[_Visit]:
        """Enter the attributes and the slots of an object, and return them."""
        found: list[_Visit] = []
        own = vars_of(value)
        if own is not None and own is not value:  # it is with ``self.__dict__ = self``
            is_container = isinstance(value, (dict, *LISTS))
            # Of a container without attributes, the items are the only place
            if own or not is_container:
                found += self._enter_container(value, "vars", path, [*own.items()])
        names = names_of_slots(type(value))
        if names:
            parts = [read_slot(value, name) for name in names]
            filled = [(at, part) for at, part in enumerate(parts) if part is not ABSENT]
            found += self._enter_container(value, "slots", path, filled)
        return found

    def _enter_container(
        self, owner: Any, kind: str, path: str, entries: Iterable[tuple[Any, Any]]
    ) -> list[_Visit]:
        """Enter a container, and return its entries."""
        place = Place(owner, kind, path)
        self.places.append(place)
        if isinstance(owner, set):  # its entries have no keys
            return [_Visit(part, place.name(key)) for key, part in entries]
        return [_Visit(part, place.name(key), Holder(place, key)) for key, part in entries]

    def _enter_script(self, module: torch.jit.ScriptModule, path: str) -> None:
        """Enter a scripted module, which lanes share: it has no state in Python."""
        self.shared.append(module)
        self.scripts.append(module)
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if id(tensor) not in self.owned:
                self._own(tensor, f"{path}.{name}".lstrip("."))
                self.params.append(tensor)

    def _share_aliases(self) -> None:
        """Count tensors that share memory with a parameter as parameters.

        Lanes share their memory too. A copy would keep the old values after a write.
        """
        # Without the 0 of tensors that have no memory, such as sparse ones
        memory = set(filter(None, map(storage_of, self.params)))
        aliases = [tensor for tensor in self.tensors if storage_of(tensor) in memory]
        if aliases:
            self.params += aliases
            known = set(map(id, aliases))
            self.tensors = [tensor for tensor in self.tensors if id(tensor) not in known]

    def _find_twins(self) -> list[types.FunctionType]:
        """Return the functions that capture parts of the model, or other such functions."""
        parts = {id(place.owner) for place in self.places}
        parts.update(map(id, self.params))
        twins: list[types.FunctionType] = []
        others = [each for each in self.functions if id(each) not in self._shared_hooks]
        while found := [each for each in others if _captures_part(each, parts)]:
            twins += found
            # Other functions may capture these, which are parts of the model from here on
            parts.update(map(id, found))
            others = [each for each in others if id(each) not in parts]
        return twins

    def _enter_cells(self) -> None:
        """Enter the closure cells of twins: a caller may bind one again."""
        for function in self.twins:
            names = function.__code__.co_freevars
            for name, cell in zip(names, function.__closure__ or (), strict=True):
                if id(cell) not in self.owned:
                    self.owned[id(cell)] = cell
                    path = f"{self.path_of(function)} captures {name!r}"
                    # Without entries: the walk has followed what the cell holds
                    self._enter_container(cell, "cell", path, ())


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a tensor and its views share; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0  # sparse, a wrapper subclass, fake, or lazy


def vars_of(value: Any) -> dict[str, Any] | None:
    """Return the ``__dict__`` of an object; None if it has none."""
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else None


def home_of_survey(survey: Survey) -> torch.device | None:
    """Return the device of a target; without a module, that of the first tensor that it holds."""
    home = home_of_target(survey.target)
    if home is not None:
        return home
    return next((tensor.device for tensor in chain(survey.params, survey.tensors)), None)


def home_of_target(target: Any) -> torch.device | None:
    """Return the device of the first parameter or buffer of a module; None without one."""
    module = owner_of(target)
    first = _first_tensor(module) if isinstance(module, torch.nn.Module) else None
    return None if first is None else first.device


def owner_of(value: Any) -> Any:
    """Return the object of a bound method; any other value itself."""
    return value.__self__ if isinstance(value, types.MethodType) else value


def _first_tensor(module: torch.nn.Module) -> torch.Tensor | None:
    """Return the first parameter of a module; without one, its first buffer, or None."""
    for _ in range(MOST_READS):
        with contextlib.suppress(RuntimeError):  # another thread adds or removes a layer
            return next(chain(module.parameters(), module.buffers()), None)
    # Once more for the error
    return next(chain(module.parameters(), module.buffers()), None)


def _state_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that its copy gets.

    A copy has None for the trainer of a LightningModule.
    """
    cls = type(module)
    if cls.__getstate__ is torch.nn.Module.__getstate__ or hasattr(cls, "__deepcopy__"):
        # The list is made in one step: other threads may set attributes
        return dict([*vars(module).items()])
    state: Any = module.__getstate__()
    kept = state if isinstance(state, dict) else {}
    found: dict[str, Any] = {}
    for name, part in [*vars(module).items()]:
        is_dropped = name not in kept or (kept[name] is None and part is not None)
        if not is_dropped:
            found[name] = part
    return found


def _is_model(part: Any) -> bool:
    """True for a part of a closure that belongs to the model: lanes share all other parts."""
    part = owner_of(part)
    is_code = isinstance(part, (torch.nn.Module, types.FunctionType, functools.partial))
    learns = isinstance(part, torch.Tensor) and part.requires_grad
    return is_code or learns or is_generator(part)


def _is_shared(value: Any) -> bool:
    """True for an object that all lanes use."""
    cls = type(value)
    is_type = cls.__module__ in _OF_TYPES and cls is not types.SimpleNamespace
    is_of_torch = cls.__module__.startswith(_SHARED_BY_MODULE)
    # A bare object() is a mark, which code compares by identity
    is_mark = cls is object or _is_singleton(value)
    return isinstance(value, _SHARED) or is_of_torch or is_type or is_mark


def _refuse_weak_module(value: Any, path: str) -> None:
    """Refuse a weak reference to a module, or to a method of one."""
    if not isinstance(value, weakref.ref):
        return
    owner = owner_of(value())
    if isinstance(owner, torch.nn.Module):
        msg = (
            f"{path!r} is a weak reference to a {type(owner).__name__}; its copy would lead to the "
            "original. Hold it in a list: [value]"
        )
        raise ReplicaError(msg)


def _is_singleton(value: Any) -> bool:
    """True for an attribute of its class, as the members of enums are."""
    return any(each is value for each in [*vars(type(value)).values()])


def _has_plain_lookup(value: Any) -> bool:
    """False for a dict with a ``__getattr__`` that raises KeyError, which deepcopy passes on."""
    try:
        getattr(value, "__deepcopy__", None)
    except Exception:  # noqa: BLE001  # code of the user's
        return False
    return True


def _captures_part(function: types.FunctionType, parts: set[int]) -> bool:
    """True if a function captures a part of the model. `parts` are the ids of the parts."""
    return any(_leads(part, parts) for _, part in list_captured(function))


def _leads(part: Any, parts: set[int], depth: int = 0) -> bool:
    """True if a captured value is, or leads to, a part of the model.

    Raises:
        ReplicaError: If it is a list, tuple, or dict of such parts.
    """
    part = owner_of(part)
    if id(part) in parts or isinstance(part, (torch.nn.Module, functools.partial)):
        return True
    if depth < _DEEPEST_LIST and isinstance(part, (list, tuple, dict)):
        held = [*part.values()] if isinstance(part, dict) else [*part]
        if any(_leads(each, parts, depth + 1) for each in held):
            msg = (
                f"a function captures a {type(part).__name__} that holds parts of the model. Make "
                "it an attribute of the model, or give it by functools.partial"
            )
            raise ReplicaError(msg)
    return False
