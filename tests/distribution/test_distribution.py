"""The wheel and the source distribution: they build without warnings, and have all that a user
needs.
"""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers.tiers import require_packages

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://example.org/owner/parawrap"
DOCUMENTATION = "https://example.org/docs"
LINK = re.compile(r"\]\(([^)]*)\)")


def build(folder, *options, **environment):
    """Build into that folder, and return what the build printed."""
    require_packages("build", "twine")
    variables = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    command = [sys.executable, "-m", "build", *options, "--outdir", folder, ROOT]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=variables | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with a wheel and a source distribution, and what their build printed."""
    folder = tmp_path_factory.mktemp("dist")
    return folder, build(
        folder, PARAWRAP_REPOSITORY=REPOSITORY, PARAWRAP_DOCUMENTATION=DOCUMENTATION
    )


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built[0].glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def metadata_of(source):
    with tarfile.open(source) as opened:
        (member,) = [
            each for each in opened.getmembers() if re.fullmatch(r"[^/]+/PKG-INFO", each.name)
        ]
        return email.message_from_bytes(opened.extractfile(member).read())


def test_builds_have_no_warnings(built):
    """Neither setuptools nor `twine check --strict` prints a warning: a package index can show the
    description.
    """
    assert [
        line for line in built[1].splitlines() if re.match(r"(?i)(\S*warning\b|\*{5})", line)
    ] == []
    command = [sys.executable, "-m", "twine", "check", "--strict", *sorted(built[0].iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("PASSED")) == (0, 2), done.stdout + done.stderr


def test_wheel_has_only_the_package(wheel):
    """All modules, the marker of types, the page of timelines, the licence, and the command."""
    files = set(wheel.namelist())
    assert {str(file.relative_to(ROOT)) for file in (ROOT / "parawrap").rglob("*.py")} <= files
    assert {"parawrap/py.typed", "parawrap/displays/timeline.html"} <= files
    assert {name.partition("/")[0].partition("-")[0] for name in files} == {
        "parawrap",
        "parawrap_torch",
    }
    (info,) = {name.partition("/")[0] for name in files if ".dist-info/" in name}
    assert f"{info}/licenses/LICENSE" in files
    assert "parawrap = parawrap.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_errors_cite_the_address(wheel, tmp_path):
    """With PARAWRAP_DOCUMENTATION, errors of the wheel end with an address.

    Those of the source name a page.
    """
    wheel.extractall(tmp_path)
    script = "import parawrap; print(parawrap.__file__); print(parawrap.LaunchError('no'))"
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    file, error = done.stdout.splitlines()
    assert Path(file).is_relative_to(tmp_path)
    assert error == f"no ({DOCUMENTATION}/errors.html#launcherror)"


def test_source_can_be_tested(built):
    """The source distribution has every file of the repository that `make test` reads."""
    (source,) = built[0].glob("*.tar.gz")
    with tarfile.open(source) as opened:
        files = {name.partition("/")[2] for name in opened.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {name for name in tracked if not name.startswith(".")} <= files


def test_links_on_a_package_index(built, tmp_path):
    """With PARAWRAP_REPOSITORY, all links of the description and the metadata are absolute, and
    lead to files.

    Without it, there are none.
    """
    (source,) = built[0].glob("*.tar.gz")
    metadata = metadata_of(source)
    links = LINK.findall(metadata.get_payload())
    assert len(links) > 20
    for link in links:
        kind, _, path = link.removeprefix(f"{REPOSITORY}/").partition("/HEAD/")
        assert kind in ("blob", "raw")
        assert (ROOT / path.partition("#")[0]).is_file(), link
    assert dict(each.split(", ") for each in metadata.get_all("Project-URL")) == {
        "Source": REPOSITORY,
        "Documentation": f"{REPOSITORY}/tree/HEAD/docs",
    }
    build(tmp_path, "--sdist", PARAWRAP_REPOSITORY="")
    (source,) = tmp_path.iterdir()
    metadata = metadata_of(source)
    assert LINK.findall(metadata.get_payload()) == []
    assert metadata.get_all("Project-URL") is None
