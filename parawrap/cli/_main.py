"""The command ``parawrap``: its parser, and its exit codes."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from parawrap import __version__
from parawrap.cli import _completion, _doctor, _run, _trace_to_page
from parawrap.cli._usage_error import UsageError

__all__ = ["main"]

_SUBCOMMANDS = {"doctor": _doctor, "run": _run, "timeline": _trace_to_page, "completion": _completion}
_INTERRUPTED = 130  # as shells report Ctrl-C
_EXAMPLES = """examples:
  parawrap doctor                                    # check this machine
  parawrap run train:main --device cpu --n 2 -- 0.1  # call main(0.1) of train.py in two ranks
  parawrap timeline lanes.json                       # make a page of a recorded trace
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return the exit code: 0 for success, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # as after 2>&-: print would write to standard output
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    _print_any_character()
    parser = _parser()
    options, rest = _split(argv)
    _check_command(parser, options)
    given = parser.parse_args(options)
    try:
        if rest and given.run is not _run.run:
            msg = f"{given.command} takes no arguments after --"
            raise UsageError(msg)
        given.rest = rest
        code: int = given.run(given)
        if sys.stdout is not None:  # as after >&-
            sys.stdout.flush()
    except UsageError as error:
        print(f"parawrap {given.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # of standard output: the subcommands handle others
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
        if not isinstance(error, BrokenPipeError):  # as in `parawrap doctor | head -1`
            print(f"parawrap {given.command}: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


def _print_any_character() -> None:
    """Print escapes for characters that the encoding of the terminal does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _check_command(parser: argparse.ArgumentParser, options: Sequence[str]) -> None:
    """Suggest the subcommand that a wrong name resembles, as argparse does only since Python 3.14."""
    command = options[0] if options and not options[0].startswith("-") else None
    if command is not None and command not in _SUBCOMMANDS:
        similar = difflib.get_close_matches(command, _SUBCOMMANDS, n=1)
        remedy = f"Did you mean {similar[0]}?" if similar else f"Give one of {', '.join(_SUBCOMMANDS)}"
        parser.error(f"{command!r} is not a command. {remedy}")


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after ``--``."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "parawrap",
        description="Run PyTorch code in parallel, check a machine, and look at timelines.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"parawrap {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, subcommand in _SUBCOMMANDS.items():
        added = commands.add_parser(
            name,
            help=subcommand.HELP,
            description=f"{subcommand.HELP}.",
            epilog=subcommand.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        subcommand.add_options(added)
        added.set_defaults(run=subcommand.run, parser=parser)
    return parser
