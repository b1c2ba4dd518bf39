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
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

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

_Part = tuple[Any, str, Place | None, Any]
"""A part of an object: the part, its path, and the place and the key where a container holds it."""

# Values that lanes may share because they do not change. Subclasses count, such as np.float64.
_IMMUTABLE = (
    *(*PLAIN, numbers.Number, enum.Enum, type, slice, range),
    *(
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
        torch.finfo,
        torch.iinfo,
    ),
    *(pathlib.PurePath, dt.date, dt.time, dt.timedelta, dt.tzinfo, re.Pattern, string.Template),
    *(
        types.BuiltinFunctionType,
        types.EllipsisType,
        types.NotImplementedType,
        types.CodeType,
        property,
    ),
)
# Objects with a life outside the model. All lanes use the same one.
_SHARED = (
    *(
        types.ModuleType,
        torch.jit.ScriptModule,
        torch.jit.ScriptFunction,
        contextvars.ContextVar,
        io.IOBase,
        socket.socket,
    ),
    *(weakref.ref, weakref.ProxyType, weakref.CallableProxyType),
    *(
        logging.Logger,
        logging.LoggerAdapter,
        logging.Handler,
        queue.Queue,
        queue.SimpleQueue,
        concurrent.futures.Executor,
    ),
    *(
        threading.Thread,
        threading.local,
        threading.Event,
        threading.Condition,
        threading.Semaphore,
        threading.Barrier,
    ),
    *(
        type(threading.Lock()),
        type(threading.RLock()),
        concurrent.futures.Future,
        asyncio.AbstractEventLoop,
    ),
    *(multiprocessing.process.BaseProcess, multiprocessing.synchronize.SemLock),
)
# Types such as ``Optional[Tensor]`` are no instances of `type`. A copy of one comes from a cache,
# which has it still.
_OF_TYPES = ("typing", "types", "typing_extensions")
_SHARED_BY_MODULE = ("torch._dynamo", "torch._C", "torch._ops", "torch.distributed", "torch.cuda")
_DEEPEST_LIST = 3  # levels of lists and dicts in a closure that are searched for modules

# Layers of torch.nn whose forward writes no attribute and no buffer. Listed, because others do:
# LazyLinear, spectral norms.
_QUIET = """
    Sequential ModuleList ModuleDict ParameterList ParameterDict Identity Linear Bilinear
    Flatten Unflatten Fold Unfold Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d
    ConvTranspose3d LayerNorm GroupNorm RMSNorm LocalResponseNorm Threshold ReLU RReLU Hardtanh
    ReLU6 Sigmoid Hardsigmoid Tanh SiLU Mish Hardswish ELU CELU SELU GLU GELU Hardshrink
    LeakyReLU LogSigmoid Softplus Softshrink PReLU Softsign Tanhshrink Softmin Softmax Softmax2d
    LogSoftmax MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d LPPool1d LPPool2d
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d
    AdaptiveMaxPool3d ZeroPad2d ConstantPad1d ConstantPad2d ReflectionPad1d ReflectionPad2d
    ReplicationPad1d ReplicationPad2d Dropout Dropout1d Dropout2d Dropout3d AlphaDropout
    FeatureAlphaDropout Embedding EmbeddingBag RNN LSTM GRU RNNCell LSTMCell GRUCell
    MultiheadAttention Transformer TransformerEncoder TransformerDecoder TransformerEncoderLayer
    TransformerDecoderLayer PixelShuffle PixelUnshuffle Upsample ChannelShuffle CosineSimilarity
    PairwiseDistance L1Loss MSELoss CrossEntropyLoss NLLLoss BCELoss BCEWithLogitsLoss KLDivLoss
    SmoothL1Loss
"""
_QUIET_CLASSES = frozenset(
    getattr(torch.nn, name) for name in _QUIET.split() if hasattr(torch.nn, name)
)
_QUIET_IN_EVAL = frozenset({torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d})
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # the buffers of these


class Survey:
    """All that a target leads to. The walk is iterative, so that depth costs no recursion.

    Attributes:
        places: The containers that lanes get copies of.
        params: The parameters, and other tensors that learn or share memory with them. Lanes on
            their device share them.
        tensors: The other tensors. Each lane has its own copy.
        versioned: Those of the other tensors that have versions: all but inference tensors.
        modules: The modules, each before its submodules.
        shared: The objects that all lanes use.
        twins: The functions with closures that hold parts of the model. Each lane gets its own.
        holders: By the id of a tensor or a function, the containers that hold it, with the key of
            each; None for a container that cannot change, such as a tuple.
        left_out: The attributes that copies of a module do not have, such as the trainer of a
            LightningModule.
        namespaces: The dicts that deepcopy would take apart wrongly, such as those with
            ``self.__dict__ = self``.
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
        self.generators: list[Any] = []  # of random numbers
        self.shared: list[Any] = []
        self.scripts: list[torch.jit.ScriptModule] = []
        self.opaque: list[Any] = []  # instances that only `copy.deepcopy` knows how to copy
        self.functions: list[types.FunctionType] = []
        self.namespaces: list[Any] = []
        self.left_out: list[tuple[torch.nn.Module, str]] = []
        self.holders: dict[int, list[tuple[Place, Any] | None]] = {}
        self._walk(target)
        self._share_aliases()
        self._buffers: set[int] = set()
        for tensor in self.tensors:
            if any(place.kind == BUFFERS for place in self.places_of(tensor)):
                self._buffers.add(id(tensor))
        self.twins = self._find_twins()
        for function in self.twins:
            for name, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            ):
                if id(cell) not in self.owned:  # a caller may bind it again
                    self.owned[id(cell)] = cell
                    self._enter(cell, "cell", f"{self.path_of(function)} captures {name!r}", ())
        self.is_lazy = any(map(is_lazy, self.params))
        self.versioned: list[torch.Tensor] = []
        if not self.is_lazy:  # a tensor without a shape has no version
            self.versioned += [tensor for tensor in self.tensors if not tensor.is_inference()]
        renormalizes = any(getattr(module, "max_norm", None) is not None for module in self.modules)
        owners = [*self.modules, *(place.owner for place in self.places if place.kind == "vars")]
        classes = {base for owner in owners for base in type(owner).__mro__}
        writes = find_writes(classes, self.functions, methods, self.paths)
        self.writes_data = writes.weights or renormalizes
        self.in_turns = self.writes_data or writes.gradients

    def path_of(self, value: Any) -> str:
        """Return the path to a part of the target."""
        return self.paths.get(id(value)) or "the target"

    def places_of(self, tensor: torch.Tensor) -> list[Place]:
        """Return the containers that hold a tensor, without those that cannot change."""
        return [holder[0] for holder in self.holders.get(id(tensor), ()) if holder is not None]

    def is_buffer(self, tensor: torch.Tensor) -> bool:
        """True for a buffer of a module."""
        return id(tensor) in self._buffers

    # The walk

    def _walk(self, target: Any) -> None:
        waiting: list[_Part] = [(target, "", None, None)]
        while waiting:
            value, path, place, key = waiting.pop()
            if isinstance(value, (torch.Tensor, types.FunctionType)):
                self.holders.setdefault(id(value), []).append(
                    None if place is None else (place, key)
                )
            if id(value) in self.owned or isinstance(value, _IMMUTABLE):
                continue
            self.owned[id(value)], self.paths[id(value)] = value, path
            waiting += reversed([*self._parts(value, path)])

    def _parts(self, value: Any, path: str) -> Iterable[_Part]:
        """Enter an object, and return each of its parts: the part, its path, and its place."""
        if isinstance(value, torch.Tensor):
            learns = isinstance(value, torch.nn.Parameter) or value.requires_grad
            (self.params if learns else self.tensors).append(value)
            return ()
        if isinstance(value, torch.jit.ScriptModule):
            self._enter_script(value, path)
            return ()
        if isinstance(value, torch.nn.Module):
            return self._parts_of_module(value, path)
        if isinstance(value, dict):
            if vars_of(value) is value or not _has_plain_lookup(value):
                self.namespaces.append(value)
            # A list of the entries, here and below, is made in one step: other threads may write
            entries = [*dict.items(value)]
            keys = [
                (key, f"{path} key", None, None)
                for key, _ in entries
                if not isinstance(key, _IMMUTABLE)
            ]
            return [
                *keys,
                *self._enter(value, "items", path, entries),
                *self._attributes(value, path),
            ]
        if isinstance(value, LISTS):
            return [
                *self._enter(value, "list", path, enumerate(read_items(value))),
                *self._attributes(value, path),
            ]
        if isinstance(value, (tuple, frozenset)):
            return [(part, f"{path}[{at}]", None, None) for at, part in enumerate(value)]
        if isinstance(value, functools.partial):
            held = (value.func, *value.args, *value.keywords.values())
            return [
                (part, f"{path}.{'args' if at else 'func'}", None, None)
                for at, part in enumerate(held)
            ]
        if isinstance(value, types.MethodType):
            return [
                (value.__self__, f"{path}.__self__", None, None),
                (value.__func__, path, None, None),
            ]
        if isinstance(value, types.FunctionType):
            return self._parts_of_function(value, path)
        return self._parts_of_instance(value, path)

    def _parts_of_module(self, module: torch.nn.Module, path: str) -> Iterable[_Part]:
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
            return [(compiled_original(module), f"{path}._orig_mod".lstrip("."), None, None)]
        state = _state_of(module)
        self.left_out += [(module, name) for name in [*vars(module)] if name not in state]
        own = [(name, part) for name, part in state.items() if name not in MODULE_TABLES]
        attributes = self._enter(module, "vars", path, own)
        parts: list[_Part] = []
        for name, table in state.items():
            if name in NOT_CALLED:
                self.owned[id(table)] = table
                self.shared.append(table)
            elif name in MODULE_TABLES and isinstance(table, dict):
                self.owned[id(table)], self.paths[id(table)] = table, path
                # A table of hooks is an OrderedDict, whose own views are not read in one step
                entries = [*dict.items(table)]
                parts += self._enter(module, name, path, entries)
                if self._shares_hooks and name in HOOK_TABLES:
                    self._shared_hooks.update(id(hook) for _, hook in entries)
        return [*parts, *attributes]

    def _parts_of_function(self, function: types.FunctionType, path: str) -> Iterable[_Part]:
        if is_compiled_function(function):
            self.shared.append(function)
            return ()
        self.functions.append(function)
        named = map(function.__globals__.get, function.__code__.co_names)
        self.generators += filter(is_generator, named)
        return [
            (part, f"{path} captures {name}", None, None)
            for name, part in list_captured(function)
            if _is_model(part)
        ]

    def _parts_of_instance(self, value: Any, path: str) -> Iterable[_Part]:
        cls = type(value)
        if isinstance(value, weakref.ref):
            referent = value()
            owner = referent.__self__ if isinstance(referent, types.MethodType) else referent
            if isinstance(owner, torch.nn.Module):
                msg = (
                    f"{path!r} is a weak reference to a {type(owner).__name__}; its copy would "
                    "lead to the original. Hold it in a list: [value]"
                )
                raise ReplicaError(msg)
        if isinstance(value, Iterator) and not isinstance(value, _SHARED):
            msg = (
                f"no replica can be made: {path!r} is an iterator ({cls.__name__}). Keep its items "
                "in a list"
            )
            raise ReplicaError(msg)
        if draws := is_generator(value):
            self.generators.append(value)
        has_shared_class = isinstance(value, _SHARED) or cls is object
        is_of_torch = cls.__module__.startswith(_SHARED_BY_MODULE)
        is_type = cls.__module__ in _OF_TYPES and cls is not types.SimpleNamespace
        is_shared = has_shared_class or is_of_torch or is_type
        if draws or is_shared or _is_singleton(value):
            self.shared.append(value)
            return ()
        if vars_of(value) is None and not names_of_slots(cls):
            self.opaque.append(value)
        return self._attributes(value, path)

    def _attributes(self, value: Any, path: str) -> Iterable[_Part]:
        """Yield the attributes and the slots of an object."""
        found: list[_Part] = []
        own = vars_of(value)
        if own is not None and own is not value:  # it is with ``self.__dict__ = self``
            is_container = isinstance(value, (dict, *LISTS))
            # Of a container without attributes, the items are the only place
            if own or not is_container:
                found += self._enter(value, "vars", path, [*own.items()])
        names = names_of_slots(type(value))
        if names:
            parts = [read_slot(value, name) for name in names]
            filled = [(at, part) for at, part in enumerate(parts) if part is not ABSENT]
            found += self._enter(value, "slots", path, filled)
        return found

    def _enter(
        self, owner: Any, kind: str, path: str, entries: Iterable[tuple[Any, Any]]
    ) -> list[_Part]:
        """Enter a container, and return its entries."""
        place = Place(owner, kind, path)
        self.places.append(place)
        holder = None if isinstance(owner, set) else place  # the entries of a set have no keys
        return [(part, place.name(key), holder, key) for key, part in entries]

    def _enter_script(self, module: torch.jit.ScriptModule, path: str) -> None:
        """Enter a scripted module, which lanes share: it has no state in Python."""
        self.shared.append(module)
        self.scripts.append(module)
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if id(tensor) not in self.owned:
                self.owned[id(tensor)] = tensor
                self.paths[id(tensor)] = f"{path}.{name}".lstrip(".")
                self.params.append(tensor)

    def _share_aliases(self) -> None:
        """Count tensors that share memory with a parameter as parameters.

        Lanes share their memory too. A copy would keep the old values after a write.
        """
        # Without the 0 of tensors that have no memory of their own, such as sparse ones
        memory = set(filter(None, map(storage_of, self.params)))
        aliases = [tensor for tensor in self.tensors if storage_of(tensor) in memory]
        if aliases:
            self.params += aliases
            known = set(map(id, aliases))
            self.tensors = [tensor for tensor in self.tensors if id(tensor) not in known]

    def _find_twins(self) -> list[types.FunctionType]:
        """Return the functions that capture parts of the model, or other such functions."""
        parts = {id(place.owner) for place in self.places} | set(map(id, self.params))
        twins: list[types.FunctionType] = []
        others = [each for each in self.functions if id(each) not in self._shared_hooks]
        while True:
            found = [
                function
                for function in others
                if any(_leads(part, parts) for _, part in list_captured(function))
            ]
            if not found:
                return twins
            twins += found
            # Other functions may capture those, which are parts of the model now
            parts.update(map(id, found))
            others = [each for each in others if id(each) not in parts]

    # Decisions

    def is_quiet(self) -> bool:
        """Read the modules: True if forward is code of listed classes of torch.nn alone.

        These write no attribute, buffer, or parameter.
        """
        return self._has_only(_is_quiet_module)

    def writes_statistics_alone(self) -> bool:
        """Read the modules: True if forward is code of listed classes, and batch norms of torch.nn.

        In training mode, these write their statistics in place, and nothing else. All tensors
        besides parameters are such statistics then.
        """
        statistics: set[int] = set()
        for module in self.modules:
            if type(module) in _QUIET_IN_EVAL:
                statistics.update(map(id, map(vars(module)[BUFFERS].get, _STATISTICS)))
        return self._has_only(_is_listed_module) and statistics.issuperset(map(id, self.tensors))

    def _has_only(self, is_known: Callable[[torch.nn.Module], bool]) -> bool:
        if self.functions or self.scripts or not all(map(is_known, self.modules)):
            return False
        others = [
            place.owner for place in self.places if not isinstance(place.owner, torch.nn.Module)
        ]
        return not any(others)


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
    tensors = chain(survey.params, survey.tensors)
    return next((tensor.device for tensor in tensors), None) if home is None else home


def home_of_target(target: Any) -> torch.device | None:
    """Return the device of the first parameter or buffer of a module; None without one."""
    module = target.__self__ if isinstance(target, types.MethodType) else target
    first = _first_tensor(module) if isinstance(module, torch.nn.Module) else None
    return None if first is None else first.device


def _first_tensor(module: torch.nn.Module) -> torch.Tensor | None:
    """Return the first parameter of a module; without one, its first buffer, or None."""
    for _ in range(MOST_READS):
        with contextlib.suppress(RuntimeError):  # another thread adds or removes a layer
            return next(chain(module.parameters(), module.buffers()), None)
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
    part = part.__self__ if isinstance(part, types.MethodType) else part
    is_code = isinstance(part, (torch.nn.Module, types.FunctionType, functools.partial))
    return is_code or is_generator(part) or (isinstance(part, torch.Tensor) and part.requires_grad)


def _is_singleton(value: Any) -> bool:
    """True for an attribute of its class, as the members of enums are."""
    return any(each is value for each in [*vars(type(value)).values()])


def _has_plain_lookup(value: Any) -> bool:
    """False for a dict whose ``__getattr__`` raises KeyError, which `copy.deepcopy` passes on."""
    try:
        getattr(value, "__deepcopy__", None)
    except Exception:  # noqa: BLE001  # code of the user's
        return False
    return True


def _is_quiet_module(module: torch.nn.Module) -> bool:
    writes = module.training and type(module) in _QUIET_IN_EVAL
    return not writes and _is_listed_module(module)


def _is_listed_module(module: torch.nn.Module) -> bool:
    """True for a layer of a listed class with no other code: no hook, and no function set on it."""
    cls = type(module)
    if cls not in _QUIET_CLASSES and cls not in _QUIET_IN_EVAL:
        return False
    own = [*vars(module).items()]
    has_hooks = any(name in HOOK_TABLES and part for name, part in own if name not in NOT_CALLED)
    has_code = any(callable(part) and hasattr(cls, name) for name, part in own)
    is_own_forward = cls.forward.__module__.startswith("torch.")
    return (
        not has_hooks
        and not has_code
        and is_own_forward
        and getattr(module, "max_norm", None) is None
    )


def _leads(part: Any, parts: set[int], depth: int = 0) -> bool:
    """True if a captured value is, or leads to, a part of the model. `parts` are their ids.

    Raises:
        ReplicaError: If it is a list, tuple, or dict of such parts.
    """
    part = part.__self__ if isinstance(part, types.MethodType) else part
    if id(part) in parts or isinstance(part, (torch.nn.Module, functools.partial)):
        return True
    if depth < _DEEPEST_LIST and isinstance(part, (list, tuple, dict)):
        held = [*(part.values() if isinstance(part, dict) else part)]
        if any(_leads(each, parts, depth + 1) for each in held):
            msg = (
                f"a function captures a {type(part).__name__} that holds parts of the model. Make "
                "it an attribute of the model, or give it by functools.partial"
            )
            raise ReplicaError(msg)
    return False
