"""Class methods and static methods above and below ``@wrapper``, also as Python 3.13 and later bind them."""

from __future__ import annotations

import pickle
import threading
import types

import cloudpickle
import pytest

from parawrap import UnsendableError, wrapper
from tests.launch.processes import PATIENCE_S, ranks

launched = wrapper(ranks(1))


class UnchainedClassmethod(classmethod):
    """Binds as classmethod does from Python 3.13 on: the function within is not asked how it binds itself."""

    def __get__(self, instance, owner=None):
        return types.MethodType(self.__func__, type(instance) if owner is None else owner)


class Model:
    """Has a class method and a static method in each order."""

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
    """Inherits all of them."""

    bias = 0


KINDS = ["above", "unchained", "below", "unchained_below", "static_above", "static_below"]


def expected(kind, bias):
    """What the rank gives for 1."""
    return (1,) if kind.startswith("static") else (bias + 1,)


def sent(method):
    """The same method after a way through pickle."""
    return pickle.loads(pickle.dumps(method))


def sent_by_cloudpickle(method):
    """The same method after a way through cloudpickle."""
    return cloudpickle.loads(cloudpickle.dumps(method))


def as_it_is(method):
    """The method itself."""
    return method


@pytest.mark.parametrize("way", [as_it_is, sent, sent_by_cloudpickle])
@pytest.mark.parametrize("kind", KINDS)
def test_a_method_is_called_on_its_class(kind, way):
    """Through an object or a subclass, and after it was pickled, a call runs the method on the right class."""
    if way is as_it_is:
        assert getattr(Model(), kind)(1) == expected(kind, 10)
    assert way(getattr(Small, kind))(1) == expected(kind, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_is_submitted_on_its_class(kind):
    """``submit`` starts the ranks. If Python leaves the class out, the error says how to order the decorators."""
    method = getattr(Small, kind)
    try:
        ending = method.submit(1).results(timeout=PATIENCE_S)
    except TypeError as error:
        ending = str(error)
    names_the_order = isinstance(method, types.MethodType) and "@wrapper" in str(ending) and "@classmethod" in str(ending)
    assert ending == expected(kind, 0) or names_the_order


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_of_a_method_is_named_as_the_caller_wrote_it(kind):
    """The class is not counted among the arguments."""
    with pytest.raises(UnsendableError) as caught:
        getattr(Model, kind)([0, threading.Lock()])
    assert str(caught.value).startswith("args[0][1] cannot be sent to another process: lock")
