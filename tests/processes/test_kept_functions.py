"""Ranks that stay keep functions, and each call is as if it had brought its function."""

from __future__ import annotations

import functools
import gc
import math
import operator
import sys
import types
import weakref

import pytest
import torch

from parawrap import Platform
from parawrap.processes import kept_functions
from parawrap.processes.kept_functions import parts_of
from parawrap.processes.script_globals import ScriptOfRank, SentScript


@pytest.fixture(scope="module")
def two():
    with Platform(device="cpu", n_cpus=2, ipc_groups=None, verbose=False).open() as ranks:
        yield ranks


def size_of_repeated_call(function, *args):
    """Return the bytes of a call whose function was sent before."""
    script = SentScript(imports=True)
    for _ in range(3):
        packed = script.pack_call(function, args, {})
        script.note_sent(packed)
    assert not packed.brings_definitions
    return packed.block.size


def answer():
    return 42


def test_later_calls_bring_only_arguments():
    assert size_of_repeated_call(answer) == size_of_repeated_call(gc.collect) == 0


def made(value):
    def read(added=0):
        return value + added

    return read


def test_closures_and_defaults(two):
    """A variable of a closure, and a default, are those of the moment of the
    call. -0.0 is not 0.0.
    """
    for value in (1, 2, 2, True, 0.0, -0.0, 1):
        function = made(value)
        for _ in range(3):
            (found, _) = two(function)
            assert (repr(found), type(found)) == (repr(function()), type(function()))
    function = made(1)
    for default in (5, 6, 6):
        function.__defaults__ = (default,)
        assert two(function) == (1 + default,) * 2


def test_code_that_changes(two):
    """Code may change, as in a cell of a notebook that is run again: the new code runs, also under
    the same name, or in the same function.
    """
    space = {"__name__": "__main__"}
    for text in ("1", "2", "1", "1"):
        exec(f"def f():\n    return {text}", space)
        assert two(space["f"]) == (int(text),) * 2
        assert two(space["f"]) == (int(text),) * 2
    function = made(3)
    two(function), two(function)
    function.__code__ = made(3).__code__.replace(co_consts=tuple(made(3).__code__.co_consts))
    assert two(function) == (3, 3)


def counter():
    number = 0

    def count():
        nonlocal number
        number += 1
        count.__defaults__ = (number,)
        return number

    return count


def test_calls_leave_nothing_on_a_function(two):
    """Variables of its closure, and its defaults, do not outlive a call."""
    count = counter()
    assert [two(count) for _ in range(4)] == [(1, 1)] * 4
    assert count() == 1


def test_mutable_parts_are_sent_each_time(two):
    """A list in a closure, or as a default, is that of the call."""
    values = []

    def read(extra=values):
        return list(extra), list(values)

    assert parts_of(read) is None
    for number in range(3):
        values.append(number)
        assert two(read) == (read(),) * 2


def test_other_callables(two):
    """Partials, methods, wrapped functions, and classes are kept as functions are."""

    class Model:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, value):
            return self.scale * value

        def method(self, value):
            return self.scale + value

    def wrapped(value):
        return value

    def decorate(function, factor):
        @functools.wraps(function)
        def call(value):
            return factor * function(value)

        return call

    model = Model(2)
    for scale in (2, 3):
        model.scale = scale
        assert two(model, 5) == (5 * scale,) * 2
        assert two(model.method, 5) == (5 + scale,) * 2
        assert two(functools.partial(wrapped, scale)) == (scale,) * 2
        assert two(decorate(wrapped, scale), 5) == (5 * scale,) * 2
    assert two(max, 3, 4) == (4, 4)
    assert two(types.SimpleNamespace, a=1) == (types.SimpleNamespace(a=1),) * 2


def test_arguments_use_globals_of_the_ranks(two):
    """A function that is an argument, or an object of the script, finds what earlier calls
    assigned, also if the called function stays in the ranks.
    """
    space = {"__name__": "__main__"}
    exec(
        "def load():\n    global weights\n    weights = [4, 2]\n"
        "def total(_=None):\n    weights.append(1)\n    return sum(weights)\n"
        "class Trainer:\n    def run(self):\n        return total()\n"
        "def apply(function):\n    return function()\n"
        "def run(trainer):\n    return trainer.run()\n",
        space,
    )
    two(space["load"])
    assert [two(space["apply"], space["total"])[0] for _ in range(3)] == [7, 8, 9]
    assert [two(space["run"], space["Trainer"]())[0] for _ in range(3)] == [10, 11, 12]


def test_function_that_a_call_keeps(two):
    """A later call does not change its variables."""

    def keep(number, function):
        import builtins

        builtins.kept_functions = (
            [*getattr(builtins, "kept_functions", []), function] if number else []
        )
        return [each() for each in builtins.kept_functions]

    def keep_itself(value):
        def returned():
            return value

        return returned

    functions = keep_itself(5), keep_itself(7)
    two(keep, 0, functions[0])
    assert two(keep, 1, functions[0])[0] == [5]
    assert two(keep, 1, functions[1])[0] == [5, 7]


def test_function_that_ranks_import(two):
    """A function that ranks import is looked up in the rank at each call: a call may have replaced
    it.
    """

    def replace():
        import math

        math.kept_sqrt, math.sqrt = math.sqrt, lambda value: "replaced"

    def restore():
        import math

        math.sqrt = math.kept_sqrt

    assert two(math.sqrt, 4.0) == two(math.sqrt, 4.0) == (2.0, 2.0)
    two(replace)
    assert two(math.sqrt, 4.0) == ("replaced", "replaced")
    two(restore)
    assert two(math.sqrt, 4.0) == (2.0, 2.0)


def test_versions_of_a_function_are_freed():
    """The ranks forget the last one when they get the next."""
    script = SentScript(imports=True)
    rank = ScriptOfRank()
    function = made(0)
    for number in range(5):
        function.__defaults__ = (number,)
        packed = script.pack_call(function, (), {})
        script.note_sent(packed)
        rank.take(packed.item, memoryview(bytearray(packed.block.to_bytes())))
    assert len(rank._kept) == 1


def test_arguments_of_a_kept_function_are_freed():
    """The ranks keep a function without the arguments of the call that brought it."""
    script = SentScript(imports=True)
    packed = script.pack_call(made(0), (torch.zeros(9),), {})
    rank = ScriptOfRank()
    _, args, _ = rank.take(packed.item, memoryview(bytearray(packed.block.to_bytes())))
    is_alive = weakref.ref(*args)
    del args
    gc.collect()
    assert is_alive() is None


def test_ranks_keep_a_bounded_number(two, monkeypatch):
    """The ranks keep a bounded number, and those that are dropped are sent again."""
    monkeypatch.setattr(kept_functions, "_MOST_FUNCTIONS", 4)
    functions = [made(number) for number in range(9)]
    for order in (range(9), range(8, -1, -1), [0, 1, 2, 0, 1, 2, 8, 0]):
        for number in order:
            assert two(functions[number]) == (number, number)


def test_dropped_function_is_freed():
    """A dropped function is freed after others have taken its place."""
    script = SentScript(imports=True)
    dropped = made(-1)
    alive = weakref.ref(dropped)
    for function in (dropped, *(made(number) for number in range(kept_functions._MOST_FUNCTIONS))):
        script.note_sent(script.pack_call(function, (), {}))
    del dropped, function
    gc.collect()
    assert alive() is None


def test_call_that_does_not_arrive(two):
    """A call whose packing fails, or that is never sent, leaves nothing that
    later calls rely on.
    """
    function = made(7)
    with pytest.raises(TypeError):
        two(function, (each for each in ()))
    assert two(function) == (7, 7)
    thread = two._run
    for _ in range(3):  # packed, and never sent, as after Ctrl-C
        thread.script.pack_call(made(8), (), {})
    assert two(made(9)) == (9, 9)


def test_name_that_is_bound_after_its_function(two, monkeypatch):
    """A call of a function without a name in `__main__` does not replace what has its name now."""
    main = vars(sys.modules["__main__"])
    space = {"__name__": "__main__"}
    exec("def function_without_name(): return 1", space)
    read = eval("lambda: function_without_name", main)
    assert two(space["function_without_name"]) == (1, 1)
    monkeypatch.setitem(main, "function_without_name", 5)
    for _ in range(2):
        assert two(read) == (5, 5)
        assert two(space["function_without_name"]) == (1, 1)


def test_class_in_an_annotation_that_is_defined_again(two, monkeypatch):
    """A call does not replace the new class by the one that came with its function."""
    main = vars(sys.modules["__main__"])
    for name in ("Metrics", "measure"):
        monkeypatch.setitem(main, name, None)
    text = "class Metrics: value = 1\ndef measure() -> Metrics: return Metrics.value"
    # Without the future import of this file, which makes annotations texts
    exec(compile(text, "<cell>", "exec", dont_inherit=True), main)
    assert [two(main["measure"]) for _ in range(3)] == [(1, 1)] * 3
    exec("class Metrics: value = 2", main)
    assert [two(main["measure"]) for _ in range(3)] == [(2, 2)] * 3


def test_parts_say_which_defaults_have_names():
    def read(*values, **named):
        return values, named

    read.__kwdefaults__ = {"a": 1}
    named = parts_of(read)
    read.__kwdefaults__, read.__defaults__ = None, ("a", 1)
    assert not all(map(operator.is_, named, parts_of(read)))
