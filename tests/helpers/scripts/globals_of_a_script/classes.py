"""Instances keep their class as argument, as result, in a global of the rank, and between
ranks. So do methods.
"""

import enum

import torch.distributed as dist
from script_checks import same

from parawrap import Platform, current_rank

platform = Platform(device="cpu", n_cpus=2, verbose=False)


class Point:
    def __init__(self, x):
        self.x = x

    def moved(self, by):
        return Point(self.x + by)

    @classmethod
    def make(cls, x):
        return cls(x)


class Color(enum.Enum):
    RED = 1

    def shade(self):
        return f"dark {self.name}"


def move(point):
    global last
    last = point.moved(current_rank().global_rank)
    return type(point) is Point, last


def color(value):
    return value is Color.RED, Color.RED, value.shade()


def gather(point):
    points = [None] * 2
    dist.all_gather_object(points, point)
    return [type(each) is Point and each.x for each in points]


with platform.open() as ranks:
    moved = ranks(move, Point(1))
    found = [(is_point, type(point) is Point, point.x) for is_point, point in moved]
    same(found, [(True, True, 1), (True, True, 2)])
    same([point.x for _, point in ranks(move, moved[1][1])], [2, 3])
    same(ranks(lambda: isinstance(last, Point)), (True, True))
    same(ranks(gather, Point(3)), ([3, 3], [3, 3]))
    same([each.x for each in (*ranks(Point(1).moved, 5), *ranks(Point.make, 7))], [6, 6, 7, 7])
    is_red, red, shade = ranks(color, Color.RED)[1]
    assert (is_red, red is Color.RED, shade) == (True, True, "dark RED")
