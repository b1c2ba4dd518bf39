"""The process of an elastic agent: torchrun, told to start ranks that call the parent, and ended with the parent.

Runs in a process of its own, whose standard input is a line to the parent.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from parawrap.launch._wire import Wire, is_readable, line_at_standard_input

__all__ = ["serve"]

_LOOK_S = 0.5


def serve(arguments: list[str], grace_s: float) -> None:
    """Be the agent; tells the parent the exit codes of the ranks that failed last."""
    gc.enable()
    wire = Wire(line_at_standard_input())
    # Ranks meet at the parent's store. With this the agent opens none of its own, which would listen on every interface.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    threading.Thread(target=_end_with_parent, args=(wire, grace_s), daemon=True).start()
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        wire.send("failures", {rank: failure.exitcode for rank, failure in error.failures.items()})
        sys.exit(1)


def _end_with_parent(wire: Wire, grace_s: float) -> None:
    """When the parent hangs up or is gone: the signal at which torchrun ends its ranks and itself; later, by force."""
    parent = os.getppid()
    while not is_readable(wire, _LOOK_S) and os.getppid() == parent:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(1)
