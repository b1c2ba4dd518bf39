"""Functions and classes of modules that only the launching process has go to ranks by value."""

from __future__ import annotations

import importlib.util
import sys
import types

from parawrap import wrapper
from tests.helpers.processes import failure_of, notes_of, ranks

SOURCE = """
import functools

SCALE = 4

class Row:
    def scaled(self):
        return SCALE

@functools.cache
def compute():
    return Row().scaled() + 4
"""


def import_from_folder(name, folder, monkeypatch):
    """Import a module from the working folder, and leave the folder."""
    (folder / f"{name}.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(folder)
    try:
        return importlib.import_module(name)
    finally:
        monkeypatch.chdir("/")


def make_module(name, folder, monkeypatch):
    """Make a module without a file."""
    module = types.ModuleType(name)
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_private_modules_are_sent(tmp_path, monkeypatch):
    """The function itself, functions that use it, cached functions, and instances of classes arrive."""
    made = [import_from_folder, make_module]
    modules = [make(f"parent_only_{make.__name__}", tmp_path, monkeypatch) for make in made]

    def use(rows):
        return [(module.compute(), row.scaled(), row) for module, row in zip(modules, rows, strict=True)]

    (found,) = wrapper(ranks(1))(use)([module.Row() for module in modules])
    for module, (total, scaled, row) in zip(modules, found, strict=True):
        assert (total, scaled, type(row)) == (8, 4, module.Row)
    assert wrapper(ranks(1))(modules[0].compute)() == (8,)
    for module in modules:
        monkeypatch.delitem(sys.modules, module.__name__)


def test_import_hook_is_explained(tmp_path, monkeypatch):
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
