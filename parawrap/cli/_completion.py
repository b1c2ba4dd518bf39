"""``parawrap completion``: completion for a shell."""

from __future__ import annotations

import argparse

from parawrap.cli._usage_error import UsageError

__all__ = ["EXAMPLES", "HELP", "add_options", "run"]

HELP = "Print a script that completes the command line in a shell"
EXAMPLES = """examples:
  parawrap completion bash > ~/.local/share/bash-completion/completions/parawrap
  parawrap completion zsh > ~/.zfunc/_parawrap        # a folder of your fpath
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"])


def run(given: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        msg = "completion needs the package shtab. Run pip install 'parawrap-torch[cli]'"
        raise UsageError(msg) from error
    print(shtab.complete(given.parser, given.shell))
    return 0
