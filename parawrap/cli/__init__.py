"""The command ``parawrap``: its parser, its exit codes, and ``timeline``.

This package reads the words of the command line, and prints the answers. It imports torch inside
the functions that use it: `parawrap --help` does not wait for torch.

file            | contents                                               | tests
--------------- | ------------------------------------------------------ | -------------------------
__init__.py     | the parser, the exit codes, and `parawrap timeline`    | cli/test_main.py
                |                                                        | cli/test_trace_to_page.py
_doctor.py      | `parawrap doctor`: limits of the machine, and a trial  | cli/test_doctor.py
                | of lanes and of ranks                                  |
_run_command.py | `parawrap run`: find a function, convert its           | cli/test_run.py
                | arguments, launch it                                   |
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parawrap import __version__
from parawrap.cli import _doctor, _run_command
from parawrap.displays import read_timeline, refusal_of_path, write_timeline

__all__ = ["main"]

_INTERRUPTED = 130  # as shells report Ctrl-C
_EXAMPLES = """examples:
  parawrap doctor                                         # check this machine
  parawrap run train:main --device cpu --n 2 -- --lr 0.1  # main(lr=0.1) of train.py in two ranks
  parawrap timeline lanes.json                            # make a page of a recorded trace
"""
_TIMELINE_EXAMPLES = """examples:
  parawrap timeline lanes.json                # writes lanes.html
  parawrap timeline lanes.json -o page.html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return the exit code.

    The code is 0 for success, 1 for a failure, 2 for wrong usage, and 130 after Ctrl-C.

    Args:
        argv: The words of the command line without the program; by default those of this process.

    Raises:
        SystemExit: If argparse refuses the words, with code 2, or after --help, with code 0.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # argparse does not see the words after "--". It would read them as options of the subcommand
    end = words.index("--") if "--" in words else len(words)
    parser = _parser()
    given, strays = parser.parse_known_args(words[:end])
    given.rest = words[end + 1 :]
    # Refused here and not by argparse, which has no cure for an option of the function
    if strays:
        msg = f"unrecognized arguments: {' '.join(strays)}"
        if given.command == "run":
            cure = shlex.join(_move_behind_dashes(words[:end], strays) + given.rest)
            msg += f". Put arguments of the function after --: {cure}"
        parser.error(msg)
    try:
        code: int = given.run(given)
    except argparse.ArgumentError as error:  # as subcommands refuse a value
        print(f"parawrap {given.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


def _move_behind_dashes(words: Sequence[str], strays: Sequence[str]) -> list[str]:
    """Return the command with all strays, which are in the order of the words, behind "--"."""
    pending = [*strays]
    kept = []
    for word in words:
        if pending and word == pending[0]:
            pending.pop(0)
        else:
            kept.append(word)
    return ["parawrap", *kept, "--", *strays]


def _parser() -> argparse.ArgumentParser:
    options: dict[str, Any] = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        # The meaning of an abbreviation would change with each new option
        "allow_abbrev": False,
    }
    description = "Run PyTorch code in parallel, check a machine, and look at timelines."
    parser = argparse.ArgumentParser(
        "parawrap", description=description, epilog=_EXAMPLES, **options
    )
    parser.add_argument("--version", action="version", version=f"parawrap {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )

    def add_command(
        name: str, text: str, examples: str, run: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=text, description=f"{text}.", epilog=examples, **options
        )
        command.set_defaults(run=run)
        return command

    text = "Check what this machine has, and try a block on two lanes and a launch of two ranks"
    doctor = add_command("doctor", text, _doctor.EXAMPLES, _doctor.run)
    _doctor.add_options(doctor)

    text = "Launch a function, and print the result of each rank"
    run = add_command("run", text, _run_command.EXAMPLES, _run_command.run)
    _run_command.add_options(run)

    text = "Make a page of a recorded trace, and say where it is"
    timeline = add_command("timeline", text, _TIMELINE_EXAMPLES, _make_page)
    timeline.add_argument("file", type=Path, metavar="FILE", help="a .json file of p.trace")
    timeline.add_argument(
        "-o", "--output", type=Path, metavar="PAGE", help="the page; by default FILE with .html"
    )
    return parser


def _make_page(given: argparse.Namespace) -> int:
    """Write the page of a trace, and print the idle times and the slowest span.

    Raises:
        ArgumentError: If the trace cannot be read, or the page cannot be written.
    """
    try:
        timeline = read_timeline(given.file)
    except OSError as error:
        msg = f"{str(given.file)!r} cannot be read: {error.strerror}"
        raise argparse.ArgumentError(None, msg) from error
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error
    page: Path = given.output or given.file.with_suffix(".html")
    page = page.expanduser()  # shells leave the "~" in --output=~/page.html as it is
    refusal = refusal_of_path(page)
    if refusal is not None:
        raise argparse.ArgumentError(None, refusal)
    write_timeline(page, timeline)
    print(timeline)
    print(f"wrote {page.resolve().as_uri()}")
    return 0
