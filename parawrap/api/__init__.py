"""The public functions and classes.

Each one checks its arguments and delegates to the engine or to a launcher.
"""
