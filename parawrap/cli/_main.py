"""The command ``parawrap``: its parser, and its exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from parawrap import __version__
from parawrap.cli import _doctor, _run, _trace_to_page
from parawrap.cli._usage_error import UsageError

_SUBCOMMANDS = {"doctor": _doctor, "run": _run, "timeline": _trace_to_page}
_INTERRUPTED = 130  # as shells report Ctrl-C
_EXAMPLES = """examples:
  parawrap doctor                                         # check this machine
  parawrap run train:main --device cpu --n 2 -- --lr 0.1  # call main(lr=0.1) of train.py in two ranks
  parawrap timeline lanes.json                            # make a page of a recorded trace
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return the exit code: 0 for success, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    parser = _parser()
    given, strays = parser.parse_known_args(words[:end])
    given.rest = words[end + 1 :]
    if strays:
        msg = f"unrecognized arguments: {' '.join(strays)}"
        if given.command == "run":
            msg += f". Put arguments of the function after --: parawrap run {given.target} -- {' '.join(strays)}"
        parser.error(msg)
    try:
        code: int = given.run(given)
    except UsageError as error:
        print(f"parawrap {given.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "parawrap",
        description="Run PyTorch code in parallel, check a machine, and look at timelines.",
        epilog=_EXAMPLES,
        formatter_class=as_written,
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
            formatter_class=as_written,
            allow_abbrev=False,
        )
        subcommand.add_options(added)
        added.set_defaults(run=subcommand.run)
    return parser
