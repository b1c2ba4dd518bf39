"""Everything that runs in another process: a server that forks, wires, ranks, and their pool.

    Pool ── data wire ──────► main thread of a rank: runs calls, answers them
      │ └── control wire ───► control thread of a rank: stacks, interrupts, its end
      └──── ForkServer: forks ranks, reports how they end, ends what they leave behind

This package knows a number of ranks, settings, and functions. It does not depend on platforms,
clusters, or models.
"""
