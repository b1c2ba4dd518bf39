"""Methods above and below ``@wrapper``, including the binding rules of Python 3.13."""

from __future__ import annotations

import pickle
import threading
import types

import cloudpickle
import pytest

from parawrap import UnsendableError, wrapper
from tests.helpers.processes import ranks

launched = wrapper(ranks(1))


class UnchainedClassmethod(classmethod):
    """Binds like classmethod in Python 3.13 and later, which does not call the wrapped function's ``__get__``."""

    def __get__(self, instance, owner=None):
        return types.MethodType(self.__func__, type(instance) if owner is None else owner)


class Model:
    """Has a method, and a class method and a static method in each decorator order."""

    bias = 10

    @launched
    def method(self, x):
        return self.bias + x

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


@pytest.mark.parametrize("kind", ["above", "unchained", "below", "unchained_below", "static_above", "static_below"])
def test_a_method_is_called_on_its_class(kind):
    """Through an object, a subclass, or a pickle. Addresses of arguments do not count the class."""
    bias = 0 if kind.startswith("static") else 10
    assert getattr(Model(), kind)(1) == (bias + 1,)
    method = getattr(Small, kind)
    for each in method, pickle.loads(pickle.dumps(method)), cloudpickle.loads(cloudpickle.dumps(method)):
        assert each(1) == (1,)
    with pytest.raises(UnsendableError) as caught:
        method([0, threading.Lock()])
    assert str(caught.value).startswith("args[0][1] cannot be sent to another process: lock")
    if isinstance(method, types.MethodType):  # Python does not pass the class to `submit`
        with pytest.raises(TypeError, match=r"@wrapper.*@classmethod|@classmethod.*@wrapper"):
            method.submit(1)
    else:
        assert method.submit(1).results() == (1,)


def test_map_of_a_method_uses_its_object():
    model = Model()
    model.bias = 3
    assert [outcome[0] for outcome in model.method.map([1, 2])] == [4, 5]
