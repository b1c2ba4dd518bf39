"""The command ``parawrap``: its parser, and its exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

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
    parser = _parser()
    options, rest = _split(argv)
    given = parser.parse_args(options)
    try:
        if rest and given.run is not _run.run:
            msg = f"{given.command} takes no arguments after --"
            raise UsageError(msg)
        given.rest = rest
        code: int = given.run(given)
        sys.stdout.flush()
    except UsageError as error:
        print(f"parawrap {given.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as in `parawrap doctor | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


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
        )
        subcommand.add_options(added)
        added.set_defaults(run=subcommand.run, parser=parser)
    return parser
