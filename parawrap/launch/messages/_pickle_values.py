"""Pack a value for another process into one file: a pickle, followed by the memory of tensors and arrays.

The reader maps the file and builds tensors on the mapping. A result of gigabytes is therefore written once and read without
a copy. It takes one descriptor for any number of tensors, and is freed with the last tensor. Functions that the reader
cannot import are pickled by value (cloudpickle). Modules of any class, such as ``torch.backends.cudnn``, and torch's
operators are pickled by name. Tensors on an accelerator arrive on the CPU. Open files are refused, because cloudpickle
would send their content as text.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import linecache
import mmap
import os
import pickle
import struct
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import cloudpickle
import torch

from parawrap.errors import UnsendableError
from parawrap.launch.messages._find_unpicklable import RefusedError, find_unpicklable
from parawrap.launch.messages._importable_modules import is_importable
from parawrap.launch.messages._pickle_definitions import reduce_class, reduce_definition
from parawrap.launch.messages._pickle_exceptions import reduce_exception
from parawrap.launch.messages._script_names import may_read_names, names_of_script

__all__ = [
    "ScriptNotes",
    "ValuePickler",
    "explain_unpicklable",
    "memory_file",
    "pack",
    "pack_with_script",
    "packed",
    "pickle_apart",
    "unpack",
    "unpack_from",
    "unpack_with_script",
]

_HEAD = struct.Struct("<QQ")  # the pickle's length, the number of buffers
_SPAN = struct.Struct("<QQ")  # a buffer's offset and length
_ALIGNMENT = 64  # bytes, as torch aligns CPU tensors
_WORTH_MAPPING = 1 << 20  # bytes; below, reading takes less time than mapping
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_OPERATORS: Any = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor).__bases__[0])  # also of higher order


def memory_file(name: str) -> int:
    """Make a file without a path, in memory if the system supports that. It disappears when it is closed."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"parawrap-{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def packed(value: Any, name: str, address: str, sent: list[types.FunctionType | type] | None = None) -> int:
    """Pack a value into a new file and return it. Raises like `pack`, and closes the file then.

    Functions and classes that are pickled with their code, closures, and globals are appended to `sent`.
    """
    file = memory_file(name)
    try:
        pack(value, file, address, sent)
    except BaseException:
        os.close(file)
        raise
    return file


def pack_with_script(value: Any, name: str) -> int:
    """Pack a value for a rank into a new file, and behind it further names of the script. Return the file.

    The functions of ``__main__`` have the rank's ``__main__`` as their globals. The last value of a dict may be
    `ScriptNotes`.

    Raises:
        UnsendableError: If the value cannot be pickled.
    """
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    pickler = ValuePickler(stream, buffers, in_main=True)
    with explain_unpicklable(value, "", buffers):
        pickler.dump(value)
    end, count = stream.tell(), len(buffers)
    names, unsent = names_of_script()
    try:
        pickler.dump((names, unsent))
    except Exception as error:  # noqa: BLE001 (classes may raise anything)
        stream.truncate(end)
        stream.seek(end)
        del buffers[count:]
        reasons = dict.fromkeys(names, f"the script's names cannot be pickled ({error})") | unsent
        stream.write(pickle.dumps(pickle.dumps(({}, reasons))))  # bytes, because the reader's memo lacks what failed
    file = memory_file(name)
    try:
        _write(file, stream.getbuffer(), buffers)
    except BaseException:
        os.close(file)
        raise
    return file


def pack(value: Any, file: int, address: str, sent: list[types.FunctionType | type] | None = None) -> None:
    """Write a value to the start of an open file.

    Raises:
        UnsendableError: If the value cannot be pickled. The message names the unpicklable part, as a path from `address`.
    """
    _write(file, *pickle_apart(value, address, sent))


def _write(file: int, pickled: memoryview, buffers: list[memoryview]) -> None:
    head, spans = _layout(len(pickled), [each.nbytes for each in buffers])
    with open(file, "wb", closefd=False) as out:
        out.write(head)
        out.write(pickled)
        for (offset, _), buffer in zip(spans, buffers, strict=True):
            out.seek(offset)
            out.write(buffer)


def pickle_apart(
    value: Any, address: str, sent: list[types.FunctionType | type] | None = None
) -> tuple[memoryview, list[memoryview]]:
    """Return the pickle of a value, and the memory of its tensors and arrays, which is not copied.

    `sent` is that of `packed`.

    Raises:
        UnsendableError: If the value cannot be pickled. The message names the unpicklable part, as a path from `address`.
    """
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    with explain_unpicklable(value, address, buffers):
        ValuePickler(stream, buffers, sent).dump(value)
    return stream.getbuffer(), buffers


@contextlib.contextmanager
def explain_unpicklable(value: Any, address: str, buffers: list[memoryview]) -> Iterator[None]:
    """Turn an exception from pickling a value into an UnsendableError."""
    try:
        yield
    except Exception as error:
        buffers.clear()  # the frames of the traceback hold them
        place, found, reason = find_unpicklable(value, address, _refusal)
        why = str(reason or error) or repr(reason or error)
        msg = f"{place} cannot be sent to another process: {type(found).__qualname__}: {why}"
        del found, reason  # the context of `reason` is `error`, and its traceback holds this frame
        raise UnsendableError(msg) from error


def unpack(file: int) -> Any:
    """Return the value that `pack` wrote. The caller may close the file afterwards."""
    return unpack_from(_memory_of(file))


def unpack_from(memory: memoryview) -> Any:
    """Return the value that `pack` wrote, given the bytes of the file. Its tensors lie in this memory."""
    return _unpickler_of(memory).load()


def unpack_with_script(file: int) -> tuple[Any, Callable[[], Any]]:
    """Return the value that `pack_with_script` wrote, and a function to call once.

    It returns the further names of the script: those that were sent, with their values, and the others, with the reason.
    """
    unpickler = _unpickler_of(_memory_of(file))

    def load_names() -> Any:
        names = unpickler.load()
        return pickle.loads(names) if isinstance(names, bytes) else names

    return unpickler.load(), load_names


def _unpickler_of(memory: memoryview) -> pickle.Unpickler:
    length, count = _HEAD.unpack_from(memory)
    spans = [_SPAN.unpack_from(memory, _HEAD.size + i * _SPAN.size) for i in range(count)]
    start = _HEAD.size + count * _SPAN.size
    buffers = [memory[offset : offset + size] for offset, size in spans]
    return pickle.Unpickler(io.BytesIO(memory[start : start + length]), buffers=buffers)


def _layout(pickled: int, sizes: list[int]) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the file's header, and the offset and length of each buffer after the pickle."""
    end = _HEAD.size + len(sizes) * _SPAN.size + pickled
    spans = []
    for size in sizes:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        spans.append((offset, size))
        end = offset + size
    return _HEAD.pack(pickled, len(sizes)) + b"".join(_SPAN.pack(*span) for span in spans), spans


def _memory_of(file: int) -> memoryview:
    """Return the file's bytes, writable and private. Small files are read, because a mapping keeps a descriptor open."""
    size = os.fstat(file).st_size
    if size >= _WORTH_MAPPING:
        return memoryview(mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    return memoryview(bytearray(os.pread(file, size, 0)))  # not read(): ranks share the file's position


def _refusal(value: Any) -> Exception | None:
    """Return the exception from pickling this value, or None if it succeeds."""
    buffers: list[memoryview] = []
    try:
        ValuePickler(io.BytesIO(), buffers).dump(value)
    except Exception as error:  # noqa: BLE001 (classes may raise anything)
        return error.with_traceback(None)  # its frames lead back to the caller's, which holds the error
    finally:
        buffers.clear()
    return None


class ScriptNotes:
    """Placeholder for a dict of what the pickler has noticed about the functions and classes before it.

    ``objects`` has those of ``__main__``, by name. ``sources`` has the source lines of files that do not exist, by name, so
    that tracebacks show notebook cells. ``reads_names`` is True if one of them may use any name of the script.
    """


class _MainGlobals(dict[str, Any]):
    """Placeholder for the globals of ``__main__`` in the rank."""


def _main_globals() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle pickler that keeps tensor memory out of the pickle."""

    def __init__(
        self,
        stream: io.BytesIO,
        buffers: list[memoryview] | None,
        sent: list[types.FunctionType | type] | None = None,
        *,
        in_main: bool = False,
    ) -> None:
        keep_apart = None if buffers is None else lambda buffer: buffers.append(buffer.raw())
        super().__init__(stream, protocol=5, buffer_callback=keep_apart)
        self._sent = [] if sent is None else sent
        self._storages: dict[object, torch.UntypedStorage] = {}
        self._main_objects: dict[str, Any] = {}
        self._sources: dict[str, list[str]] = {}
        self._reads_names = False
        self._importable = {"__main__": True}  # cloudpickle sends what it defines by value
        if in_main:
            self.globals_ref[id(vars(sys.modules["__main__"]))] = _MainGlobals(__name__="__main__")
        self._files = {__file__}  # of `_tensor` and `_storage`, which every reader can import

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in _PLAIN_TENSORS and _is_dense(obj):
            return self._reduce_tensor(obj)
        if (name := _name_of_module(obj)) is not None:  # before isinstance, which would load a lazy module
            return resolve_name, (name,)
        if isinstance(obj, ScriptNotes):
            notes = {"objects": self._main_objects, "sources": self._sources, "reads_names": self._reads_names}
            return dict, (notes,)
        if isinstance(obj, _MainGlobals):
            return _main_globals, ()
        if isinstance(obj, types.FunctionType):
            self._note_source(obj.__code__.co_filename)
        if type(obj) in _FILES and obj is not sys.stdout and obj is not sys.stderr:
            msg = "an open file belongs to its process: send the path, and open the file there"
            raise RefusedError(obj, msg)
        if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
            msg = "DistributedDataParallel belongs to the process group of its rank: send functional.unwrap(model) instead"
            raise RefusedError(obj, msg)
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__" and obj.__qualname__.isidentifier():
            self._main_objects[obj.__qualname__] = obj
        if isinstance(obj, BaseException):
            return reduce_exception(obj, lambda value: _refusal(value) is None)
        if (name := _name_of_operator(obj)) is not None:
            return resolve_name, (name,)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            return _storage, (pickle.PickleBuffer(_bytes_of(obj)),)
        if isinstance(obj, (type, types.FunctionType, types.ModuleType)):
            self._check_module(obj.__name__ if isinstance(obj, types.ModuleType) else obj.__module__)
        if (definition := reduce_definition(obj)) is not None:
            return definition
        reduced = super().reducer_override(obj)
        if isinstance(obj, (types.FunctionType, type)) and reduced is not NotImplemented:
            self._sent.append(obj)
            if isinstance(obj, type):
                return reduce_class(obj, reduced)
            if isinstance(obj, types.FunctionType) and may_read_names(obj.__code__):
                self._reads_names = True
        return reduced

    def _check_module(self, name: str) -> None:
        """Have cloudpickle send the content of a module by value if ranks cannot import it."""
        if name not in self._importable:
            module = sys.modules.get(name)
            self._importable[name] = module is None or is_importable(name)
            if module is not None and not self._importable[name]:
                cloudpickle.register_pickle_by_value(module)

    def _note_source(self, filename: str) -> None:
        if filename not in self._files:
            self._files.add(filename)
            if not Path(filename).exists() and (lines := linecache.getlines(filename)):
                self._sources[filename] = lines

    def _reduce_tensor(self, tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Reduce a tensor to a view of its storage. Each storage is pickled once, so tensors still share memory."""
        torch.utils.hooks.warn_if_has_hooks(tensor)  # as torch does when it pickles
        here = tensor.detach().cpu()
        storage = here.untyped_storage()
        # All empty storages have the address 0. Others may be two objects for one memory, as with torch.from_numpy.
        memory = (storage.data_ptr(), storage.nbytes()) if storage.nbytes() else id(storage)
        storage = self._storages.setdefault(memory, storage)
        place = (here.storage_offset(), tuple(here.shape), here.stride())
        return _tensor, (type(tensor), storage, here.dtype, *place, tensor.requires_grad)


def _name_of_module(value: Any) -> str | None:
    """Return the name to import a module by, if it has its own class. None for any other object.

    cloudpickle handles instances of ``types.ModuleType`` itself.
    """
    if type(value) is types.ModuleType:
        return None
    try:
        name = object.__getattribute__(value, "__name__")  # getattr would load a lazy module
    except Exception:  # noqa: BLE001 (classes may raise anything)
        return None
    if not isinstance(name, str):
        return None
    if sys.modules.get(name) is value:
        return name
    before, _, last = name.rpartition(".")  # torch.ops.aten is an attribute of torch.ops, but not in sys.modules
    parent = sys.modules.get(before)
    are_modules = isinstance(value, types.ModuleType) and isinstance(parent, types.ModuleType)
    return name if are_modules and vars(parent).get(last) is value else None


def _name_of_operator(value: Any) -> str | None:
    """Return the name of an operator of torch, such as ``torch.ops.aten.add.Tensor``. None for any other object."""
    if not isinstance(value, _OPERATORS):
        return None
    name = f"{value.__module__}.{value.__name__}".replace("torch._ops.", "torch.ops.", 1)
    try:
        return name if resolve_name(name) is value else None
    except (ImportError, AttributeError):  # its library has removed it
        return None


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if memory, shape, and strides describe the tensor completely. torch pickles other tensors."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_nested
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
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    return torch.nn.Parameter(tensor, requires_grad) if cls is torch.nn.Parameter else tensor.requires_grad_(requires_grad)


def _storage(memory: Any) -> torch.UntypedStorage:
    if len(memory) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Return the storage's memory without a copy. The memory keeps the storage alive, which may be a copy from a device."""
    memory = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = storage  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    return memoryview(memory).cast("B")
