"""Calls in the processes of torchrun, srun, and mpirun worlds, which no process watches."""
