"""House rules: allowed imports between rooms, side effects of importing parawrap, and documentation of public names."""

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

# The rooms that each room may import, in addition to `errors` and itself. "." is parawrap/__init__.py.
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


def subpackage_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "."


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(module: str, *, at_import: bool) -> set[str]:
    """Return the parawrap modules that a module imports. With `at_import`, skip imports in functions and for types."""
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
def test_a_module_imports_only_from_allowed_rooms(module):
    """Imports inside functions and for type checking count too."""
    subpackage = subpackage_of(module)
    assert room in ALLOWED, f"room {room!r} is not in ALLOWED: add it there and to the design"
    allowed = ALLOWED[subpackage] | {"errors", subpackage}
    for name in imports_of(module, at_import=False):
        assert subpackage_of(name) in allowed, f"{module} imports {name}"


def test_there_are_no_circular_imports():
    """The import graph can be sorted topologically, and no module imports its own room's `__init__`."""
    inits = {name for name, file in MODULES.items() if file.name == "__init__.py"}
    graph = {module: imports_of(module, at_import=True) & set(MODULES) for module in MODULES}
    for module, names in graph.items():
        assert not (module not in inits and module.rpartition(".")[0] in names), (
            f"{module} imports its own package's __init__"
        )
    tuple(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_use_only_the_public_modules_of_other_rooms(module):
    """A module does not import from underscored files of other rooms."""
    for name in imports_of(module, at_import=False):
        private = [part for part in name.split(".")[1:] if part.startswith("_") and part != "_version"]
        assert not private or room_of(name) == room_of(module), f"{module} imports from the private module {name}"


def test_importing_parawrap_loads_no_slow_packages():
    """In a new interpreter, `import parawrap` loads no package that most programs do not need.

    Packages that `import torch` loads do not count. For example, torch.hub loads tqdm if it is installed.
    """
    script = (
        "import sys, torch; before = set(sys.modules); import parawrap; "
        f"print([name for name in {NEVER_LOADED!r} if name in sys.modules and name not in before])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert found.stdout.strip() == "[]"


def test_importing_parawrap_has_no_side_effects():
    """Importing starts no thread, prints nothing, and changes no thread count, signal handler, or environment variable."""
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


def test_every_public_name_exists_and_all_is_sorted():
    """`__all__` is sorted and has no duplicates, and `dir()` has every name."""
    assert parawrap.__all__ == sorted(parawrap.__all__)
    assert len(parawrap.__all__) == len(set(parawrap.__all__))
    for name in parawrap.__all__:
        assert getattr(parawrap, name) is not None
        assert name in dir(parawrap)


def test_every_error_is_public():
    """Every exception in parawrap.errors is in `parawrap.__all__`."""
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
def test_public_names_have_a_docstring_with_an_example(name, value):
    """A public function or class has its own docstring with a doctest. An exception needs only a docstring."""
    document = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert document, f"{name} has no docstring"
    if not (inspect.isclass(value) and issubclass(value, parawrap.ParawrapError)):
        assert ">>>" in document, f"{name} has no example"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_has_a_docstring(module):
    """Every module has a docstring, and every name in its `__all__` exists."""
    file = MODULES[module]
    assert ast.get_docstring(ast.parse(file.read_text())), f"{module} has no docstring"
    loaded = importlib.import_module(module) if not module.startswith("parawrap.cli") else None
    offered = getattr(loaded, "__all__", [])
    assert all(hasattr(loaded, name) for name in offered)


def test_no_file_or_folder_has_a_vague_name():
    """A name such as `utils` does not describe the contents."""
    vague = {"utils", "util", "helpers", "helper", "common", "core", "manager", "managers", "misc"}
    assert [file for file in FILES if vague & set(file.with_suffix("").name.strip("_").split("_"))] == []
    assert [folder for folder in PACKAGE.rglob("*") if folder.is_dir() and folder.name.strip("_") in vague] == []


def test_the_tree_in_the_docstring_of_errors_is_complete():
    """The tree names every exception once, with its builtin bases."""
    drawn = inspect.getdoc(parawrap.errors) or ""
    for name in sorted(parawrap.__all__):
        value = getattr(parawrap, name)
        if not (inspect.isclass(value) and issubclass(value, parawrap.ParawrapError)):
            continue
        (line,) = [line for line in drawn.splitlines() if name in line.replace("(", " ").split()]
        for base in value.__bases__:
            if base.__module__ == "builtins" and base is not Exception:
                assert base.__name__ in line, f"{name} derives from {base.__name__}, which the tree does not show"


def test_the_package_has_py_typed():
    """Type checkers need the file py.typed."""
    assert (PACKAGE / "py.typed").exists()
