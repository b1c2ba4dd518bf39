"""One walk over everything that a target leads to: its modules, tensors, containers, and functions.

A replica is `copy.deepcopy` of the target, so the walk follows what deepcopy copies. It refuses
objects that lanes would have to share, and must not: modules that globals name, iterators, and weak
references to modules.
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
# The modules with the classes of types such as ``Optional[Tensor]``, which are not instances of
# `type`. Python caches these types, and lanes share them: `Replica.clear`, which empties copies,
# must not empty a cached type
_TYPING_MODULES = ("typing", "types", "typing_extensions")
# The modules with the classes of handles: compiled code, operators, process groups, streams
_MODULES_OF_HANDLES = (
    "torch._dynamo",
    "torch._C",
    "torch._ops",
    "torch.distributed",
    "torch.cuda",
)
# The search for modules in a closure enters at most this many nested lists and dicts. So it also
# ends in a list that holds itself. A guess that no test has contradicted
_DEEPEST_LIST = 3


class Holder(NamedTuple):
    """A container that holds a tensor or a function, and its key there."""

    place: Place
    key: Any


class _Visit(NamedTuple):
    """An object that the walk has found, and its path.

    `holder` is None if the object is in a container that cannot be written, such as a tuple.
    """

    value: Any
    path: str
    holder: Holder | None = None


class Survey:
    """All that a target leads to. A survey borrows the objects, and writes none of them.

    It does not change once it is made. `methods` are the methods that calls enter, besides forward.
    With `shares_hooks`, hooks are not among the closures: all lanes use the model's own, as in
    torch.nn.DataParallel.

    Attributes:
        objects: All objects that the walk has found, by their ids. They stay alive here, so that no
            other object gets one of these ids.
        paths: The paths of objects, by their ids.
        places: The containers that lanes get copies of.
        params: The parameters, and other tensors that require gradients or share memory with a
            parameter. Lanes on their device share them.
        tensors: The other tensors. Each lane has its own copy.
        versioned: The members of `tensors` that have versions: all but inference tensors.
        modules: The modules, each before its submodules.
        generators: The generators of random numbers that the target holds, or its code names.
        shared: The objects that all lanes use.
        scripts: The TorchScript modules among these.
        opaque: The objects without attributes, into which the walk cannot look.
        functions: The functions that are not compiled.
        closures: The functions that capture parts of the model. Each lane gets its own.
        holders: By the id of a tensor or a function, the containers that hold it; None for one that
            cannot be written, such as a tuple.
        left_out: Modules, each with an attribute that its copies do not get, such as the trainer
            of a LightningModule.
        namespaces: The dicts that deepcopy would not copy rightly, such as one with
            ``self.__dict__ = self``.
        is_lazy: True if a parameter gets its shape in the first call.
        writes_data: True if forward may write a tensor, and leave its version alone.
        in_turns: True if lanes must run one after another, because forward writes shared weights or
            gradients.

    Raises:
        ReplicaError: If the target leads to something that cannot be copied. The message names the
            path and a cure.
    """

    def __init__(
        self, target: Any, methods: Iterable[str] = (), *, shares_hooks: bool = False
    ) -> None:
        self.target = target
        self._shares_hooks = shares_hooks
        self._shared_hooks: set[int] = set()  # ids
        self.objects: dict[int, Any] = {}
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

        self._buffers: set[int] = set()  # ids
        for tensor in self.tensors:
            kinds = {place.kind for place in self.places_of(tensor)}
            if BUFFERS in kinds:
                self._buffers.add(id(tensor))
        self.is_lazy = any(map(is_lazy, self.params))
        self.versioned: list[torch.Tensor] = []
        if not self.is_lazy:  # a tensor without a shape has no version
            self.versioned += [tensor for tensor in self.tensors if not tensor.is_inference()]

        self.closures = self._find_closures()
        self._enter_cells()

        # What may forward write, by the code of all classes in the model?
        classes: set[type] = set()
        for module in self.modules:
            classes.update(type(module).__mro__)
        for place in self.places:
            if place.kind == "vars":
                classes.update(type(place.owner).__mro__)
        writes = find_writes(classes, self.functions, methods, self.paths)
        # Embeddings with `max_norm` write their weights in forward, in C++
        renormalizes = any(getattr(module, "max_norm", None) is not None for module in self.modules)
        self.writes_data = writes.weights or renormalizes
        self.in_turns = self.writes_data or writes.gradients

    def path_of(self, value: Any) -> str:
        """Return the path to a part of the target."""
        return self.paths.get(id(value)) or "the target"

    def places_of(self, tensor: torch.Tensor) -> list[Place]:
        """Return the containers that hold a tensor, without those that cannot be written."""
        holders = self.holders.get(id(tensor), ())
        return [holder.place for holder in holders if holder is not None]

    def module_path_of(self, place: Place) -> str:
        """Return the path of the module that a container belongs to, also inside its attributes."""
        paths_of_modules = {self.paths[id(module)] for module in self.modules}
        path = place.path
        while path and path not in paths_of_modules:
            last_step = max(path.rfind("."), path.rfind("["), 0)
            path = path[:last_step]
        return path

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
            if id(value) in self.objects or isinstance(value, _IMMUTABLE):
                continue
            self._note(value, path)
            # `pop` takes the last one. In reverse, parts are visited in their order in the object
            waiting += reversed([*self._enter(value, path)])

    def _note(self, value: Any, path: str) -> None:
        """Note an object and its path."""
        self.objects[id(value)] = value
        self.paths[id(value)] = path

    def _enter(self, value: Any, path: str) -> Iterable[_Visit]:
        """Enter an object into the lists of its kind, and return its parts."""
        if isinstance(value, torch.Tensor):
            is_parameter = isinstance(value, torch.nn.Parameter) or value.requires_grad
            found = self.params if is_parameter else self.tensors
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
        keys = [_Visit(key, f"{path} key") for key, _ in entries]
        items = self._enter_container(value, "items", path, entries)
        return [*keys, *items, *self._enter_attributes(value, path)]

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
        entries = [(name, part) for name, part in state.items() if name not in MODULE_TABLES]
        attributes = self._enter_container(module, "vars", path, entries)
        parts: list[_Visit] = []
        for name, table in state.items():
            if name in NOT_CALLED:  # such as hooks of `state_dict`: lanes share the table as it is
                self.objects[id(table)] = table
                self.shared.append(table)
            elif name in MODULE_TABLES and isinstance(table, dict):
                self._note(table, path)
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
        values_of_globals = map(function.__globals__.get, function.__code__.co_names)
        self.generators += filter(is_generator, values_of_globals)
        captured = list_captured(function)
        return [
            _Visit(part, f"{path} captures {name}")
            for name, part in captured
            if _belongs_to_model(part)
        ]

    def _enter_instance(self, value: Any, path: str) -> Iterable[_Visit]:
        _refuse_weak_module(value, path)
        if isinstance(value, Iterator) and not isinstance(value, _SHARED):
            msg = (
                f"no replica can be made: {path!r} is an iterator ({type(value).__name__}). Keep "
                "its items in a list"
            )
            raise ReplicaError(msg)
        if is_generator(value):
            self.generators.append(value)
            self.shared.append(value)
            return ()
        if _is_shared(value):
            self.shared.append(value)
            return ()
        if vars_of(value) is None and not names_of_slots(type(value)):
            self.opaque.append(value)
        return self._enter_attributes(value, path)

    def _enter_attributes(self, value: Any, path: str) -> Iterable[_Visit]:
        """Enter the attributes and the slots of an object, and return them."""
        found: list[_Visit] = []
        attributes = vars_of(value)
        is_own_namespace = attributes is value  # after ``self.__dict__ = self``
        if attributes is not None and not is_own_namespace:
            is_container = isinstance(value, (dict, *LISTS))
            # Most containers of a subclass have no attributes. Then their items are enough
            if attributes or not is_container:
                found += self._enter_container(value, "vars", path, [*attributes.items()])
        names = names_of_slots(type(value))
        if names:
            parts = enumerate([read_slot(value, name) for name in names])
            filled = [(index, part) for index, part in parts if part is not ABSENT]
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
            if id(tensor) not in self.objects:
                self._note(tensor, f"{path}.{name}".lstrip("."))
                self.params.append(tensor)

    def _share_aliases(self) -> None:
        """Move tensors that share memory with a parameter to the parameters.

        Lanes share the memory of parameters. A lane's copy of such a tensor would keep the old
        values after a write into the parameter.
        """
        # Without the 0 of tensors that have no memory, such as sparse ones
        memory = {*map(storage_of, self.params)} - {0}
        others: list[torch.Tensor] = []
        for tensor in self.tensors:
            found = self.params if storage_of(tensor) in memory else others
            found.append(tensor)
        self.tensors = others

    def _find_closures(self) -> list[types.FunctionType]:
        """Return the functions that capture parts of the model, or other such functions."""
        parts = {id(place.owner) for place in self.places}
        parts.update(map(id, self.params))
        closures: list[types.FunctionType] = []
        others = [each for each in self.functions if id(each) not in self._shared_hooks]
        while True:
            found = [each for each in others if _captures_part(each, parts)]
            if not found:
                return closures
            closures += found
            # Other functions may capture these, which are parts of the model from here on
            parts.update(map(id, found))
            others = [each for each in others if id(each) not in parts]

    def _enter_cells(self) -> None:
        """Enter the cells of closures: code of the user's may bind a captured name again."""
        for function in self.closures:
            names = function.__code__.co_freevars
            for name, cell in zip(names, function.__closure__ or (), strict=True):
                if id(cell) not in self.objects:
                    self.objects[id(cell)] = cell
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
    """Return the device of a module; for another target, that of the first tensor that it holds.

    None if there is no tensor.
    """
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
    """Return the attributes of a module that its copies get, according to its ``__getstate__``.

    That of a LightningModule replaces the trainer by None, so the copies do not get the trainer.
    """
    cls = type(module)
    # The list, here and below, is made in one step: other threads may set attributes
    entries = [*vars(module).items()]
    if cls.__getstate__ is torch.nn.Module.__getstate__ or hasattr(cls, "__deepcopy__"):
        return dict(entries)
    state: Any = module.__getstate__()
    if not isinstance(state, dict):
        return {}
    found: dict[str, Any] = {}
    for name, part in entries:
        is_replaced = part is not None and state.get(name) is None
        if name in state and not is_replaced:
            found[name] = part
    return found


def _belongs_to_model(part: Any) -> bool:
    """True for a captured value that belongs to the model. Lanes share other captured values."""
    part = owner_of(part)
    is_code = isinstance(part, (torch.nn.Module, types.FunctionType, functools.partial))
    learns = isinstance(part, torch.Tensor) and part.requires_grad
    return is_code or learns or is_generator(part)


def _is_shared(value: Any) -> bool:
    """True for an object that all lanes use."""
    cls = type(value)
    is_type = cls.__module__ in _TYPING_MODULES and cls is not types.SimpleNamespace
    is_handle = cls.__module__.startswith(_MODULES_OF_HANDLES)
    # A bare object() is a sentinel, which code compares by identity
    is_sentinel = cls is object or _is_singleton(value)
    return isinstance(value, _SHARED) or is_handle or is_type or is_sentinel


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
    """True for an attribute of its own class, as the members of an enum are."""
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
    return any(_is_part(value, parts) for _, value in list_captured(function))


def _is_part(value: Any, parts: set[int], depth: int = 0) -> bool:
    """True if a captured value is a part of the model, a method of one, a module, or a partial.

    `depth` is the number of lists and dicts around the value.

    Raises:
        ReplicaError: If the value is a list, tuple, or dict that holds such a part.
    """
    value = owner_of(value)
    if id(value) in parts or isinstance(value, (torch.nn.Module, functools.partial)):
        return True
    if depth < _DEEPEST_LIST and isinstance(value, (list, tuple, dict)):
        held = [*value.values()] if isinstance(value, dict) else [*value]
        if any(_is_part(each, parts, depth + 1) for each in held):
            msg = (
                f"a function captures a {type(value).__name__} that holds parts of the model. Make "
                "it an attribute of the model, or give it by functools.partial"
            )
            raise ReplicaError(msg)
    return False
