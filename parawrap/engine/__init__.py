"""A call of a parallel target: scatter, replicate, apply, and gather.

`call.py` has a cut call, whole. `replicas.py` keeps the copies of the model, `survey.py` finds what
there is to copy, `borrowed.py` brings back what forward does to arguments, `hand_over.py` gives the
outputs to the caller, and `streams.py` runs whole batches.
"""
