"""Pickle values for another process, with the memory of tensors and arrays outside of the pickle.

A packed value is one block of bytes: a head, a pickle, and the memory of tensors, which is aligned.
The tensors of the receiver use this memory. Functions and classes that the receiver cannot import
go by value, with cloudpickle. Tensors on an accelerator arrive on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import pickle
import reprlib
import struct
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import cloudpickle
import torch

from parawrap._private_names import class_of_id, goes_by_name, id_of_class, names_in_code
from parawrap.displays import safe_repr
from parawrap.errors import UnsendableError
from parawrap.processes.definitions import adapt_class, is_generic, reduce_generic
from parawrap.processes.held_signals import HeldSignals, do_nothing
from parawrap.processes.refusals import reason_of_mode, reason_to_refuse
from parawrap.processes.shared_memory import ALIGNMENT, Block
from parawrap.tree import PLAIN, TENSORS, is_dense

_LENGTH = struct.Struct("<Q")  # 8 bytes: tensors may be larger than 4 GiB
_MOST_STEPS = 5  # levels of nesting in a message: deeper paths are useless
# Unpicklable parts in a search for the innermost one. A guess: the search takes 0.1 s then
_MOST_REFUSED = 64
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_DESCRIPTORS_IN_C = (types.GetSetDescriptorType, types.MemberDescriptorType)
_CACHED: Any = type(functools.cache(len))  # the class of functions with a cache
# The class of operators of torch, and the base class of overloads and of operators of higher order
_OPERATORS: Any = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor).__bases__[0])


class Packed(Block):
    """A pickled value: a head with the lengths, the pickle, and the memory of each tensor."""

    def __init__(self, pickled: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        super().__init__()
        lengths = [sum(map(len, pickled)), *map(len, buffers)]  # of memory without a format: bytes
        head = [len(lengths), *lengths]
        self._add(b"".join(map(_LENGTH.pack, head)))
        self._align()
        for piece in pickled:
            self._add(piece)
        for part in buffers:
            self._align()
            self._add(part)

    def _align(self) -> None:
        missing = -self.size % ALIGNMENT  # bytes up to the next multiple
        self._add(bytes(missing))

    def _add(self, part: Any) -> None:
        self.parts.append(part)
        self.size += len(part)


class PickleStream:
    """A file that keeps what a pickler writes, in pieces. Large texts and bytes are not copied."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.write = self.pieces.append


def pack(
    value: Any, address: str = "", make_pickler: Callable[..., ValuePickler] | None = None
) -> Packed:
    """Pickle a value.

    Args:
        value: The value.
        address: Its name in error messages. If it is empty, the keys of `value` are the names of
            its parts.
        make_pickler: Makes the pickler from a stream and a list for the memory of tensors.

    Raises:
        UnsendableError: If the value cannot be pickled. The message names the unpicklable part, as
            a path from `address`.
    """
    if type(value) in PLAIN:
        return Packed([pickle.dumps(value, 5)], [])
    buffers: list[memoryview] = []
    stream = PickleStream()
    make_pickler = make_pickler or ValuePickler
    try:
        make_pickler(stream, buffers).dump(value)
    except Exception as error:
        buffers.clear()  # the traceback would keep the memory of tensors alive
        place, found, reason = _find_unpicklable(value, address, error)
        why = f"{type(found).__qualname__}: {str(reason) or repr(reason)}"
        msg = f"{place} cannot be sent to another process: {why}"
        # The context of `reason` is `error`, whose traceback has this frame: a cycle otherwise
        del found, reason
        raise UnsendableError(msg) from error
    return Packed(stream.pieces, buffers)


def unpack(block: memoryview | bytes) -> Any:
    """Return the value of a block. Its tensors use this memory, or a copy if the block is bytes."""
    memory = block if isinstance(block, memoryview) else memoryview(bytearray(block))
    (count,) = _LENGTH.unpack_from(memory)
    lengths = struct.unpack_from(f"<{count}Q", memory, _LENGTH.size)
    contents, end = [], (1 + count) * _LENGTH.size
    for length in lengths:
        start = end + -end % ALIGNMENT  # the next aligned place, as `Packed._align` makes it
        end = start + length
        contents.append(memory[start:end])
    return pickle.loads(contents[0], buffers=contents[1:])


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle pickler that keeps the memory of tensors out of the pickle."""

    replaces = False  # True to describe the parts of exceptions that cannot be pickled

    def __init__(self, stream: Any, buffers: list[memoryview]) -> None:
        # A pickler calls it with the memory of each storage and array, and leaves out the memory
        super().__init__(
            stream, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw())
        )
        self._storages: dict[object, torch.UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        # The order matters: each branch is for values that a later one would handle wrongly
        if type(obj) is _CACHED and _goes_by_value(obj.__module__):
            return _make_cached, (obj.__wrapped__, obj.cache_parameters())  # with an empty cache
        if type(obj) in TENSORS and _is_described_by_memory(obj):
            return self._reduce_tensor(obj)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            return _storage, (pickle.PickleBuffer(_bytes_of(obj)),)
        if (name := _name_of(obj)) is not None:
            return resolve_name, (name,)
        if isinstance(obj, types.ModuleType):
            _register_unimportable(obj.__name__)
        elif isinstance(obj, (type, types.FunctionType)):
            _register_unimportable(obj.__module__)
        if isinstance(obj, type) and obj in received_classes:
            return _class_sent_before, (id_of_class[obj], obj.__qualname__)
        if (reason := reason_to_refuse(obj)) is not None:
            raise pickle.PicklingError(reason)
        if isinstance(obj, BaseException):
            return _reduce_exception(obj, replaces=self.replaces)
        if type(obj) is functools.cached_property:  # before Python 3.12 it has a lock
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        if is_generic(obj) and not goes_by_name(obj):
            return reduce_generic(obj)
        reduced = super().reducer_override(obj)
        return adapt_class(obj, reduced) if isinstance(obj, type) else reduced

    def _reduce_tensor(
        self, tensor: torch.Tensor
    ) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Reduce a tensor to a view of its storage.

        Each storage is pickled once, so tensors still share memory.
        """
        if (reason := reason_of_mode()) is not None:
            raise pickle.PicklingError(reason)
        torch.utils.hooks.warn_if_has_hooks(tensor)  # as torch does when it pickles
        here = tensor.detach().cpu()
        storage = here.untyped_storage()
        # Two storage objects may have the same memory, as from torch.from_numpy. All empty ones
        # have the address 0
        is_empty = storage.nbytes() == 0
        key = id(storage) if is_empty else (storage.data_ptr(), storage.nbytes())
        storage = self._storages.setdefault(key, storage)
        view = (here.storage_offset(), tuple(here.shape), here.stride())
        return _tensor, (type(tensor), storage, here.dtype, *view, tensor.requires_grad)


class IdentityPickler(pickle.Pickler):
    """Pickles functions, classes, and objects of `classes` by their ids, to compare contents.

    It adds these objects to `met`, which keeps them alive: no other object gets their ids.
    """

    def __init__(self, stream: io.BytesIO, met: list[Any], *classes: type) -> None:
        super().__init__(stream, 5)
        self._met = met
        # pickle would refer to classes and functions by their names
        self._classes = (type, types.FunctionType, *classes)

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, self._classes):
            self._met.append(obj)
            return id(obj)
        return None


# -- classes and modules

received_classes: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that another process has sent by value to this one.

An object of such a class goes back as an object of the sender's class.
"""


def _class_sent_before(identifier: str, name: str) -> type:
    """Return the class that this process has sent with this identifier of cloudpickle."""
    cls: type | None = class_of_id.get(identifier)
    if cls is None:
        msg = f"the class {name} of this object no longer exists here: it was defined again"
        raise UnsendableError(msg)
    return cls


# Names of modules that were checked. Any thread may add to it: at worst, two check one module
_checked: set[str] = set()
_unimportable: set[str] = set()  # the modules that parawrap has registered to go by value


def _register_unimportable(name: str) -> None:
    """Have cloudpickle send a module by value if other processes cannot import it."""
    if name in sys.modules and name not in _checked:
        # `is_importable` would take an exception of a signal handler for one of a finder
        held = HeldSignals(do_nothing)
        try:
            if name != "__main__" and not is_importable(name):
                cloudpickle.register_pickle_by_value(sys.modules[name])
                _unimportable.add(name)
            _checked.add(name)
        finally:
            held.end()


def _goes_by_value(name: str) -> bool:
    """True if a module's definitions are pickled by value.

    Then other processes cannot import it, or the user has registered it or its package.
    """
    _register_unimportable(name)
    return name == "__main__" or is_among(name, cloudpickle.list_registry_pickle_by_value())


def modules_of_user() -> set[str]:
    """Return the names of the modules that the user has registered to go by value."""
    registered: set[str] = cloudpickle.list_registry_pickle_by_value()
    return registered - _unimportable


def is_among(name: str | None, modules: set[str]) -> bool:
    """True if a module, or a package around it, is among these."""
    while name:
        if name in modules:
            return True
        name = name.rpartition(".")[0]
    return False


def is_importable(name: str) -> bool:
    """True if an import finds the top package of this module, in the same file.

    A module that was loaded from its file may be on no import path.
    """
    root = name.partition(".")[0]
    own_spec = getattr(sys.modules.get(root), "__spec__", None)
    own_file = getattr(own_spec, "origin", None)
    for finder in sys.meta_path:
        try:
            found = finder.find_spec(root, None)
            if found is None:
                continue
            if own_file is None or found.origin is None:  # without a file, as namespace packages
                return True
            return found.origin == own_file or Path(found.origin).samefile(own_file)
        except Exception:  # noqa: BLE001 (finders may raise anything)
            continue
    return root in sys.builtin_module_names


def _name_of(value: Any) -> str | None:
    """Return the name of an operator of torch, or of a module with a class of its own.

    None for any other object.
    """
    if isinstance(value, _OPERATORS):
        name = f"{value.__module__}.{value.__name__}".replace("torch._ops.", "torch.ops.", 1)
    # such as torch.backends.cudnn
    elif isinstance(value, types.ModuleType) and type(value) is not types.ModuleType:
        name = value.__name__
    else:
        return None
    try:
        return name if resolve_name(name) is value else None
    except (ImportError, AttributeError, ValueError):  # the name has been deleted
        return None


def _make_cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """Return a function with an empty cache."""
    return functools.lru_cache(**parameters)(function)


# -- tensors


def _is_described_by_memory(tensor: torch.Tensor) -> bool:
    """True if memory, shape, and strides describe the tensor completely.

    torch pickles other tensors.
    """
    return (
        is_dense(tensor)
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__)
    )


def _tensor(
    cls: type[torch.Tensor],
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """Return a tensor on a storage."""
    if (reason := reason_of_mode()) is not None:
        raise pickle.UnpicklingError(reason)
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)
    if cls is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _storage(memory: Any) -> torch.UntypedStorage:
    """Return a storage on this memory."""
    if len(memory) == 0:  # `frombuffer` refuses it
        return torch.UntypedStorage(0)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    """Return the memory of a storage without a copy.

    The result keeps the storage alive, which may be a copy from a device. It is no memoryview: the
    collector of Python 3.11 crashes if it meets a view of a view in a cycle, such as that of an
    exception and the frames of its traceback.
    """
    memory: Any = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = storage
    return memory


# -- exceptions


def _reduce_exception(error: BaseException, *, replaces: bool) -> Any:
    """Reduce an exception to its class, arguments, attributes, and cause.

    The user's ``__init__`` and ``__reduce__`` often fail, so they are not called. Causes may form a
    circle, so they are state, which is pickled afterwards.
    """
    # The builtin class `base` makes an object of the user's class from the arguments `made_from`.
    # It is not always the first base: `__base__` is the one that makes instances
    base: Any = type(error)
    while base.__module__ != "builtins":
        base = base.__base__
    _, made_from, *given = base.__reduce__(error)
    try:
        _new_exception(type(error), base, made_from)
    except TypeError:  # a class in C with a state of its own, such as pydantic's ValidationError
        return error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    state: dict[str, Any] = dict(*given)  # `given` has the dict of attributes, if there is one
    own = object.__getstate__(error)
    if isinstance(own, tuple):
        _, slots = own  # the attributes in slots; the others are in `state` already
        state |= slots
    # C code keeps `name` outside of `__dict__`, and some versions of Python do not reduce it. Other
    # builtin classes reduce their fields, or read them from `args`
    if isinstance(error, (NameError, AttributeError)):
        state["name"] = error.name

    args = error.args
    if replaces:
        made_from = tuple(map(_sendable, made_from))
        args = tuple(map(_sendable, args))
        state = {name: _sendable(value) for name, value in state.items()}
    constructor_args = type(error), base, made_from
    parts = args, state, error.__cause__
    # The six parts of `object.__reduce__`; an exception has no items of a list or dict
    return _new_exception, constructor_args, parts, None, None, _set_exception_state


def _sendable(value: Any) -> Any:
    """Return a part of an exception, or a description if it cannot be pickled."""
    if isinstance(value, BaseException) or _refusal(value) is None:
        return value  # an exception gets the same reduction as the outer one
    if type(value) in (list, tuple):  # such as the members of an ExceptionGroup
        return type(value)(map(_sendable, value))
    return safe_repr(value)


def _new_exception(
    cls: type[BaseException], base: Any, made_from: tuple[Any, ...]
) -> BaseException:
    """Make an exception as its builtin class does, without the user's `__init__`."""
    error: BaseException = base.__new__(cls, *made_from)
    base.__init__(error, *made_from)
    return error


def _set_exception_state(
    error: BaseException, parts: tuple[tuple[Any, ...], dict[str, Any], BaseException | None]
) -> None:
    args, state, cause = parts
    # The class may have a property `args`, or be a frozen dataclass
    BaseException.args.__set__(error, args)  # type: ignore[attr-defined]
    for name, value in state.items():
        object.__setattr__(error, name, value)
    if cause is not None:  # setting None would hide the context
        object.__setattr__(error, "__cause__", cause)


# -- the part of a value that cannot be pickled


class _Unpicklable(NamedTuple):
    """A part of a value, and the exception from pickling it."""

    address: str
    value: Any
    error: Exception


def _refusal(value: Any) -> Exception | None:
    """Return the exception from pickling this value, or None if it succeeds."""
    if type(value) in PLAIN:
        return None
    buffers: list[memoryview] = []
    try:
        ValuePickler(io.BytesIO(), buffers).dump(value)
    except Exception as error:  # noqa: BLE001 (classes may raise anything)
        # Without the traceback, whose frames include that of the caller, which keeps the error
        return error.with_traceback(None)
    finally:
        # The traceback of a cause may keep this frame, and with it the memory of tensors
        buffers.clear()
    return None


def _find_unpicklable(value: Any, address: str, error: Exception) -> _Unpicklable:
    """Return the innermost unpicklable part."""
    whole = _Unpicklable(address, value, error)
    dead_ends: list[_Unpicklable] = []
    # Without an address, `value` is a dict whose keys name the parts: this step does not count
    steps = _MOST_STEPS if address else _MOST_STEPS + 1
    found = _descend(whole, steps, {id(value): value}, dead_ends)
    # The first dead end is an innermost one: a part is noted before the value around it
    return found or dead_ends[0]


def _descend(
    whole: _Unpicklable, steps: int, refused: dict[int, Any], dead_ends: list[_Unpicklable]
) -> _Unpicklable | None:
    """Return the innermost unpicklable part of a value.

    None if its parts are unpicklable only because they lead back to a value in `refused`, such as
    a method that uses its class. Then `dead_ends` gets the value.

    Args:
        whole: The value, which is unpicklable.
        steps: How many levels below it are searched.
        refused: Unpicklable values that were searched, by their ids. New ones are added.
        dead_ends: Gets the values for which the result is None.
    """
    if steps == 0:
        return whole
    is_cause = True  # until a part is found that may be the cause
    for part, place in _parts(whole.value, whole.address):
        # Objects of subclasses too, such as a member of an IntEnum: they are rarely the cause
        if isinstance(part, PLAIN):
            continue
        was_searched = id(part) in refused
        has_refused_enough = len(refused) == _MOST_REFUSED
        if was_searched or has_refused_enough:
            is_cause = False
        elif (error := _refusal(part)) is not None:
            is_cause = False
            refused[id(part)] = part  # alive, so that no other part gets its id
            inner = _descend(_Unpicklable(place, part, error), steps - 1, refused, dead_ends)
            if inner is not None:
                return inner
    if is_cause:
        return whole
    dead_ends.append(whole)
    return None


def _parts(value: Any, address: str) -> Iterator[tuple[Any, str]]:
    """Yield the parts that a pickle of a value includes, each with its address.

    Parts that are hard to find are left out.
    """
    if reason_to_refuse(value) is not None:
        return  # it is refused as a whole
    if isinstance(value, type):
        yield from _parts_of_class(value, address)
        return
    if not goes_by_name(type(value)):
        yield type(value), f"{address}'s class {type(value).__qualname__}"
    if isinstance(value, Mapping):
        for key, part in list(value.items()):
            # Without an address, the value is a dict whose keys name its parts
            place = f"{address}[{reprlib.repr(key)}]" if address else str(key)
            yield part, place
    elif isinstance(value, (list, tuple, set, frozenset)):
        for i, part in enumerate(value):
            yield part, f"{address}[{i}]"
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value, address)
        return
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield getattr(value, name), f"{address}.{name}"
    elif isinstance(value, types.MethodType):
        yield value.__self__, f"{address}.__self__"
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__, address
        return
    elif isinstance(value, property):
        for accessor in (value.fget, value.fset, value.fdel):
            yield accessor, address
        return
    elif isinstance(value, torch.nn.Module):
        for name, part in (*value.named_children(), *value.named_parameters(recurse=False)):
            is_of_sequence = name.isdecimal()  # such as a child of Sequential
            place = f"{address}[{name}]" if is_of_sequence else f"{address}.{name}"
            yield part, place
    with contextlib.suppress(Exception):
        # This raises if the object refuses to be pickled: then its attributes are not the cause
        value.__reduce_ex__(5)
        for name, part in list(getattr(value, "__dict__", {}).items()):
            yield part, f"{address}.{name}"


def _parts_of_class(cls: type, address: str) -> Iterator[tuple[Any, str]]:
    if goes_by_name(cls):
        return
    for base in cls.__bases__:
        yield base, f"{address}'s base {base.__qualname__}"
    # Methods come last. They often use the class, so they are unpicklable because of an attribute
    methods: list[tuple[Any, str]] = []
    for name, part in list(vars(cls).items()):
        if name == "_abc_impl" or isinstance(part, _DESCRIPTORS_IN_C):
            continue  # not pickled: Python makes it again with the class
        if isinstance(part, _METHODS):
            methods.append((part, f"{address}.{name}"))
        else:
            yield part, f"{address}.{name}"
    yield from methods


def _parts_of_function(function: types.FunctionType, address: str) -> Iterator[tuple[Any, str]]:
    if is_generic(function):
        for cls, implementation in function.registry.items():  # type: ignore[attr-defined]
            yield implementation, f"{address}'s implementation for {cls.__qualname__}"
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an unassigned variable
            yield cell.cell_contents, f"{address}'s variable {name!r}"
    for name in names_in_code(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name], f"{address}'s global {name!r}"
    for name, part in vars(function).items():
        yield part, f"{address}.{name}"
