"""Ranks on several machines: the nodes of a cluster, the line from each to where the launch is watched, and the queue."""
