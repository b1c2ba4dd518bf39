"""The command ``parawrap``: one file per subcommand. Imports torch only where a subcommand needs it."""

from parawrap.cli._main import main

__all__ = ["main"]
