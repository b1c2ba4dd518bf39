"""`wrapper` and `Wrapper`: any callable launches, keeps its metadata when decorated, and can be pickled."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import pickle
import pydoc
import textwrap
import threading
import typing

import cloudpickle
import pytest

from parawrap import (
    LaunchError,
    Platform,
    PlatformError,
    RankResults,
    UnsendableError,
    Wrapper,
    current_rank,
    wrapper,
)

TWO = Platform(device="cpu", n_cpus=2, verbose=False)
METHODS = ("submit", "map", "dry_run", "inline")

launched = wrapper(TWO)


@launched
def shift(a: int, b: float = 2.0, *, scale: int = 1) -> str:
    """Return the shifted value and the rank."""
    return f"{scale * (a + b)} in rank {current_rank().global_rank}"


def bare(a: int) -> int:
    return a + current_rank().global_rank


decorated_elsewhere = launched(bare)


class Model:
    """A class with every kind of method, decorated above and below its other decorator."""

    bias = 10

    def __init__(self, weight):
        self.weight = weight

    @launched
    def method(self, x):
        """A method."""
        return self.weight * x + current_rank().global_rank

    @launched
    @classmethod
    def outer_class(cls, x):
        """A class method."""
        return cls.bias + x

    @classmethod
    @launched
    def inner_class(cls, x):
        """A class method."""
        return cls.bias + x

    @launched
    @staticmethod
    def outer_static(x):
        """A static method."""
        return x + 1

    @staticmethod
    @launched
    def inner_static(x):
        """A static method."""
        return x + 1

    def plain(self, x):
        return self.weight - x

    def __call__(self, x):
        return self.weight**x


class Small(Model):
    """A subclass that inherits all decorated methods."""

    bias = 0

    def method(self, x):
        return super().method(x)


class MyError(Exception):
    """Cannot be pickled by default: its attributes differ from its arguments."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}")
        self.code, self.detail = code, detail


KINDS = {
    "method": (3, (6, 7)),
    "outer_class": (3, (13, 13)),
    "inner_class": (3, (13, 13)),
    "outer_static": (3, (4, 4)),
    "inner_static": (3, (4, 4)),
}


def local():
    """Return a decorated function that can only be pickled by value."""
    return launched(lambda x: x + 1)


# --- metadata ---


def test_function_keeps_its_metadata():
    """Name, module, source, annotations, and signature are those of the function in __wrapped__."""
    plain = shift.__wrapped__
    assert inspect.isfunction(plain)
    for name in ("__name__", "__qualname__", "__module__", "__defaults__", "__kwdefaults__", "__annotations__"):
        assert getattr(shift, name) == getattr(plain, name)
    assert inspect.signature(shift) == inspect.signature(plain)
    assert inspect.unwrap(shift) is plain
    assert inspect.getsource(shift) == inspect.getsource(plain)
    assert typing.get_type_hints(shift) == {"a": int, "b": float, "scale": int, "return": str}


@pytest.mark.parametrize("kind", KINDS)
def test_method_keeps_its_metadata(kind):
    method = getattr(Model(2), kind)
    assert (method.__name__, method.__qualname__, str(inspect.signature(method))) == (kind, f"Model.{kind}", "(x)")
    assert method.__doc__.startswith("A ")
    assert method.platform is TWO


def test_equality_is_that_of_functions():
    """The same method of the same object is equal, also as a key; those of other objects and functions are not."""
    model = Model(2)
    assert {model.method: 1}[model.method] == 1
    assert model.method != Model(2).method
    assert shift not in (decorated_elsewhere, shift.__wrapped__)


def test_help_and_dir_show_the_methods():
    """`help` shows the signature, the docstring, and each method; also for a function without a docstring."""
    for function, signature in ((shift, "shift(a:"), (local(), "<lambda>"), (Model(2).method, "method(x)")):
        text = pydoc.plain(pydoc.render_doc(function))
        assert signature in text
        assert inspect.cleandoc(function.__wrapped__.__doc__ or "") in text
        assert all(f"- {name}(" in text for name in METHODS)
        assert {*METHODS, "platform", "__wrapped__"} <= set(dir(function))


@pytest.mark.parametrize(("misspelled", "meant"), [("sumbit", "submit"), ("mapp", "map"), ("dryrun", "dry_run")])
def test_misspelled_method_is_suggested(misspelled, meant):
    for function in (shift, Model(2).method):
        words = rf"{function.__qualname__}.*no attribute '{misspelled}': did you mean '{meant}'"
        with pytest.raises(AttributeError, match=words):
            getattr(function, misspelled)


def test_attributes():
    """`platform` is read-only. Other attributes are set on the function."""
    with pytest.raises(AttributeError):
        shift.platform = Platform(device="cpu")
    with pytest.raises(AttributeError, match=r"no attribute 'zzzz'$"):
        shift.zzzz  # noqa: B018
    function = local()
    function.note = 3
    assert function.__wrapped__.note == 3


# --- valid functions ---


def test_function_runs_once_per_rank():
    """Positional, keyword, and default arguments reach each rank, and there is one result per rank, in order."""
    results = shift(1, scale=3)
    assert results == ("9.0 in rank 0", "9.0 in rank 1")
    assert type(results) is RankResults


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (functools.partial(pow, 2), (3,), (8, 8)),
        (len, ([1, 2, 3],), (3, 3)),
        (Model(5).plain, (1,), (4, 4)),
        (Model(3), (2,), (9, 9)),
        (", ".join, (["a", "b"],), ("a, b", "a, b")),
        (dict, ([(1, 2)],), ({1: 2}, {1: 2})),
        (bare, (1,), (1, 2)),
    ],
    ids=["partial", "builtin", "bound", "object", "builtin method", "class", "function"],
)
def test_any_callable_launches(function, args, expected):
    assert launched(function)(*args) == expected


def test_closures_and_recursion():
    """A local function sees the values of its variables at the call, and can call its undecorated form."""
    factor = 2

    @launched
    def power(n):
        return factor * power.__wrapped__(n - 1) if n else 1

    assert power(2) == (4, 4)
    factor = 5
    assert power(2) == (25, 25)


@pytest.mark.parametrize("kind", KINDS)
def test_methods_launch_and_are_pickled(kind):
    """Through the instance and the class, and after both picklers."""
    x, expected = KINDS[kind]
    model = Model(2)
    assert getattr(model, kind).submit(x).results() == expected
    assert getattr(Model, kind)(*([model, x] if kind == "method" else [x])) == expected
    for module in (cloudpickle, pickle):
        back = module.loads(module.dumps(getattr(model, kind)))
        assert (back.platform, back.inline(x)) == (TWO, expected[:1])
        if kind != "method":
            assert module.loads(module.dumps(getattr(Model, kind))).inline(x) == expected[:1]


def test_subclass_inherits_methods():
    """An inherited method is bound to the subclass, also through super(). A decorated __call__ launches."""

    class Callable:
        @launched
        def __call__(self, x):
            return x + 1

    assert Small.outer_class(3) == Small.inner_class(3) == (3, 3)
    assert Small(2).method(3) == (6, 7)
    assert Callable()(1) == (2, 2)


# --- invalid functions ---


async def a_coroutine():
    pass


def a_generator():
    yield 1


async def an_async_generator():
    yield 1


@pytest.mark.parametrize("function", [a_coroutine, a_generator, an_async_generator])
def test_coroutines_are_refused(function):
    """Coroutines and generators cannot leave their process."""
    with pytest.raises(TypeError, match=rf"{function.__name__} returns a coroutine or a generator"):
        launched(function)


@pytest.mark.parametrize("face", [wrapper, Wrapper])
def test_other_values_are_refused(face):
    """The error names the value and the correct call, also for a missing argument."""
    for value in (None, "cpu", {"device": "cpu"}):
        with pytest.raises(PlatformError) as caught:
            face(value)
        assert repr(value) in str(caught.value)
        assert f"{face.__name__}(Platform(device=...))" in str(caught.value)
    with pytest.raises(TypeError, match=r"wrapper cannot decorate 3, .*\. Give it a function"):
        launched(3)
    with pytest.raises(TypeError, match=r"shift\(\) missing a required argument: 'a'"):
        shift()
    with pytest.raises(PlatformError, match="bare") as caught:
        Wrapper(bare)
    assert "@Wrapper" not in str(caught.value)


@pytest.mark.parametrize("function", [bare, Model, shift, Platform], ids=["function", "class", "decorated", "Platform"])
def test_missing_parentheses(function):
    with pytest.raises(PlatformError, match=rf"got the callable {function.__qualname__} .*@wrapper\(Platform\("):
        wrapper(function)


@pytest.mark.parametrize(
    "call",
    [
        lambda function: function(1),
        lambda function: function.submit(1),
        lambda function: function.inline(1),
        lambda function: Wrapper(TWO).start(function),
    ],
    ids=["call", "submit", "inline", "start"],
)
def test_launch_inside_a_rank(call):
    with pytest.raises(LaunchError, match=r"within rank \d of 2: a rank cannot launch ranks"):
        launched(call)(shift)


# --- errors ---


class Holder:
    def __init__(self, **held):
        self.__dict__.update(held)

    @launched
    def take(self, x, y=None):
        return x, y

    @launched
    def give(self):
        return {"rows": [1, threading.Lock()]}


@pytest.mark.parametrize(
    ("call", "address"),
    [
        (lambda: shift(1, scale={"a": [0, threading.Lock()]}), r"kwargs\['scale'\]\['a'\]\[1\]"),
        (lambda: Holder().take(0, [threading.Lock()]), r"args\[1\]\[0\]"),
        (lambda: Holder(lock=threading.Lock()).take(1), r".*\.lock of the object"),
        (lambda: Holder().give(), r"the result\['rows'\]\[1\]"),
        (lambda: Wrapper(TWO).start(lambda rank, local_rank, group, args: 0, (1, threading.Lock())), r"args\[1\]"),
    ],
    ids=["keyword", "method", "object", "result", "start"],
)
def test_unsendable_has_its_address(call, address):
    """The address starts at the argument that the caller passed, without the method's own object."""
    with pytest.raises(UnsendableError, match=rf"^{address} cannot be sent to another process: lock"):
        call()


def test_unsendable_captured_value():
    """The error names the variable before any rank starts, also inside a decorated argument."""
    lock = threading.Lock()
    holding = launched(lambda: lock)
    for refused in (holding, holding.submit, holding.dry_run):
        with pytest.raises(UnsendableError, match="the variable 'lock'"):
            refused()
    with pytest.raises(UnsendableError, match=r"the variable 'lock' .*args\[0\]"):
        launched(lambda function: None)(holding)


# --- pickles, copies, modules ---


def test_pickles_by_name_or_by_value():
    """A global is pickled by name. Other functions need cloudpickle, and keep their decoration."""
    for module in (cloudpickle, pickle):
        assert module.loads(module.dumps(shift)) is shift
    for function in (local(), decorated_elsewhere):  # another object has the name of the second one
        back = cloudpickle.loads(cloudpickle.dumps(function))
        assert (back.platform, back.inline(2)) == (TWO, function.inline(2))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(local())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_launch(copied):
    for function in (shift.inline, shift):
        assert callable(copied(function))
    assert copied({"function": local()})["function"](1) == (2, 2)
    assert copied(Model(2).method)(3) == (6, 7)


def test_decorated_values_in_ranks():
    """Decorated functions, and objects of local classes with decorated methods, are arguments and results."""

    class Local:
        @launched
        def method(self, x):
            return x + current_rank().global_rank

    def receive(functions, *models):
        called = [each.__wrapped__(3) for each in functions]
        return called, [model.method.__wrapped__(3) for model in models], functions[0]

    results = launched(receive)([local(), Model(2).outer_static], Model(2), Local())
    for rank, (functions, models, back) in enumerate(results):
        assert (functions, models) == ([4, 4], [6 + rank, 3 + rank])
        assert back.platform == TWO
    assert results[0][2](1) == (2, 2)
    assert Local().method(1) == (1, 2)


MODULE = """
import threading
from parawrap import Platform, wrapper

launched = wrapper(Platform(device="cpu", n_cpus=2, verbose=False))
LOCK = threading.Lock()
SEEN = []

@launched
def function(x):
    with LOCK:
        SEEN.append(x)
        return len(SEEN)

def plain(x):
    with LOCK:
        return x

renamed = launched(plain)

class Locked:
    @launched
    @classmethod
    def method(cls, x):
        return plain(x)
"""


def test_modules_are_imported_in_ranks(tmp_path, monkeypatch):
    """A module's functions are pickled by name, so its globals need not be picklable, and start fresh in ranks."""
    (tmp_path / "a_locked_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    locked = importlib.import_module("a_locked_module")
    locked.SEEN.extend("here")
    assert locked.function(1) == (1, 1)
    assert locked.renamed(2) == (2, 2)
    assert "".join(locked.SEEN) == "here"
    assert locked.Locked().method(1) == (1, 1)


def test_modules_that_no_import_finds(tmp_path):
    """A function of a module that was loaded from a file is pickled by value, with the globals that it uses."""
    source = """
        from parawrap import Platform, current_rank, wrapper

        STEP = 10

        @wrapper(Platform(device="cpu", n_cpus=2, verbose=False))
        def function(x):
            return x + STEP * current_rank().global_rank
    """
    (tmp_path / "a_plugin.py").write_text(textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location("a_plugin_by_path", tmp_path / "a_plugin.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.function(1) == (1, 11)


# --- Wrapper ---


def task(global_rank, local_rank, process_group, args):
    if args == ("fail",):
        raise MyError(global_rank, detail=args)
    return global_rank, local_rank, process_group and process_group.size(), args


def test_task_gets_its_rank():
    """A task gets its global rank, local rank, process group, and args. Its exception keeps its type."""
    for args in (None, ("example", 3)):
        results = Wrapper(TWO).start(task, args)
        assert results == ((0, 0, 2, args), (1, 1, 2, args))
        assert type(results) is RankResults
    with pytest.raises(MyError) as caught:
        Wrapper(TWO).start(task, ("fail",))
    assert caught.value.detail == ("fail",)


@pytest.mark.parametrize(("groups", "sizes"), [(None, (None, None)), ([[1]], (None, 1)), ([], (2, 2))], ids=str)
def test_task_without_a_group(groups, sizes):
    """Without a process group, or if it excludes this rank, the process group is None."""
    platform = Platform(device="cpu", n_cpus=2, verbose=False, ipc_groups=groups)
    assert tuple(size for _, _, size, _ in Wrapper(platform).start(task)) == sizes


@pytest.mark.parametrize(
    ("wrong", "words"), [(3, r"Wrapper\.start cannot run 3"), (lambda args: None, "too many positional arguments")]
)
def test_other_tasks_are_refused(wrong, words):
    with pytest.raises(TypeError, match=words):
        Wrapper(TWO).start(wrong)
