"""The private names of torch and Python: where they may stand, and what happens without them."""

from __future__ import annotations

import ast
import pkgutil
from pathlib import Path

import pytest
import torch
from torch.nn import Linear

import parawrap
from parawrap import VersionError, _private_names
from parawrap._private_names import private_name
from tests.helpers.processes import run_script

PACKAGE = Path(parawrap.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {file: ast.parse(file.read_text()) for file in FILES}

# Documented, in spite of the underscore
DOCUMENTED = {"_asdict", "_exit", "_fields", "_getframe", "_current_frames", "_make", "_replace", "_xoptions"}
# Private names of optional packages, in the only file that uses them
OF_OTHERS = {
    "batch_job.py": {"_make_sbatch_string"},
    "geometric_graphs.py": {"_inc_dict", "_key", "_slice_dict"},
    "transformers_caches.py": {"_quantized_keys"},
    "collate.py": {"torch.utils.data._utils"},
}
OF_MODULES = {"_parameters", "_buffers", "_modules"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_names(room):
    """The names that one package of parawrap defines, as functions, classes, variables, or attributes."""
    found = set()
    for file, tree in TREES.items():
        for node in ast.walk(tree) if file.parent == room else ():
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return found


OURS = {room: defined_names(room) - {"_version"} for room in {file.parent for file in FILES}}


def private_attributes(file):
    """Yield the private names of objects other than parawrap's, and the private modules that are imported."""
    ours = OURS[file.parent] - OF_MODULES
    for node in ast.walk(TREES[file]):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name) and name not in ours:
                yield name
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] != "parawrap":
                if any(map(is_private, module.split("."))):
                    yield module
                yield from (each.name for each in node.names if is_private(each.name))
            case ast.Constant(value=str(name)) if name in NAMES:
                yield name


def names_in(file):
    """The private names in `_private_names.py`: the last part of each path, attributes, and strings."""
    for node in ast.walk(TREES[file]):
        match node:
            case ast.Constant(value=str(text)) if text.isidentifier() and is_private(text):
                yield text
            case ast.Call(func=ast.Name(id="private_name" | "private_reader"), args=[ast.Constant(value=str(path)), *_]):
                yield path.rpartition(".")[2]
            case ast.Call(func=ast.Name(id="private_attribute"), args=[_, ast.Constant(value=str(name)), _]):
                yield name
            case ast.Attribute(attr=name) if is_private(name):
                yield name


LIST = PACKAGE / "_private_names.py"
NAMES = set(names_in(LIST))


def test_only_the_list_holds_them():
    """A private name of torch or Python stands in `_private_names.py`, and nowhere else."""
    for file in set(FILES) - {LIST}:
        assert set(private_attributes(file)) - DOCUMENTED - OF_OTHERS.get(file.name, set()) == set(), file


def test_every_name_exists():
    """A failure names what a new release of torch or Python lacks. The tests of the features test what a name does."""
    for node in ast.walk(TREES[LIST]):
        match node:
            case ast.Call(func=ast.Name(id="private_name" | "private_reader"), args=[ast.Constant(value=path), *_]):
                pkgutil.resolve_name(path)
    _private_names.check_modules()
    assert set(vars(Linear(2, 2))) >= _private_names.NOT_CALLED


# What no other test of a feature would notice


def test_finalizers_before_a_fork(tmp_path):
    """Ranks do not run the finalizers of the modules that the server imported."""
    script = """
import weakref
from parawrap._private_names import keep_finalizers_from_exits
class Owner: pass
imported, owned = Owner(), Owner()
weakref.finalize(imported, print, "imported")
keep_finalizers_from_exits()
weakref.finalize(owned, print, "owned")
"""
    assert run_script(tmp_path, script).split() == ["owned"]


def test_threads_are_joined(tmp_path):
    """A rank ends when the threads of its function end. Idle workers of thread pools do not hold it."""
    script = """
import threading
from concurrent.futures import ThreadPoolExecutor
from parawrap._private_names import join_threads
pool = ThreadPoolExecutor(1)
pool.submit(print, "pool").result()
go = threading.Event()
threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
threading.Timer(0.1, go.set).start()
join_threads()
print("joined")
"""
    assert run_script(tmp_path, script).split() == ["pool", "thread", "joined"]


# Without a name


def test_imports_without_any_name(tmp_path):
    """If all names are missing, every module imports. What needs a name raises VersionError; the rest works."""
    script = """
import importlib, pkgutil, sys
import torch

def missing(path):
    raise AttributeError(path)

pkgutil.resolve_name = missing
import parawrap
for module in pkgutil.walk_packages(parawrap.__path__, "parawrap."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(parawrap.default_collate(2)([torch.ones(1), torch.ones(1)]))
with parawrap.parallel(torch.nn.Linear(2, 2), ["cpu", "cpu"]) as p:
    try:
        p(torch.ones(9, 2))
    except parawrap.VersionError as error:
        print(error)
"""
    collated, error = run_script(tmp_path, script).splitlines()
    assert collated == "(tensor([[1.]]), tensor([[1.]]))"
    assert error.startswith("lanes need torch.")
    assert f"with torch {torch.__version__.partition('+')[0]}" in error


def test_missing_name_is_refused():
    """When it is used, also in `isinstance`."""
    with pytest.raises(VersionError, match="lanes need"):
        isinstance(1, private_name("torch.Gone", "lanes"))
