"""Ranks find functions, classes, and small values of the script by name, although they do not run the script."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import types

import pytest
import torch

from parawrap.launch.messages._pickle_values import pack_with_script, unpack_with_script
from parawrap.launch.messages._script_names import names_of_script
from tests.helpers.processes import run_script

SCRIPT = """
import io, json, sys, types
import torch
from parawrap import Platform, wrapper

class Base:
    def name(self):
        return helper(type(self).__name__)

class First(Base): pass
class Second(Base): pass
class Net(torch.nn.Linear): pass

def helper(text):
    return text.lower()

slow = sys.modules["slow"] = types.ModuleType("slow")
slow.__spec__ = types.SimpleNamespace(origin="slow.py")
LR, CONFIG, COUNT, DATA = 3, {"width": [1, 2]}, 0, torch.zeros(3)
saved = io.BytesIO()
torch.save(Net(1, 1), saved)

def use_data():
    return DATA.sum()

def count():
    global COUNT
    COUNT += 1
    CONFIG["width"].append(COUNT)

def find(saved):
    by_name = globals()["Second"]().name(), eval("LR + len(CONFIG['width'])"), eval("First.__name__")
    subclasses = [each.__name__ for each in Base.__subclasses__()]
    model = torch.load(io.BytesIO(saved), weights_only=False)
    return *by_name, subclasses, type(model).__name__

def change():
    count()
    count()
    main = sys.modules["__main__"]
    made = main.First()
    return [COUNT, main.COUNT, CONFIG, main.CONFIG is CONFIG, isinstance(made, Base), main.LR]

def plot():
    return slow.figure

def imports(model):
    model.eval()
    return "slow" in sys.modules

def lacks(name):
    return globals()[name]

CALLS = [
    (find, saved.getvalue()), (change,), (lacks, "use_data"), (lacks, "unknown"), (imports, Net(1, 1)),
]

if __name__ == "__main__":
    found = []
    for function, *args in CALLS:
        try:
            found.append(wrapper(Platform(device="cpu", verbose=False))(function)(*args)[0])
        except Exception as error:
            found.append([type(error).__name__, error.__notes__[0]])
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return json.loads(run_script(tmp_path_factory.mktemp("script"), SCRIPT))


def test_names_of_script_are_found(outcomes):
    """``globals()``, `eval`, ``__subclasses__``, and torch.load find names that no code uses."""
    assert outcomes[0] == ["second", 5, "First", ["First", "Second"], "Net"]


def test_the_script_is_one_module(outcomes):
    """Functions share their globals with the rank's `__main__`, and names that load late do not reset values."""
    assert outcomes[1] == [2, 2, {"width": [1, 2, 1, 2]}, True, True, 3]


def test_missing_name_is_explained(outcomes):
    assert [kind for kind, _ in outcomes[2:4]] == ["KeyError", "KeyError"]
    assert "the rank lacks the name 'use_data' of the script, because 'DATA' holds a Tensor" in outcomes[2][1]
    assert outcomes[3][1].startswith("raised in rank")


def test_unused_name_loads_nothing(outcomes):
    """A rank imports the modules of other functions only when it needs them. `model.eval()` is not `eval`."""
    assert outcomes[4] is False


@pytest.fixture
def main(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    return sys.modules["__main__"]


def test_unsendable_names_stay(main):
    """They keep all names behind, with the reason, and the value arrives."""
    exec(f"def large(): return {'x' * 100_000!r}", vars(main))  # pickle writes it before it fails
    main.holder = functools.partial(len)
    main.holder.lock = threading.Lock()
    file = pack_with_script([torch.ones(3)], "test")
    value, load_names = unpack_with_script(file)
    os.close(file)
    names, unsent = load_names()
    assert (value[0].tolist(), names, [*unsent]) == ([1, 1, 1], {}, ["large", "holder"])
    assert "the script's names cannot be pickled (cannot pickle '_thread.lock' object)" in unsent["holder"]


def test_search_for_names_is_bounded(main):
    main.light, main.heavy = functools.partial(len, "a"), functools.partial(len, torch.ones(1))
    for number in range(2000):
        exec(f"def f{number}(): return f{number + 1}", vars(main))
    sent, unsent = names_of_script()
    assert [*sent] == ["light"]
    assert "'heavy' holds a Tensor" in unsent["heavy"]
    assert unsent["f0"] == "'f0' uses more than 1000 other objects"
    assert unsent["f999"] == "the script has too many definitions"
