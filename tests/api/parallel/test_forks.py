"""Forked children and the end of the process, with a block open."""

from __future__ import annotations

import faulthandler
import os
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

from parawrap import parallel
from tests.helpers.processes import run_script
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def in_fork(use):
    """Return the exit code of a forked child that calls `use`."""
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        try:
            use()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_worker_calls_a_model():
    """In a child, which has no lanes, the model runs plainly."""
    model = nn.Linear(1, 1)

    @torch.no_grad()
    def rows(indices):
        return model(torch.full((5, 1), float(indices[0])))

    with parallel(model, TWO) as p:
        p.submit(torch.ones(5, 1)).result(PATIENCE_S)
        loader = DataLoader(range(6), collate_fn=rows, num_workers=1, multiprocessing_context="fork")
        assert_close(list(loader), [rows([index]) for index in range(6)])


@torch.no_grad()
@pytest.mark.parametrize("use", ["call", "submit", "close", "new block"])
def test_a_child_waits_for_no_thread(use):
    """Also if the parent's lanes are at work, and a thread of the parent waits to copy the model."""
    waits, goes_on, begun = threading.Event(), threading.Event(), threading.Event()

    def call(x):
        with torch.no_grad():
            begun.set()
            return model(x)

    def wait(module, args):
        if (args[0] == 7).any():
            waits.set()
            assert goes_on.wait(PATIENCE_S)

    def new_block():
        with parallel(torch.relu, TWO) as own:
            assert own.submit(torch.ones(4)).result(PATIENCE_S).sum().item() == 4

    model, x = nn.Sequential(nn.Linear(3, 2)).eval(), torch.ones(6, 3)
    model[0].register_forward_pre_hook(wait)
    with parallel(model, TWO, out_dims=0) as p, ThreadPoolExecutor(2) as others:
        model(x)
        slow = others.submit(call, torch.full((6, 3), 7.0))
        assert waits.wait(PATIENCE_S)
        model[0].tag = [use]
        begun.clear()
        waiting = others.submit(call, x)
        assert begun.wait(PATIENCE_S)
        uses = {"call": lambda: model(x), "submit": lambda: p.submit(x).result(), "close": p.close, "new block": new_block}
        try:
            assert in_fork(uses[use]) == 0
        finally:
            goes_on.set()
        assert slow.result(PATIENCE_S).shape == waiting.result(PATIENCE_S).shape == (6, 2)


def test_programs_with_open_blocks_exit(tmp_path):
    script = """
        import torch
        from parawrap import parallel
        model = torch.nn.Linear(4, 4)
        p = parallel(model, ["cpu"] * 3)
        p.__enter__()
        model(torch.randn(7, 4))
        p.submit(torch.randn(7, 4)).result()
        print("end")
    """
    assert run_script(tmp_path, script, fresh=True) == "end\n"
