"""A rank's own side: how a process becomes a rank, calls the function, and ends when it is told to."""
