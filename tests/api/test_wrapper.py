"""`wrapper` and `Wrapper`: any callable launches, keeps its metadata when decorated, and can be pickled."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import pickle
import pydoc
import subprocess
import sys
import textwrap
import threading
import typing
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest

from parawrap import (
    LaunchError,
    Platform,
    PlatformError,
    RankDiedError,
    RankResults,
    UnsendableError,
    Wrapper,
    current_rank,
    wrapper,
)

TWO = Platform(device="cpu", n_cpus=2, verbose=False, timeout_min=0.5)

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


# --- metadata ---


def test_decorated_function_keeps_its_metadata():
    """Name, module, source, and signature are those of the function in __wrapped__."""
    plain = shift.__wrapped__
    assert inspect.isfunction(plain)
    for name in ("__name__", "__qualname__", "__module__", "__defaults__", "__kwdefaults__"):
        assert getattr(shift, name) == getattr(plain, name)
    assert inspect.signature(shift) == inspect.signature(plain)
    assert inspect.unwrap(shift) is plain
    assert inspect.getsource(shift) == inspect.getsource(plain)


def test_decorated_methods_are_equal_as_bound_methods_are():
    """The same method of the same object is equal, also as a key; those of other objects and other functions are not."""
    model = Model(2)
    assert model.method == model.method
    assert {model.method: 1}[model.method] == 1
    assert model.method != Model(2).method
    assert shift == shift
    assert shift != decorated_elsewhere
    assert shift != shift.__wrapped__


METHODS = ("submit", "map", "dry_run", "inline")


def test_help_shows_the_methods_below_the_docstring():
    """`help` shows the signature, the function's docstring, and each method; also for a function without a docstring."""
    for function, signature in ((shift, "shift(a:"), (_local(), "<lambda>"), (Model(2).method, "method(x)")):
        text = pydoc.plain(pydoc.render_doc(function))
        assert signature in text
        assert inspect.cleandoc(function.__wrapped__.__doc__ or "") in text
        assert all(f"- {name}(" in text for name in METHODS)


def test_dir_shows_the_methods():
    """Completion offers the methods of decorated functions and of decorated methods."""
    for function in (shift, _local(), Model(2).method, Model.outer_static):
        assert {*METHODS, "platform", "__wrapped__"} <= set(dir(function))


@pytest.mark.parametrize(
    ("misspelled", "meant"), [("sumbit", "submit"), ("mapp", "map"), ("dryrun", "dry_run"), ("in_line", "inline")]
)
def test_a_misspelled_method_is_suggested(misspelled, meant):
    """AttributeError names the function, the attribute, and the method that was meant."""
    for function in (shift, Model(2).method):
        with pytest.raises(AttributeError, match=f"no attribute '{misspelled}': did you mean '{meant}'") as caught:
            getattr(function, misspelled)
        assert function.__qualname__ in str(caught.value)
    with pytest.raises(AttributeError, match=r"no attribute 'zzzz'$"):
        shift.zzzz  # noqa: B018


def test_a_decorated_function_keeps_its_annotations():
    """Documentation tools and validators read the same annotations as from the function."""
    assert shift.__annotations__ == shift.__wrapped__.__annotations__
    assert typing.get_type_hints(shift) == {"a": int, "b": float, "scale": int, "return": str}


def test_decorated_method_keeps_its_metadata():
    """Name, docstring, and signature are those of the undecorated bound method, and `platform` is available."""
    for kind in KINDS:
        method = getattr(Model(2), kind)
        assert (method.__name__, method.__qualname__) == (kind, f"Model.{kind}")
        assert str(inspect.signature(method)) == "(x)"
        assert method.__doc__.startswith("A ")
        assert method.platform is TWO


def test_platform_attribute_is_read_only():
    """The `platform` attribute returns the platform of the decorator, and cannot be set."""
    assert shift.platform is TWO
    with pytest.raises(AttributeError):
        shift.platform = Platform(device="cpu")


def test_attributes_are_set_on_the_function():
    """An attribute that is set on the decorated function is set on the function."""

    @launched
    def function():
        pass

    function.note = 3
    assert function.__wrapped__.note == 3


# --- valid functions ---


def test_a_function_runs_once_per_rank():
    """Positional, keyword, and default arguments reach each rank, and there is one result per rank, in order."""
    results = shift(1, scale=3)
    assert results == ("9.0 in rank 0", "9.0 in rank 1")
    assert type(results) is RankResults


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (lambda x: x + 1, (1,), (2, 2)),
        (functools.partial(pow, 2), (3,), (8, 8)),
        (len, ([1, 2, 3],), (3, 3)),
        (Model(5).plain, (1,), (4, 4)),
        (Model(3), (2,), (9, 9)),
        (", ".join, (["a", "b"],), ("a, b", "a, b")),
        (dict, ([(1, 2)],), ({1: 2}, {1: 2})),
        (bare, (1,), (1, 2)),
    ],
    ids=["lambda", "partial", "builtin", "bound", "object", "builtin method", "class", "function"],
)
def test_any_callable_launches(function, args, expected):
    """Any callable can be decorated, and runs in ranks."""
    assert launched(function)(*args) == expected


def test_closure_is_sent_with_its_captured_values():
    """A local function sees the values that its captured variables have at the call."""
    factor = 2

    @launched
    def multiply(x):
        return x * factor

    assert multiply(2) == (4, 4)
    factor = 5
    assert multiply(2) == (10, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_methods_of_every_kind_launch(kind):
    """Methods decorated above or below classmethod and staticmethod launch through the instance and the class."""
    x, expected = KINDS[kind]
    model = Model(2)
    assert getattr(model, kind)(x) == expected
    assert getattr(model, kind).submit(x).results() == expected
    through_the_class = getattr(Model, kind)
    assert (through_the_class(model, x) if kind == "method" else through_the_class(x)) == expected


def test_a_subclass_inherits_decorated_methods():
    """An inherited method is bound to the subclass, also through super()."""
    assert Small.outer_class(3) == (3, 3)
    assert Small.inner_class(3) == (3, 3)
    assert Small(2).method(3) == (6, 7)


def test_a_parameter_may_have_any_name():
    """The decorator reserves no keyword."""
    function = launched(lambda **given: sorted(given))
    given = dict.fromkeys(["args", "function", "instance", "kwargs", "platform", "self"])
    assert function.inline(**given) == (list(given),)
    assert function(**given) == function.submit(**given).results() == (list(given),) * 2
    assert len(function.dry_run(**given).ranks) == 2


def test_recursive_function_calls_itself_undecorated():
    """A recursive function calls its undecorated form by its decorated name, also in a rank."""

    @launched
    def count(n):
        return 1 + count.__wrapped__(n - 1) if n else 0

    assert count(3) == (3, 3)


def test_a_decorated_call_operator_launches():
    """An object with a decorated __call__ launches when it is called."""

    class Callable:
        @launched
        def __call__(self, x):
            return x + 1

    assert Callable()(1) == (2, 2)


async def _a_coroutine():
    pass


def _a_generator():
    yield 1


async def _an_async_generator():
    yield 1


@pytest.mark.parametrize(
    "function",
    [_a_coroutine, _a_generator, _an_async_generator],
)
def test_coroutine_and_generator_functions_are_refused(function):
    """Coroutines and generators cannot leave their process: the decorator raises immediately."""
    with pytest.raises(TypeError, match=rf"{function.__name__} returns a coroutine or a generator"):
        launched(function)


def test_a_missing_argument_is_an_error_before_any_rank_starts():
    """Arguments that do not match the signature raise Python's TypeError, with the parameter's name."""
    with pytest.raises(TypeError, match=r"shift\(\) missing a required argument: 'a'"):
        shift()


# --- invalid functions ---


@pytest.mark.parametrize("face", [wrapper, Wrapper])
def test_non_platform_is_refused(face):
    """The error names the function, the given value, and the correct call."""
    for value in (None, "cpu", {"device": "cpu"}, 2):
        with pytest.raises(PlatformError) as caught:
            face(value)
        assert repr(value) in str(caught.value)
        assert f"{face.__name__}(Platform(device=...))" in str(caught.value)


def test_wrapper_class_of_a_function_is_refused():
    """Wrapper is not a decorator, and its error does not suggest to use it as one."""
    with pytest.raises(PlatformError, match="bare") as caught:
        Wrapper(bare)
    assert "@Wrapper" not in str(caught.value)


@pytest.mark.parametrize("function", [bare, Model, shift, Platform], ids=["function", "class", "decorated", "Platform"])
def test_wrapper_without_parentheses_is_refused(function):
    """A decorator that gets a function instead of a platform raises with the correct usage."""
    with pytest.raises(PlatformError, match=rf"got the callable {function.__qualname__} .*@wrapper\(Platform\("):
        wrapper(function)


def test_non_callable_cannot_be_decorated():
    """Decorating raises, not only the call, and the message shows the value."""
    for value in (None, 3, "shift", [shift]):
        with pytest.raises(TypeError, match=r"wrapper cannot decorate .*\. Give it a function") as caught:
            launched(value)
        assert repr(value) in str(caught.value)


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
def test_launch_inside_a_rank_is_refused(call):
    """The error shows how to run the function inside the rank."""
    with pytest.raises(LaunchError, match=r"within rank \d of 2: a rank cannot launch ranks"):
        launched(call)(shift)


# --- errors ---


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeyError("key"), lambda: MyError(3, detail="why"), lambda: FileNotFoundError(2, "no such", "file"),
        lambda: StopIteration(4), lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"), lambda: KeyboardInterrupt(),
        lambda: ExceptionGroup("several", [ValueError(1), KeyError(2)]),
    ],
    ids=["KeyError", "MyError", "OSError", "StopIteration", "Unicode", "KeyboardInterrupt", "Group"],
)  # fmt: skip
def test_an_exception_of_a_rank_keeps_its_type(make):
    """Type, arguments, and attributes are those raised in the rank. Notes name the rank and its traceback."""

    @launched
    def fail():
        if current_rank().global_rank == 1:
            raise make()

    expected = make()
    with pytest.raises(type(expected)) as caught:
        fail()
    assert type(caught.value) is type(expected)
    assert str(caught.value) == str(expected)
    told = {name: value for name, value in vars(caught.value).items() if name != "__notes__"}
    assert told == vars(expected)
    assert any("rank 1 of 2" in note and "raise make()" in note for note in caught.value.__notes__)


def test_sys_exit_in_a_rank_raises_with_its_code():
    """A rank that calls sys.exit returns no result."""
    with pytest.raises(RankDiedError, match=r"sys\.exit\(3\)"):
        launched(sys.exit)(3)


class Holder:
    def __init__(self, **held):
        self.__dict__.update(held)

    @launched
    def take(self, x, y=None):
        return x, y

    @classmethod
    @launched
    def take_by_class(cls, x, y=None):
        return x, y

    @launched
    def give(self):
        return {"rows": [1, threading.Lock()]}


@pytest.mark.parametrize(
    ("call", "address"),
    [
        (lambda: launched(bare)(threading.Lock()), "args[0]"),
        (lambda: shift(1, scale={"a": [0, threading.Lock()]}), "kwargs['scale']['a'][1]"),
        (lambda: Holder().take(0, [threading.Lock()]), "args[1][0]"),
        (lambda: Holder.take_by_class(threading.Lock()), "args[0]"),
        (lambda: Holder().take(0, y=threading.Lock()), "kwargs['y']"),
        (lambda: Holder().give(), "the result['rows'][1]"),
        (lambda: Wrapper(TWO).start(lambda global_rank, local_rank, group, args: 0, (1, threading.Lock())), "args[1]"),
    ],
    ids=["position", "keyword", "method", "classmethod", "method keyword", "result", "start"],
)
def test_unsendable_argument_is_named_as_passed(call, address):
    """The address starts at the argument that the caller passed, without the method's own object."""
    with pytest.raises(UnsendableError) as caught:
        call()
    assert str(caught.value).startswith(f"{address} cannot be sent to another process: lock")


def test_an_object_that_cannot_be_sent_with_its_method_is_named():
    """A method is sent with its object. The error names the attribute that cannot be sent."""
    with pytest.raises(UnsendableError, match=r"\.lock of the object cannot be sent to another process: lock"):
        Holder(lock=threading.Lock()).take(1)


def test_a_captured_value_that_cannot_be_sent_is_named():
    """A closure over a lock raises before any rank starts, and the error names the variable."""
    lock = threading.Lock()

    @launched
    def function():
        return lock

    for refused in (function, function.submit, function.dry_run):
        with pytest.raises(UnsendableError, match="the variable 'lock'"):
            refused()


def test_a_decorated_argument_that_cannot_be_sent_is_searched_too():
    """The error names the value inside a decorated argument that cannot be sent, not only the function."""
    lock = threading.Lock()
    holding = launched(lambda: lock)
    with pytest.raises(UnsendableError, match=r"the variable 'lock' .*args\[0\]"):
        launched(lambda function: None)(holding)


# --- pickling ---


def _local():
    return launched(lambda x: x + 1)


def test_a_global_decorated_function_is_pickled_by_name():
    """A module's function unpickles as the same object, with pickle and with cloudpickle."""
    for mod in (cloudpickle, pickle):
        assert mod.loads(mod.dumps(shift)) is shift


@pytest.mark.parametrize("kind", KINDS)
def test_decorated_methods_are_pickled(kind):
    """A method of an instance or a class unpickles decorated and bound, with pickle and with cloudpickle."""
    x, expected = KINDS[kind]
    for mod in (cloudpickle, pickle):
        back = mod.loads(mod.dumps(getattr(Model(2), kind)))
        assert back.platform == TWO
        assert back.inline(x) == expected[:1]
        if kind != "method":
            assert mod.loads(mod.dumps(getattr(Model, kind))).inline(x) == expected[:1]


def test_a_local_decorated_function_is_pickled_by_value():
    """With cloudpickle it keeps its decoration. With pickle it raises, as any lambda does."""
    back = cloudpickle.loads(cloudpickle.dumps(_local()))
    assert (back.platform, back(2)) == (TWO, (3, 3))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(_local())


def test_function_decorated_under_another_name_is_pickled():
    """The function's name does not refer to `launched(bare)`, so it is pickled by value, and unpickles decorated."""
    back = cloudpickle.loads(cloudpickle.dumps(decorated_elsewhere))
    assert (back.platform, back(2)) == (TWO, (2, 3))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_a_decorated_function_launch(copied):
    """Objects that hold a decorated function can be copied, also methods and local functions."""
    for function in (shift.inline, shift, _local(), {"a": shift}["a"]):
        assert callable(copied(function))
    assert copied(_local())(1) == (2, 2)
    assert copied({"function": _local()})["function"](1) == (2, 2)
    assert copied(Model(2).method)(3) == (6, 7)


def test_decorated_functions_are_arguments_and_results():
    """A decorated function reaches a rank with its platform and __wrapped__, and can be returned."""

    def receive(functions):
        return [(each.platform.n_cpus, each.__wrapped__(3)) for each in functions], functions[0]

    for told, back in launched(receive)([_local(), decorated_elsewhere, Model(2).outer_static]):
        assert [n_cpus for n_cpus, _ in told] == [2, 2, 2]
        assert [value for _, value in told][::2] == [4, 4]
        assert back(1) == (2, 2)


def test_an_object_with_a_decorated_method_is_an_argument():
    """An instance reaches the rank with its decorated methods, and its undecorated method works there."""
    assert launched(lambda model: model.method.__wrapped__(3))(Model(2)) == (6, 7)


def test_local_class_with_a_decorated_method_is_sent():
    """A class that a function defines is pickled by value, together with its decorated methods."""

    class Local:
        @launched
        def method(self, x):
            return x + current_rank().global_rank

    assert Local().method(1) == (1, 2)
    assert launched(lambda local: local.method.__wrapped__(1))(Local()) == (1, 2)


# --- modules ---

MODULE = '''
"""A user's module with something that cannot be sent among its globals."""
import threading
from parawrap import Platform, wrapper

PLATFORM = Platform(device="cpu", n_cpus=2, verbose=False, timeout_min=0.5)
LOCK = threading.Lock()
SEEN = []

@wrapper(PLATFORM)
def function(x):
    with LOCK:
        SEEN.append(x)
        return len(SEEN)

def plain(x):
    with LOCK:
        return x

renamed = wrapper(PLATFORM)(plain)

class Locked:
    @wrapper(PLATFORM)
    def method(self, x):
        with LOCK:
            return x

    @wrapper(PLATFORM)
    @classmethod
    def outer_class(cls, x):
        with LOCK:
            return x

    @classmethod
    @wrapper(PLATFORM)
    def inner_class(cls, x):
        with LOCK:
            return x

    @wrapper(PLATFORM)
    @staticmethod
    def outer_static(x):
        with LOCK:
            return x

    @staticmethod
    @wrapper(PLATFORM)
    def inner_static(x):
        with LOCK:
            return x
'''


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """Return an importable module with functions that use a global lock."""
    (tmp_path / "a_locked_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("a_locked_module")
    sys.modules.pop("a_locked_module", None)


def test_a_module_is_imported_in_ranks(locked):
    """A module's function is pickled by name, so its globals need not be picklable, and start fresh in ranks."""
    locked.SEEN.extend("here")
    assert locked.function(1) == (1, 1)
    assert locked.renamed(2) == (2, 2)
    assert "".join(locked.SEEN) == "here"


@pytest.mark.parametrize("kind", KINDS)
def test_methods_of_a_module_are_imported_in_ranks(locked, kind):
    """Methods of every kind are pickled by name too."""
    assert getattr(locked.Locked(), kind)(1) == (1, 1)


def by_path(path, name, *, registered):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    if registered:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=[True, False], ids=["in sys.modules", "not in sys.modules"])
def loaded_by_path(request, tmp_path):
    """A module that was loaded from a file, and that no import finds."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    source = textwrap.dedent("""
        from parawrap import Platform, current_rank, wrapper

        STEP = 10

        @wrapper(Platform(device="cpu", n_cpus=2, verbose=False, timeout_min=0.5))
        def function(x):
            return x + STEP * current_rank().global_rank
    """)
    (folder / "a_plugin.py").write_text(source)
    yield by_path(folder / "a_plugin.py", "a_plugin_by_path", registered=request.param)
    sys.modules.pop("a_plugin_by_path", None)


def test_a_function_of_a_module_that_ranks_cannot_import_launches(loaded_by_path):
    """A decorated function of a module that no import finds is pickled by value, with the globals that it uses."""
    assert loaded_by_path.function(1) == (1, 11)


def test_module_registered_with_cloudpickle_is_pickled_by_value(locked):
    """Decorated functions of such a module are sent with the globals of this process."""
    locked.LOCK = NoLock()
    locked.SEEN.extend("here")
    cloudpickle.register_pickle_by_value(locked)
    try:
        assert locked.function(1) == (5, 5)
    finally:
        cloudpickle.unregister_pickle_by_value(locked)


class NoLock:
    """A lock that can be pickled."""

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


SCRIPT = """
import pickle, cloudpickle
from parawrap import Platform, Wrapper, current_rank, wrapper

STEP = 1
PLATFORM = Platform(device="cpu", n_cpus=2, verbose=False, timeout_min=0.5)

class Mine(Exception):
    pass

@wrapper(PLATFORM)
def function(n):
    if n < 0:
        raise Mine(n)
    return n and STEP + function.__wrapped__(n - 1)

class Model:
    @wrapper(PLATFORM)
    def method(self, x):
        return x + STEP

@wrapper(PLATFORM)
def back():
    return function, Model()

if __name__ == "__main__":
    STEP = 2
    assert function(3) == (6, 6), function(3)
    assert Model().method(1) == (3, 3)
    assert pickle.loads(pickle.dumps(function)) is function
    sent = cloudpickle.loads(cloudpickle.dumps(function))
    assert sent.platform == PLATFORM and sent(1) == (2, 2)
    returned, model = back()[1]
    assert returned(1) == (2, 2) and type(model) is Model
    assert Wrapper(PLATFORM).start(lambda rank, local_rank, group, args: (rank, STEP, args), (1,))[1] == (1, 2, (1,))
    try:
        function(-1)
    except Mine as error:
        print("all is well", error.args)
"""


def test_a_script_launches_its_own_functions(tmp_path):
    """Functions, classes, and exceptions of __main__ are pickled by value, with the globals at the call."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "all is well (-1,)\n", "")


# --- threads ---


def test_threads_call_a_decorated_function_at_once():
    """Calls from several threads run at the same time, and each gets its own results."""
    barrier = threading.Barrier(4)

    def call(x):
        barrier.wait()
        return decorated_elsewhere(10 * x)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(4))) == [(10 * x, 10 * x + 1) for x in range(4)]


# --- Wrapper ---


def place(global_rank, local_rank, process_group, args):
    rank = current_rank()
    return (global_rank, local_rank, process_group is rank.group, args)


def test_task_gets_its_rank_as_arguments():
    """A task gets its global rank, local rank, process group, and args."""
    for args in (None, (), ("example", 3)):
        results = Wrapper(TWO).start(place, args)
        assert results == ((0, 0, True, args), (1, 1, True, args))
        assert type(results) is RankResults


def test_a_task_without_a_group_gets_none():
    """Without a process group, or if it excludes this rank, the process group is None."""

    def group_size(global_rank, local_rank, process_group, args):
        return None if process_group is None else process_group.size()

    for groups, sizes in ((None, (None, None)), ([[1]], (None, 1)), ([], (2, 2))):
        platform = Platform(device="cpu", n_cpus=2, verbose=False, ipc_groups=groups)
        assert Wrapper(platform).start(group_size) == sizes


def test_a_task_that_is_not_callable_is_refused():
    """The error shows the value."""
    for task in (None, 3, "task"):
        with pytest.raises(TypeError, match=rf"Wrapper\.start cannot run {task!r}"):
            Wrapper(TWO).start(task)


def test_task_with_other_parameters_is_refused():
    """A task that does not take four arguments raises before any rank starts."""
    with pytest.raises(TypeError, match="too many positional arguments"):
        Wrapper(TWO).start(lambda args: None)


def test_a_tasks_exception_keeps_its_type():
    """Wrapper.start raises the exception of the task."""

    def fail(global_rank, local_rank, process_group, args):
        raise MyError(global_rank, detail=args)

    with pytest.raises(MyError) as caught:
        Wrapper(TWO).start(fail, (7,))
    assert caught.value.detail == (7,)
