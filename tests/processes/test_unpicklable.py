"""UnsendableError names the address of the part that cannot be sent, with its type and the reason."""

from __future__ import annotations

import functools
import threading
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn

from tests.helpers.packing import address_of, refusal_of

LOCK = threading.Lock()


def locked(value):
    value.lock = LOCK
    return value


def locked_ring():
    ring = []
    ring += [ring, {"back": ring, "lock": LOCK}]
    return ring


def capturing(part):
    return lambda: part


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([1, (2, {"steps": [3, LOCK]})], "value[1][1]['steps'][1]"),
        (SimpleNamespace(net=SimpleNamespace(lock=LOCK)), "value.net.lock"),
        (capturing({"a": LOCK}), "value's variable 'part'['a']"),
        ([capturing(capturing(LOCK))], "value[0]'s variable 'part''s variable 'part'"),
        (lambda: [(lambda: LOCK) for _ in range(3)], "value's global 'LOCK'"),
        (functools.partial(print, 1, LOCK), "value.args[1]"),
        (functools.partial(print, end=LOCK), "value.keywords['end']"),
        (MethodType(print, SimpleNamespace(lock=LOCK)), "value.__self__.lock"),
        ([torch.ones(1), locked(torch.ones(1))], "value[1].lock"),
        (nn.Sequential(locked(nn.ReLU())), "value[0].lock"),
        (locked_ring(), "value[1]['lock']"),
        ([{LOCK}], "value[0][0]"),
    ],
)
def test_innermost_part_is_named(value, place):
    assert address_of(value) == place


def test_open_files_are_refused(tmp_path):
    with (tmp_path / "data.txt").open("w") as file:
        assert address_of({"files": [file]}) == "value['files'][0]"
        assert address_of(capturing(file)) == "value's variable 'part'"
        assert "an open file belongs to its process: send the path, and open the file there" in str(refusal_of(file))


def test_message_has_the_reason():
    class Session:
        def __reduce__(self):
            msg = "a session stays where it is"
            raise RuntimeError(msg)

    error = refusal_of([Session()])
    assert str(error).startswith("value[0] cannot be sent to another process: ")
    assert "Session: a session stays where it is (" in str(error)
    assert isinstance(error.__cause__, RuntimeError)
