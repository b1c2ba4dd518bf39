"""The rank's side of a launch: a process becomes a rank, calls the function, and ends on order."""
