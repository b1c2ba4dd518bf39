"""What decorators make of a script's functions arrives in ranks, or the error names the cure."""

from __future__ import annotations

import pytest

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
import functools, torch
from parawrap import Platform, UnsendableError, wrapper
import operators
from operators import increment as operator_of_module, jitted as jitted_of_module

launched = wrapper(Platform(device="cpu", verbose=False))

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

@torch.compile
def compiled(x):
    return x + 1

@torch.library.custom_op("of_script::increment", mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    return x + 1

@torch.jit.script
def scripted(x: torch.Tensor):
    return x + 1

def use_all():
    table = Table()
    of_functions = describe([1, "a"]), fibonacci(30), describe.__module__
    of_modules = [each(torch.ones(1)).item() for each in (operators.increment, operator_of_module, jitted_of_module)]
    return *of_functions, table.kind(1), table.rows, *of_modules

print(launched(use_all)()[0])
for each in (compiled, operator, scripted):
    try:
        launched(lambda: each)()
    except UnsendableError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The lines that the script prints."""
    folder = tmp_path_factory.mktemp("decorated")
    (folder / "operators.py").write_text(OPERATORS)
    return run_script(folder, SCRIPT).splitlines()


def test_decorated_functions_arrive(lines):
    """Caches, cached properties, dispatching functions, and operators of modules."""
    assert lines[0] == str((["integer", "object"], 832040, "__main__", "integer", [1], 2.0, 2.0, 2.0))


def test_unsendable_functions_name_the_cure(lines):
    """Compiled functions, custom operators, and scripted functions of the script belong into a module."""
    assert len(lines) == 4
    for line in lines[1:]:
        assert line.startswith("the global 'each' used by the function cannot be sent")
        assert "define it in a module, and import it from there" in line
