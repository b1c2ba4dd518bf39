"""Functions and classes of modules that only the launching process has go to ranks by value."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest

from parawrap import wrapper
from parawrap.launch.messages._importable_modules import is_importable
from tests.helpers.processes import failure_of, notes_of, ranks

SOURCE = """
import functools

SCALE = 4

class Row:
    def scaled(self):
        return SCALE

@functools.cache
def cached():
    return SCALE

def compute():
    return Row().scaled() + cached()
"""


def load_from_file(name, path, monkeypatch):
    """Load a module from a file that is not on the import path."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def import_from_folder(folder, name, monkeypatch):
    """Import a module from the working folder, and leave the folder."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(folder)
    try:
        return importlib.import_module(name)
    finally:
        monkeypatch.chdir("/")


def make_module(name, monkeypatch):
    """Make a module without a file."""
    module = types.ModuleType(name)
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("kind", ["file", "folder", "made"])
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_functions_of_modules_that_ranks_cannot_import_launch(kind, method, tmp_path, monkeypatch):
    """The function itself, functions that use it, cached functions, and instances of classes arrive."""
    name = f"parent_only_{kind}_{method}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    if kind == "file":
        module = load_from_file(name, tmp_path / f"{name}.py", monkeypatch)
    elif kind == "folder":
        module = import_from_folder(tmp_path, name, monkeypatch)
    else:
        module = make_module(name, monkeypatch)
    row, cached = module.Row(), module.cached

    def use(row):
        return module.compute(), cached(), row.scaled(), row

    ((total, four, scaled, same),) = wrapper(ranks(1, spawn_method=method))(use)(row)
    assert (total, four, scaled, type(same)) == (8, 4, 4, module.Row)
    assert wrapper(ranks(1, spawn_method=method))(module.compute)() == (8,)
    monkeypatch.delitem(sys.modules, name)


def test_a_module_of_an_import_hook_is_explained(tmp_path, monkeypatch):
    """ModuleNotFoundError has a note that ranks have no import hooks of the script."""
    (tmp_path / "content.py").write_text(SOURCE)

    class Finder:
        def find_spec(self, name, path=None, target=None):
            return importlib.util.spec_from_file_location(name, tmp_path / "content.py") if name == "hooked" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    import hooked  # pyright: ignore[reportMissingImports]

    try:
        error, _ = failure_of(hooked.compute)
    finally:
        monkeypatch.delitem(sys.modules, "hooked")
    assert type(error) is ModuleNotFoundError
    assert "have no import hooks of the script" in notes_of(error)


@pytest.mark.parametrize(
    "name", ["sys", "json", "json.decoder", "torch.nn.modules.linear", "numpy", "tests.helpers.processes"]
)
def test_installed_modules_are_importable(name):
    """Modules of Python, of installed packages, and of the import path are sent by name."""
    assert is_importable(name)


def test_a_file_under_another_name_is_not_importable(tmp_path, monkeypatch):
    """A folder of the import path does not help if the file has another name."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "content.py").write_text(SOURCE)
    load_from_file("other_name", tmp_path / "content.py", monkeypatch)
    assert not is_importable("other_name")
