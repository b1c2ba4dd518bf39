"""``parawrap timeline``: make a page of a recorded trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from parawrap.cli._usage_error import UsageError
from parawrap.displays import read_timeline, refusal_of_path, write_timeline

HELP = "Make a page of a recorded trace, and say where it is"
EXAMPLES = """examples:
  parawrap timeline lanes.json                # writes lanes.html
  parawrap timeline lanes.json -o page.html
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a .json file of p.trace")
    parser.add_argument("-o", "--output", type=Path, metavar="PAGE", help="the page; by default FILE with .html")


def run(given: argparse.Namespace) -> int:
    """Write the page, and print the idle times and the slowest span."""
    try:
        timeline = read_timeline(given.file)
    except OSError as error:
        msg = f"{str(given.file)!r} cannot be read: {error.strerror}"
        raise UsageError(msg) from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    page: Path = given.output or given.file.with_suffix(".html")
    if refusal := refusal_of_path(page):
        raise UsageError(refusal)
    write_timeline(page, timeline)
    print(timeline)
    print(f"wrote {page.resolve().as_uri()}")
    return 0
