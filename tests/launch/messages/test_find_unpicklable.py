"""UnsendableError names the address of the part that cannot be sent, with its type and the reason."""

from __future__ import annotations

import collections
import functools
import sys
import tempfile
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.helpers.packing import address_of, refusal_of

LOCK = threading.Lock()


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def method(self): ...


class Slotted:
    __slots__ = ("__hidden", "part")

    def __init__(self, part=None, hidden=None):
        self.part = part
        self.__hidden = hidden


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Record:
    inner: Any


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = LOCK


class Key:
    lock = None

    def __repr__(self):
        return "Key()"


def locked_key():
    key = Key()
    key.lock = LOCK
    return key


def locked_tensor():
    tensor = torch.ones(1)
    tensor.origin = LOCK
    return tensor


def locked_ring():
    ring = []
    ring += [ring, {"back": ring, "lock": LOCK}]
    return ring


def capturing(part):
    return lambda: part


def capturing_an_unassigned_variable():
    def inner():
        return never, lock

    lock = LOCK
    if lock is None:
        never = 1
    return inner


class Careful:
    """Leaves its lock out of its state."""

    def __init__(self):
        self.lock = LOCK
        self.rows = [], (each for each in ())

    def __getstate__(self):
        return {"rows": self.rows}


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([1, (2, {"steps": [3, LOCK]})], "value[1][1]['steps'][1]"),
        ({0: {("a", 1): LOCK}}, "value[0][('a', 1)]"),
        (Pair(1, LOCK), "value[1]"),
        (Record(Record(LOCK)), "value.inner.inner"),
        (Holder(net=Holder(lock=LOCK)), "value.net.lock"),
        (Slotted(part=[LOCK]), "value.part[0]"),
        (Slotted(hidden=LOCK), "value._Slotted__hidden"),
        (capturing({"a": LOCK}), "['a'] of the variable 'part' captured by value"),
        ([capturing(capturing(LOCK))], "the variable 'part' captured by the variable 'part' captured by value[0]"),
        (capturing_an_unassigned_variable(), "the variable 'lock' captured by value"),
        (lambda: [(lambda: LOCK) for _ in range(3)], "the global 'LOCK' used by value"),
        (lambda x=LOCK, *, y=1: (x, y), "the default of value's parameter 'x'"),
        (lambda x=1, *, y=LOCK: (x, y), "the default of value's parameter 'y'"),
        (functools.partial(print, 1, LOCK), "value.args[1]"),
        (functools.partial(print, file=LOCK), "value.keywords['file']"),
        (functools.partial(capturing(LOCK)), "the variable 'part' captured by value.func"),
        (Holder(lock=LOCK).method, "value.__self__.lock"),
        ({locked_key(): 1}, ".lock of the key Key() of value"),
        ({1, locked_key()}, ".lock of a member of value"),
        ((each for each in ()), "value"),
        ([1, sys.stderr.buffer if hasattr(sys.stderr, "buffer") else sys.__stderr__], "value[1]"),
        ([torch.ones(1), locked_tensor()], "value[1].origin"),
        (nn.Sequential(Locked()), "value[0].lock"),
        (locked_ring(), "value[1]['lock']"),
        (collections.deque([1, LOCK]), "value[1]"),
        (collections.defaultdict(capturing(LOCK)), "the variable 'part' captured by an argument that makes value"),
        ([Careful()], "value[0].rows[1]"),
    ],
)
def test_the_innermost_part_is_named(value, place):
    assert address_of(value) == place


def test_addresses_start_with_args_or_kwargs():
    """In a call, addresses start with ``args``, ``kwargs``, or "the function"."""

    class ByValue:
        lock = LOCK

    assert address_of({"args": ({"lock": LOCK},), "kwargs": {}}, "") == "args[0]['lock']"
    assert address_of({"args": (), "kwargs": {"out": LOCK}}, "") == "kwargs['out']"
    assert address_of({"the function": lambda: LOCK, "args": ()}, "") == "the global 'LOCK' used by the function"
    assert address_of({"args": (ByValue,)}, "").startswith("args[0]")


@pytest.mark.parametrize("mode", ["r", "w", "r+b"])
def test_open_files_are_refused(tmp_path, mode):
    """The message says what to send instead."""
    (tmp_path / "data.txt").write_text("1 2 3")
    with (tmp_path / "data.txt").open(mode) as file:
        assert address_of({"files": [file]}) == "value['files'][0]"
        assert address_of(capturing(file)) == "the variable 'part' captured by value"
        assert "an open file belongs to its process: send the path, and open the file there" in str(refusal_of(file))
    with tempfile.NamedTemporaryFile("w+") as file:
        assert address_of([file]) == "value[0].file"


def test_the_message_has_type_and_reason():
    error = refusal_of([LOCK])
    assert str(error).startswith(
        "value[0] cannot be sent to another process: lock: cannot pickle '_thread.lock' object (docs"
    )
    assert isinstance(error.__cause__, TypeError)


def test_the_message_has_the_refusal_of_a_class():
    class Session:
        def __reduce__(self):
            msg = "a session stays where it is"
            raise RuntimeError(msg)

    assert "Session: a session stays where it is" in str(refusal_of([Session()]))


def test_a_value_nested_too_deeply_raises():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert "recursion" in str(refusal_of(deep))
