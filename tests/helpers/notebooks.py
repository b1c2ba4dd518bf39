"""Run a notebook in a kernel of its own."""

from __future__ import annotations

import asyncio

import nbformat
import pytest
from nbclient import NotebookClient


def run_notebook(cells, folder, interrupt_at=None):
    """Return the executed cells. A cell that raises fails the test.

    Args:
        cells: The source of each cell.
        folder: The kernel runs in this folder.
        interrupt_at: A file. The kernel is interrupted once the file exists, as the button of a notebook does.
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path = folder / "notebook.ipynb"
    nbformat.write(notebook, path)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(folder / name.lower()))
        client = NotebookClient(
            nbformat.read(path, as_version=4),
            timeout=60,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        )
        if interrupt_at is not None:
            tasks = []
            client.on_notebook_start = lambda **_: tasks.append(asyncio.ensure_future(_interrupt(client, interrupt_at)))
        return client.execute().cells


async def _interrupt(client, path):
    while not path.exists():  # noqa: ASYNC110 (another process writes it)
        await asyncio.sleep(0.05)
    await client.km.interrupt_kernel()
