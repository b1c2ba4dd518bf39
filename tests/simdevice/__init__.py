"""A simulated accelerator, for tests that need several devices on a machine that has none.

``install()`` adds the device type ``sim`` to torch: devices ``sim:0`` to ``sim:3`` in host memory, which
behave as separate devices do. An operator over two of them raises, an ordinal out of range raises, every
copy between them is counted, and backward runs on a worker thread per device. ``install(name="neuron")``
gives the type another name::

    if (reason := simdevice.available()) is None:
        sim = simdevice.install()           # also torch.sim and torch.get_device_module("sim")
        model = torch.nn.Linear(4, 2).to("sim:1")
        simdevice.reset_stats()
        model(torch.ones(3, 4).to("sim:1"))
        assert simdevice.stats().h2d_bytes == 48

Each device has streams, spelled as CUDA's are (``torch.sim.Stream``, ``Event``, ``stream``, ``current_stream``,
``wait_stream``, ``record_stream`` ...), and code that orders its work on them wrongly fails, in every run::

    side = sim.Stream("sim:1")
    x = torch.ones(3, device="sim:1")
    with sim.stream(side):
        x.add_(1)                           # on another stream than the ones: side.wait_stream(...) is missing
    assert simdevice.stats().races == ()    # names the two operators, their streams and what each did

Two mechanisms detect such errors:

* A race detector. Every use of device memory must come after the uses it conflicts with: by the order of one
  stream, by an event, or because the host waited in between. Memory that another stream uses when it is freed
  needs a ``record_stream`` for it, or an order of the streams before the next allocation. Only elements that an
operator touches count: two streams may write parts of one tensor that share no element.
* Late copies. Copies between devices, and those with ``non_blocking=True`` from or to pinned memory, happen as
  late as the program allows: before the next kernel of their stream, or of one that waits for it, or when the
host waits. They read their source at that moment. Fresh and freed memory holds NaN (all bits set).

Good to know before use:

* Install before the first backward pass of the process, the CPU's included: torch creates the worker threads
  of all devices then, and only then. A test session does best to install while it is being configured.
* Installing cannot be undone. From then on ``torch.accelerator.current_accelerator()`` is ``sim``, even
  where there is a real accelerator.
* Operators run the CPU's kernels, so results equal the CPU's up to rounding (attention and recurrent layers
  take another path), and random numbers come from the CPU's generator. Kernels run when they are issued, in
  the thread that issues them; only the copies above come later.
* What the host does to pinned memory is not watched: it shows in the numbers alone. So does a race that a
  wait of the host in another thread happens to order.
* The default stream is one like the others: nothing orders it with them. Priorities, graphs, timing beyond
  the host's clock, peer access, and events between processes are not simulated; nor are sparse, nested and
  quantized tensors.

The C++ half (``native``) is compiled once per version of torch, of Python and of itself, and kept under
``$XDG_CACHE_HOME/parawrap-tests`` (``~/.cache/parawrap-tests``).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Protocol, Self, cast

import torch
from torch.utils import backend_registration

__all__ = ["Stats", "available", "install", "reset_stats", "stats"]

_NAME = "sim"
_EXTENSION = "parawrap_simdevice"
_NATIVE = Path(__file__).with_name("native")
_CFLAGS = ["-O1", "-g0"]
_BUILD_TIMEOUT = 1800.0  # it takes two minutes of a processor, and test machines may be busy
_BUILD_SCRIPT = "import json, sys, torch.utils.cpp_extension as e; e.load(**json.loads(sys.argv[1]))"
_install_lock = threading.Lock()

_Device = torch.device | str | int | None


class _Extension(Protocol):
    """The functions that binding.cpp exports."""

    device_type: int

    def start(self, count: int) -> None: ...
    def device_count(self) -> int: ...
    def current_device(self) -> int: ...
    def set_device(self, index: int) -> None: ...
    def current_stream_id(self, device: int) -> int: ...
    def read_counters(self) -> dict[str, int]: ...
    def read_memory(self) -> list[tuple[int, int]]: ...
    def read_races(self) -> list[str]: ...
    def reset_counters(self) -> None: ...


@dataclass(frozen=True)
class Stats:
    """Counters of the simulated devices since ``reset_stats()``, and their live memory.

    ``h2d``, ``d2h`` and ``d2d`` number the copies from host to device, from device to host and from one
    device to another; the ``_bytes`` fields say how many bytes arrived by them. Copies within one device and
    copies of no element are not counted. ``late`` numbers the copies that were put off. ``scalar_reads``
    numbers the calls like ``item()``, which on an accelerator wait for the device. ``operators`` numbers the
    kernels run. ``live`` and ``live_bytes`` describe the memory now allocated on all devices,
    ``live_by_device`` and ``live_bytes_by_device`` that on each; a reset leaves them. ``races`` says what the
    race detector found, a sentence each, and no more than twenty.
    """

    h2d: int
    h2d_bytes: int
    d2h: int
    d2h_bytes: int
    d2d: int
    d2d_bytes: int
    late: int
    scalar_reads: int
    operators: int
    live_by_device: tuple[int, ...]
    live_bytes_by_device: tuple[int, ...]
    races: tuple[str, ...]

    @property
    def live(self) -> int:
        """The number of live allocations on all devices."""
        return sum(self.live_by_device)

    @property
    def live_bytes(self) -> int:
        """The bytes in live allocations on all devices."""
        return sum(self.live_bytes_by_device)


def available(name: str = _NAME) -> str | None:
    """Return why the device cannot be installed here, or None if it can."""
    return next(_obstacles(name), None)


def install(count: int = 4, name: str = _NAME) -> ModuleType:
    """Add ``count`` devices of type ``name`` to torch and return their module, such as ``torch.sim``.

    A second call in one process returns the same module, and with another number of devices it raises
        ValueError. The first call ever compiles the device, which takes about a minute.
    """
    with _install_lock:
        if (module := _installed()) is None:
            if (reason := available(name)) is not None:
                raise RuntimeError(f"the simulated device cannot be installed: {reason}")
            extension = _load_extension()
            extension.start(count)
            backend_registration.rename_privateuse1_backend(name)
            module = _device_module(extension)
            torch._register_device_module(name, module)  # type: ignore[no-untyped-call]
            backend_registration.generate_methods_for_privateuse1_backend()
        elif module.device_count() != count:
            raise ValueError(f"{module.device_count()} simulated devices are installed, not {count}")
        return module


def stats() -> Stats:
    """Return the counters as they stand."""
    extension = _extension()
    memory = extension.read_memory()
    return Stats(
        **extension.read_counters(),
        live_by_device=tuple(blocks for blocks, _ in memory),
        live_bytes_by_device=tuple(nbytes for _, nbytes in memory),
        races=tuple(extension.read_races()),
    )


def reset_stats() -> None:
    """Set all counters to zero, except those of live memory."""
    _extension().reset_counters()


# The module is an attribute of torch, so that two copies of this package share it.


def _installed() -> ModuleType | None:
    module = getattr(torch, _name(), None)
    return module if hasattr(module, "_parawrap_extension") else None


def _name() -> str:
    """Return the name that the device type has in this process."""
    return torch._C._get_privateuse1_backend_name()


def _extension() -> _Extension:
    module = _installed()
    if module is None:
        raise RuntimeError("the simulated device is not installed; call install() first")
    return cast("_Extension", module._parawrap_extension)


# ---------------------------------------------------------------- torch.sim


def _index(device: _Device, extension: _Extension) -> int:
    """Return a device's ordinal; a device without one means the current device."""
    if isinstance(device, int):
        return device
    if device is not None:
        device = torch.device(device)
        if device.type != _name():
            raise ValueError(f"expected a {_name()} device, got {device}")
        if device.index is not None:
            return device.index
    return extension.current_device()


def _device_module(extension: _Extension) -> ModuleType:
    """Return the device module, with the functions of torch.cuda that torch calls."""
    module = ModuleType(f"torch.{_name()}", "The simulated devices of parawrap's tests.")
    vars(module).update(_of_devices(extension), **_of_streams(extension), _parawrap_extension=extension)
    return module


def _of_devices(extension: _Extension) -> dict[str, Callable[..., object]]:
    """Return the functions of torch.sim that are about devices, memory and random numbers."""

    class DeviceGuard:
        """Makes a device the current one for the length of a with block."""

        def __init__(self, device: _Device) -> None:
            self._index = _index(device, extension)
            self._previous: int = -1

        def __enter__(self) -> None:
            self._previous = extension.current_device()
            if self._index >= 0:
                extension.set_device(self._index)

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            traceback: TracebackType | None,
        ) -> None:
            extension.set_device(self._previous)

    def set_device(device: _Device) -> None:
        extension.set_device(_index(device, extension))

    def memory_allocated(device: _Device = None) -> int:
        return extension.read_memory()[_index(device, extension)][1]

    def get_rng_state(device: _Device = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
        torch.set_rng_state(new_state)

    return {
        "device": DeviceGuard,
        "device_count": extension.device_count,
        "current_device": extension.current_device,
        "set_device": set_device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "empty_cache": lambda: None,
        "memory_allocated": memory_allocated,
        "manual_seed": lambda _: None,  # torch.manual_seed has seeded the CPU's generator, which is used
        "manual_seed_all": lambda _: None,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "_is_in_bad_fork": lambda: False,
    }


def _of_streams(extension: _Extension) -> dict[str, Callable[..., object]]:
    """Return the classes and functions of torch.sim that are about streams and events."""

    class Stream(torch.Stream):
        """A stream of the current device, or of another; new ones are handed out in turn from a pool per
        device: of 32, or of 8 if the priority is negative.
        """

        def __new__(cls, device: _Device = None, priority: int = 0, **numbers: int) -> Self:
            if numbers:
                return super().__new__(cls, priority=priority, **numbers)
            return super().__new__(cls, torch.device(_name(), _index(device, extension)), priority=priority)

    def event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event(
            _name(), enable_timing=enable_timing
        )  # a function, because torch compares only torch.Event objects

    def numbered(stream_id: int, device: _Device) -> Stream:
        index = _index(device, extension)
        return Stream(stream_id=stream_id, device_index=index, device_type=extension.device_type)

    def current_stream(device: _Device = None) -> Stream:
        return numbered(extension.current_stream_id(_index(device, extension)), device)

    def default_stream(device: _Device = None) -> Stream:
        return numbered(0, device)

    def set_stream(stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @contextlib.contextmanager
    def use_stream(stream: torch.Stream | None) -> Iterator[None]:
        """Make a stream current on its device, and its device the current one, for the length of a with block."""
        if stream is None:
            yield
            return
        device, previous = extension.current_device(), current_stream(stream.device)
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(previous)
            extension.set_device(device)

    def synchronize(device: _Device = None) -> None:
        torch.accelerator.synchronize(_index(device, extension))

    return {
        "Stream": Stream,
        "Event": event,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "stream": use_stream,
        "synchronize": synchronize,
    }


# ---------------------------------------------------------------- building


def _obstacles(name: str) -> Iterator[str]:
    """Yield the reasons why the device cannot be installed."""
    if _installed() is not None:
        return
    backend = torch._C._get_privateuse1_backend_name()
    if backend not in ("privateuseone", name):
        yield f"the device type {backend!r} takes torch's only place for a custom device"
    if importlib.util.find_spec("fcntl") is None:
        yield "it is built under a file lock, which needs a POSIX system"
    library = _library()
    if library.is_file():
        return
    parent = next(path for path in library.parents if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        yield f"nothing can be written to {parent}"
    if shutil.which(_compiler()) is None:
        yield f"the C++ compiler {_compiler()!r} is not on PATH"
    if _ninja_directory() is None:
        yield "ninja is neither on PATH nor installed beside Python"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield f"Python's headers are not in {sysconfig.get_path('include')}"
    if importlib.util.find_spec("setuptools") is None:
        yield "setuptools, which torch builds extensions with, is not installed"


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _ninja_directory() -> str | None:
    """Return the folder of the ninja program: PATH's, else the one installed with this Python."""
    places = [None, str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    if (spec := importlib.util.find_spec("ninja")) is not None and spec.origin is not None:
        places.append(str(Path(spec.origin).parent / "data" / "bin"))
    for place in places:
        if (program := shutil.which("ninja", path=place)) is not None:
            return str(Path(program).parent)
    return None


def _native_files(pattern: str) -> list[Path]:
    return sorted(_NATIVE.glob(pattern))


def _library() -> Path:
    """Return the folder of the extension, one per combination of sources, torch, and compiler."""
    parts = [
        torch.__version__,
        str(torch.version.git_version),
        sys.version,
        str(sysconfig.get_config_var("EXT_SUFFIX")),
        platform.platform(),
        _compiler(),
        *_CFLAGS,
        *(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in _native_files("*")),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "parawrap-tests", f"simdevice-{key}", f"{_EXTENSION}.so")


def _load_extension() -> _Extension:
    """Return the extension, and compile it if it does not exist."""
    library = _library()
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(library.with_name("build.lock")):
            if not library.is_file():
                _build(library)
    spec = importlib.util.spec_from_file_location(_EXTENSION, library)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return cast("_Extension", extension)


def _build(library: Path) -> None:
    """Compile the extension.

    It runs in a separate process, because torch's builder changes its process and cannot run twice in one. It uses a
    separate folder, because a killed builder leaves partial files and a lock file, which would block the
    next builder forever. Only a finished library is moved to its place.
    """
    for leftover in library.parent.glob("build-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as folder:
        arguments = {
            "name": _EXTENSION,
            "sources": [str(path) for path in _native_files("*.cpp")],
            "extra_cflags": _CFLAGS,
            "build_directory": folder,
            "is_python_module": False,
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _BUILD_SCRIPT, json.dumps(arguments)],
            cwd=folder,
            env={
                **os.environ,
                "PATH": os.pathsep.join(filter(None, [os.environ.get("PATH"), _ninja_directory()])),
                "CXX": _compiler(),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the simulated device could not be built:\n{done.stdout}{done.stderr}")
        Path(folder, library.name).replace(library)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a lock between processes, which the system releases if its holder dies."""
    import fcntl  # not on Windows, where available() says so

    deadline = time.monotonic() + _BUILD_TIMEOUT
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} has been held for {_BUILD_TIMEOUT:.0f} s") from None
                time.sleep(0.1)
        yield
