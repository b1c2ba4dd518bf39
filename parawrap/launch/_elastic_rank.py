"""What an elastic agent starts: a process that calls the parent, and is a rank from then on."""

from __future__ import annotations

import os
import socket
from typing import NoReturn

from parawrap.launch._worker import run_rank

__all__ = ["call"]


def call(path: str) -> NoReturn:
    """Be the rank that torchrun's variables say, at the line that the parent answers at this path."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    run_rank(line, {"rank": int(os.environ["RANK"]), "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"])})
