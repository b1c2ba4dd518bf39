"""Exceptions from ranks keep their type, args, attributes, and notes, even if the class does not
pickle.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading

import pytest

from parawrap.errors import LaunchError
from parawrap.processes.outcomes import pack_exception, summary_of
from parawrap.processes.pickling import unpack

LOCK = threading.Lock()


def sent(error):
    return unpack(pack_exception(error).to_bytes())


class OtherArgs(Exception):
    def __init__(self, code, *, reason):
        super().__init__(f"{reason} ({code})")
        self.code = code


class MissingFile(ValueError, OSError):
    """OSError makes its instances, although ValueError comes first."""

    def __init__(self, text, path):
        super().__init__(text)
        self.path = path


class NamedGroup(ExceptionGroup):
    """Its base class cannot make it, as with pydantic's ValidationError; only its own reduction
    can.
    """

    def __init__(self, name, exceptions):
        self.args = (name,)

    def __reduce__(self):
        return NamedGroup, (self.message, self.exceptions), vars(self)


class Slotted(Exception):
    __slots__ = ("code", "unset")

    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class WithLock(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock, self.code = LOCK, 7


SENDABLE = [
    (KeyError(("a", 1)), []),
    (PermissionError(13, "denied", "a", None, "b"), ["errno", "filename", "filename2"]),
    (ImportError("no", name="a", path="b"), ["name", "path"]),
    (
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        ["encoding", "object", "start", "reason"],
    ),
    (subprocess.CalledProcessError(2, ["make"], b"out"), ["returncode", "cmd", "output"]),
    (OtherArgs(3, reason="no space"), ["code"]),
    (Slotted(code=4), ["code"]),
    (Frozen(3), ["code"]),
    (MissingFile("no", "a"), ["path"]),
    (WithLock("busy"), ["code"]),
    (NamedGroup("several", [OtherArgs(1, reason="v")]), ["message"]),
    # The text has a lone surrogate, which cannot be encoded
    (ValueError(os.fsdecode(b"caf\xe9")), []),
]


@pytest.mark.parametrize(
    ("error", "names"), SENDABLE, ids=[type(error).__name__ for error, _ in SENDABLE]
)
def test_exception_is_complete(error, names):
    """Type, args, text, and attributes arrive.

    An attribute that cannot be sent does not affect the others.
    """
    vars(error)["__notes__"] = ["in epoch 3"]
    got = sent(error)
    assert type(got) is type(error)
    assert repr(got.args) == repr(error.args)
    assert summary_of(got) == summary_of(error)
    assert [getattr(got, name) for name in names] == [getattr(error, name) for name in names]
    assert got.__notes__ == ["in epoch 3"]


def test_group_with_an_unsendable_part():
    """A group keeps its type, so that ``except*`` works.

    Only unsendable parts of its members are replaced.
    """
    group = ExceptionGroup(
        "several", [WithLock("busy"), ExceptionGroup("inner", [KeyError("a"), ValueError(LOCK)])]
    )
    got = sent(group)
    assert [type(each) for each in got.exceptions] == [WithLock, ExceptionGroup]
    assert (got.exceptions[0].code, got.exceptions[0].lock) == (7, repr(LOCK))
    assert got.exceptions[1].exceptions[1].args == (repr(LOCK),)


def test_chains_and_circles_of_causes():
    """Packing a chain takes linear time, although each exception is an argument and the cause of
    the next one.
    """
    first = error = KeyError("first")
    for number in range(40):
        further = ValueError(number, error)
        further.__cause__ = error
        error = further
    got = sent(error)
    for _ in range(40):
        assert got.__cause__ is got.args[1]
        got = got.__cause__
    assert repr(got) == repr(first)
    first.__cause__ = first
    frozen = Frozen(3)
    object.__setattr__(frozen, "__cause__", KeyError("cause"))
    assert repr(sent(frozen).__cause__) == "KeyError('cause')"
    circle = sent(first)
    assert circle.__cause__ is circle


def test_unsendable_class_is_told():
    class LockedError(Exception):
        lock = LOCK

    got = sent(LockedError("no space"))
    assert type(got) is LaunchError
    assert "LockedError: no space" in str(got)
