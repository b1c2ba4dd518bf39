"""Functions of a script in ranks that stay: which globals stay in the ranks, which are sent again, and which are refused.

One script runs all sections, each with new ranks. A section checks itself.
"""

from __future__ import annotations

import json

import pytest

from tests.helpers.processes import run_script

HEAD = """
import copy, dataclasses, enum, json, math, threading, time, traceback
import torch, torch.distributed as dist
from parawrap import Platform, UnsendableError, current_rank

def error_of(call, *args):
    try:
        found = call(*args)
    except Exception as error:
        return error
    raise AssertionError(found)

def refuses(call, *args, texts):
    error = error_of(call, *args)
    assert type(error) is UnsendableError, repr(error)
    for text in texts:
        assert text in str(error), (text, str(error))

def same(value, expected):
    assert value == expected, (value, expected)
"""

SECTIONS = {
    # ``global model`` in one call is there in the next, in each rank its own, and not here.
    "assigned in ranks": """
def load(size):
    global model
    model = [current_rank().global_rank] * size

def total():
    return sum(model)

with platform.open() as ranks:
    ranks(load, 3)
    same([ranks(total), ranks(lambda: len(model))], [(0, 3), (3, 3)])
    ranks(lambda: model.append(5))
    same([ranks(total), ranks[1](total), "model" in globals()], [(5, 8), 8, False])
    ranks[1](load, 1)
    same(ranks(total), (5, 1))
""",
    # A changed number, dict, or dataclass arrives; one that a rank changed stays.
    "settings": """
@dataclasses.dataclass
class Setting:
    depth: int

LR, CONFIG, setting = 1, {"width": [1, 2]}, Setting(3)

def read():
    return LR, CONFIG["width"], setting.depth

def change_there():
    CONFIG["width"].append(9)

def delete_there():
    global CONFIG
    del CONFIG

def evaluate(text):
    return eval(text)

with platform.open() as ranks:
    same(ranks(read)[0], (1, [1, 2], 3))
    LR, setting.depth = 2, 4
    CONFIG["width"].append(3)
    same(ranks(read)[1], (2, [1, 2, 3], 4))
    ranks(change_there)
    same(ranks(read)[1], (2, [1, 2, 3, 9], 4))
    CONFIG = {"width": []}
    refuses(ranks, read, texts=["the global 'CONFIG' was changed in this rank", "global CONFIG; del CONFIG"])
    ranks(delete_there)
    setting, LR, SCALE = dataclasses.replace(setting, depth=5), 0.5, 2
    same(ranks(lambda: (*read(), SCALE))[0], (0.5, [], 5, 2))
    for SCALE in 3, 4:
        same(ranks(evaluate, "LR + SCALE"), (0.5 + SCALE, 0.5 + SCALE))
""",
    # Redefined functions and classes arrive, also those that others use. Children and objects of a redefined class keep it.
    "definitions": """
def helper():
    return 1

class Thing:
    def name(self):
        return "first"

class Child(Thing):
    pass

Thing.child, thing = Child, Thing()

def make():
    def inner():
        return 1 if helper else unset
    return inner
    unset = 0

made = make()

def use():
    return helper(), Thing().name(), Child().name()

def outer():
    return use()

with platform.open() as ranks:
    same([ranks(outer)[0], ranks(use)[1]], [(1, "first", "first")] * 2)
    same(ranks(lambda: (Thing.child is Child, thing.name(), made())), ((True, "first", 1),) * 2)

    def helper():
        return 2

    class Thing:
        def name(self):
            return "second"

    same(ranks(outer)[0], (2, "second", "first"))
    same(ranks(lambda: thing.name()), ("first", "first"))

    def helper():
        return math.sqrt(9)

    same(ranks(outer)[0][0], 3.0)
""",
    # Globals of one call share their objects. Those of two calls, arguments, defaults, and closures would be copies.
    # A list is sent again together with a new holder.
    "shared": """
net, late, rows = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1), torch.zeros(3)
trained, part, history = [net.weight], rows[1:], []

def is_tied():
    return trained[0] is net.weight

with platform.open() as ranks:
    same([ranks(is_tied), ranks(is_tied)], [(True, True)] * 2)
    refuses(ranks, lambda given: given["model"][0] is net, {"model": [net]}, texts=["an argument holds", "travel apart"])
    refuses(ranks, lambda given=net: given, texts=["the function holds", "travel apart"])
    same(ranks(lambda given: given is late, late), (True, True))
    same(ranks(lambda: rows.sum().item()), (0, 0))
    refuses(ranks, lambda: part.sum().item(), texts=["'part'", "'rows'"])
    same(ranks(lambda: len(history)), (0, 0))
    holder = {"history": history}
    same(ranks(lambda: [holder["history"].append(1), len(history)]), ([None, 1], [None, 1]))
""",
    # An object that this process changed in place raises, because the ranks have their own. A copy of it replaces theirs.
    "changed in place": """
class Box:
    def __init__(self, value):
        self.value = value

net, box = torch.nn.Linear(1 << 15, 1), Box(torch.ones(2))  # a large tensor, and a small one

def weight():
    return net.weight[0, :2].sum().item()

def train():
    with torch.no_grad():
        net.weight.fill_(2)

with platform.open() as ranks:
    same([ranks(weight)[0], ranks(weight)[1]], [weight()] * 2)
    ranks(train)
    same(ranks(weight), (4.0, 4.0))
    with torch.no_grad():
        net.weight.zero_()
    refuses(ranks, lambda: weight(), texts=["the global 'net', a Linear, was changed in place", "and weight uses it"])
    net = copy.deepcopy(net)
    same(ranks(weight), (0.0, 0.0))
    same(ranks(lambda: box.value.sum().item()), (2.0, 2.0))
    box.value.add_(1)
    refuses(ranks, lambda: box.value, texts=["the global 'box', a Box, was changed in place"])
""",
    # A function may use a global that is defined after the ranks received the function.
    "defined later": """
def use(is_defined):
    return later if is_defined else 0

with platform.open() as ranks:
    same(ranks(use, False), (0, 0))
    same(type(error_of(ranks, use, True)), NameError)
    later = 5
    same(ranks(use, True), (5, 5))
""",
    # A global that cannot be unpickled is sent again, with the others of its call. A call that was queued lacks them.
    "queued": """
class Cursed:
    def __reduce__(self):
        return int, ("no number",)

cursed, plain, go = Cursed(), 3, pathlib.Path("go").absolute()

def hold():
    while not go.exists():
        time.sleep(0.01)

def use():
    return cursed, plain

with platform.open() as ranks:
    held = ranks.submit(hold)
    first, second = ranks.submit(use), ranks.submit(use)
    go.touch()
    same(held.results(), (None, None))
    error = error_of(first.results)
    same(type(error), ValueError)
    assert "unpickled the function, its arguments, and its globals" in error.__notes__[0], error.__notes__
    error = error_of(second.results)
    same(type(error), NameError)
    assert "could not load the globals of an earlier call: ValueError" in error.__notes__[0], error.__notes__
    cursed = 5
    same(ranks(use), ((5, 3), (5, 3)))
""",
    # A global that cannot be pickled is named if the call uses it.
    "unsendable": """
LOCKS = {"rows": [threading.Lock()]}

with platform.open() as ranks:
    sending = " cannot be sent to another process: "
    refuses(ranks, lambda: LOCKS, texts=["the global 'LOCKS'", "['rows'][0]", sending + "lock"])
    refuses(ranks, lambda: ranks(max, 1, 2), texts=["the global 'ranks'", sending + "Ranks"])
    same(type(error_of(ranks, lambda name: globals()[name], "LOCKS")), KeyError)
""",
    # Instances keep their class as argument, as result, in a global of the rank, and between ranks.
    "classes": """
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
    same([(is_point, type(point) is Point, point.x) for is_point, point in moved], [(True, True, 1), (True, True, 2)])
    same([point.x for _, point in ranks(move, moved[1][1])], [2, 3])
    same(ranks(lambda: isinstance(last, Point)), (True, True))
    same(ranks(gather, Point(3)), ([3, 3], [3, 3]))
    same([each.x for each in (*ranks(Point(1).moved, 5), *ranks(Point.make, 7))], [6, 6, 7, 7])
    is_red, red, shade = ranks(color, Color.RED)[1]
    assert (is_red, red is Color.RED, shade) == (True, True, "dark RED")
""",
    # A global that one call sends to one rank arrives in the others with their calls, as it was when the call was made.
    "order": """
VALUE = 3

def pick():
    return VALUE

with platform.open() as ranks:
    same([ranks[1](pick), ranks(pick), ranks[0](pick)], [3, (3, 3), 3])
    VALUE = 5
    launch = ranks.submit(pick)
    VALUE = 6
    same([launch.results(), ranks(pick)], [(5, 5), (6, 6)])
""",
}


CASES = [("forkserver", name) for name in SECTIONS] + [("fork", "assigned in ranks"), ("fork", "classes")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The error of each case, or None."""
    text = HEAD
    for method, name in CASES:
        body = SECTIONS[name].replace("\n", "\n    ")
        text += f"""
raised = None
platform = Platform(device="cpu", n_cpus=2, verbose=False, spawn_method={method!r})
try:{body}
except BaseException:
    raised = traceback.format_exc()
print(json.dumps(raised), flush=True)
"""
    output = run_script(tmp_path_factory.mktemp("script"), text)
    return dict(zip(CASES, map(json.loads, output.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_globals_of_a_script(case, outcomes):
    assert outcomes[case] is None
