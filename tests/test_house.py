"""The house rules: who imports whom, what an import loads, and what every public name owes its reader."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import parawrap

PACKAGE = Path(parawrap.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Who may import whom, beside `errors` and itself. "." is parawrap/__init__.py.
ALLOWED = {
    "_version": set(),
    "errors": set(),
    "cpu": set(),
    "tree": set(),
    "backends": {"tree"},
    "shards": {"tree", "backends"},
    "replicas": {"tree", "backends"},
    "lanes": {"tree", "backends"},
    "engine": {"tree", "backends", "shards", "replicas", "lanes"},
    "launch": {"backends"},
    "faces": {"engine", "launch", "shards", "lanes", "tree", "backends"},
    "neuron": {"faces", "engine", "shards", "lanes", "tree", "backends"},
    "functional": {"launch", "tree"},
    "testing": {"launch", "faces", "engine", "lanes", "backends", "tree"},
    "cli": {"faces", "launch", "engine", "_version"},
    ".": {"_version", "cpu", "faces", "shards", "launch", "engine", "functional", "neuron"},
}

NEVER_LOADED = [
    "ray", "submitit", "torch_xla", "torch_neuronx", "torch_neuron", "matplotlib", "torch._dynamo", "tqdm", "sklearn",
    "parawrap.backends.neuron", "parawrap.launch",
]  # fmt: skip


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "."


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(module: str, *, at_import: bool) -> set[str]:
    """The parawrap modules that a module names in imports; `at_import`: only those that run when it is imported."""
    found: set[str] = set()

    def note(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively, line {node.lineno}"
            source = node.module or ""
            found.update(
                f"{source}.{alias.name}" if f"{source}.{alias.name}" in MODULES else source for alias in node.names
            )

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if at_import and (isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_type_checking(child)):
                continue
            note(child)
            walk(child)

    walk(ast.parse(MODULES[module].read_text()))
    return {name for name in found if name.partition(".")[0] == "parawrap"} - {module}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_from_the_rooms_below_it(module):
    """Every edge between rooms, also one inside a function or for types alone, is one that the design allows."""
    room = room_of(module)
    assert room in ALLOWED, f"{room} has no place in the order of rooms: give it one here and in the design"
    allowed = ALLOWED[room] | {"errors", room}
    for name in imports_of(module, at_import=False):
        assert room_of(name) in allowed, f"{module} imports {name}"


def test_no_modules_import_each_other_in_a_circle():
    """There is an order in which modules can be imported one after the other."""
    inits = {name for name, file in MODULES.items() if file.name == "__init__.py"}
    graph = {module: imports_of(module, at_import=True) & set(MODULES) for module in MODULES}
    for module, names in graph.items():
        assert not (module not in inits and module.rpartition(".")[0] in names), f"{module} imports its own room's __init__"
    tuple(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_room_is_entered_by_its_door(module):
    """A module takes from other rooms what their __init__ offers, not from their underscored files."""
    for name in imports_of(module, at_import=False):
        private = [part for part in name.split(".")[1:] if part.startswith("_") and part != "_version"]
        assert not private or room_of(name) == room_of(module), f"{module} reaches into {name}"


def test_importing_parawrap_loads_nothing_heavy():
    """In a fresh interpreter, `import parawrap` loads no cluster, no vendor's runtime, no compiler, bars and plots.

    What `import torch` loads of its own accord (torch.hub takes tqdm where it is installed) is not parawrap's doing.
    """
    script = (
        "import sys, torch; before = set(sys.modules); import parawrap; "
        f"print([name for name in {NEVER_LOADED!r} if name in sys.modules and name not in before])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert found.stdout.strip() == "[]"


def test_importing_parawrap_has_no_side_effects():
    """No thread is started, no figure of threads set, nothing written, no signal taken and no environment changed."""
    script = """
import os, signal, sys, threading, torch
def state():
    return (threading.active_count(), torch.get_num_threads(), dict(os.environ), signal.getsignal(signal.SIGINT),
            torch.get_default_dtype(), torch.is_grad_enabled(), torch.cuda.is_initialized(), sys.excepthook)
before = state()
import parawrap
assert state() == before, (before, state())
"""
    found = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_every_public_name_is_there_and_listed_in_order():
    """`__all__` is sorted, has no name twice, and dir() shows all of it."""
    assert parawrap.__all__ == sorted(parawrap.__all__)
    assert len(parawrap.__all__) == len(set(parawrap.__all__))
    for name in parawrap.__all__:
        assert getattr(parawrap, name) is not None
        assert name in dir(parawrap)


def test_every_error_is_public():
    """What parawrap raises can be caught by a name from `parawrap`."""
    errors = {
        name for name, value in vars(parawrap.errors).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert errors <= set(parawrap.__all__)


def _public_things():
    for name in parawrap.__all__:
        value = getattr(parawrap, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            yield name, value


@pytest.mark.parametrize(("name", "value"), list(_public_things()))
def test_every_public_name_is_documented_with_an_example(name, value):
    """A function or class has a docstring of its own with a doctest; an error has a docstring."""
    document = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert document, f"{name} has no docstring"
    if not (inspect.isclass(value) and issubclass(value, parawrap.ParawrapError)):
        assert ">>>" in document, f"{name} has no example"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_says_what_it_is(module):
    """Each file has a docstring, and `__all__`, where there is one, holds names that exist (ruff sorts them)."""
    file = MODULES[module]
    assert ast.get_docstring(ast.parse(file.read_text())), f"{module} has no docstring"
    loaded = importlib.import_module(module) if not module.startswith("parawrap.cli") else None
    offered = getattr(loaded, "__all__", [])
    assert all(hasattr(loaded, name) for name in offered)


def test_no_file_is_named_for_nothing_in_particular():
    """A name such as utils says nothing about what is inside."""
    vague = {"utils", "util", "helpers", "helper", "common", "core", "manager", "managers", "misc"}
    assert [file for file in FILES if vague & set(file.with_suffix("").name.strip("_").split("_"))] == []
    assert [folder for folder in PACKAGE.rglob("*") if folder.is_dir() and folder.name.strip("_") in vague] == []


def test_the_hierarchy_that_errors_draws_is_the_one_there_is():
    """The tree in the docstring of `errors` has every class, once, under the classes that it derives from."""
    drawn = inspect.getdoc(parawrap.errors) or ""
    for name in sorted(parawrap.__all__):
        value = getattr(parawrap, name)
        if not (inspect.isclass(value) and issubclass(value, parawrap.ParawrapError)):
            continue
        (line,) = [line for line in drawn.splitlines() if name in line.replace("(", " ").split()]
        for base in value.__bases__:
            if base.__module__ == "builtins" and base is not Exception:
                assert base.__name__ in line, f"{name} is a {base.__name__} and the drawing does not say so"


def test_the_package_says_that_it_is_typed():
    """py.typed is there for type checkers."""
    assert (PACKAGE / "py.typed").exists()
