"""A global that cannot be pickled is named if the call uses it."""

import threading

from script_checks import refuses

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)

LOCKS = {"rows": [threading.Lock()]}

with platform.open() as ranks:
    sending = " cannot be sent to another process: "
    refuses(ranks, lambda: LOCKS, texts=["the global 'LOCKS'", "['rows'][0]", sending + "lock"])
    refuses(ranks, lambda: ranks(max, 1, 2), texts=["the global 'ranks'", sending + "Ranks"])
