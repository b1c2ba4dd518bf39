"""Print how many page faults buffers cause outside, inside, and after blocks."""

import resource

import torch

from parawrap.cpu import keep_freed_memory

torch.set_num_threads(1)


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        # 64 MiB is more than the largest M_MMAP_THRESHOLD that glibc chooses on its own, so each
        # buffer has new pages.
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


print(faults())
with keep_freed_memory():
    for _ in range(4):
        faults()  # the heap grows: the first buffers of a block may have new pages
    print(faults())
    with keep_freed_memory():
        pass
    print(faults())
print(faults())
