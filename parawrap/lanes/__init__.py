"""One WORKER per device slot: lanes, the pool that owns them, and what follows a caller into them.

Knows threads, devices and torch's thread-local modes; refuses to know modules and how a call is cut.
"""

from parawrap.lanes._backlog import Hand
from parawrap.lanes._lane import Lane, Span, Task, current_lane
from parawrap.lanes._modes import Modes, sees_only_its_own_thread
from parawrap.lanes._outcome import Outcome, first_failure, note
from parawrap.lanes._pace import WAKE_UP_NS
from parawrap.lanes._pool import LanePool
from parawrap.lanes._streams import LaneFuture
from parawrap.lanes._threads import intra_op_threads

__all__ = [
    "WAKE_UP_NS",
    "Hand",
    "Lane",
    "LaneFuture",
    "LanePool",
    "Modes",
    "Outcome",
    "Span",
    "Task",
    "current_lane",
    "first_failure",
    "intra_op_threads",
    "note",
    "sees_only_its_own_thread",
]
