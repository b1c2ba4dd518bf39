"""Use one block of shared memory here and in ranks."""

from multiprocessing import shared_memory

from parawrap import Platform, wrapper


def attach(name):
    block = shared_memory.SharedMemory(name=name)
    block.buf[0] += 1
    block.close()


platform = Platform(device="cpu", n_cpus=2, verbose=False, ipc_groups=None)
with platform.open() as opened:
    block = shared_memory.SharedMemory(create=True, size=80)
    opened[0](attach, block.name)
    wrapper(platform)(attach)(block.name)
again = shared_memory.SharedMemory(name=block.name)
print(again.buf[0] > 0)
again.close()
block.close()
block.unlink()
