"""Launches on a Slurm cluster.

The ranks of a launch are the tasks of its batch job: Slurm starts, supervises, and ends them. This
process and the tasks communicate through files in a folder and Slurm's commands, without a pool.

word         | meaning in Slurm
------------ | ---------------------------------------------------------------------------------
batch job    | a script that `sbatch` submits. It waits in a queue, and then runs on the first of
             | the nodes that Slurm has reserved for it
task         | a process that `srun` starts, called in the script: here one per rank
requeue      | to end a job, and to put it back into the queue with its number. A user, an
             | operator, a preemption, or the loss of a node may cause it
start        | (a word of parawrap) a run of the script. The first has number 0, and each requeue
             | adds one: SLURM_RESTART_COUNT
job array    | jobs of one script that are submitted together. `7_0` and `7_1` are elements of 7
`scontrol`   | the command that reads and changes jobs, through the controller of the cluster
`slurmstepd` | the program on each node that runs the tasks there. It writes into the log of the job
submitit     | a Python package that writes the script, and in each task unpickles a function, calls
             | it, and pickles ``("success", result)`` or ``("error", traceback)`` into a file

file             | contents                                    | tests
---------------- | ------------------------------------------- | -----------------------------------
batch_job.py     | the batch script, its resources, and its    | launch/slurm/test_batch_job.py
                 | submission with submitit                    |
batch_run.py     | follow a submitted job: output, states,     | launch/slurm/test_batch_run.py
                 | restarts, cancels, errors                   |
commands.py      | scontrol, scancel, and other commands;      | launch/slurm/test_batch_job.py
                 | states of a job                             |
job_start.py     | one start of a job: outcomes and deaths of  | launch/slurm/test_batch_run.py
                 | its ranks, lost nodes                       |
launch_folder.py | the private folder through which the        | launch/slurm/test_launch_folder.py
                 | submitter and the tasks communicate         |
task.py          | a task of the job, which is a rank:         | launch/slurm/test_slurm_launcher.py
                 | outcome, signals, preemption, exit          |
"""
