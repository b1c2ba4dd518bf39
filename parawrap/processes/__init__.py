"""Everything that runs in another process: a server that forks, wires, ranks, and their pool.

    Pool ── data wire ──────► main thread of a rank: runs calls, answers them
      │ └── control wire ───► control thread of a rank: stacks, interrupts, its end
      └──── ForkServer: forks ranks, reports how they end, ends what they leave behind

There are two wires because the main thread of a rank reads nothing while it runs a call. Its
control thread must read orders meanwhile.

This package knows a number of ranks, settings, and functions. It does not depend on platforms,
clusters, or models.

How a call of ranks that stay runs::

    ranks(f, x)
     │
     ├─ SentScript.pack_call                                                  script_globals.py
     │      pack the function if the ranks lack it, the globals that          kept_functions.py
     │      changed, and the arguments
     ├─ HeldSignals                                                           held_signals.py
     │      until `finish`, Ctrl-C only wakes this thread, so that it
     │      interrupts no message
     ├─ Pool.begin                                                            pool.py
     │      encode for all ranks, then send: at a limit of this process,      wire.py
     │      the call fails before a rank has got it
     ├─ RanksRun.drive                                                        launch/ranks_run.py
     │      this thread waits for the answers, and reads them                 events.py
     │      ▲ the thread of the pool reads status and output, runs timers,    members.py
     │      └ and wakes this thread at a death; it goes on after Ctrl-C
     ├─ Pool.finish                                                           pool.py
     │      note how the ranks have ended the call; handle Ctrl-C
     └─ values_of                                                             outcomes.py
            unpickle the values, or raise the error of the first failure

If another call runs, or waits, a call lines up behind it, and the thread of the pool makes it.

If a rank raises or dies, `Pool._settle` interrupts the call in the other ranks. After an echo, it
waits a second for the original failure. `Pool._look` finds ranks that hang, or that wait for ranks
which do not take part. The call ends once each of its ranks has an outcome, and `first_failure` in
`outcomes.py` picks the error.

Words that several files use:

- The launching process runs the script. A member is a rank as the launching process sees it. The
  others of a call are ranks that do not run its function, but take the function and the globals
  that the call brings: later calls rely on them.
- An outcome is how one rank has ended a call. An ending is how the whole call has ended. An echo is
  an outcome that reports a lost connection to another rank: the original failure is raised instead.
- A generation is the process groups of all ranks. If a call leaves them unusable, the ranks make
  the next generation before their next call.
- A look is a request to a rank: where is its main thread, and for how long?
- A space is the globals of one module, or of one dict of `exec`.
- A block is the memory of the tensors of one message. A large one lies in a slab: shared memory
  that its owner fills again once the reader has released it. An item says where in the block a
  value is.

Two rules hold for all pools, and `tests/processes/test_supervision.py` keeps them: the thread that
owns a pool resolves every open call on every way out, and nothing in it waits without a deadline,
which is an hour if nothing is due earlier.

A worker is a rank that stays: the lane of a `parallel` block sends and receives, and one thread per
`parallel` block notices how processes end (`workers/local_workers.py`).

file              | contents                                    | tests
----------------- | ------------------------------------------- | ----------------------------------
calls.py          | the state of a call; when ranks count as    | processes/test_progress.py
                  | hanging or idle                             | launch/test_hangs.py
definitions.py    | copies of classes and generic functions     | processes/test_definitions.py
                  | that cloudpickle makes wrongly              |
events.py         | events that a pool waits for, in its own    | processes/test_supervision.py
                  | thread and in a caller's                    |
fork_server.py    | the process that forks ranks; keepers,      | processes/test_fork_server.py
                  | which end leftover processes                | processes/test_supervision.py
forks.py          | descriptors that processes which the user   | processes/test_forks.py
                  | forks must not inherit                      |
held_signals.py   | hold back Ctrl-C while a caller changes a   | processes/test_held_signals.py
                  | pool                                        |
kept_functions.py | functions that ranks keep between calls     | processes/test_kept_functions.py
latch.py          | an event that Ctrl-C cannot leave locked    | processes/test_held_signals.py
main_thread.py    | where the main thread of a rank is, and how | processes/test_progress.py
                  | long it idles; stacks                       | launch/test_hangs.py
members.py        | processes of ranks, as the launching        | processes/test_fork_server.py
                  | process sees them: start, output, end       | processes/test_supervision.py
outcomes.py       | how ranks end a call; which failure is      | processes/test_outcomes.py
                  | raised, and its text (`RankDiedError` and   | processes/test_exceptions.py
                  | others)                                     | contract/test_failures.py
output.py         | output of ranks: kept, written to log       | processes/test_output.py
                  | files, printed by lines                     |
packing.py        | values of one message: tensors in one       | workers/test_requests.py
                  | block, small pickles                        |
pickling.py       | pickle values with tensors apart; what goes | processes/test_pickling.py
                  | by value; name what cannot be sent          | processes/test_modules_by_value.py
                  |                                             | processes/test_unpicklable.py
pool.py           | calls of ranks: send, supervise, time       | launch/test_ends_of_calls.py
                  | limits, hangs, deadlocks, interrupts        | launch/test_failed_calls.py
                  |                                             | launch/test_hangs.py
preemption.py     | `should_checkpoint`, `requeue`: ranks agree | processes/test_preemption.py
                  | on the step to save in                      |
rank_process.py   | the process of a rank: main thread, control | processes/test_rank_process.py
                  | thread, exit                                |
refusals.py       | values that lose their meaning in another   | processes/test_unpicklable.py
                  | process: shards, fake tensors               |
script_globals.py | globals of the script                       | processes/test_script_globals.py
settings.py       | environment, folder, import path, and       | processes/test_settings.py
                  | settings of torch for ranks                 | launch/test_ranks.py
shared_memory.py  | memory that processes share: files without  | processes/test_wire.py
                  | a path, slabs                               | processes/test_rank_process.py
torch_groups.py   | the store where ranks meet, their groups,   | processes/test_torch_groups.py
                  | ends of collectives                         | launch/test_failed_calls.py
wire.py           | messages over one end of a socket, with     | processes/test_wire.py
                  | limits on files and memory                  | processes/test_supervision.py
"""
