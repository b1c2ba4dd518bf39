"""One GPU: the overhead of a call, and the throughput of `map` compared with the machine's limits.

All arms use torch's default float32 precision. The suite also runs `cpu_lanes` on the host.
"""

from __future__ import annotations

from benchmarks import cuda_calls, cuda_map
from benchmarks._measure import Row
from benchmarks.cuda_target import the_gpu
from benchmarks.nets import plain_attention


def rows() -> list[Row]:
    """Compare calls with torch.nn.DataParallel, one lane with the plain call,
    and `map` with loops.
    """
    target = the_gpu()
    with plain_attention():
        return [*cuda_calls.rows(target), *cuda_map.rows(target)]
