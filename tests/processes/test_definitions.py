"""Copies of classes that travel by value mean the same as the originals."""

from __future__ import annotations

import abc
import enum
import threading
from typing import Generic, TypeVar

import pytest

from parawrap._private_names import class_of_id, id_of_class
from parawrap.processes.pickling import pack, unpack

T = TypeVar("T")
RAN = []


def copy_of(cls):
    """Return a copy of a class as another process would make it."""
    block = pack(cls, "value").to_bytes()
    class_of_id.pop(id_of_class.pop(cls))
    found = unpack(block)
    assert found is not cls
    return found


class Base:
    """A base that requires an argument of the class statement, and notes each class."""

    def __init_subclass__(cls, *, name, **others):
        super().__init_subclass__(**others)
        RAN.append(name)
        cls.title = name


class Second:
    def __init_subclass__(cls, **others):
        super().__init_subclass__(**others)
        RAN.append("second")


class Flexible(enum.Enum):
    def __init_subclass__(cls):
        RAN.append("enum")


def define(kind):
    """Define a class of this kind here, so that it travels by value."""
    match kind:
        case "plain":

            class Part(Base, name="part"):
                pass

        case "slots":

            class Part(Base, name="part"):
                __slots__ = ("x",)

        case "abstract, of two bases":

            class Part(Second, abc.ABC, Base, name="part"):
                @abc.abstractmethod
                def run(self): ...

        case "generic":

            class Part(Generic[T], Base, name="part"):  # noqa: PYI059 (the hook of Generic comes first)
                pass

        case "enum":

            class Part(Flexible):
                RED = 1

        case "child of a generic":
            whole = define("generic")

            class Part(whole[int], name="child"):
                pass

    return Part


@pytest.mark.parametrize(
    "kind", ["plain", "slots", "abstract, of two bases", "generic", "enum", "child of a generic"]
)
def test_hooks_of_bases_run_once(kind):
    """A copy keeps what `__init_subclass__` has set, and later classes run it as before."""
    cls, hook = define(kind), vars(Base)["__init_subclass__"]
    before = list(RAN)
    got = copy_of(cls)
    assert before == RAN
    assert vars(Base)["__init_subclass__"] is hook
    assert getattr(got, "title", None) == getattr(cls, "title", None)
    assert [base.__name__ for base in got.__mro__] == [base.__name__ for base in cls.__mro__]
    assert getattr(got, "__parameters__", None) == getattr(cls, "__parameters__", None)
    if kind == "slots":
        assert type(got.x) is type(cls.x)
    if kind == "enum":
        assert (got.RED.value, list(got.__members__)) == (1, ["RED"])
    define(kind)
    assert len(RAN) > len(before)


class Strict(type):
    """A metaclass that fails once, and defines a class of another thread meanwhile."""

    fails = False

    def __new__(mcls, title, bases, namespace, **others):
        cls = super().__new__(mcls, title, bases, namespace, **others)
        if mcls.fails:
            thread = threading.Thread(target=define, args=("plain",))
            thread.start()
            thread.join()
            msg = "no copies"
            raise RuntimeError(msg)
        return cls

    def __init__(cls, *args, **_):
        super().__init__(*args)


def test_hooks_are_given_back(monkeypatch):
    """Hooks are given back if the creation of a class raises. Classes of other threads run them
    meanwhile.
    """

    class Part(Base, name="strict", metaclass=Strict):
        pass

    hook = vars(Base)["__init_subclass__"]
    monkeypatch.setattr(Strict, "fails", True)
    RAN.clear()
    with pytest.raises(RuntimeError, match="no copies"):
        copy_of(Part)
    assert RAN == ["part"]
    assert vars(Base)["__init_subclass__"] is hook
