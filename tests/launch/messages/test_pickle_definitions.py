"""Decorated functions of a script arrive in ranks: caches, properties, dispatch, types, and operators."""

from __future__ import annotations

from tests.helpers.processes import run_script

OPERATORS = """
import torch

@torch.library.custom_op("of_module::increment", mutates_args=())
def increment(x: torch.Tensor) -> torch.Tensor:
    return x + 1

@torch.jit.script
def jitted(x: torch.Tensor):
    return x + 1
"""
SCRIPT = """
import functools, torch, typing
from parawrap import Platform, wrapper
import operators
from operators import increment as operator_of_module, jitted as jitted_of_module

@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

class Table:
    @functools.cached_property
    def rows(self):
        return [1]

    @functools.singledispatchmethod
    def kind(self, value):
        return "object"

    @kind.register
    def _(self, value: int):
        return "integer"

@functools.singledispatch
def describe(value):
    return "object"

@describe.register
def _(value: int):
    return "integer"

@describe.register
def _(value: list):
    return [describe(each) for each in value]

class Registered:
    names = []

    def __init_subclass__(cls):
        Registered.names.append(cls.__name__)

class First(Registered): pass

UserId, P = typing.NewType("UserId", int), typing.ParamSpec("P")

def use_all():
    class Second(Registered): pass
    table = Table()
    of_classes = First.__name__, Registered.names, UserId.__supertype__, UserId.__module__, P.__name__
    of_functions = describe([1, "a"]), fibonacci(30), describe.__module__
    of_modules = operator_of_module is operators.increment, jitted_of_module(torch.ones(1)).item()
    return *of_functions, table.kind(1), table.rows, *of_classes, *of_modules

print(wrapper(Platform(device="cpu", verbose=False))(use_all)()[0])
"""


def test_decorated_function_arrives(tmp_path):
    (tmp_path / "operators.py").write_text(OPERATORS)
    functions, classes = (["integer", "object"], 832040, "__main__"), ("First", ["First", "Second"], int, "__main__", "P")
    assert run_script(tmp_path, SCRIPT) == f"{(*functions, 'integer', [1], *classes, True, 2.0)}\n"
