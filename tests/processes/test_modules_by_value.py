"""Functions and classes of modules that only the launching process has go to ranks by value."""

from __future__ import annotations

import importlib.util
import sys
import types

from parawrap import wrapper
from tests.helpers.processes import ranks

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


def test_private_modules_are_sent(monkeypatch):
    """Functions, functions that use them, cached functions, and instances of classes of a module
    without a file arrive.
    """
    module = types.ModuleType("parent_only")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, "parent_only", module)
    (found,) = wrapper(ranks(1))(lambda row: (module.compute(), row.scaled(), row))(module.Row())
    assert (found[:2], type(found[2])) == ((8, 4), module.Row)


def test_files_named_as_another_module(tmp_path, monkeypatch):
    """The module of the script is used, and not the one that ranks would import."""
    (tmp_path / "config_of_test.py").write_text("def scale(): return 1")
    (tmp_path / "loaded.py").write_text("def scale(): return 2")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.spec_from_file_location("config_of_test", tmp_path / "loaded.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "config_of_test", module)
    spec.loader.exec_module(module)
    assert wrapper(ranks(1))(module.scale)() == (2,)
