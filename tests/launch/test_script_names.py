"""Ranks find functions, classes, and small values of the script by name, although they do not run the script."""

from __future__ import annotations

import json
import sys
import types

import pytest

from parawrap.launch.messages import _script_names
from parawrap.launch.messages._script_names import names_of_script
from tests.helpers.processes import run_script

SCRIPT = """
import functools, io, json, logging, sys, threading, typing
import torch, torch.distributed as dist
from parawrap import Platform, wrapper

class Base:
    def name(self):
        return helper(type(self).__name__)

class First(Base): pass
class Second(Base): pass
class Net(torch.nn.Linear): pass

@functools.lru_cache
def helper(text):
    return text.lower()

LR, CONFIG, COUNT, DATA, LOCK = 3, {"width": [1, 2]}, 0, torch.zeros(3), threading.Lock()
log = logging.getLogger("own")
saved = io.BytesIO()
torch.save(Net(1, 1), saved)

def use_data():
    return DATA.sum()

def count():
    global COUNT
    COUNT += 1
    CONFIG["width"].append(COUNT)

class Large:
    rows = DATA

def create(name):
    return globals()[name]().name()

def evaluate(text):
    return eval(text)

def list_subclasses():
    return [each.__name__ for each in Base.__subclasses__()]

def load_model(data):
    return type(torch.load(io.BytesIO(data), weights_only=False)).__name__

def gather():
    found = [None] * 2
    dist.all_gather_object(found, sys.modules["__main__"].First())
    return [each.name() for each in found]

def change():
    count()
    count()
    main = sys.modules["__main__"]
    made = main.First()
    return [COUNT, main.COUNT, CONFIG, main.CONFIG is CONFIG, isinstance(made, Base), main.LR]

def lacks(name):
    return globals()[name]

def lacks_attribute(name):
    return getattr(sys.modules["__main__"], name)

class Outer:
    class Inner: pass

class Registry:
    subs = []
    def __init_subclass__(cls, **_):
        Registry.subs.append(cls.__name__)

class Sub1(Registry): pass
class Sub2(Registry): pass

def save_nested():
    data = io.BytesIO()
    torch.save(Outer.Inner(), data)
    return Outer.Inner.__qualname__, type(torch.load(io.BytesIO(data.getvalue()), weights_only=False)) is Outer.Inner

def register():
    before = list(Registry.subs)
    class Sub3(Registry): pass
    return before, Registry.subs

CALLS = [
    (create, "Second"), (evaluate, "LR + len(CONFIG['width'])"), (evaluate, "First.__name__"), (list_subclasses,),
    (load_model, saved.getvalue()), (gather,), (change,),
    (lacks, "use_data"), (lacks, "Large"), (lacks, "LOCK"), (lacks_attribute, "DATA"), (lacks, "unknown"),
    (save_nested,), (register,),
]

if __name__ == "__main__":
    found = []
    for function, *args in CALLS:
        try:
            found.append(wrapper(Platform(device="cpu", n_cpus=2, verbose=False))(function)(*args)[1])
        except Exception as error:
            found.append([type(error).__name__, error.__notes__[0]])
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The results or errors of each call of the script."""
    return json.loads(run_script(tmp_path_factory.mktemp("script"), SCRIPT))


def test_definitions_of_the_script_are_found_by_name(outcomes):
    """``globals()``, `eval`, ``__subclasses__``, torch.load, and object collectives find names that no code uses."""
    assert outcomes[:6] == ["second", 5, "First", ["First", "Second"], "Net", ["first", "first"]]


def test_the_script_in_a_rank_is_one_module(outcomes):
    """Functions share their globals with the rank's `__main__`, and names that load late do not reset values."""
    assert outcomes[6] == [2, 2, {"width": [1, 2, 1, 2]}, True, True, 3]


def test_a_name_that_was_not_sent_is_explained(outcomes):
    """The error has a note that says which part stayed, unless the script has no such name."""
    notes = [(kind, note.partition(":")[0]) for kind, note in outcomes[7:11]]
    stayed = [
        ("use_data", "DATA", "Tensor"),
        ("Large", "Large", "Tensor"),
        ("LOCK", "LOCK", "lock"),
        ("DATA", "DATA", "Tensor"),
    ]
    assert [kind for kind, _ in notes] == ["KeyError"] * 3 + ["AttributeError"]
    assert [note for _, note in notes] == [
        f"the rank lacks the name {name!r} of the script, because {holder!r} holds a {kind}, and only definitions and "
        "small values are sent"
        for name, holder, kind in stayed
    ]
    assert outcomes[11][1].startswith("raised in rank")


def test_names_that_nothing_uses_load_no_module(tmp_path):
    """A rank imports the modules of other functions only when it needs them, and `model.eval()` is no need."""
    (tmp_path / "slow.py").write_text("raise ImportError")
    text = """
    import sys, types, torch
    from parawrap import Platform, wrapper
    slow = sys.modules["slow"] = types.ModuleType("slow")
    slow.__spec__ = types.SimpleNamespace(origin="slow.py")

    def plot():
        return slow.figure

    @wrapper(Platform(device="cpu"))
    def train(model):
        model.eval()
        return "slow" in sys.modules

    print(train(torch.nn.Linear(1, 1)))
    """
    assert run_script(tmp_path, text) == "RankResults(False)\n"


def test_a_name_that_cannot_be_pickled_does_not_fail_the_launch(tmp_path):
    """The launch succeeds without the script's other names, and their use explains why."""
    text = """
    from parawrap import Platform, wrapper

    def other():
        return 1

    import functools, threading
    holder = functools.partial(other)
    holder.lock = threading.Lock()

    @wrapper(Platform(device="cpu", verbose=False))
    def train(name):
        return globals()[name] if name else 1

    print(train(""))
    try:
        train("other")
    except KeyError as error:
        print(error.__notes__[0])
    """
    first, second = run_script(tmp_path, text).splitlines()
    assert first == "RankResults(1)"
    assert second.startswith("the rank lacks the name 'other' of the script")
    assert "lock" in second


if sys.version_info >= (3, 12):

    def test_type_aliases_do_not_fail_the_launch(tmp_path):
        """An alias that pickle sends by name does not keep the launch from starting."""
        text = """
        from parawrap import Platform, wrapper
        type Row = list[int]

        @wrapper(Platform(device="cpu", verbose=False))
        def train():
            return 1

        print(train())
        """
        assert run_script(tmp_path, text) == "RankResults(1)\n"


def test_nested_classes_keep_their_qualified_names(outcomes):
    """A rank can save an object of a nested class, which pickle finds under its qualified name."""
    assert outcomes[-2] == ["Outer.Inner", True]


def test_init_subclass_runs_for_new_classes_only(outcomes):
    """A registry of subclasses is as the script left it, and grows by a class that the rank makes."""
    before, after = outcomes[-1]
    assert sorted(before) == ["Sub1", "Sub2"]
    assert after == [*before, "Sub3"]


def test_the_search_for_names_is_bounded(monkeypatch):
    """Thousands of functions that use each other are searched once, and the others stay with a reason."""
    main = types.ModuleType("__main__")
    for number in range(3000):
        exec(f"def f{number}(): return f{(number + 1) % 3000}", vars(main))
    for number in range(30_000):
        exec(f"def g{number}(): pass", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    looked = []
    parts = _script_names._parts
    monkeypatch.setattr(_script_names, "_parts", lambda *given: looked.append(1) or parts(*given))
    sent, unsent = names_of_script()
    assert len(looked) <= _script_names._MOST_PARTS_OF_SCRIPT
    assert len(sent) + len(unsent) == 33_000
    assert unsent["f0"] == "'f0' uses more than 1000 other objects"
    assert unsent["g29999"] == "the script has too many definitions"
