"""A call of a parallel target: scatter, replicate, apply, and gather.

This package knows models, tensors, devices, and lanes in threads of this process. It does not know
other processes, ranks, or clusters: `workers` takes the same steps with lanes in other processes,
and `neuroncores` with lanes that feed cores.

How a call runs::

    model(x, mask=m)
     │
     ├─ stub      the block has put it over forward: it finds the calls of    patch.py, call.py
     │            the block
     ├─ plain?    run without lanes: inside a lane, under a tracer, in a      must_run_plainly
     │            forked child
     ├─ plan      look up which arguments are cut, and the sizes of the       cut.py
     │            shards; a single shard usually runs without lanes
     ├─ current?  compare the model with its state at the last refresh; if    model_state.py
     │            they differ, bring the replicas up to date                  replicas.py
     │                                                                        parameter_copies.py
     ├─ scatter   cut the arguments into one shard per lane, and note what    cut.py
     │            each lane has borrowed                                      placed_call.py
     │                                                                        borrowed.py
     ├─ apply     run every shard in its lane; the caller runs lane 0's,      lanes.py
     │            and each that no lane has begun; in turns, one thread
     │            runs all shards of a device
     ├─ gather    join the changes of arguments and the outputs on the        join.py
     │            output device; copy what lanes keep                         placed_call.py
     │                                                                        output_handover.py
     └─ settle    refuse, give back, or put back what forward wrote into      forward_writes.py
                  the model; enter the changes into the caller's arguments    lent_containers.py

Read `call.py` first: it begins with a list of the functions that take these steps, in order. Read
`lanes.py` next. Whole calls (`map`, `submit`) and calls in workers take the same steps, in
`whole_call.py`, in `WorkerSession.call` of `workers/worker_session.py`, and in `ModelServer.answer`
of `workers/worker.py`.

Terms of several files:

term           | meaning
-------------- | ---------------------------------------------------------------------------------
plain call     | the call as without parawrap: the model itself, in the caller's thread
cut call       | a call with arguments that are cut into a shard per lane, or more
whole call     | a batch of `map`, or a submitted call: one lane runs it, uncut
leaf, spec     | what `flatten` makes of nested values: the values, and the containers around them
`WholeLeaf`    | a leaf that stands for a whole container, such as a cache with its own rules
path           | the keys from ``(args, kwargs)``, or from an output, to a value
extent         | the row count of a leaf, or a negative number that says why it has no rows
plan           | the dim that each leaf is cut on, and the sizes of the shards
part, shard    | what one lane runs of a cut call, and its arguments. A call has a part per lane,
               | or more: part i runs in lane ``i % lanes``
column         | the values of all parts at one place of the arguments, or of the outputs
origin         | the value of the caller, or of the model, that a value of a lane is a copy of
cure           | the options that an error names, with which the refused call runs
home, away     | the device of the model, and others: lanes there have copies of its parameters
turns          | one thread runs parts one after another: gradients or random numbers need an order
generation     | the number of refreshes that found the model changed; a whole call needs its own
quiet          | forward writes nothing, so looks for its writes are left out (`possible_writes.py`)
dirty          | a call may have left something in a replica, which is put back before the next one
lent, loan     | the copies that a lane has of the caller's arguments, as they were before forward
moment, mark   | the position of the caller on streams when it made a call (`device_streams.py`)
place          | a container of a model: its owner, its kind, and the path to it (`places.py`)
learns         | requires gradients, as a parameter that is not frozen does
survey, state  | what the model leads to, and what it held at the last refresh; `replicas.py` has
               | a table of these, and one of the words build, update, renew, restore, and doubt

- A call is decided from the call alone: from its arguments, the options of the block, the model,
  and the modes of torch. It never depends on earlier calls, on a measured time, on two equal
  numbers, or on a shape that happens to match. Between calls, a session keeps plans, replicas,
  counters, and which warnings it has given. A clock decides only whether a look at all hooks is
  repeated (`_SETTLED_S` in `model_state.py`).
- The caller's containers are written after all joins, so a refused call leaves dicts and lists of
  its arguments alone.
- Of several lanes that fail, the first one's error is raised (`lane_errors.py`).
- `tests/engine/test_entries.py` limits the number of functions that a warm call enters.

Without `out_dims`, the sizes of the shards are never all equal (`uneven_sizes` in
`shard_sizes.py`). A size that does not come from the rows cannot match different counts, so each
call shows which outputs follow the rows. No shard has one row next to shards of two:

rows | lanes | without `out_dims`           | with `out_dims`
---- | ----- | ---------------------------- | ---------------
11   | 2     | 6, 5                         | 6, 5
16   | 2     | 9, 7                         | 8, 8
8    | 2     | 5, 3, with a warning         | 4, 4
8    | 4     | 3, 3, 2, with a warning      | 2, 2, 2, 2
6    | 3     | 4, 2, with a warning         | 2, 2, 2
5    | 3     | 3, 2                         | 3, 2
4    | 2     | a plain call, with a warning | 2, 2
3    | 2     | a plain call                 | a plain call

On devices with streams, inputs in pageable host memory above 64 KiB go through pinned memory
(`backends/_transfer.py`). `map` and `submit` copy the next batch on another stream while the
current one runs; at most two batches per lane are on the device. Outputs go straight to their place
on the output device.

No lock is used where one step of Python is enough. These are one step, with and without the
interpreter lock:

one step                                                       | used for
-------------------------------------------------------------- | -----------------------------------
`pop`, `popleft`, `popitem` of a dict, list, or deque          | work that one thread alone may take
`append`, an assignment of an item, `setdefault`, `set.add`    | results, caches, names to warn of
`[*dict.items(d)]`, `[*values]` of a list or set, `deque.copy` | a look at what other threads change
an assignment of an attribute                                  | a new state, which is complete
                                                               | before it is stored

These are not: ``x += 1``, a loop over a dict or a deque, a view of an OrderedDict or of a class of
the user's, a look followed by a write. A counter belongs to a lock, and its comment names the lock.
Two flags that two threads write and read crosswise are written and read under one lock.

When the code of a file runs:

- For each call: `call.py`, `cut.py`, `flat_call.py`, `model_state.py`, `lanes.py`, `join.py`; with
  other arguments than tensors on the CPU also `placed_call.py`, `borrowed.py`,
  `lent_containers.py`, `join_by_place.py`, `output_handover.py`,
  `device_streams.py`. Whole calls have `session.py`, `streams.py`, and `whole_call.py`.
- For each new structure of arguments: `in_dims.py`, `shard_sizes.py`.
- When replicas are made or refreshed: `replicas.py`, `replica.py`, `survey.py`,
  `possible_writes.py`, `called_code.py`, `copy_target.py`, `copy_checks.py`, `places.py`,
  `parameter_copies.py`, `refused_models.py`.
- When a lane fails, or a call or an output is refused: `lane_errors.py`, `cut_errors.py`,
  `join_errors.py`, `join_trials.py`, `output_place.py`.

file                | contents                             | tests
------------------- | ------------------------------------ | ---------------------------------------
apply.py            | `apply_tasks`: run functions in      | api/test_scatter_gather.py
                    | lanes, for `parallel_apply`          | api/test_tuple_parallel.py
batched_copies.py   | send many tensors to another device  | devices/test_cost_of_copies.py
                    | in few copies                        | devices/test_replica_set.py
borrowed.py         | changes of arguments: noted for each | api/parallel/test_borrowed_arguments.py
                    | lane, joined, entered into the       | api/parallel/test_cut_and_join.py
                    | caller's objects                     |
call.py             | a cut call, from its stub to its     | api/parallel/test_answers.py
                    | output; plain calls, turns           | api/parallel/test_concurrency.py
                    |                                      | devices/test_turns.py
called_code.py      | `find_writes`: code that forward     | api/parallel/test_shared_by_lanes.py
                    | leads to; writes of weights,         | api/parallel/test_modes.py
                    | globals, generators                  |
columns.py          | values of all lanes at one place:    | engine/test_join_outputs.py
                    | kinds, equality, words               | api/parallel/test_joining.py
concatenate.py      | join tensors on the output device,   | engine/test_concatenate.py
                    | pad them; reduce numbers, or refuse  | engine/test_reduce_numbers.py
                    | them                                 |
copy_checks.py      | repeat copies that another thread    | api/parallel/test_concurrency.py
                    | disturbed; compare new replicas with | api/parallel/test_same_object.py
                    | the model                            |
copy_target.py      | how an object of any class is copied | api/parallel/test_shared_by_lanes.py
                    | for a lane                           | api/parallel/test_same_object.py
cut.py              | plan which arguments are cut, cache  | engine/test_cut.py
                    | plans, scatter, write rows back      | engine/test_round_trip.py
                    |                                      | api/parallel/test_cut_and_join.py
cut_errors.py       | errors of calls that cannot be cut,  | engine/test_cut_errors.py
                    | with the `in_dims` that settle them  | api/parallel/test_cures_of_calls.py
device_streams.py   | streams of a lane, and the order of  | devices/test_lane_streams.py
                    | its work and the caller's            | cuda/test_memory.py
fingerprint.py      | the weights and options of a target  | api/parallel/test_resume.py
                    | as a text, equal in every process    |
flat_call.py        | a call taken apart: the row count or | api/parallel/test_cutting.py
                    | the kind of each leaf                |
forward_writes.py   | writes of forward into the model:    | api/parallel/test_state.py
                    | given back, put back with a warning, | api/parallel/test_freshness.py
                    | refused                              | api/parallel/test_shared_by_lanes.py
given_arguments.py  | arguments of a call in another       | workers/test_given_arguments.py
                    | process: changes there, made here    |
in_dims.py          | `in_dims`: where the rows of each    | api/parallel/test_cutting.py
                    | argument lie                         |
join.py             | `join`: the outputs of the lanes;    | engine/test_join_outputs.py
                    | usual ones at once                   | engine/test_round_trip.py
join_by_place.py    | `Joiner`: join other outputs place   | engine/test_join_outputs.py
                    | by place, or refuse them             | api/parallel/test_joining.py
join_errors.py      | errors of outputs that cannot be     | api/parallel/test_cures_of_outputs.py
                    | joined, with the options that join   | api/test_cures.py
                    | all of them                          |
join_rules.py       | `out_dims`, `reduce`, and other      | engine/test_join_rules.py
                    | options for joining                  |
join_trials.py      | find each place that cannot be       | api/parallel/test_cures_of_outputs.py
                    | joined; try declarations that join   | api/test_cures.py
                    | it                                   |
lane_errors.py      | the error of the first lane that     | api/parallel/test_errors.py
                    | failed, with notes                   |
lanes.py            | lanes: their guarantees, threads,    | api/parallel/test_concurrency.py
                    | parts of a call, the caller's modes  | api/parallel/test_interrupts.py
                    |                                      | api/parallel/test_modes.py
lent_containers.py  | changes by forward in containers of  | api/parallel/test_borrowed_arguments.py
                    | arguments: found in a lane's copy,   | api/parallel/test_cut_and_join.py
                    | repeated in the caller's own         |
model_state.py      | `ModelState.is_current`: compare the | api/parallel/test_freshness.py
                    | model with its state at the last     |
                    | refresh; `Snapshot`: what containers |
                    | of a model or of a replica held      |
output_handover.py  | copy what a lane keeps of an output: | api/parallel/test_output_handover.py
                    | its containers, and buffers in it    |
output_place.py     | `OutputPlace`, `Cure`: one place of  | api/parallel/test_cures_of_outputs.py
                    | a refused output, its sizes          |
parameter_copies.py | copies of parameters on other        | devices/test_parameter_copies.py
                    | devices, and the way of gradients    | engine/test_gradients_of_copies.py
                    | back                                 |
patch.py            | replace methods of a module while a  | api/parallel/test_same_object.py
                    | block is open                        |
placed_call.py      | calls with other arguments than      | api/parallel/test_joining.py
                    | tensors on the CPU: the shards that  | api/parallel/test_output_handover.py
                    | lanes place, and the way back        | devices/test_parallel.py
places.py           | containers of a model: where they    | api/parallel/test_freshness.py
                    | are, how they are read and written   |
possible_writes.py  | what forward may write, by modules   | api/parallel/test_state.py
                    | and training flags                   | api/parallel/test_modes.py
refused_models.py   | models that get no replicas          | devices/test_replica_set.py
                    |                                      | cuda/test_graphs.py
replica.py          | one replica: its tensors, what it    | api/parallel/test_output_handover.py
                    | owns, what is put back               | devices/test_lane_state.py
replicas.py         | replicas of all lanes: make,         | api/parallel/test_freshness.py
                    | refresh, renew buffers, settle       | api/parallel/test_renewed_buffers.py
                    | writes                               | devices/test_replica_set.py
resume.py           | `map(resume=folder)`: files of       | api/parallel/test_resume.py
                    | outputs, digests of batches          |
session.py          | an open block: sends whole calls to  | api/parallel/test_streams.py
                    | lanes; counters                      | api/parallel/test_concurrency.py
shard_sizes.py      | how many rows each lane gets         | engine/test_shard_sizes.py
stats.py            | `p.stats`: counters of calls, rows,  | api/parallel/test_streams.py
                    | and busy seconds                     | displays/test_tables.py
streams.py          | streams of batches, for `map`:       | api/parallel/test_streams.py
                    | order, batches in flight, errors     | api/parallel/test_errors.py
survey.py           | one walk over all that a target      | api/parallel/test_cures_of_calls.py
                    | leads to; which objects lanes share, | api/parallel/test_shared_by_lanes.py
                    | or cannot                            |
trace.py            | `p.trace`: record the calls of each  | api/parallel/test_streams.py
                    | lane                                 |
whole_call.py       | a call that one lane runs whole, its | api/parallel/test_streams.py
                    | arguments there, its future          | devices/test_lane_streams.py
rules/              | values with their own rules:         | engine/test_register_split.py
                    | registered classes, caches,          | engine/test_packages.py
                    | TensorDicts, graphs                  |
"""
