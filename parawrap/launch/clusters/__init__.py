"""Ranks on several machines: cluster nodes, their connections to the supervising process, and the job queue."""
