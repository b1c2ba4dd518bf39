"""Functions of a script in ranks that stay: which globals stay in the ranks, which are sent again,
and which are refused.

One script runs all sections, each with new ranks. A section checks itself.
"""

from __future__ import annotations

import json

import pytest

from tests.helpers.processes import run_script
from tests.helpers.scripts import SCRIPTS, read_script

SECTIONS = sorted(path.stem for path in (SCRIPTS / "globals_of_a_script").glob("*.py"))


def guarded(section):
    """Return a section that prints its error, or null."""
    body = section.replace("\n", "\n    ")
    return f"""
raised = None
try:
    {body}
except BaseException:
    raised = traceback.format_exc()
print(json.dumps(raised), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The error of each section, or None."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script_checks.py").write_text(read_script("script_checks"))
    sections = [guarded(read_script(f"globals_of_a_script/{name}")) for name in SECTIONS]
    output = run_script(folder, "import json, traceback\n" + "".join(sections))
    return dict(zip(SECTIONS, map(json.loads, output.splitlines()), strict=True))


@pytest.mark.parametrize("case", SECTIONS)
def test_globals_of_a_script(case, outcomes):
    assert outcomes[case] is None
