"""Exceptions from ranks keep their type, args, attributes, and notes, even if the class does not pickle."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import threading

import pytest
import torch
import torch.distributed as dist

from parawrap import Platform
from parawrap.errors import LaunchError, RankDiedError
from parawrap.launch import Job
from parawrap.launch.messages._pickle_values import unpack
from parawrap.launch.messages._rank_errors import is_echo, pack_exception, summary_of, traceback_of

LOCK = threading.Lock()


def sent(error: BaseException) -> BaseException:
    """Return the exception after it was packed and unpacked."""
    file = pack_exception(error)
    try:
        return unpack(file)
    finally:
        os.close(file)


class OtherArgs(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code


class OneOtherArg(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"failed with {code}")
        self.code = code


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__("failed", code)
        self.code = code


class WithLock(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = LOCK
        self.code = 7


class LockInArgs(Exception): ...


class Unreducible(Exception):
    def __reduce__(self):
        msg = "not me"
        raise RuntimeError(msg)


class ForgetsItsNotes(Exception):
    def __reduce__(self):
        return ForgetsItsNotes, self.args


class OwnOSError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "No such table", path)
        self.table = "users"


class OfTwoBases(ValueError, OSError):
    def __init__(self, *, table: str) -> None:
        OSError.__init__(self, 2, "No such table")
        self.table = table


class OwnDecodeError(UnicodeDecodeError):
    def __init__(self, data: bytes) -> None:
        super().__init__("utf-8", data, 0, 1, "invalid start byte")


class OwnExit(SystemExit):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Unreadable(RuntimeError):
    def __str__(self) -> str:
        raise TypeError


class Wrapping(Exception):
    def __init__(self, inner: Exception) -> None:
        super().__init__(inner)


ALL = [
    ValueError("plain"),
    ValueError(),
    KeyError("missing"),
    KeyError(("a", 1)),
    StopIteration(3),
    KeyboardInterrupt(),
    SystemExit(3),
    OwnExit(code=4),
    OSError(2, "No such file", "data.csv"),
    PermissionError(13, "denied", "a", None, "b"),
    OwnOSError("data.csv"),
    OfTwoBases(table="users"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    OwnDecodeError(b"\xff"),
    ImportError("no", name="numpie", path="/lib"),
    SyntaxError("bad", ("f.py", 1, 2, "x = = 1", 1, 3)),
    json.JSONDecodeError("Expecting value", "{", 1),
    subprocess.CalledProcessError(2, ["make"], b"out", b"err"),
    torch.OutOfMemoryError("CUDA out of memory"),
    dist.DistBackendError("NCCL error"),
    RankDiedError("gone", rank=1, exit_code=3),
    OtherArgs(3, "no space"),
    OneOtherArg(3),
    KeywordOnly(code=3),
    WithLock("busy"),
    LockInArgs("busy", LOCK),
    Unreducible("odd", 3),
    ForgetsItsNotes("odd"),
    Frozen(3),
    Unreadable("odd"),
    Wrapping(OtherArgs(3, "inner")),
    ExceptionGroup("several", [ValueError("v"), KeyError("k")]),
    ExceptionGroup("several", [OtherArgs(3, "v"), ExceptionGroup("inner", [KeywordOnly(code=1)])]),
    ExceptionGroup("several", [WithLock("busy"), ValueError("v")]),
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_the_type_of_an_exception_arrives(error):
    """`except` works in the parent as in the rank."""
    assert type(sent(error)) is type(error)


@pytest.mark.parametrize("error", [each for each in ALL if LOCK not in each.args], ids=lambda error: type(error).__name__)
def test_the_args_and_text_of_an_exception_arrive(error):
    """The exception has the same args and the same summary."""
    got = sent(error)
    assert repr(got.args) == repr(error.args)
    assert summary_of(got) == summary_of(error)


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (OSError(2, "No such file", "data.csv"), ["errno", "strerror", "filename"]),
        (PermissionError(13, "denied", "a", None, "b"), ["errno", "filename", "filename2"]),
        (OwnOSError("data.csv"), ["errno", "strerror", "filename", "table"]),
        (OfTwoBases(table="users"), ["errno", "strerror", "table"]),
        (OwnDecodeError(b"\xff"), ["encoding", "object", "start", "end", "reason"]),
        (SystemExit(3), ["code"]),
        (OwnExit(code=4), ["code"]),
        (StopIteration(3), ["value"]),
        (ImportError("no", name="numpie", path="/lib"), ["msg", "name", "path"]),
        (SyntaxError("bad", ("f.py", 1, 2, "x = = 1", 1, 3)), ["filename", "lineno", "offset", "text"]),
        (json.JSONDecodeError("Expecting value", "{", 1), ["msg", "doc", "pos", "lineno"]),
        (subprocess.CalledProcessError(2, ["make"], b"out"), ["returncode", "cmd", "output"]),
        (RankDiedError("gone", rank=1, exit_code=3), ["rank", "signal", "exit_code"]),
        (OtherArgs(3, "no space"), ["code"]),
        (OneOtherArg(3), ["code"]),
        (KeywordOnly(code=3), ["code"]),
        (Frozen(3), ["code"]),
        (WithLock("busy"), ["code"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_attributes_of_an_exception_arrive(error, names):
    """Attributes arrive, and an attribute that cannot be sent does not affect the others."""
    got = sent(error)
    missing = object()
    assert [getattr(got, name, missing) for name in names] == [getattr(error, name) for name in names]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ValueError("v"),
        lambda: OtherArgs(3, "v"),
        lambda: WithLock("v"),
        lambda: LockInArgs(LOCK),
        lambda: Unreducible("v"),
        lambda: ForgetsItsNotes("v"),
    ],
    ids=["plain", "other args", "with a lock", "lock in args", "unreducible", "own reduce"],
)
def test_the_notes_of_an_exception_arrive(make):
    """Notes arrive for every kind of class."""
    error = make()
    error.add_note("in epoch 3")
    assert sent(error).__notes__ == ["in epoch 3"]


def test_the_members_of_an_exception_group_keep_their_types():
    """A member that pickle cannot rebuild keeps its type and its place in the group."""
    group = sent(ExceptionGroup("several", [WithLock("busy"), ExceptionGroup("inner", [KeywordOnly(code=1)])]))
    assert isinstance(group, ExceptionGroup)
    assert [type(each) for each in group.exceptions] == [WithLock, ExceptionGroup]
    assert group.subgroup(KeywordOnly) is not None


class NamedGroup(ExceptionGroup):
    """A group that only its own reduction can rebuild, because its arguments are not those of its base class."""

    def __init__(self, name, exceptions):
        self.args = (name,)

    def __reduce__(self):
        return NamedGroup, (self.message, self.exceptions)


def test_an_exception_that_only_its_own_reduction_rebuilds_arrives():
    """Such an exception keeps its type, its text, and its state."""
    got = sent(NamedGroup("several", [KeyError("a")]))
    assert (type(got), str(got), repr(got.exceptions)) == (NamedGroup, "several (1 sub-exception)", "(KeyError('a'),)")


def test_a_validation_error_of_pydantic_arrives():
    """Its state is in C, and its class refuses to be made by ValueError."""
    core = pytest.importorskip("pydantic_core")
    error = core.ValidationError.from_exception_data("Config", [{"type": "int_parsing", "loc": ("lr",), "input": "x"}])
    got = sent(error)
    assert (type(got), str(got), got.errors()) == (type(error), str(error), error.errors())


def test_an_exception_with_a_tensor_arrives_with_it():
    """A tensor attribute keeps its values and dtype, without its autograd graph."""
    error = ValueError("nan in loss")
    error.loss = 2 * torch.ones(2, dtype=torch.float64, requires_grad=True)
    got = sent(error)
    assert (got.loss.tolist(), got.loss.dtype) == ([2, 2], torch.float64)


def test_an_exception_of_a_local_class_arrives():
    """A class defined in a function keeps its name and bases."""

    class LocalError(KeyError):
        def __init__(self, *, code):
            super().__init__(code)

    got = sent(LocalError(code=3))
    assert (type(got).__qualname__, got.args, isinstance(got, KeyError)) == (LocalError.__qualname__, (3,), True)


def test_an_unsendable_exception_class_becomes_a_launch_error():
    """LaunchError contains the type and text of the original exception."""

    class LockedError(Exception):
        lock = LOCK

    got = sent(LockedError("no space"))
    assert isinstance(got, LaunchError)
    assert "LockedError: no space" in str(got)


def test_packing_exceptions_leaks_no_descriptors():
    """Every file that packing opens is closed, also after failed attempts."""
    before = os.open(os.devnull, os.O_RDONLY)
    os.close(before)
    for error in ALL:
        sent(error)
    after = os.open(os.devnull, os.O_RDONLY)
    os.close(after)
    assert after == before


# -- texts


def failing(error: BaseException) -> BaseException:
    def inner() -> None:
        raise error

    try:
        inner()
    except BaseException as caught:
        return caught


def test_a_summary_is_the_last_line_of_the_traceback():
    """The summary has the type and the text."""
    assert summary_of(KeyError("k")) == "KeyError: 'k'"


@pytest.mark.parametrize(
    "error", [Unreadable("odd"), ValueError("two\nlines"), SyntaxError("bad", ("f.py", 1, 2, "x =", 1, 3))]
)
def test_every_exception_has_a_summary_that_names_it(error):
    """The summary names the type, even if the exception has no readable text."""
    assert type(error).__name__ in summary_of(error)


def test_a_traceback_has_frames_and_cause():
    """The text has the user's frames, the cause, and the exception."""
    cause = failing(KeyError("cause"))
    error = ValueError("effect")
    error.__cause__ = cause
    text = traceback_of(failing(error))
    assert text.splitlines()[-1] == "ValueError: effect"
    assert "in inner" in text
    assert "KeyError: 'cause'" in text
    assert "direct cause" in text


def test_a_traceback_omits_leading_frames_of_parawrap():
    """The text starts at the first frame outside parawrap. Without such a frame, all stay."""
    with pytest.raises(ZeroDivisionError) as caught:
        Job(Platform(device="cpu"), lambda: 1 / 0).call()
    error = caught.value.with_traceback(caught.tb.tb_next)  # begins in Job.call
    assert "in call" not in traceback_of(error)
    assert "in <lambda>" in traceback_of(error)
    with pytest.raises(TypeError) as caught:
        Job(Platform(device="cpu"), 3).call()
    text = traceback_of(caught.value.with_traceback(caught.tb.tb_next))
    assert "in call" in text


# -- echoes

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
ECHOES = [
    RuntimeError(
        f"{GLOO}pair.cc:537] Read error [127.0.0.1]:6534: Connection reset by peer. This is typically caused by a remote "
        "worker hanging or bugs in the application. Check the logs of the remote worker before reporting an error."
    ),
    RuntimeError(f"{GLOO}pair.cc:534] Connection closed by peer [127.0.0.1]:39837"),
    RuntimeError(f"{GLOO}pair.cc:601] writev [127.0.1.1]:5151: Broken pipe"),
    RuntimeError(f"Gloo connectFullMesh failed with [{GLOO}pair.cc:144] connect [127.0.0.1]:3: Connection refused"),
    RuntimeError(f"{GLOO}pair.cc:298] Socket closed"),
    dist.DistNetworkError(
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
    ),
    dist.DistNetworkError("recvValue failed on SocketImpl(fd=3, addr=[localhost]:2): Connection reset by peer"),
    dist.DistNetworkError("sendBytes failed on SocketImpl(fd=3, addr=[localhost]:2): Broken pipe"),
    dist.DistBackendError("NCCL communicator was aborted on rank 1."),
    dist.DistBackendError(
        "NCCL error in: ../c10d/NCCLUtils.hpp:268, remote process exited or there was a "
        "network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a "
        "remote process exiting prematurely.\nLast error:\nsocketPollConnect: Connection closed by remote peer node0<53412>"
    ),
    dist.DistBackendError(
        "NCCL error in: ../c10d/NCCLUtils.cpp:77, unhandled system error, NCCL version 2.27.5\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "Last error:\nsocketStartConnect: Connect to 10.0.0.1<41029> failed : Connection refused"
    ),
    ConnectionResetError(104, "Connection reset by peer"),
    BrokenPipeError(32, "Broken pipe"),
]


@pytest.mark.parametrize("error", ECHOES, ids=lambda error: str(error)[:40])
def test_a_backend_error_about_a_lost_rank_is_an_echo(error):
    """Errors of gloo, NCCL, and the store about a lost connection are echoes."""
    assert is_echo(error)


def test_an_error_caused_by_an_echo_is_an_echo():
    """Frameworks wrap the error of a broken collective in their own errors."""
    error = RuntimeError("training failed in step 5")
    error.__cause__ = ECHOES[0]
    assert is_echo(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("bad shape"),
        ValueError("connection closed by peer"),
        KeyError("broken pipe"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        FileNotFoundError(2, "No such file or directory", "data.csv"),
        OSError(28, "No space left on device"),
        NotImplementedError("peer review"),
        ExceptionGroup("several", [ValueError("v")]),
        KeyboardInterrupt(),
        Unreadable("odd"),
    ],
    ids=lambda error: repr(error.args)[:40],
)
def test_a_user_error_is_not_an_echo(error):
    """Other exceptions are failures, even if their text resembles an echo."""
    assert not is_echo(error)
