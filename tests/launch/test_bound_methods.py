"""Class methods and static methods above and below ``@wrapper``, including the binding rules of Python 3.13."""

from __future__ import annotations

import pickle
import threading
import types

import cloudpickle
import pytest

from parawrap import UnsendableError, wrapper
from tests.helpers.processes import ranks
from tests.helpers.waiting import PATIENCE_S

launched = wrapper(ranks(1))


class UnchainedClassmethod(classmethod):
    """Binds like classmethod in Python 3.13 and later, which does not call the wrapped function's ``__get__``."""

    def __get__(self, instance, owner=None):
        return types.MethodType(self.__func__, type(instance) if owner is None else owner)


class Model:
    """Has a class method and a static method in each decorator order."""

    bias = 10

    @classmethod
    @launched
    def above(cls, x):
        return cls.bias + x

    @UnchainedClassmethod
    @launched
    def unchained(cls, x):
        return cls.bias + x

    @launched
    @classmethod
    def below(cls, x):
        return cls.bias + x

    @launched
    @UnchainedClassmethod
    def unchained_below(cls, x):
        return cls.bias + x

    @staticmethod
    @launched
    def static_above(x):
        return x

    @launched
    @staticmethod
    def static_below(x):
        return x


class Small(Model):
    """Inherits all methods."""

    bias = 0


KINDS = ["above", "unchained", "below", "unchained_below", "static_above", "static_below"]


def expected(kind, bias):
    """Return the expected results for the argument 1."""
    return (1,) if kind.startswith("static") else (bias + 1,)


def pickled(method):
    """Return the method after a round trip through pickle."""
    return pickle.loads(pickle.dumps(method))


def cloudpickled(method):
    """Return the method after a round trip through cloudpickle."""
    return cloudpickle.loads(cloudpickle.dumps(method))


def unchanged(method):
    """Return the method."""
    return method


@pytest.mark.parametrize("transfer", [unchanged, pickled, cloudpickled])
@pytest.mark.parametrize("kind", KINDS)
def test_a_method_is_called_on_its_class(kind, transfer):
    """A call through an object or a subclass, also after pickling, runs the method on the right class."""
    if transfer is unchanged:
        assert getattr(Model(), kind)(1) == expected(kind, 10)
    assert transfer(getattr(Small, kind))(1) == expected(kind, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_is_submitted_on_its_class(kind):
    """``submit`` passes the class. If Python does not pass it, the error explains the order of the decorators."""
    method = getattr(Small, kind)
    try:
        outcome = method.submit(1).results(timeout=PATIENCE_S)
    except TypeError as error:
        outcome = str(error)
    names_the_order = isinstance(method, types.MethodType) and "@wrapper" in str(outcome) and "@classmethod" in str(outcome)
    assert outcome == expected(kind, 0) or names_the_order


@pytest.mark.parametrize("kind", KINDS)
def test_argument_addresses_do_not_count_the_class(kind):
    """UnsendableError names ``args[0]`` for the first argument that the caller wrote."""
    with pytest.raises(UnsendableError) as caught:
        getattr(Model, kind)([0, threading.Lock()])
    assert str(caught.value).startswith("args[0][1] cannot be sent to another process: lock")
