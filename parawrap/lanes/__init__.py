"""One worker thread per device slot: lanes, the pools that own them, and the modes that follow a caller into them.

A `LanePool` runs tasks; its guarantees are at the top of ``_lane_pool.py``. A `ThreadPool` runs the calls of one target in
a `LanePool`, and owns the copies of the target.
"""

from parawrap.lanes._first_failure import Outcome, first_failure, note, raise_first_failure
from parawrap.lanes._lane_calls import Entry, LaneCall, Prepare, Record, WholeCall, as_call, timed
from parawrap.lanes._lane_pool import Lane, LanePool, Task, TurnsOf, here
from parawrap.lanes._lane_streams import LaneFuture
from parawrap.lanes._thread_modes import Modes, intra_op_threads, sees_only_its_own_thread
from parawrap.lanes._thread_pool import ThreadPool

__all__ = [
    "Entry",
    "Lane",
    "LaneCall",
    "LaneFuture",
    "LanePool",
    "Modes",
    "Outcome",
    "Prepare",
    "Record",
    "Task",
    "ThreadPool",
    "TurnsOf",
    "WholeCall",
    "as_call",
    "first_failure",
    "here",
    "intra_op_threads",
    "note",
    "raise_first_failure",
    "sees_only_its_own_thread",
    "timed",
]
