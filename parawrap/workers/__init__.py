"""Lanes that work in other processes: the same calls without a shared interpreter lock.

A worker is a rank of a pool of processes, or a Ray actor, with a copy of the model. Its lane in
this process sends it parts of calls, and batches in chunks. This package takes the steps of a call
from `engine`, and processes and messages from `processes`. It does not know how a call is cut, or
how a process starts.

How a batch of `map` gets to a worker and back::

    p.map(batches)
     │
     ├─ chunk     put batches into one message: about 5 ms of work            WorkerStream
     │                                                                        chunk_size.py
     ├─ pack      tensors into one block, anything else into pickles          processes/packing.py
     ├─ post      to the worker with the fewest messages, at most two; else   worker_lanes.py
     │            into the backlog
     ├─ travel    over a socket and shared memory, or through Ray's object    processes/wire.py
     │            store                                                       ray_workers.py
     ├─ answer    in the worker: run one batch after another from the state   local_workers.py
     │            of the model; pack each output before the next batch        worker.py
     ├─ receive   the thread that waits receives for all, and sends what      worker_lanes.py
     │            waits in the backlog
     └─ read      unpickle the output; do to the caller's arguments what      worker_session.py
                  the call did to the worker's                                writes.py

The model travels with a message only if it has changed (`model.py`).

word             | meaning
---------------- | -------------------------------------------------------------------------------
request, message | one call of `submit`, one part of a cut call, or a chunk, on its way to a worker
chunk            | batches of a stream in one message
form             | the common part of the calls of a message, such as their method and modes
block            | of a message: the bytes of its tensors. Otherwise the `with` block of the user
item             | a packed value, which refers to tensors in the block of its message
reader           | the thread that receives answers for all threads that wait
receiver         | the thread that reads for futures that no caller waits for, and runs callbacks

A call also writes into its arguments, which are copies in the worker. The answer brings new values
of tensors, new entries of containers, and marks: a mark stands in the output for an argument that
the model returned, and the caller gets its own object there. Objects with rules are those of a
class in `register_split`. Writes into other objects cannot return, and raise SessionError.

file              | contents                                       | tests
----------------- | ---------------------------------------------- | -------------------------------
chunk_size.py     | how many batches of a stream travel in one     | workers/test_stream.py
                  | message                                        |
local_workers.py  | workers on this machine: start, supervise,     | workers/test_local_worker.py
                  | end; `serve` in the worker                     |
model.py          | `build`; the model as workers get it, and when | workers/test_sent_model.py
                  | it is sent again                               | workers/test_build.py
ray_workers.py    | workers on a Ray cluster                       | workers/test_ray_workers.py
submitted_call.py | a whole call of `submit`, and its future       | workers/test_worker_pool.py
                  |                                                | workers/test_local_worker.py
worker.py         | in the worker: its model, modes, and answers   | workers/test_worker_pool.py
                  | to messages                                    | workers/test_sent_model.py
worker_lanes.py   | lanes of workers: queue, send, receive,        | workers/test_worker_lane.py
                  | replace workers that died                      | workers/test_local_worker.py
worker_session.py | the session of a block over workers: cut       | workers/test_worker_pool.py
                  | calls, whole calls, streams                    | workers/test_stream.py
writes.py         | writes of a call into its arguments: returned  | workers/test_given_arguments.py
                  | to the caller, or refused                      |
"""

from parawrap.workers.model import build
from parawrap.workers.ray_workers import devices_of
from parawrap.workers.worker_session import WorkerSession

__all__ = ["WorkerSession", "build", "devices_of"]
