"""Functions of a script in ranks that stay: which globals stay in the ranks, which are sent again,
and which are refused.

One script runs all sections, each with new ranks. A section checks itself.
"""

from __future__ import annotations

import json

import pytest

from tests.helpers.processes import run_script

HEAD = """
import copy, dataclasses, enum, json, math, os, threading, time, traceback, types
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
    # A number, and small dicts that changed in place, arrive. A dataclass that changed in place
    # does not.
    "settings": """
import collections

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
""",
    # A global that the ranks assigned is theirs until a function deletes it there.
    "owned": """
STEP = 1

def advance():
    global STEP
    STEP += 1
    return STEP

def forget():
    global STEP
    del STEP

with platform.open() as ranks:
    same(ranks(advance), (2, 2))
    STEP = 10
    same(ranks(advance), (3, 3))
    ranks(forget)
    same(ranks(advance), (11, 11))
""",
    # Redefined functions and classes arrive, also those that others use. Children and objects of a
    # redefined class keep it.
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
    # Globals of one call share their objects.
    "shared": """
net = torch.nn.Linear(2, 1)
trained = [net.weight]

def is_tied():
    return trained[0] is net.weight

with platform.open() as ranks:
    same([ranks(is_tied), ranks(is_tied)], [(True, True)] * 2)
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
    # A global that cannot be pickled is named if the call uses it.
    "unsendable": """
LOCKS = {"rows": [threading.Lock()]}

with platform.open() as ranks:
    sending = " cannot be sent to another process: "
    refuses(ranks, lambda: LOCKS, texts=["the global 'LOCKS'", "['rows'][0]", sending + "lock"])
    refuses(ranks, lambda: ranks(max, 1, 2), texts=["the global 'ranks'", sending + "Ranks"])
""",
    # Instances keep their class as argument, as result, in a global of the rank, and between ranks.
    # So do methods.
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
    found = [(is_point, type(point) is Point, point.x) for is_point, point in moved]
    same(found, [(True, True, 1), (True, True, 2)])
    same([point.x for _, point in ranks(move, moved[1][1])], [2, 3])
    same(ranks(lambda: isinstance(last, Point)), (True, True))
    same(ranks(gather, Point(3)), ([3, 3], [3, 3]))
    same([each.x for each in (*ranks(Point(1).moved, 5), *ranks(Point.make, 7))], [6, 6, 7, 7])
    is_red, red, shade = ranks(color, Color.RED)[1]
    assert (is_red, red is Color.RED, shade) == (True, True, "dark RED")
""",
    # Large globals that are unchanged are not pickled again.
    "large": """
class Counted:
    pickled = 0
    def __init__(self, rows):
        self.rows = rows
    def __reduce__(self):
        Counted.pickled += 1
        return Counted, (self.rows,)

table, rows = Counted([1] * 10), list(range(100_000))

def use():
    return len(table.rows) + len(rows)

with platform.open() as ranks:
    same([ranks(use) for _ in range(3)], [(100_010, 100_010)] * 3)
    same(Counted.pickled, 1)
""",
    # Globals of methods of a global object, of functions in a container, and of a metaclass.
    "through objects": """
SCALE = 1

class Meta(type):
    def scaled(cls):
        return SCALE

class Model(torch.nn.Module, metaclass=Meta):
    def forward(self):
        return SCALE

class Plain:
    def scaled(self):
        return SCALE

model, plain, handlers = torch.nn.Sequential(Model()), Plain(), {"a": [lambda: SCALE]}

def use():
    return model[0](), plain.scaled(), handlers["a"][0](), Model.scaled()

with platform.open() as ranks:
    same(ranks(use)[1], (1, 1, 1, 1))
    SCALE = 2
    same(ranks(use)[1], (2, 2, 2, 2))
""",
    # Classes that cloudpickle refuses, or makes without their slots.
    "odd classes": """
import functools, typing

class Pair(typing.NamedTuple):
    a: int

class Cached:
    @functools.cached_property
    def value(self):
        return 3

with platform.open() as ranks:
    same(ranks(lambda pair: (pair, Pair(2), Cached().value), Pair(1))[0], (Pair(1), Pair(2), 3))
""",
    # Generic functions and methods arrive with their implementations, which may use them.
    "singledispatch": """
import functools
SCALE, LOCK = 2, threading.Lock()

class Leaf: pass

@functools.singledispatch
def total(value: object):
    "Sum."
    return SCALE

@total.register
def _(value: list):
    return sum(map(total, value))

@total.register(Leaf)
def of_leaf(value):
    return 5 * SCALE

@functools.singledispatch
def single(value):
    return value

class Reader:
    @functools.singledispatchmethod
    def read(self, value):
        return "other"

    @read.register(int)
    def _(self, value):
        return total([value, Leaf()])

    @functools.singledispatchmethod
    @classmethod
    def name(cls, value):
        return cls.__name__

def use(reader):
    found = total([1, [Leaf()], 2]), reader.read(""), reader.read(1), Reader.name(3)
    return found, (total.__name__, total.__doc__, total.__module__, total.__wrapped__(1))

with platform.open() as ranks:
    same(ranks(use, Reader())[0], ((14, "other", 12, "Reader"), ("total", "Sum.", "__main__", 2)))
    SCALE = 3
    same(ranks(use, Reader())[1][0], (21, "other", 18, "Reader"))
    same(ranks(total, [1, Leaf()]), (18, 18))
    single.register(Leaf)(lambda value: LOCK)
    refuses(ranks, single, 1, texts=["the global 'LOCK' cannot be sent"])
    Reader.locks = [threading.Lock()]
    refuses(ranks, max, Reader(), texts=["args[0]'s class Reader.locks[0] cannot be sent"])
""",
    # A module that is registered to go by value is sent as it is here, also after each reload.
    # Others are imported.
    "registered modules": """
import cloudpickle, functools, importlib, pathlib, sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.getcwd())
pathlib.Path("edited").mkdir()
pathlib.Path("edited/__init__.py").touch()

def write(number):
    pathlib.Path("edited/steps.py").write_text(
        # a file of another size: ranks write bytecode within the same second
        "import functools\\n" * number
        + "from parawrap import Platform, wrapper\\n"
        "def doubling(f): return functools.wraps(f)(lambda: 2 * f())\\n"
        f"def helper(): return {number}\\n"
        "def plain(): return helper()\\n"
        "@doubling\\n"
        "def doubled(): return helper()\\n"
        "@wrapper(Platform(device='cpu', n_cpus=2))\\n"
        "def launched(): return helper()\\n"
        "@functools.cache\\n"
        "def cached(): return helper()\\n"
    )

write(1)
import edited, edited.steps as steps
from edited.steps import helper

def by_module():
    return steps.plain()

def by_package():
    return edited.steps.plain()

def by_name():
    return helper()

def by_wrapper():
    return wrapped()

def by_launched():
    return launched.__wrapped__()

def edit(number):
    global helper, wrapped, launched
    write(number)
    importlib.reload(steps)
    helper, launched, wrapped = steps.helper, steps.launched, functools.partial(steps.plain)

def numbers():
    functions = [steps.plain, steps.doubled, steps.launched, steps.cached]
    functions += [by_module, by_name, by_wrapper, by_launched]
    return [ranks(function)[1] for function in functions]

def expected(number):
    return [number, 2 * number, *[number] * 6]

edit(1)
with platform.open() as ranks:
    for registered in (steps, edited):
        same([numbers(), numbers()], [expected(1)] * 2)
        edit(2)
        cloudpickle.register_pickle_by_value(registered)
        same([numbers(), numbers()], [expected(2)] * 2)
        by_package_too = registered is edited
        same(ranks(by_package)[0], 2 if by_package_too else 1)
        edit(3)
        same([numbers(), numbers()], [expected(3)] * 2)
        same(ranks(by_package)[0], 3 if by_package_too else 1)
        cloudpickle.unregister_pickle_by_value(registered)
        same(numbers(), expected(1))
    # the same objects, which only travel in another way
    ranks(lambda: setattr(steps, "helper", lambda: 5))
    same([ranks(by_name)[0], ranks(steps.plain)[0]], [1, 5])
    cloudpickle.register_pickle_by_value(steps)
    same([ranks(by_name)[0], ranks(steps.plain)[0]], [3, 3])
    cloudpickle.unregister_pickle_by_value(steps)
""",
    # A class does not run ``__init_subclass__`` again: not in the ranks, and not here if it comes
    # from a rank.
    "registered classes": """
class Base:
    known = {}

    def __init_subclass__(cls, *, name, **others):
        super().__init_subclass__(**others)
        assert name not in Base.known
        Base.known[name] = cls.title = name

class Part(Base, name="part"):
    pass

def use(part):
    class Inner(Part, name="inner"):
        pass
    return list(Base.known), part.title, type(part) is Part, Inner()

with platform.open() as ranks:
    *found, inner = ranks(use, Part())[0]
    same(found, [["part", "inner"], "part", True])
    same((inner.title, isinstance(inner, Part), list(Base.known)), ("inner", True, ["part"]))
    class Later(Base, name="later"):
        pass
    same(list(Base.known), ["part", "later"])
""",
    # A global that one call sends to one rank arrives in the others with their calls, as it was
    # when the call was made.
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
    # A function under the same key, a list that was too large to compare, and globals of functions
    # in attributes.
    "contents of containers": """
registry, rows, scale = {"loss": lambda: 1}, [0] * 10_000, 1
holder = types.SimpleNamespace(loss=lambda: scale)

def read():
    return registry["loss"](), len(rows), holder.loss()

with platform.open() as ranks:
    same(ranks(read)[0], (1, 10_000, 1))
    registry["loss"], scale = lambda: 2, 2
    rows.clear()
    same(ranks(read)[0], (2, 0, 2))
""",
    # Rank 0 fails at once, and the other one is interrupted before it begins the call, which brings
    # globals and settings.
    "call that fails at once": """
class Slow:  # keeps rank 1 at work after its answer
    def __del__(self):
        time.sleep(0.5 if os.environ.get("RANK") == "1" else 0)

late, TASK = 1, "TASK"

def fail():
    if current_rank().global_rank == 0:
        raise ValueError(late)

with platform.open() as ranks:
    ranks(Slow)
    os.environ[TASK], late = "7", 2
    assert type(error_of(ranks, fail)) is ValueError
    same(ranks(lambda: (os.environ.get(TASK), late)), (("7", 2),) * 2)
""",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The error of each section, or None."""
    text = HEAD
    for name in SECTIONS:
        body = SECTIONS[name].replace("\n", "\n    ")
        text += f"""
raised = None
platform = Platform(device="cpu", n_cpus=2, verbose=False)
try:{body}
except BaseException:
    raised = traceback.format_exc()
print(json.dumps(raised), flush=True)
"""
    output = run_script(tmp_path_factory.mktemp("script"), text)
    return dict(zip(SECTIONS, map(json.loads, output.splitlines()), strict=True))


@pytest.mark.parametrize("case", SECTIONS)
def test_globals_of_a_script(case, outcomes):
    assert outcomes[case] is None
