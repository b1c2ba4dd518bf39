"""Classes with decorated methods. Ranks import this file, which does not import pytest: each new
rank would take 0.2 s of a processor for that.
"""

from __future__ import annotations

import types

from parawrap import Platform, wrapper

launched = wrapper(Platform(device="cpu", n_cpus=1, verbose=False))


class UnchainedClassmethod(classmethod):
    """Binds like classmethod in Python 3.13 and later, which does not call the wrapped function's
    ``__get__``.
    """

    def __get__(self, instance, owner=None):
        return types.MethodType(self.__func__, type(instance) if owner is None else owner)


class Model:
    """Has a method, and a class method and a static method in each decorator order."""

    bias = 10

    def __init__(self, **held):
        vars(self).update(held)

    @launched
    def method(self, x):
        """A method."""
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

    def through_super(self, x):
        return super().method(x)
