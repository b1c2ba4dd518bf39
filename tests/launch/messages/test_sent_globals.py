"""Functions of a script in ranks that stay: which globals stay in the ranks, which are sent again, and which are refused.

One script runs all sections, each with ranks of its own. A section checks itself.
"""

from __future__ import annotations

import json

import pytest

from tests.helpers.processes import run_script

HEAD = """
import argparse, copy, dataclasses, enum, functools, json, math, pathlib, sys, threading, time, traceback, types, typing
import torch, torch.distributed as dist
from parawrap import Platform, UnsendableError, current_rank, wrapper

platform = Platform(device="cpu", n_cpus=2, verbose=False, spawn_method=sys.argv[1])

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

def drop():
    global model
    del model

with platform.open() as ranks:
    ranks(load, 3)
    same([ranks(total), ranks(lambda: len(model))], [(0, 3), (3, 3)])
    ranks(lambda: model.append(5))
    same([ranks(total), ranks[1](total), "model" in globals()], [(5, 8), 8, False])
    ranks[1](load, 1)
    same(ranks(total), (5, 1))
    ranks(drop)
    same(repr(error_of(ranks, total)), repr(NameError("name 'model' is not defined")))
    ranks[1](load, 1)
    same(ranks[1](total), 1)
    same(type(error_of(ranks, total)), NameError)
    ranks(load, 1)
    same(ranks(total), (0, 1))
""",
    # A changed number, dict, dataclass, namespace, or module arrives; one that a rank changed stays.
    "settings": """
@dataclasses.dataclass
class Setting:
    depth: int
    names: tuple = ("a",)

LR, CONFIG, setting, options = 1, {"width": [1, 2]}, Setting(3), argparse.Namespace(verbose=True)
by_hand = types.ModuleType("by_hand")
by_hand.lr = 1

def read():
    return LR, CONFIG["width"], setting.depth, setting.names, options.verbose, by_hand.lr

def read_through():
    return *read(), SCALE

def change_there():
    CONFIG["width"].append(9)

def delete_there():
    global CONFIG
    del CONFIG

with platform.open() as ranks:
    same(ranks(read)[0], (1, [1, 2], 3, ("a",), True, 1))
    LR, setting.depth, options.verbose, by_hand.lr = 2, 4, False, 2
    CONFIG["width"].append(3)
    same(ranks(read)[1], (2, [1, 2, 3], 4, ("a",), False, 2))
    ranks(change_there)
    same(ranks(read)[1], (2, [1, 2, 3, 9], 4, ("a",), False, 2))
    CONFIG = {"width": []}
    refuses(ranks, read, texts=["the global 'CONFIG' was changed in this rank", "global CONFIG; del CONFIG"])
    ranks(delete_there)
    setting, LR, SCALE = dataclasses.replace(setting, names=("b", "c")), 0.5, 2
    same(ranks(read_through)[0], (0.5, [], 4, ("b", "c"), False, 2, 2))
    SCALE = 3
    same(ranks(lambda: read_through())[1], (0.5, [], 4, ("b", "c"), False, 2, 3))
    same(ranks(lambda text: eval(text), "LR + SCALE"), (3.5, 3.5))
    LR = 1
    same(ranks(lambda text: eval(text), "LR + SCALE"), (4, 4))
""",
    # Redefined functions and classes arrive, also those that others use. A child of a redefined class keeps its parent.
    "definitions": """
def helper():
    return 1

class Thing:
    def name(self):
        return "first"

class Child(Thing):
    pass

def use():
    return helper(), Thing().name(), Child().name(), half(8), factorial(4)

def outer():
    return use()

half = lambda value: value / 2
REGISTRY = {}

def register(function):
    REGISTRY[function.__name__] = function
    return function

@register
def entry():
    return 1

def run():
    return REGISTRY["entry"]()

def factorial(number):
    return 1 if number < 2 else number * factorial(number - 1)

with platform.open() as ranks:
    same([ranks(outer)[0], ranks(use)[1]], [(1, "first", "first", 4.0, 24)] * 2)
    same(ranks(run), (1, 1))

    def helper():
        return 2

    class Thing:
        def name(self):
            return "second"

    @register
    def entry():
        return 2

    half = lambda value: value // 2
    same(ranks(outer)[0], (2, "second", "first", 4, 24))
    same(ranks(run), (2, 2))

    class Child(Thing):
        pass

    same(ranks(outer)[0], (2, "second", "second", 4, 24))

    def helper():
        return math.sqrt(9), F.relu(torch.tensor(-1.0)).item()

    import torch.nn.functional as F
    same(ranks(outer)[0][0], (3.0, 0.0))
    outer = lambda: "replaced"
    same(ranks(outer)[0], "replaced")
""",
    # Globals of one call share their objects. Those of two calls, arguments, defaults, and closures would be copies.
    "shared": """
base = torch.zeros(3)
view = base[1:]

def change():
    base[1] = 7
    return view[0].item()

class Descent:  # torch.optim imports torch.compile, which takes seconds
    def __init__(self, parameters):
        self.parameters = list(parameters)

    def step(self):
        with torch.no_grad():
            for each in self.parameters:
                each -= each.grad / 2
                each.grad = None

net = torch.nn.Linear(2, 1)
optimizer = Descent(net.parameters())

def step():
    net(torch.ones(2)).sum().backward()
    before = net.weight.detach().clone()
    optimizer.step()
    return (before - net.weight).mean().round(decimals=4).item()

apart, late, rows = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1), torch.zeros(3)
apart_optimizer, part = Descent(apart.parameters()), rows[1:]
HISTORY, PART = [], None

def closure_over(given):
    return lambda: given.bias.shape[0]

def append():
    HISTORY.append(1)

def append_part():
    PART["history"].append(1)
    return len(HISTORY)

with platform.open() as ranks:
    same(ranks(change), (7.0, 7.0))
    same([ranks(step), ranks(step)], [(0.5, 0.5)] * 2)
    same(ranks(lambda: apart.bias.shape[0]), (1, 1))
    refuses(ranks, lambda: len(apart_optimizer.parameters), texts=["'apart_optimizer'", "'apart'"])
    texts = ["an argument holds", "that the global 'apart' holds too"]
    refuses(ranks, lambda given: given["model"][0] is apart, {"model": [apart]}, texts=texts)
    refuses(ranks, closure_over(apart), texts=["'apart'"])
    refuses(ranks, lambda given=apart: given, texts=["'apart'"])
    same(ranks(lambda: apart.bias.shape[0]), (1, 1))
    same(ranks(lambda given: given is late, late), (True, True))
    same(ranks(lambda: rows.sum().item()), (0, 0))
    refuses(ranks, lambda: part.sum().item(), texts=["'part'", "'rows'"])
    same(ranks(lambda: len(HISTORY)), (0, 0))
    PART = {"history": HISTORY}
    same(ranks(append_part), (1, 1))
    HISTORY = []
    refuses(ranks, append, texts=["'HISTORY'"])
""",
    # An object that this process changed in place raises, because the ranks have their own. A copy of it replaces theirs.
    "changed in place": """
class Box:
    made = 0

    def __init__(self, value):
        self.value, self.call = value, print

net, box, generator = torch.nn.Linear(2, 1), Box([1]), torch.Generator().manual_seed(1)

def weight():
    return net.weight.sum().item()

def unbox():
    return box.value

def train():
    with torch.no_grad():
        net.weight.fill_(2)

def count():
    Box.made += 1
    return Box.made

def draw():
    return torch.rand(1, generator=generator).item()

with platform.open() as ranks:
    same(ranks(weight)[0], net.weight.sum().item())
    ranks(train)
    same(ranks(weight), (4.0, 4.0))
    with torch.no_grad():
        net.weight.zero_()
    refuses(ranks, weight, texts=["the global 'net', a Linear, was changed in place", "and weight uses it"])
    net = copy.deepcopy(net)
    same(ranks(weight), (0.0, 0.0))
    same(ranks(unbox), ([1], [1]))
    box.value.append(2)
    refuses(ranks, unbox, texts=["the global 'box', a Box, was changed in place", "and unbox uses it"])
    box = Box([3])
    same(ranks(unbox), ([3], [3]))
    same([ranks(count), ranks(count)], [(1, 1), (2, 2)])
    Box.made += 1
    refuses(ranks, count, texts=["Box"])
    assert ranks(draw)[0] != ranks(draw)[0]
""",
    # A global that the ranks and this process assign is refused, with its user and the cure.
    "two owners": """
def assign():
    global both
    both = 1

def read():
    return both

def read_through():
    return read()

def assign_late():
    global late_global
    late_global = 1

mine = 5

def assign_mine():
    global mine
    mine += 1
    return mine

with platform.open() as ranks:
    ranks(assign)
    both = 2
    for call, user in (read, "read"), (read_through, "read"), (lambda: both, "<lambda>"):
        text = f"the global 'both', which {user} uses, was assigned in the ranks"
        refuses(ranks, call, texts=[text, "del both"])
    del both
    same(ranks(read), (1, 1))
    both = 3
    refuses(ranks, read, texts=["'both'"])
    same([ranks(assign_mine), ranks(assign_mine), mine], [(6, 6), (7, 7), 5])
    mine = 50
    refuses(ranks, assign_mine, texts=["'mine'"])
    ranks.submit(assign_late)
    late_global = 2
    refuses(lambda: ranks.submit(lambda: late_global).results(), texts=["'late_global'"])
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
    # A queued call lacks the globals that an earlier call could not load.
    "queued": """
class Cursed:
    def __reduce__(self):
        return int, ("no number",)

cursed, go = Cursed(), pathlib.Path("go").absolute()

def hold():
    while not go.exists():
        time.sleep(0.01)

def use():
    return cursed

with platform.open() as ranks:
    ranks.submit(hold)
    first, second = ranks.submit(use), ranks.submit(use)
    go.touch()
    same(type(error_of(first.results)), ValueError)
    error = error_of(second.results)
    same(type(error), NameError)
    assert "could not load the globals of an earlier call: ValueError" in error.__notes__[0], error.__notes__
    cursed = 5
    same(ranks(use), (5, 5))
""",
    # A global that cannot be pickled is named if the call uses it. One that cannot be unpickled is sent again.
    "unsendable": """
LOCK, LOCKS, unused = threading.Lock(), {"rows": [threading.Lock()]}, threading.Lock()

class Cursed:
    def __reduce__(self):
        return int, ("no number",)

cursed, plain = Cursed(), 3

def use_cursed():
    return cursed, plain

def use_lock():
    return LOCK

with platform.open() as ranks:
    sending = " cannot be sent to another process: "
    for use in use_lock, lambda: LOCK:
        refuses(ranks, use, texts=["the global 'LOCK'", sending + "lock"])
    refuses(ranks, lambda: LOCKS, texts=["the global 'LOCKS'", "['rows'][0]", sending + "lock"])
    refuses(ranks, lambda: ranks(max, 1, 2), texts=["the global 'ranks'", sending + "Ranks"])
    error = error_of(ranks, use_cursed)
    same(type(error), ValueError)
    assert "unpickled the function, its arguments, and its globals" in error.__notes__[0]
    cursed = 4
    same(ranks(use_cursed), ((4, 3), (4, 3)))
    LOCK = 5
    same(ranks(use_lock), (5, 5))
    same(type(error_of(ranks, lambda name: globals()[name], "unused")), KeyError)
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

class Failure(Exception):
    pass

class Color(enum.Enum):
    RED = 1

    def shade(self):
        return f"dark {self.name}"

class Level(enum.IntEnum):
    HIGH = 2

class Pair(typing.NamedTuple):
    first: int = 1

class Options(typing.TypedDict):
    depth: int

class Box(typing.Generic[typing.TypeVar("T")]):
    pass

class Base:
    members = {}

    def __init_subclass__(cls):
        Base.members[cls.__name__] = cls

class Sub(Base):
    pass

level = Level.HIGH

def move(point):
    global last
    last = point.moved(current_rank().global_rank)
    return type(point) is Point, last

def color(value):
    return value is Color.RED, Color.RED, value.shade(), level is Level.HIGH, level

def fail():
    raise Failure("text")

def gather(point):
    points = [None] * 2
    dist.all_gather_object(points, point)
    return [type(each) is Point and each.x for each in points]

@functools.wraps(move)
def wrapped(x):
    return move(Point.make(x))

@wrapper(Platform(device="cpu", n_cpus=1, verbose=False))
def decorated(x):
    return wrapped(x)[1]

with platform.open() as ranks:
    moved = ranks(move, Point(1))
    same([(is_point, type(point) is Point, point.x) for is_point, point in moved], [(True, True, 1), (True, True, 2)])
    same([point.x for _, point in ranks(move, moved[1][1])], [2, 3])
    same(ranks(lambda: isinstance(last, Point)), (True, True))
    same(ranks(gather, Point(3)), ([3, 3], [3, 3]))
    methods = *ranks(Point(1).moved, 5), *ranks(Point.make, 7), *ranks(decorated, 8)
    same([each.x for each in methods], [6, 6, 7, 7, 8, 9])
    same([point.x for _, point in ranks(functools.partial(wrapped, 9))], [9, 10])
    error = error_of(ranks, fail)
    assert type(error) is Failure and "raise Failure" in error.__notes__[0]
    is_red, red, shade, is_high, high = ranks(color, Color.RED)[1]
    assert (is_red, red is Color.RED, shade, is_high, high is Level.HIGH) == (True, True, "dark RED", True, True)
    same(ranks(lambda: Pair())[0], Pair())
    same(ranks(lambda: Options(depth=2))[0], {"depth": 2})
    assert ranks(lambda: type(Box()))[1] is Box
    assert ranks(lambda: Base.members["Sub"] is Sub and issubclass(Sub, Base))[0]
""",
    # A global that one call sends to one rank arrives in the others with their calls, as it was when the call was made.
    "order": """
VALUE = 3

def pick():
    return VALUE

def closure(number):
    return lambda: number + VALUE

with platform.open() as ranks:
    same([ranks[1](pick), ranks(pick), ranks[0](pick)], [3, (3, 3), 3])
    VALUE = 4
    same([ranks[0](pick), ranks(pick)], [4, (4, 4)])
    same([ranks[1](closure(1)), ranks(closure(2))], [5, (6, 6)])
    launches = [ranks.submit(lambda step=step: (step, VALUE)) for step in range(3)]
    same([each.results() for each in launches], [((step, 4),) * 2 for step in range(3)])
    VALUE = 5
    launch = ranks.submit(pick)
    VALUE = 6
    same([launch.results(), ranks(pick)], [(5, 5), (6, 6)])
    VALUE = 7
    slow, dropped = ranks.submit(time.sleep, 0.5), ranks.submit(pick)
    dropped.cancel()
    slow.results()
    same(ranks(pick), (7, 7))
""",
}


@pytest.fixture(scope="module", params=["forkserver", "fork"])
def outcomes(request, tmp_path_factory):
    """The error of each section, or None."""
    text = HEAD
    for name, section in SECTIONS.items():
        body = section.replace("\n", "\n    ")
        text += f"""
raised = None
try:{body}
except BaseException:
    raised = traceback.format_exc()
print(json.dumps([{name!r}, raised]), flush=True)
"""
    output = run_script(tmp_path_factory.mktemp("script"), text, request.param)
    return dict(map(json.loads, output.splitlines()))


@pytest.mark.parametrize("section", SECTIONS)
def test_globals_of_a_script(section, outcomes):
    assert outcomes[section] is None
