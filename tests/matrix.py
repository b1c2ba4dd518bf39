"""Test the wheel with releases of Python and torch: ``python -m tests.matrix [--python 3.12 ...]
[--torch VERSION ...]``.

Each cell is a new environment with one Python and one torch. It runs the examples of README.md and
docs/, and a quick part of the tests, in about three minutes. ``--page docs/versions.md`` enters the
results into that page.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import datetime as dt
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NAMES = ("python3", "python3.11", "python3.12", "python3.13", "python3.14", "python3.14t")
TORCHES = ("2.8.0", "2.9.0", "2.13.0", "newest")
# The cell has it from the wheel
NOT_COPIED = (".*", "__pycache__", "_build", "build", "dist", "*.egg-info", "parawrap")
LAUNCHES = ("tests/processes/test_pickling.py", "tests/launch/test_world.py")
EXAMPLES = ("README.md", "docs", *LAUNCHES)
QUICK = ("tests/test_private_names.py", "tests/test_tree.py", "tests/engine", "tests/api/parallel")
MARKS = "-m", "not (contract or slurm or ray or long or stress)"
# Ray's test cluster refuses to kill a node if this process is connected to it. In Ray 2.40, that
# may be any node. That release also leaves log files open.
CLUSTERS = (
    *("tests/launch/slurm", "tests/workers/test_ray_workers.py", "tests/contract/test_results.py"),
    *("-k", "(slurm or ray) and not lost_node"),
    *("-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"),
)
SUMMARY = re.compile(r"^=* ?((?:\d+ \w+(?:, )?)+) in [\d.]+s", re.MULTILINE)
RULE = "|---|---|---|---|---|---|---:|---|\n"


class Cell(NamedTuple):
    """One environment.

    `packages` is "pinned" as in constraints.txt, or "lowest": the lower bounds of setup.cfg.
    """

    python: str
    torch: str
    packages: str


class Row(NamedTuple):
    """The result of a cell, as a row of the page."""

    python: str
    torch: str
    packages: str
    system: str
    examples: str
    tests: str
    seconds: str
    date: str

    @property
    def is_green(self) -> bool:
        return not re.search(r"\b(failed|errors?|not)\b", f"{self.examples}; {self.tests}")

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"


def pythons() -> dict[str, str]:
    """Return the interpreters that parawrap may run on by version: those on PATH, and those of
    pyenv.
    """
    paths = [
        *filter(None, map(shutil.which, NAMES)),
        *Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python"),
    ]
    found: dict[str, str] = {}
    for path in map(str, paths):
        # A shim of pyenv for a Python that is not active
        with contextlib.suppress(subprocess.CalledProcessError):
            found.setdefault(version_of(path), path)
    return {
        version: found[version]
        for version in sorted(found, key=numbers)
        if (3, 11) <= numbers(version) < (3, 15)
    }


def chosen(names: Sequence[str], *, skip_missing: bool) -> Iterator[str]:
    """Yield interpreters by path, or by a version such as 3.14t, which this machine must have
    unless `skip_missing`.
    """
    found = pythons()
    for name in names:
        release = name.removesuffix("t")
        if not re.fullmatch(r"[\d.]+", release):
            yield name
            continue
        fits = [version for version in found if f"{version}.".startswith(f"{release}.")]
        fits = [version for version in fits if version.endswith("t") == name.endswith("t")]
        if fits:
            yield found[fits[-1]]
        elif skip_missing:
            print(f"Python {name} is skipped: this machine does not have it.", flush=True)
        else:
            msg = (
                f"this machine has no Python {name}. It has "
                f"{', '.join(found) or 'none that parawrap can use'}"
            )
            raise SystemExit(msg)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def version_of(python: str) -> str:
    """Return the version of an interpreter, with a t if it is free-threaded."""
    script = (
        "import platform, sysconfig; print(platform.python_version(), "
        "sysconfig.get_config_var('Py_GIL_DISABLED'))"
    )
    version, without_gil = _printed(python, script).split()
    return version + "t" * (without_gil == "1")


def _printed(python: str, script: str, folder: Path | None = None) -> str:
    return subprocess.run(
        [python, "-c", script], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def lower_bounds() -> list[str]:
    """Return the lowest releases that setup.cfg allows, also of the packages for Slurm and Ray."""
    project = configparser.ConfigParser()
    project.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = project["options.extras_require"]
    lists = project["options"]["install_requires"], extras["slurm"], extras["ray"]
    return [each.replace(">=", "==") for each in " ".join(lists).split()]


def install(cell: Cell, wheel: Path, folder: Path) -> str:
    """Make the environment of a cell, and return its interpreter."""
    subprocess.run([cell.python, "-m", "venv", folder / "venv"], check=True)
    python = str(folder / "venv" / "bin" / "python")
    limits = folder / "constraints.txt"
    if cell.packages == "lowest":
        lines, torch, extras = lower_bounds(), [], "test,slurm,ray"
    else:
        lines = [
            line
            for line in (ROOT / "constraints.txt").read_text().splitlines()
            if not line.startswith("torch==")
        ]
        torch, extras = ["torch" if cell.torch == "newest" else f"torch=={cell.torch}"], "test"
    limits.write_text("\n".join(lines))
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "-c",
        str(limits),
        f"{wheel}[{extras}]",
        *torch,
    ]
    subprocess.run(command, check=True)
    # With all processors; pip uses one
    compiling = [python, "-m", "compileall", "-qq", "-j", "0", folder / "venv" / "lib"]
    subprocess.run(compiling, check=False)
    return python


def run(cell: Cell, wheel: Path, folder: Path) -> Row:
    python = install(cell, wheel, folder)
    files = folder / "files"
    shutil.copytree(ROOT, files, ignore=shutil.ignore_patterns(*NOT_COPIED))
    torch, where = _printed(
        python, "import torch, parawrap; print(torch.__version__, parawrap.__file__)", files
    ).split()
    assert str(folder / "venv") in where, f"the cell would test {where} instead of the wheel"
    began = time.monotonic()
    parts = (*EXAMPLES, *MARKS), (*QUICK, *MARKS)
    running = [
        tested(python, part, files, folder / f"{number}.log") for number, part in enumerate(parts)
    ]
    examples, tests = (outcome(*each) for each in running)
    if cell.packages == "lowest":
        tests += f"; clusters: {outcome(*tested(python, CLUSTERS, files, folder / 'clusters.log'))}"
    seconds = f"{time.monotonic() - began:.0f}"
    return Row(
        version_of(cell.python),
        torch,
        cell.packages,
        " ".join(platform.libc_ver()),
        examples,
        tests,
        seconds,
        today(),
    )


def today() -> str:
    return dt.date.today().isoformat()


def tested(
    python: str, part: Sequence[str], files: Path, log: Path
) -> tuple[subprocess.Popen[bytes], Path]:
    command = [python, "-m", "pytest", "-q", *part]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=files, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        ), log


def outcome(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return pytest's counts. If a test failed, print the end of the log."""
    code = process.wait()
    text = log.read_text(errors="replace")
    if code:
        print(text[-6000:], flush=True)
    counts = SUMMARY.findall(text)
    if not counts:
        return f"not finished: exit code {code}"
    said: str = counts[-1]
    return (
        f"{said}, error: exit code {code}"
        if code and not re.search(r"\b(failed|errors?)\b", said)
        else said
    )


def enter(rows: Sequence[Row], page: Path) -> None:
    """Replace the rows of the same Python, torch, and packages in the table of a page.

    Keep what was not installed out.
    """
    rows = [row for row in rows if row.system]
    head, _, old = page.read_text().partition(RULE)
    table, _, tail = old.partition("\n\n")
    lines = {_cell_of(line): line for line in filter(None, table.splitlines())}
    lines.update({_cell_of(str(row)): str(row) for row in rows})
    ordered = sorted(lines, key=lambda cell: numbers(" ".join(cell[:2])))
    page.write_text(head + RULE + "\n".join(lines[cell] for cell in ordered) + "\n\n" + tail)


def _cell_of(line: str) -> tuple[str, ...]:
    return tuple(line.strip("| ").split(" | ")[:3])


def result(cell: Cell, wheel: Path) -> Row:
    """Return the row of a cell, also if it could not be installed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run(cell, wheel, Path(folder))
        except subprocess.CalledProcessError as error:
            print(error, error.stderr or "", flush=True)
            return Row(
                version_of(cell.python),
                cell.torch,
                cell.packages,
                "",
                "not installed",
                "",
                "",
                today(),
            )


def main() -> int:
    """Run the cells; return 1 if one is not green."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", nargs="*", help="versions such as 3.12, or paths; default: all that are found"
    )
    parser.add_argument(
        "--skip-missing-interpreters",
        action="store_true",
        help="skip versions that this machine lacks",
    )
    parser.add_argument(
        "--torch", nargs="*", default=TORCHES, help='releases of torch, such as 2.8.0, or "newest"'
    )
    parser.add_argument(
        "--lowest", action="store_true", help="test the lower bounds of setup.cfg instead"
    )
    parser.add_argument("--page", type=Path, help="enter the results into this page")
    options = parser.parse_args()
    skip_missing = options.skip_missing_interpreters
    found = list(
        chosen(options.python, skip_missing=skip_missing) if options.python else pythons().values()
    )
    releases = (
        [("", "lowest")] if options.lowest else [(torch, "pinned") for torch in options.torch]
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        build = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            folder,
            str(ROOT),
        ]
        subprocess.run(build, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        for python in found:
            for torch, packages in releases:
                rows.append(result(Cell(python, torch, packages), wheel))
                print(rows[-1], flush=True)
                if options.page:
                    enter(rows[-1:], options.page)
    return int(not all(row.is_green for row in rows) or not (rows or skip_missing))


if __name__ == "__main__":
    # A cell has neither this folder nor all optional packages
    for name in ("PYTHONPATH", "PARAWRAP_TEST_REQUIRE"):
        os.environ.pop(name, None)
    raise SystemExit(main())
