"""Launches on a Slurm cluster.

The ranks of a launch are the tasks of its batch job: Slurm starts, supervises, and ends them. This
process and the tasks communicate through files in a folder and Slurm's commands, without a pool.

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
