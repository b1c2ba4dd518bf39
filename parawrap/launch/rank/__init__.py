"""The rank's side of a launch: set up the process, call the function, report the outcome, and exit."""
