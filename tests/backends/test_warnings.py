"""Warnings point at the user's line."""

from __future__ import annotations

from tests.helpers.processes import run_script


def test_wrapt_without_its_extension(tmp_path):
    """The frames of a wrapt that is written in Python are not the user's."""
    script = """
        import os
        os.environ["WRAPT_DISABLE_EXTENSIONS"] = "1"
        import warnings
        import torch
        from parawrap import tuple_fn
        drop_out = tuple_fn(torch.nn.functional.dropout, parallel=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            drop_out((torch.ones(3), torch.ones(3)))
        print(*(each.filename == __file__ for each in caught))
    """
    assert run_script(tmp_path, script) == "True\n"
