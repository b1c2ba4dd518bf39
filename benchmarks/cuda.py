"""On one GPU: what a call costs beyond the plain one, and how near `map` comes to the limits of the machine.

float32 is computed as torch does by default, in every arm. `cpu_lanes` completes the suite: the lanes of the host's own
cores.
"""

from __future__ import annotations

from benchmarks import cuda_calls, cuda_map
from benchmarks._measure import Row
from benchmarks.cuda_nets import plain_attention
from benchmarks.cuda_target import the_gpu


def rows() -> list[Row]:
    """Calls against torch.nn.DataParallel, one lane against none, and streams of batches."""
    target = the_gpu()
    with plain_attention():
        return [*cuda_calls.rows(target), *cuda_map.rows(target)]
