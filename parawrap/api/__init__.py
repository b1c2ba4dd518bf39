"""The public functions and classes.

Each one checks its arguments and delegates to the engine or to a launcher. This package knows what
users write; how calls and launches run is in `engine`, `workers`, `neuroncores`, and `launch`.

word    | meaning
------- | -----------------------------------------------------------------------------------------
block   | a `Parallel` between `__enter__` and `__exit__`, and all that it opens
lane    | a thread that works on one device. `here.lane` is the lane that runs the code, or None
plain   | as without parawrap: a plain call runs the target itself, in the caller's thread
shard   | the rows of a call that one lane gets
session | the lanes of a block, the replicas of its model, and its counters (`engine/session.py`)
entry   | what to call: the target itself, or one method of it (`Entry` in `engine/call.py`)
cutter  | cuts the arguments of one method. In a dict of cutters, the key None is the target itself
row     | an entry of a tensor on the batch dim. Whether an output has rows must be declared, or
        | shown by shards of different sizes (`needs_proof`)
part    | one of the values that `tp_collate` makes for the devices, as `TupleParallel` takes them
step    | `scatter`, `replicate`, `parallel_apply`, or `gather`, as in torch.nn.DataParallel
way     | one of the kinds of calls that `compare` measures: plain, with lanes, or by `map`
job     | all that one launch needs: platform, function, and arguments (`Job` in `launch`)
share   | the devices and cores of this machine that one of several launches at a time gets

`tests/api/test_cures.py` and `tests/api/parallel/test_cures_of_calls.py` try the cures that the
errors of blocks and wrappers name.

file                    | contents                        | tests
----------------------- | ------------------------------- | ----------------------------------------
_check_arguments.py     | check the arguments of          | api/test_cures.py
                        | `parallel` before anything      |
                        | starts                          |
_containers.py          | read, rebuild, and transpose    | api/test_collate.py
                        | containers of samples and of    | api/test_tuples.py
                        | parts                           |
_decorated.py           | decorated functions and         | api/test_wrapper_methods.py
                        | methods: metadata, binding,     | api/test_wrapper.py
                        | pickles                         |
_differences.py         | differences between tensors,    | api/test_compare.py
                        | and what rounding explains      | api/test_check_rowwise.py
_map_and_submit.py      | `p.map` and `p.submit`: check   | api/parallel/test_streams.py
                        | their options, draw the         |
                        | progress bar                    |
check_rowwise.py        | `check_rowwise`: check that a   | api/test_check_rowwise.py
                        | model treats rows independently |
collate.py              | `tp_collate`,                   | api/test_collate.py
                        | `default_collate`: one          |
                        | mini-batch per device           |
collect.py              | `collect`: outputs of inner     | api/test_collect.py
                        | layers as outputs of a call     |
compare.py              | `compare`: time and differences | api/test_compare.py
                        | of plain calls and lanes, with  |
                        | a conclusion                    |
data_parallel.py        | `DataParallel`,                 | api/test_data_parallel.py
                        | `data_parallel`, and attributes | api/test_data_parallel_outputs.py
                        | looked up on the wrapped module | api/test_data_parallel_subclasses.py
                        |                                 | api/test_wrapped_attributes.py
move_to_device.py       | `recursive_to`,                 | api/test_move_to_device.py
                        | `recursive_cuda`, `cuda_attrs`, |
                        | `Batch`                         |
neuron_data_parallel.py | `neuron.DataParallel`: rows     | neuroncores/test_neuron_data_parallel.py
                        | split over NeuronCores          |
other_programs.py       | the CPU time of other programs  | api/test_other_programs.py
                        | while `compare` measures        |
parallel.py             | `parallel`, `Parallel`: open    | api/parallel/test_same_object.py
                        | and close a block; its options, | api/test_cures.py
                        | `stats`, `trace`                |
parallel_wrapper.py     | `ParallelWrapper`, with zeta's  | api/test_parallel_wrapper.py
                        | options                         |
scatter_gather.py       | `scatter`, `scatter_kwargs`,    | api/test_scatter_gather.py
                        | `replicate`, `parallel_apply`,  |
                        | `gather`, as in torch           |
sweep.py                | `train.map`: one launch per     | api/test_sweep.py
                        | item, `Sweep`, how many run at  |
                        | the same time                   |
tuple_parallel.py       | `TupleParallel`, `tuple_fn`:    | api/test_tuple_parallel.py
                        | arguments with one part per     |
                        | device                          |
tuples.py               | `cat`, `transpose`: tuples with | api/test_tuples.py
                        | one part per device             |
tuplewise.py            | `Tuplewise`: apply an operation | api/test_tuplewise.py
                        | to each item of a sequence      |
wrapper.py              | `wrapper`, `Wrapper`: call,     | api/test_wrapper.py
                        | submit, map, or run inline a    | launch/test_launch.py
                        | function on ranks               |
"""
