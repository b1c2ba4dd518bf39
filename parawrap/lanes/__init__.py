"""One worker thread per device slot: lanes, the pool that owns them, and the modes that follow a caller into them.

Knows threads, devices, and torch's thread-local modes; knows no modules and not how a call is cut. The guarantees are at
the top of ``_lane_pool.py``.
"""

from parawrap.lanes._first_failure import TaskOutcome, first_failure, raise_first_failure
from parawrap.lanes._lane_pool import Lane, LanePool, Task, here
from parawrap.lanes._lane_streams import LaneFuture
from parawrap.lanes._thread_modes import Modes, intra_op_threads, sees_only_its_own_thread
from parawrap.lanes._turns import Turns, TurnsOf

__all__ = [
    "Lane",
    "LaneFuture",
    "LanePool",
    "Modes",
    "Task",
    "TaskOutcome",
    "Turns",
    "TurnsOf",
    "first_failure",
    "here",
    "intra_op_threads",
    "raise_first_failure",
    "sees_only_its_own_thread",
]
