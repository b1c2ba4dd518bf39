"""A number, and small dicts that changed in place, arrive. A dataclass that changed in place
does not.
"""

import collections
import dataclasses

from script_checks import same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)


@dataclasses.dataclass
class Setting:
    depth: int


LR, CONFIG, setting = 1, {"width": [1, 2]}, Setting(3)
odd, ordered = {"lr": 1, "activation": lambda x: x}, collections.OrderedDict(lr=1)


def read():
    return LR, CONFIG["width"], odd["lr"], ordered["lr"], setting.depth


with platform.open() as ranks:
    same(ranks(read)[0], (1, [1, 2], 1, 1, 3))
    LR = odd["lr"] = ordered["lr"] = 2
    setting.depth = 4
    CONFIG["width"].append(3)
    same(ranks(read)[1], (2, [1, 2, 3], 2, 2, 3))
    setting = Setting(5)
    same(ranks(lambda: read()[4]), (5, 5))
