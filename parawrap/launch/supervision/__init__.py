"""The launching process's side of a launch: start ranks, collect their output, and supervise them until all have ended."""
