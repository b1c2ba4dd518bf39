"""`wrapper` and `Wrapper`: which functions they take, and that a decorated function keeps its
metadata and can be sent.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import typing

import cloudpickle
import pytest

from parawrap import Platform, Wrapper, current_rank, wrapper

TWO = Platform(device="cpu", n_cpus=2, verbose=False)

launched = wrapper(TWO)


@launched
def shift(a: int, b: float = 2.0, *, scale: int = 1) -> str:
    """Return the shifted value and the rank."""
    return f"{scale * (a + b)} in rank {current_rank().global_rank}"


def bare(a: int) -> int:
    return a + current_rank().global_rank


decorated_elsewhere = launched(bare)


def local():
    """Return a decorated function that can only be pickled by value."""
    return launched(lambda x: x + 1)


# --- metadata ---


def test_function_keeps_its_metadata():
    """Name, module, source, annotations, and signature are those of the function in __wrapped__."""
    plain = shift.__wrapped__
    assert inspect.isfunction(plain)
    for name in (
        "__name__",
        "__qualname__",
        "__module__",
        "__defaults__",
        "__kwdefaults__",
        "__annotations__",
    ):
        assert getattr(shift, name) == getattr(plain, name)
    assert inspect.signature(shift) == inspect.signature(plain)
    assert inspect.getsource(shift) == inspect.getsource(plain)
    assert typing.get_type_hints(shift) == {"a": int, "b": float, "scale": int, "return": str}


def test_attributes_of_the_function():
    """`platform` is read-only.

    Other attributes are those of the function, and may be set and deleted, as click does.
    """
    with pytest.raises(AttributeError):
        shift.platform = Platform(device="cpu")
    with pytest.raises(AttributeError, match=r"no attribute 'zzzz'$"):
        shift.zzzz  # noqa: B018
    marked = local().__wrapped__
    marked.note = 3
    function = launched(marked)
    assert function.note == 3
    del function.note
    with pytest.raises(AttributeError):
        del function.platform


# --- functions ---


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (bare, (1,), (1, 2)),
        (functools.partial(pow, 2), (3,), (8, 8)),
        (", ".join, (["a", "b"],), ("a, b", "a, b")),
        (dict, ([(1, 2)],), ({1: 2}, {1: 2})),
    ],
    ids=["function", "partial", "builtin", "class"],
)
def test_any_callable_launches(function, args, expected):
    assert launched(function)(*args) == expected


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"shift\(\) missing a required argument: 'a'"):
        shift()
    with pytest.raises(TypeError, match="too many positional arguments"):
        Wrapper(TWO).start(lambda args: None)


def test_decorators_may_add_arguments():
    """The arguments of a call are those of the outermost function, also under functools.wraps."""

    def with_config(function):
        @functools.wraps(function)
        def decorated(x):
            return function(x, config="given")

        return decorated

    def train(x, config):
        return x, config

    assert launched(with_config(train))(1) == ((1, "given"),) * 2
    with pytest.raises(TypeError, match="too many positional arguments"):
        launched(with_config(train))(1, "given")


# --- pickles, copies, modules ---


def test_pickles_by_name_or_by_value():
    """A global is pickled by name. Other functions need cloudpickle, and keep their decoration."""
    for module in (cloudpickle, pickle):
        assert module.loads(module.dumps(shift)) is shift
    for function in (local(), decorated_elsewhere):  # another object has the name of the second one
        for back in (
            cloudpickle.loads(cloudpickle.dumps(function)),
            copy.copy(function),
            copy.deepcopy(function),
        ):
            assert (back.platform, back.inline(2)) == (TWO, function.inline(2))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(local())


def test_decorated_functions_are_refused():
    """A second platform needs the plain function: the message says how to get it."""
    first = wrapper(Platform(device="cpu", n_cpus=1, verbose=False))(bare)
    two = wrapper(Platform(device="cpu", n_cpus=2, verbose=False))
    with pytest.raises(TypeError, match=r"bare is decorated .* wrapper\(platform\)\(bare\.__"):
        two(first)
    assert len(two(first.__wrapped__)(1)) == 2
