"""Thin fronts over the engine: each builds what the engine takes, and delegates."""
