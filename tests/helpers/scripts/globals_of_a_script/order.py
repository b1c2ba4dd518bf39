"""A global that one call sends to one rank arrives in the others with their calls, as it was
when the call was made.
"""

from script_checks import same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)

VALUE = 3


def pick():
    return VALUE


with platform.open() as ranks:
    same([ranks[1](pick), ranks(pick), ranks[0](pick)], [3, (3, 3), 3])
    VALUE = 5
    launch = ranks.submit(pick)
    VALUE = 6
    same([launch.results(), ranks(pick)], [(5, 5), (6, 6)])
