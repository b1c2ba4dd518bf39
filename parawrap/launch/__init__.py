"""Run a function once per rank, on this machine or a cluster, and return every rank's result.

This package starts processes, connects them, and ends them. It does not depend on modules or lanes.

word       | meaning
---------- | --------------------------------------------------------------------------------------
rank       | one of the processes that run the function, and its number
world      | all ranks of a launch. Their number is the world size
launcher   | what starts the ranks: this process, Ray, Slurm, or torchrun and other programs
store      | a dict of torch.distributed that all ranks reach, at a port or in a file. Ranks meet
           | there to make process groups
attempt    | a restart ends all ranks, and starts new ones: they are the next attempt
preemption | the machines are about to be taken away: `should_checkpoint` returns True, the
           | function saves and calls `requeue`, and the launch starts its ranks again
echo       | an error in a rank that only follows from the end of another one, such as a broken
           | connection. The rank with the cause is reported (`processes/outcomes.py`)

How a launch runs: open the machines, start the ranks, make one call, close. Ranks that stay make
any number of calls (`processes/__init__.py` shows one)::

    @wrapper ── Launch ──► Attempts ─┐            ┌── rank 0: its main thread answers calls,
                                     ├── Pool ────┤           its control thread does the rest
    open()  ──  Ranks  ──► RanksRun ─┘    │       └── rank 1
                                     RankStarter ── server: forks keepers
                                                     └── keeper: forks a rank, reports its exit,
                                                                 ends what it leaves

An ordinary launch::

    train(x)                                     of a function with @wrapper(platform)
     │
     ├─ check     can ranks be launched here, and do the arguments fit?      api/wrapper.py
     ├─ launch    choose the launcher, and start the thread of a run         api/sweep.py: run_job
     │                                                                       _launcher.py, run.py
     ├─ machines  wait for them; they choose the store where ranks meet      machines.py
     ├─ start     fork the ranks, and set each one up                        attempts.py, set_up.py
     ├─ call      send the function; each rank runs it and answers           processes/pool.py
     ├─ end       let the ranks exit; after a failure, maybe start again     attempts.py
     └─ results   unpickle the values in the thread that waits               launch.py

If a rank raises or dies, `Pool._settle` notes it, and `Pool._interrupt` ends the other ranks: at
once, or a second later if the error may be an echo. A rank that has not ended after ``grace_s`` is
killed. Ranks that stay get a KeyboardInterrupt instead if another rank raises; they end if one
dies, or if they do not stop. Then `first_failure` (`processes/outcomes.py`) picks the error that is
raised, unless `may_restart` (`attempts.py`) allows another attempt.

A `Run` (`run.py`) owns the ranks from their start to their end, and its thread acquires and
releases all that they need. `Launch` and `Ranks` are views on it. All runs are in one registry, and
one exit hook ends them. The kinds of runs are `Attempts`, `RanksRun`, `RanksCall`, `BatchRun` of
Slurm, and `FinishedRun`.

`Pool` (`processes/pool.py`) supervises the ranks of a launch in one thread: time limits, the first
failure, deadlocks, and the end of the other ranks. Ranks that stay are interrupted instead of
ended. It knows no platforms: a `RankStarter` gives it the connections of each rank, and `Machines`
a starter for each attempt. About once per second, it requests from each rank that runs a call the
state of its main thread (`Status` in `processes/main_thread.py`).

launcher | machines                                  | the pool runs in      | connections
-------- | ----------------------------------------- | --------------------- | ---------------------
`local`  | `Machines`: this machine, and the server  | the launching process | sockets and pipes;
         | in `processes/fork_server.py`             |                       | above 32 KiB, memory
         |                                           |                       | that both ends map
`ray`    | `RayMachines`: an actor per node          | the launching process | TCP
`slurm`  | none: the tasks of the job are the ranks  | none                  | files, also of
         | (`slurm/task.py`), and srun ends them     |                       | submitit; a store of
         |                                           |                       | torch.distributed at
         |                                           |                       | rank 0
`env`    | none: torchrun, srun, or mpirun has       | none                  | a gloo group of all
         | started the ranks                         |                       | ranks (`torchrun.py`)

`tests/contract/` has one suite for all launchers: results and failures.

file                | contents                                    | tests
------------------- | ------------------------------------------- | --------------------------------
_devices.py         | `Device`: kinds of devices, how many are    | launch/test_shares.py
                    | visible, variables that select them         | neuron_devices/test_launching.py
_job.py             | one call of a function on a platform;       | api/test_cures.py
                    | functions that ranks cannot run             | launch/test_launch.py
_launcher.py        | choose the launcher of a platform           | launch/test_platform.py
                    |                                             | launch/test_missing_clusters.py
_platform.py        | `Platform`: the public class, with `open`   | launch/test_platform.py
_platform_fields.py | fields of a platform: allowed values and    | launch/test_platform.py
                    | defaults; the device of a local rank        |
_rank.py            | `Rank`, `current_rank`: the place of a rank | contract/test_results.py
                    |                                             | launch/test_marks.py
_rank_results.py    | `RankResults`: one result per rank          | displays/test_tables.py
_seeds.py           | seed a rank; restore the generators of this | processes/test_settings.py
                    | process after it                            | launch/test_inline.py
_world.py           | places of ranks, read from variables of     | launch/test_world.py
                    | torchrun, srun, or mpirun                   |
agreement.py        | when to save, in ranks of Slurm and         | launch/test_agreement.py
                    | torchrun, which no pool watches             |
attempts.py         | attempts of a launch: `max_restarts`,       | launch/test_attempts.py
                    | requeues                                    |
inheritance.py      | the rank and its variables: found by its    | launch/test_marks.py
                    | children, not by programs that it starts    |
inline.py           | `inline`: run the function in this process, | launch/test_inline.py
                    | for a debugger                              |
launch.py           | `Launch`: the handle of a launch            | launch/test_launch.py
machines.py         | this machine as the place of ranks; chooses | processes/test_torch_groups.py
                    | the store where they meet                   |
preview.py          | `dry_run`: a launch as a text               | launch/test_local.py
                    |                                             | launch/test_shares.py
ranks.py            | `Ranks`, `OneRank`: handles of ranks that   | launch/test_ranks.py
                    | stay                                        |
ranks_run.py        | the run of ranks that stay, and their calls | launch/test_ranks.py
                    |                                             | launch/test_failed_calls.py
run.py              | `Run`: the owner of ranks from start to     | launch/test_run.py
                    | end; the registry of runs                   |
set_up.py           | turn a process into a rank: variables,      | processes/test_rank_process.py
                    | threads, device, seeds, groups              | launch/test_shares.py
                    |                                             | contract/test_results.py
shares.py           | devices and cores of launches that run at   | launch/test_shares.py
                    | the same time, as of `map`                  |
torchrun.py         | the env launcher: this process is a rank of | launch/test_torchrun.py
                    | torchrun, srun, or mpirun                   |
ray/                | launches on a Ray cluster                   | launch/ray/
slurm/              | launches on a Slurm cluster                 | launch/slurm/
"""

from parawrap.launch._devices import Device, make_current
from parawrap.launch._job import DECORATED, Job, check_function, check_signature
from parawrap.launch._launcher import launch, launch_array, launcher_name
from parawrap.launch._platform import Platform
from parawrap.launch._platform_fields import PlatformFields, rank_count_field, resolve_device
from parawrap.launch._rank import Rank, current_rank, inside_a_rank
from parawrap.launch._rank_results import RankResults
from parawrap.launch._seeds import preserved_generators, seed_all
from parawrap.launch._world import RankPlace
from parawrap.launch.inline import run_inline
from parawrap.launch.launch import Launch, cancel_launches, report_launches
from parawrap.launch.preview import describe_device, preview
from parawrap.launch.ranks import OneRank, Ranks
from parawrap.launch.run import cancel_runs, report_places, running
from parawrap.launch.shares import Share, share_out

__all__ = [
    "DECORATED",
    "Device",
    "Job",
    "Launch",
    "OneRank",
    "Platform",
    "PlatformFields",
    "Rank",
    "RankPlace",
    "RankResults",
    "Ranks",
    "Share",
    "cancel_launches",
    "cancel_runs",
    "check_function",
    "check_signature",
    "current_rank",
    "describe_device",
    "inside_a_rank",
    "launch",
    "launch_array",
    "launcher_name",
    "make_current",
    "preserved_generators",
    "preview",
    "rank_count_field",
    "report_launches",
    "report_places",
    "resolve_device",
    "run_inline",
    "running",
    "seed_all",
    "share_out",
]
