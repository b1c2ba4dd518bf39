"""Launches on a Slurm cluster."""
