"""Programs that tests run in processes of their own, one per file.

pytest does not collect this folder, because it would run them.
"""

from __future__ import annotations

from pathlib import Path

SCRIPTS = Path(__file__).parent


def read_script(name):
    """Return the text of a program. Tests copy it into their folder, where the program runs."""
    return (SCRIPTS / f"{name}.py").read_text()
