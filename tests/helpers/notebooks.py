"""Run a notebook in a new kernel."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient


def run_notebook(cells, folder):
    """Run cells of this source in that folder, and return them. A cell that raises fails the test."""
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
        return client.execute().cells
