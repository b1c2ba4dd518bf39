"""The side that starts ranks: their processes, what they write, and the watch over them until the last one is gone."""
