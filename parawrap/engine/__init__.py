"""A call of a parallel target: scatter, replicate, apply, and gather.

`call.py` has a cut call, whole. `replicas.py` keeps the copies of the model, `survey.py` finds what there is to copy, and
`streams.py` runs whole batches.
"""
