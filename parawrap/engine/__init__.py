"""The engine: scatter, replicate, apply, gather.

A session (``_session.py``) cuts and joins the calls of one target; `Session.call` is the whole call in one function. A pool
(``_thread_pool.py``) owns the lanes, and the copies of the target for them. A stream sends whole batches through the lanes
of a session. The engine uses every package below it, and no public class.
"""

from parawrap.engine._batch_stream import StreamOptions, StreamSession, stream
from parawrap.engine._call_recorder import CallSpan, Recorder, Trace, Work
from parawrap.engine._lane_calls import Entry, LaneCall, Prepare, Record, WholeCall, as_call, timed
from parawrap.engine._output_folder import OutputFolder
from parawrap.engine._patch_methods import PatchedMethods
from parawrap.engine._session import Ready, Session
from parawrap.engine._stats import LaneStats, Stats
from parawrap.replicas import ReplicaSet, original_method

__all__ = [
    "CallSpan",
    "Entry",
    "LaneCall",
    "LaneStats",
    "OutputFolder",
    "PatchedMethods",
    "Prepare",
    "Ready",
    "Record",
    "Recorder",
    "ReplicaSet",
    "Session",
    "Stats",
    "StreamOptions",
    "StreamSession",
    "Trace",
    "WholeCall",
    "Work",
    "as_call",
    "original_method",
    "stream",
    "timed",
]
