"""``python -m parawrap``: the command line."""

from __future__ import annotations

import sys

from parawrap.cli import main

if __name__ == "__main__":
    sys.exit(main())
