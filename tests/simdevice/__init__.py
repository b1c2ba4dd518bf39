"""A simulated accelerator, for tests that need several devices on a machine that has none.

``install()`` adds the device type ``sim`` to torch: devices ``sim:0`` to ``sim:3`` in host memory,
which behave as separate devices do. An operator over two of them raises, copies between them are
counted, and backward runs on a worker thread per device. ``install(name="neuron")`` gives the type
another name.

Each device has streams, spelled as CUDA's are, and code that orders its work on them wrongly fails
in every run:

* A race detector. Every use of device memory must come after the uses it conflicts with: by the
  order of one stream, by an event, or because the host waited in between. Memory that another
  stream uses when it is freed needs a ``record_stream`` for it, or an order of the streams before
  the next allocation. ``stats().races`` names the operators and the streams.
* Late copies. Copies between devices, and those with ``non_blocking=True`` from or to pinned
  memory, happen as late as the program allows: before the next kernel of their stream, or of one
  that waits for it, or when the host waits. They read their source at that moment. Fresh and freed
  memory holds NaN (all bits set).

Good to know before use:

* Install before the first backward pass of the process: torch creates the worker threads of all
  devices then.
* Installing cannot be undone. From then on ``torch.accelerator.current_accelerator()`` is ``sim``.
* Operators run the CPU's kernels when they are issued, and random numbers come from the CPU's
  generator.
* What the host does to pinned memory is not watched: it shows in the numbers alone. Graphs, peer
  access, and events between processes are not simulated; nor are sparse, nested, and quantized
  tensors.

The C++ half (``native``) is compiled once per version of torch, of Python, and of itself, and kept
under ``$XDG_CACHE_HOME/parawrap-tests`` (``~/.cache/parawrap-tests``).
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch.accelerator._utils import _get_device_index
from torch.types import Device
from torch.utils import backend_registration

__all__ = ["Stats", "available", "install", "reset_stats", "stats"]

_NAME = "sim"
_EXTENSION = "parawrap_simdevice"
_NATIVE = Path(__file__).with_name("native")
_CFLAGS = ["-O1", "-g0"]
_BUILD_SCRIPT = (
    "import json, sys, torch.utils.cpp_extension as e; e.load(**json.loads(sys.argv[1]))"
)


@dataclass(frozen=True)
class Stats:
    """Counters of the simulated devices since ``reset_stats()``, and their live memory.

    ``h2d``, ``d2h``, and ``d2d`` number the copies between host and devices; the ``_bytes`` fields
    say how many bytes arrived by them. Copies within one device are not counted. ``late`` numbers
    the copies that were put off. ``scalar_reads`` numbers the calls like ``item()``, which on an
    accelerator wait for the device. ``operators`` numbers the kernels run. ``races`` says what the
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
        return sum(self.live_by_device)

    @property
    def live_bytes(self) -> int:
        return sum(self.live_bytes_by_device)


def available(name: str = _NAME) -> str | None:
    """Return why the device cannot be installed here, or None if it can."""
    if _installed() is not None:
        return None
    backend = torch._C._get_privateuse1_backend_name()
    if backend not in ("privateuseone", name):
        return f"the device type {backend!r} takes torch's only place for a custom device"
    if _library().is_file():
        return None
    if shutil.which(_compiler()) is None:
        return f"the C++ compiler {_compiler()!r} is not on PATH"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return f"Python's headers are not in {sysconfig.get_path('include')}"
    if importlib.util.find_spec("setuptools") is None:
        return "setuptools, which torch builds extensions with, is not installed"
    return None


def install(count: int = 4, name: str = _NAME) -> ModuleType:
    """Add ``count`` devices of type ``name`` to torch and return their module, such as
    ``torch.sim``.

    A second call in one process returns the same module. The first call ever compiles the device,
    which takes a minute.
    """
    if (module := _installed()) is None:
        extension = _load_extension()
        extension.start(count)
        backend_registration.rename_privateuse1_backend(name)
        module = _device_module(extension)
        torch._register_device_module(name, module)
        backend_registration.generate_methods_for_privateuse1_backend()
    return module


def stats() -> Stats:
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
    return torch._C._get_privateuse1_backend_name()


def _extension() -> ModuleType:
    return _installed()._parawrap_extension


# ---------------------------------------------------------------- torch.sim


def _device_module(extension: ModuleType) -> ModuleType:
    """Return the device module, with the functions of torch.cuda that torch, parawrap, and the
    tests call.
    """

    def default_stream(device: Device = None) -> torch.Stream:
        index = _get_device_index(device, optional=True)
        return torch.Stream(stream_id=0, device_index=index, device_type=extension.device_type)

    @contextlib.contextmanager
    def use_stream(stream: torch.Stream | None) -> Iterator[None]:
        """Make a stream current on its device, and its device the current one, for the length of a
        with block.
        """
        if stream is None:
            yield
            return
        previous = torch.accelerator.current_stream(stream.device)
        with torch.accelerator.device_index(stream.device_index):
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(previous)

    module = ModuleType(f"torch.{_name()}", "The simulated devices of parawrap's tests.")
    vars(module).update(
        device=lambda device: torch.accelerator.device_index(
            _get_device_index(device, optional=True)
        ),
        device_count=extension.device_count,
        current_device=extension.current_device,
        set_device=torch.accelerator.set_device_index,
        is_available=lambda: True,
        # torch.manual_seed has seeded the CPU's generator, which is used
        manual_seed=lambda _: None,
        manual_seed_all=lambda _: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda new_state, device=None: torch.set_rng_state(new_state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        _is_in_bad_fork=lambda: False,
        Stream=torch.Stream,
        current_stream=torch.accelerator.current_stream,
        default_stream=default_stream,
        stream=use_stream,
        synchronize=torch.accelerator.synchronize,
        _parawrap_extension=extension,
    )
    return module


# ---------------------------------------------------------------- building


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _library() -> Path:
    """Return the file of the extension, one per combination of sources, torch, and compiler."""
    parts = [
        torch.__version__,
        str(torch.version.git_version),
        sys.version,
        str(sysconfig.get_config_var("EXT_SUFFIX")),
        platform.platform(),
        _compiler(),
        *_CFLAGS,
        *(
            f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"
            for path in sorted(_NATIVE.glob("*"))
        ),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "parawrap-tests", f"simdevice-{key}", f"{_EXTENSION}.so")


def _load_extension() -> ModuleType:
    library = _library()
    if not library.is_file():
        import fcntl  # Windows has none

        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_name("build.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it if its holder dies
            if not library.is_file():
                _build(library)
    spec = importlib.util.spec_from_file_location(_EXTENSION, library)
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _build(library: Path) -> None:
    """Compile the extension.

    It runs in a separate process, because torch's builder changes its process and cannot run twice
    in one. It uses a separate folder, because a killed builder leaves partial files and a lock
    file, which would block the next builder forever. Only a finished library is moved to its place.
    """
    for leftover in library.parent.glob("build-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    # This Python may have ninja
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as folder:
        arguments = {
            "name": _EXTENSION,
            "sources": [str(path) for path in sorted(_NATIVE.glob("*.cpp"))],
            "extra_cflags": _CFLAGS,
            "build_directory": folder,
            "is_python_module": False,
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _BUILD_SCRIPT, json.dumps(arguments)],
            cwd=folder,
            env={**os.environ, "PATH": path, "CXX": _compiler()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"the simulated device could not be built:\n{done.stdout}{done.stderr}"
            )
        Path(folder, library.name).replace(library)
