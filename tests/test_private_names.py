"""The private names of torch and Python: where they may stand, and that they exist."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

import parawrap
from parawrap import _private_names as names
from tests.helpers.processes import run_script

PACKAGE = Path(parawrap.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {file: ast.parse(file.read_text()) for file in FILES}

# Documented, in spite of the underscore
DOCUMENTED = {
    "_asdict",
    "_exit",
    "_fields",
    "_getframe",
    "_current_frames",
    "_make",
    "_replace",
    "_xoptions",
}
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
    """The names that one package of parawrap defines, as functions, classes, variables, or
    attributes.
    """
    found = set()
    for file, tree in TREES.items():
        for node in ast.walk(tree) if file.parent == room else ():
            match node:
                case (
                    ast.FunctionDef(name=name)
                    | ast.ClassDef(name=name)
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return found


OURS = {room: defined_names(room) - {"_version"} for room in {file.parent for file in FILES}}


def private_attributes(file):
    """Yield the private names of objects other than parawrap's, and the private modules that are
    imported.
    """
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
    """The private names in `_private_names.py`: the last part of each path, attributes, and
    strings.
    """
    for node in ast.walk(TREES[file]):
        match node:
            case ast.Constant(value=str(text)) if text.isidentifier() and is_private(text):
                yield text
            case ast.Call(
                func=ast.Name(id="private_name" | "private_reader"),
                args=[ast.Constant(value=str(path))],
            ):
                yield path.rpartition(".")[2]
            case ast.Attribute(attr=name) if is_private(name):
                yield name


LIST = PACKAGE / "_private_names.py"
NAMES = set(names_in(LIST))


def test_only_the_list_holds_them():
    """A private name of torch or Python stands in `_private_names.py`, and nowhere else."""
    for file in set(FILES) - {LIST}:
        assert (
            set(private_attributes(file)) - DOCUMENTED - OF_OTHERS.get(file.name, set()) == set()
        ), file


def test_every_attribute_exists():
    """The import of parawrap finds all other names.

    The tests of the features test what a name does.
    """
    module = torch.nn.Module()
    assert vars(module).keys() >= names.NOT_CALLED | {
        names.PARAMETERS,
        names.BUFFERS,
        names.CHILDREN,
    }
    assert hasattr(module, names.COMPILED_CALL)
    compiled = torch.compile(module)
    assert names.is_compiled_module(compiled)
    assert hasattr(compiled, "dynamo_ctx")
    assert names.compiled_original(compiled) is module
    assert names.is_compiled_function(torch.compiler.disable(lambda: None))


# What no other test of a feature would notice


def test_threads_and_finalizers_of_a_rank(tmp_path):
    """A rank ends when the threads of its function end, without idle workers of thread pools.

    It does not run the finalizers of modules that the server imported.
    """
    script = """
import threading, weakref
from concurrent.futures import ThreadPoolExecutor
from parawrap._private_names import join_threads, keep_finalizers_from_exits
class Owner: pass
imported, owned = Owner(), Owner()
weakref.finalize(imported, print, "imported")
keep_finalizers_from_exits()
weakref.finalize(owned, print, "owned")
pool = ThreadPoolExecutor(1)
pool.submit(print, "pool").result()
go = threading.Event()
threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
threading.Timer(0.1, go.set).start()
join_threads()
print("joined")
"""
    assert run_script(tmp_path, script).split() == ["pool", "thread", "joined", "owned"]
