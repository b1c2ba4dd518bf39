"""Rules for the whole package: allowed imports, whole maps, the cost of importing parawrap, and
documented public names.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

import parawrap

PACKAGE = Path(parawrap.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = [file.parent for file in FILES if file.name == "__init__.py"]
TESTS = Path(__file__).parent

# The subpackages that a subpackage may import, besides itself and `errors`. "." is
# parawrap/__init__.py.
ALLOWED = {
    "backends": {"tree"},
    "engine": {"displays", "tree", "backends"},
    "neuroncores": {"engine", "tree", "backends"},
    "processes": {"displays", "tree", "backends"},
    "launch": {"displays", "processes", "backends"},
    "workers": {"engine", "launch", "processes", "tree", "backends"},
    "api": {
        "displays",
        "workers",
        "neuroncores",
        "engine",
        "launch",
        "processes",
        "tree",
        "backends",
    },
    "neuron": {"api", "neuroncores", "backends"},
    "functional": {"launch", "processes", "tree"},
    "testing": {"api", "neuroncores"},
    "cli": {"displays", "api", "launch", "backends", "."},
    "__main__": {"cli"},
    ".": {"_version", "cpu", "api", "launch", "engine", "functional", "neuron", "workers"},
}

IN_MOST_PROGRAMS = (
    "DataParallel, ParallelWrapper, TupleParallel, Tuplewise, cat, parallel, register_split, "
    "tp_collate"
)
NEVER_LOADED = [
    "ray", "submitit", "torch_xla", "torch_neuronx", "torch_neuron", "matplotlib", "torch._dynamo",
    "tqdm", "sklearn", "parawrap.neuroncores", "parawrap.launch", "parawrap.workers",
    "transformers", "tensordict", "torch_geometric",
]  # fmt: skip


MODULES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in FILES
}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def subpackage_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "."


def imports_of(module: str) -> set[str]:
    """Return the parawrap modules that a module imports, also in functions and for types only."""
    found: set[str] = set()
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively, line {node.lineno}"
            source = node.module or ""
            found.update(
                f"{source}.{alias.name}" if f"{source}.{alias.name}" in MODULES else source
                for alias in node.names
            )
    return {name for name in found if name.partition(".")[0] == "parawrap"} - {module}


def test_imports_run_downwards():
    """The table above allows each import, also in functions and for types only.

    No underscored file of another is used.
    """
    of_all = {"errors", "_version", "_private_names", "_public"}
    for module in MODULES:
        subpackage = subpackage_of(module)
        allowed = ALLOWED.get(subpackage, set()) | {subpackage}
        for name in imports_of(module):
            other = subpackage_of(name)
            assert other in allowed | (of_all - {"_version"}), f"{module} imports {name}"
            is_private = any(part.startswith("_") for part in name.split(".")[1:])
            assert not is_private or other in of_all | {subpackage}, f"{module} imports {name}"


def read_map(folder: Path) -> list[tuple[str, str, list[str]]]:
    """Return the rows of the map in the `__init__.py` of a package: file, contents, and tests.

    The map is in the docstring, or in a comment below it. A line without a file goes on with the
    row above it.
    """
    text = (folder / "__init__.py").read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines()]
    header = [line.split() for line in lines].index(["file", "|", "contents", "|", "tests"])
    rows: list[tuple[str, str, list[str]]] = []
    for line in takewhile(lambda line: "|" in line, lines[header + 2 :]):
        file, contents, test = (cell.strip() for cell in line.split("|"))
        if file:
            rows.append((file, contents, []))
        if test:
            rows[-1][2].append(test)
    return rows


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_maps_are_whole(folder):
    """The map of a package has one row for each of its files and packages, and no row for others.

    Each row says what is in the file, and names tests that exist. An `__init__.py` needs a row only
    if it has more than names of others.
    """
    rows = read_map(folder)
    listed = [file for file, _, _ in rows]
    packages = {f"{each.name}/" for each in FOLDERS if each.parent == folder}
    needed = {file.name for file in folder.glob("*.py")} - {"__init__.py"} | packages
    assert needed - set(listed) == set(), f"{folder / '__init__.py'} lacks rows for these"
    assert sorted(set(listed)) == sorted(listed), "a file has two rows"
    for file, contents, tests in rows:
        assert (folder / file).exists(), f"there is no {file}"
        assert contents, f"the row of {file} does not say what it contains"
        assert tests, f"the row of {file} names no test"
        for test in tests:
            assert (TESTS / test).exists(), f"the row of {file} names {test}, which does not exist"


LOCKS = {"Lock", "RLock", "Condition"}


def names_of_locks(tree: ast.AST) -> Iterator[str]:
    """Yield the variables and attributes to which a file assigns a new lock."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(value, ast.Call) and last_name(value.func) in LOCKS:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from map(last_name, targets)


def last_name(expression: ast.expr) -> str:
    return ast.unparse(expression).rpartition(".")[2]


def whiles_in(node: ast.AST, locks: set[str], lock: str | None = None) -> Iterator[str]:
    """Yield each `while` in the block of a lock, without a function in between."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        lock = None
    elif isinstance(node, ast.With):
        entered = [last_name(item.context_expr) for item in node.items]
        lock = next((name for name in entered if name in locks), lock)
    elif isinstance(node, ast.While) and lock is not None:
        yield f"line {node.lineno}: a `while` in `with {lock}`"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # no statement is in one
            continue
        yield from whiles_in(child, locks, lock)


def test_no_while_in_the_block_of_a_lock():
    """Ctrl-C in the jump backward could keep the lock, see `Lanes.send`. A function may loop."""
    example = ast.parse("a.b = Lock()\nwith a.b:\n  while 1: pass\n  def f():\n    while 1: pass")
    assert [*whiles_in(example, {*names_of_locks(example)})] == ["line 3: a `while` in `with b`"]
    locks = {name for file in FILES for name in names_of_locks(tree_of(file))}
    assert {"_lock", "_queueing", "_starting"} <= locks
    found = [f"{file}, {each}" for file in FILES for each in whiles_in(tree_of(file), locks)]
    assert found == []


IMPORTS = f"""
import sys, parawrap
print([name for name in sys.modules if name.startswith(("torch", "parawrap."))])

import os, signal, threading, torch
before = set(sys.modules)  # torch.hub loads tqdm, if it is installed
from parawrap import {IN_MOST_PROGRAMS}
print([name for name in {NEVER_LOADED!r} if name in sys.modules and name not in before])

def state():
    return (threading.active_count(), torch.get_num_threads(), dict(os.environ),
            signal.getsignal(signal.SIGINT), torch.get_default_dtype(), torch.is_grad_enabled(),
            torch.cuda.is_initialized(), sys.excepthook)
before = state()
from parawrap import *
assert state() == before, (before, state())
"""


def test_imports_are_cheap():
    """`import parawrap` loads its exceptions only; blocks and wrappers, no package that most
    programs do not need.

    No import starts a thread, prints, or changes a thread count, a signal handler, or an
    environment variable.
    """
    command = [sys.executable, "-W", "error", "-c", IMPORTS]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines() == [
        "['parawrap._version', 'parawrap.errors']",
        "[]",
    ]


def test_all_names_exist_sorted():
    """`__all__` is sorted and free of duplicates, dir() shows all of it, and every exception is in
    it.
    """
    assert parawrap.__all__ == sorted(set(parawrap.__all__))
    assert set(parawrap.__all__) <= set(dir(parawrap))
    of_errors = [name for name, value in vars(parawrap.errors).items() if isinstance(value, type)]
    assert {
        name for name in of_errors if issubclass(getattr(parawrap.errors, name), Exception)
    } <= set(parawrap.__all__)


def test_public_names_have_an_example():
    for name in parawrap.__all__:
        value = getattr(parawrap, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            document = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
            assert document, f"{name} has no docstring"
            is_error = inspect.isclass(value) and issubclass(value, parawrap.ParawrapError)
            assert is_error or ">>>" in document, f"{name} has no example"


@pytest.mark.parametrize(
    "name", ["DataParallel", "Platform", "cat", "parallel", "register_split", "wrapper"]
)
def test_names_report_parawrap(name):
    """Classes and functions report the module that users import them from, and
    pickle by that name.
    """
    value = getattr(parawrap, name)
    assert value.__module__ == "parawrap"
    assert pickle.loads(pickle.dumps(value)) is value
    assert b"api" not in pickle.dumps(value)
