"""Tables and reprs: short texts, and HTML for notebooks."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from torch import nn

from parawrap import Platform, RankResults, Wrapper, current_rank, parallel, wrapper
from tests.helpers.waiting import eventually

TWO = ["cpu", "cpu"]
RANKS = Platform(device="cpu", n_cpus=2, verbose=False)


def html(value):
    """Return the texts by element, heads of rows as cells.

    Fail if an element is open or might run a script.
    """
    texts = {}
    for element in ET.fromstring(value._repr_html_()).iter():
        assert element.tag not in ("script", "style", "link", "img", "b")
        if element.text:
            texts.setdefault("td" if element.get("scope") == "row" else element.tag, []).append(
                element.text
            )
    return texts


def test_stats_as_text_and_html():
    """The table of `print(p.stats())` is the one in a notebook.

    Numbers are aligned on the right.
    """
    with parallel(nn.Linear(3, 2), TWO, out_dims=0) as p:
        p(torch.zeros(5, 3))
        stats = p.stats()

    head, *lines = str(stats).splitlines()
    shown = html(stats)
    assert shown["caption"] == [head]
    assert lines[0] == "lane    device  tasks  rows  busy s"
    assert lines[0].split(maxsplit=4) == shown["th"]
    assert [shown["td"][index] for index in (0, 3, 5, 8)] == ["lane 0", "3", "lane 1", "2"]
    assert lines[1].startswith("lane 0  cpu         1     3  ")


def test_results_show_short_values():
    """A long value is shortened; if its `__repr__` raises, its type and the exception are shown."""
    results = RankResults(["<b>", Unshowable(), list(range(1000))])
    shown = html(results)["td"]
    assert shown[:6] == [
        "0",
        "str",
        "'<b>'",
        "1",
        "Unshowable",
        "<Unshowable: its __repr__ raised KeyError>",
    ]
    assert shown[8].startswith("[0, 1, 2")
    assert shown[8].endswith(" ...")
    assert len(repr(results)) < 300
    assert repr(RankResults(range(100))).endswith("7, ... 100 ranks)")


class Unshowable:
    def __repr__(self):
        raise KeyError("state")


def test_launch_shows_its_state_now(tmp_path):
    """Rows show the state and the last line of each rank: while it runs, and after its end."""
    started = tmp_path / "started"

    def train():
        print("first\nlast")
        if current_rank().global_rank == 0:
            started.touch()
        while not (tmp_path / "go").exists():
            pass
        if current_rank().global_rank == 1:
            raise ValueError("<b>")

    launch = wrapper(RANKS)(train).submit()
    eventually(
        lambda: started.exists() and "last" in launch.logs(0), "the output of the first rank"
    )
    shown = html(launch)
    assert shown["caption"][0].endswith("train on 2 ranks: running")
    assert shown["td"][:3] == ["0", "running", "last"]
    (tmp_path / "go").touch()
    with pytest.raises(ValueError, match="<b>"):
        launch.results()
    shown = html(launch)
    assert shown["caption"][0].endswith("failed")
    assert shown["td"][-3:] == ["1", "ValueError: <b>", "ValueError: <b>"]


def test_reprs_are_one_short_line(tmp_path):
    """Each object that a user gets has a repr of at most 100 characters."""
    launchable = wrapper(RANKS)(current_rank)
    launch = launchable.submit()
    with parallel(nn.Linear(3, 2), TWO) as p:
        p(torch.zeros(9, 3))
        shown = [launchable, launch, RANKS, Wrapper(RANKS), p, p.method("forward"), p.stats()]
        shown += [
            p.stats().lanes[0],
            p.submit(torch.zeros(1, 3)),
            p.map([]),
            p.trace(tmp_path / "t.html"),
        ]
    shown += list(launch.results())
    assert eval(repr(RANKS)) == RANKS
    for value in shown:
        assert len(repr(value)) <= 100 + len(str(tmp_path))
        assert "\n" not in repr(value)
        assert "object at 0x" not in repr(value) or "generator" in repr(value)


def test_notebook_shows_tables(tmp_path, monkeypatch):
    """A notebook displays an object as HTML. `map(progress=True)` shows a widget."""
    block = "import torch\nfrom parawrap import parallel\nmodel = torch.nn.Linear(3, 2)\n"
    block += (
        "with parallel(model, 2) as p:\n    outputs = list(p.map([torch.zeros(2, 3)] * 3, "
        "progress=True))"
    )
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in (block, "p.stats()")]
    )
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    mapped, stats = (
        NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}})
        .execute()
        .cells
    )
    (shown,) = stats.outputs
    assert "busy s" in shown.data["text/html"]
    (bar,) = mapped.outputs
    assert "application/vnd.jupyter.widget-view+json" in bar.data
