"""The page of the errors of failed launches."""

from __future__ import annotations

from tests.contract.table import PAGE, SITUATIONS, cells_on_page, page_of


def test_page_is_written_as_it_is_read():
    """Writing the cells that were read from the page changes nothing."""
    cells = cells_on_page()
    assert {situation for situation, _ in cells} == {*SITUATIONS}
    assert page_of(cells) == PAGE.read_text()


def test_launchers_with_one_behavior_share():
    """A launcher without a cell is left out, and so is a situation without launchers."""
    cells = {("killed", "local"): "`A`: b \\| c", ("killed", "ray"): "`A`: b \\| c"}
    cells["killed", "slurm"] = "no error"
    _, *sections = page_of(cells).split("\n## ")
    rows = "| local, Ray | `A`: b \\| c |\n| Slurm | no error |\n"
    title = "A rank is killed by SIGKILL"
    assert sections == [f"{title}\n\n| launcher | error |\n|---|---|\n{rows}"]
