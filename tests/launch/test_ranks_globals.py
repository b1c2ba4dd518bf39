"""Functions of a script in ranks that stay: which globals stay in the ranks, which are sent again, and which are refused.

One script runs all sections, each with ranks of its own, and prints what each section found.
"""

from __future__ import annotations

import json

import pytest

from tests.helpers.processes import run_script

HEAD = """
import argparse, copy, dataclasses, enum, functools, json, math, sys, threading, time, types, typing
import torch, torch.distributed as dist
from parawrap import Platform, current_rank, wrapper

found = {}
platform = Platform(device="cpu", n_cpus=2, verbose=False, spawn_method=sys.argv[1])

def attempt(call, *args):
    try:
        return call(*args)
    except Exception as error:
        return [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
"""

STATE = """
def load(size):
    global model
    model = [current_rank().global_rank] * size

def total():
    return sum(model)

def grow():
    model.append(5)

def drop():
    global model
    del model

with platform.open() as ranks:
    ranks(load, 3)
    found["total"] = [ranks(total), ranks(lambda: len(model))]
    ranks(grow)
    found["grown"] = [ranks(total), ranks[1](total), "model" in globals()]
    ranks[1](load, 1)
    found["of one rank"] = ranks(total)
    ranks(drop)
    found["dropped"] = attempt(ranks, total)[:2]
    ranks(load, 1)
    found["again"] = ranks(total)
"""

SETTINGS = """
@dataclasses.dataclass
class Setting:
    depth: int
    names: tuple = ("a",)

LR, CONFIG, setting, options = 1, {"width": [1, 2]}, Setting(3), argparse.Namespace(verbose=True)

def read():
    return LR, CONFIG["width"], setting.depth, setting.names, options.verbose

def read_through():
    return [read(), SCALE]

def change_there():
    CONFIG["width"].append(9)

def delete_there():
    global CONFIG
    del CONFIG

with platform.open() as ranks:
    found["settings"] = [ranks(read)[0]]
    LR, setting.depth, options.verbose = 2, 4, False
    CONFIG["width"].append(3)
    found["settings"].append(ranks(read)[1])
    ranks(change_there)
    found["settings"].append(ranks(read)[1])
    CONFIG = {"width": []}
    found["both"] = attempt(ranks, read)
    ranks(delete_there)
    setting = dataclasses.replace(setting, names=("b", "c"))
    found["settings"].append(ranks(lambda: read())[0])
    LR, SCALE = 0.5, 2
    found["through"] = ranks(read_through)[0]
    SCALE = 3
    found["through"] += ranks(read_through)[1]
"""

DEFINITIONS = """
def helper():
    return 1

class Thing:
    def name(self):
        return "first"

class Child(Thing):
    pass

def use():
    return [helper(), Thing().name(), Child().name(), half(8), factorial(4)]

def outer():
    return use()

half = lambda value: value / 2

def factorial(number):
    return 1 if number < 2 else number * factorial(number - 1)

with platform.open() as ranks:
    found["first"] = [ranks(outer), ranks(use)]

    def helper():
        return 2

    class Thing:
        def name(self):
            return "second"

    half = lambda value: value // 2
    found["second"] = ranks(outer)

    class Child(Thing):
        pass

    found["third"] = ranks(outer)

    def helper():
        return math.sqrt(9), F.relu(torch.tensor(-1.0)).item()

    import torch.nn.functional as F
    found["module"] = ranks(outer)[0]
    outer = lambda: "replaced"
    found["replaced"] = ranks(outer)
"""

SHARED = """
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

apart = torch.nn.Linear(2, 1)
apart_optimizer = Descent(apart.parameters())

def use_apart():
    return apart.bias.shape[0]

def step_apart():
    return len(apart_optimizer.parameters)

def is_apart(given):
    return given["model"][0] is apart

late = torch.nn.Linear(2, 1)

def is_late(given):
    return given is late

rows = torch.zeros(3)
part = rows[1:]

def use_rows():
    return rows.sum().item()

def use_part():
    return part.sum().item()

with platform.open() as ranks:
    found["view"] = ranks(change)
    found["step"] = [ranks(step), ranks(step)]
    found["use apart"] = ranks(use_apart)
    found["step apart"] = attempt(ranks, step_apart)
    found["use apart again"] = ranks(use_apart)
    found["argument"] = attempt(ranks, is_apart, {"model": [apart]})
    found["first as argument"] = ranks(is_late, late)
    found["rows"] = ranks(use_rows)
    found["part"] = attempt(ranks, use_part)
"""

CHANGED = """
class Box:
    def __init__(self, value):
        self.value, self.call = value, print

net, box = torch.nn.Linear(2, 1), Box([1])

def weight():
    return net.weight.sum().item()

def unbox():
    return box.value

def train():
    with torch.no_grad():
        net.weight.fill_(2)

with platform.open() as ranks:
    found["before"] = ranks(weight)[0] == net.weight.sum().item()
    ranks(train)
    found["trained"] = ranks(weight)
    with torch.no_grad():
        net.weight.zero_()
    found["changed"] = attempt(ranks, weight)
    net = copy.deepcopy(net)
    found["copied"] = ranks(weight)
    found["box"] = [ranks(unbox)]
    box.value.append(2)
    found["changed box"] = attempt(ranks, unbox)
    box = Box([3])
    found["box"].append(ranks(unbox))
"""

OWNED = """
def assign():
    global both
    both = 1

def read():
    return both

def read_through():
    return read()

mine = 5

def assign_mine():
    global mine
    mine += 1
    return mine

with platform.open() as ranks:
    ranks(assign)
    both = 2
    found["both"] = [attempt(ranks, read), attempt(ranks, read_through), attempt(ranks[0], lambda: both)]
    del both
    found["cured"] = [ranks(read), ranks(lambda: both)]
    found["mine"] = [ranks(assign_mine), ranks(assign_mine), mine]
    mine = 50
    found["mine here"] = attempt(ranks, assign_mine)
"""

REFUSED = """
LOCK, LOCKS, unused = threading.Lock(), {"rows": [threading.Lock()]}, threading.Lock()

def use_lock():
    return LOCK

def use_locks():
    return LOCKS

def use_ranks():
    return ranks(max, 1, 2)

class Cursed:
    def __reduce__(self):
        return int, ("no number",)

cursed, plain = Cursed(), 3

def use_cursed():
    return cursed, plain

with platform.open() as ranks:
    for use in use_lock, use_locks, use_ranks, lambda: LOCK, use_cursed:
        found[use.__name__] = attempt(ranks, use)
    cursed = 4
    found["cured"] = ranks(use_cursed)
    LOCK = 5
    found["unlocked"] = ranks(use_lock)
    found["lacks"] = attempt(ranks, lambda name: globals()[name], "unused")[0]
"""

INSTANCES = """
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

def move(point):
    global last
    last = point.moved(current_rank().global_rank)
    return type(point) is Point, last

def is_last_point():
    return isinstance(last, Point)

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
    found["points"] = [[same, type(point) is Point, point.x] for same, point in moved]
    found["moved again"] = [point.x for _, point in ranks(move, moved[1][1])]
    found["last"] = ranks(is_last_point)
    found["gathered"] = ranks(gather, Point(3))
    found["methods"] = [each.x for each in [*ranks(Point(1).moved, 5), *ranks(Point.make, 7), *ranks(decorated, 8)]]
    found["partial"] = [point.x for _, point in ranks(functools.partial(wrapped, 9))]
    try:
        ranks(fail)
    except Failure as error:
        found["failure"] = [str(error), "raise Failure" in error.__notes__[0]]
"""

ENUMS = """
class Color(enum.Enum):
    RED = 1

    def shade(self):
        return f"dark {self.name}"

class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2

level = Level.HIGH

def color(value):
    return value is Color.RED, Color.RED, value.shade(), level is Level.HIGH, level

with platform.open() as ranks:
    found["colors"] = [
        [same, value is Color.RED, shade, is_high, high is Level.HIGH, len(Color)]
        for same, value, shade, is_high, high in ranks(color, Color.RED)
    ]
"""

ORDER = """
VALUE, UNUSED = 3, torch.ones(2)

class Base:
    pass

class Derived(Base):
    pass

def pick():
    return VALUE, Derived.__mro__[1].__name__

def pick_later(name):
    return globals()[name].sum().item()

def evaluate(text):
    return eval(text)

def assign_one():
    global one
    one = current_rank().global_rank

def read_one():
    return one

def closure(number):
    def inner():
        return number + VALUE
    return inner

with platform.open() as ranks:
    found["one"] = [ranks[1](pick), ranks(pick), ranks[0](pick)]
    VALUE = 4
    found["changed"] = [ranks[0](pick), ranks(pick)]
    found["closure"] = [ranks[1](closure(1)), ranks(closure(2))]
    found["evaluate"] = ranks(evaluate, "VALUE + len(Base.__name__)")
    ranks[1](assign_one)
    found["assigned"] = [ranks[1](read_one), attempt(ranks, read_one)[:2]]
    launches = [ranks.submit(lambda step=step: (step, VALUE)) for step in range(3)]
    found["submitted"] = [each.results() for each in launches]
    VALUE = 5
    launch = ranks.submit(pick)
    VALUE = 6
    found["early"] = [launch.results(), ranks(pick)]
"""

REFERENCES = """
REGISTRY, x, HISTORY, PART = {}, 1, [], None

def register(function):
    REGISTRY[function.__name__] = function
    return function

@register
def entry():
    return 1

def run():
    return REGISTRY["entry"]()

def evaluate(text):
    return eval(text)

class Pair(typing.NamedTuple):
    first: int = 1

class Options(typing.TypedDict):
    depth: int

class Box(typing.Generic[typing.TypeVar("T")]):
    pass

class Base:
    members = {}
    made = 0

    def __init_subclass__(cls):
        Base.members[cls.__name__] = cls

    def __init__(self):
        Base.made += 1

class Sub(Base):
    pass

def make_base():
    Base()
    return Base.made

def append():
    HISTORY.append(1)
    return len(HISTORY)

def append_part():
    PART["history"].append(1)
    return len(HISTORY)

generator = torch.Generator().manual_seed(1)

def draw():
    return torch.rand(1, generator=generator).item()

linear = torch.nn.Linear(1, 1)

def weight():
    return linear.weight.item()

def default_weight(given=linear):
    return given.weight.item()

def closure_over(given):
    def inner():
        return given.weight.item()
    return inner

settings = types.ModuleType("settings")
settings.lr = 1

def rate():
    return settings.lr

def assign():
    global owned
    owned = 1

def owned_here():
    return owned

with platform.open() as ranks:
    found["registry"] = [ranks(run)[0]]

    @register
    def entry():
        return 2

    found["registry"].append(ranks(run)[0])
    found["kinds"] = [
        ranks(lambda: Pair())[0] == Pair(),
        ranks(lambda: Options(depth=2))[0],
        ranks(lambda: type(Box()))[1] is Box,
        ranks(lambda: sorted(Base.members))[0],
        ranks(lambda: Base.members["Sub"] is Sub and issubclass(Sub, Base))[0],
    ]
    found["made"] = [ranks(make_base)[0], ranks(make_base)[0]]
    Base()
    found["made"].append(attempt(ranks, make_base)[0])
    found["drawn"] = ranks(draw)[0] != ranks(draw)[0]
    ranks(weight)
    found["apart"] = [attempt(ranks, each)[:2] for each in (default_weight, closure_over(linear))]
    found["rate"] = ranks(rate)
    settings.lr = 2
    found["rate"] += ranks(rate)

with platform.open() as ranks:
    found["evaluated"] = ranks(evaluate, "x")
    x = 2
    found["evaluated"] += ranks(evaluate, "x")

with platform.open() as ranks:
    slow = ranks.submit(time.sleep, 0.5)
    dropped = ranks.submit(run)
    dropped.cancel()
    slow.results()
    found["after a dropped call"] = ranks(run)
    ranks.submit(assign)
    owned = 2
    found["owned"] = attempt(lambda: ranks.submit(owned_here).results())[0]

with platform.open() as ranks:
    ranks(lambda: len(HISTORY))
    PART = {"history": HISTORY}
    found["together"] = ranks(append_part)
    HISTORY = []
    found["changed there"] = attempt(ranks, append)[0]
"""

SECTIONS = {
    "references": REFERENCES,
    "state": STATE,
    "settings": SETTINGS,
    "definitions": DEFINITIONS,
    "shared": SHARED,
    "changed": CHANGED,
    "owned": OWNED,
    "refused": REFUSED,
    "instances": INSTANCES,
    "order": ORDER,
    "enums": ENUMS,
}


@pytest.fixture(scope="module", params=["forkserver", "fork"])
def outcomes(request, tmp_path_factory):
    """Each section's findings. A section that raises is replaced by its error."""
    text = HEAD
    for name, section in SECTIONS.items():
        body = section.replace("\n", "\n    ")
        text += (
            f"\ntry:{body}\nexcept BaseException as error:\n"
            "    import traceback\n    found = {'raised': traceback.format_exc()}\n"
            f"print(json.dumps([{name!r}, found]), flush=True)\nfound = {{}}\n"
        )
    output = run_script(tmp_path_factory.mktemp("script"), text, request.param)
    return dict(map(json.loads, output.splitlines()))


def test_a_global_that_a_rank_assigns_stays(outcomes):
    """``global model`` in one call is there in the next, in each rank its own, and not here."""
    assert outcomes["state"] == {
        "total": [[0, 3], [3, 3]],
        "grown": [[5, 8], 8, False],
        "of one rank": [5, 1],
        "dropped": ["NameError", "name 'model' is not defined"],
        "again": [0, 1],
    }


def test_changed_settings_arrive(outcomes):
    """A changed number, dict, dataclass, or namespace arrives; one that a rank changed stays."""
    found = outcomes["settings"]
    assert found["settings"] == [
        [1, [1, 2], 3, ["a"], True],
        [2, [1, 2, 3], 4, ["a"], False],
        [2, [1, 2, 3, 9], 4, ["a"], False],
        [2, [], 4, ["b", "c"], False],
    ]
    assert found["through"] == [[0.5, [], 4, ["b", "c"], False], 2, [0.5, [], 4, ["b", "c"], False], 3]


def test_a_setting_changed_on_both_sides_is_refused(outcomes):
    """UnsendableError names a dict that a rank changed in place and this process changed, too. ``del`` there cures it."""
    kind, text, *_ = outcomes["settings"]["both"]
    assert kind == "UnsendableError"
    assert "the global 'CONFIG' was changed in this rank" in text
    assert "global CONFIG; del CONFIG" in text


def test_redefined_functions_and_classes_arrive(outcomes):
    """Also those that other functions use. A child of a redefined class keeps its parent, as it does here."""
    first = [1, "first", "first", 4.0, 24]
    assert outcomes["definitions"] == {
        "first": [[first, first], [first, first]],
        "second": [[2, "second", "first", 4, 24]] * 2,
        "third": [[2, "second", "second", 4, 24]] * 2,
        "module": [[3.0, 0.0], "second", "second", 4, 24],
        "replaced": ["replaced", "replaced"],
    }


def test_globals_that_share_objects_share_them(outcomes):
    """Two globals that one call sends share their tensors in the rank."""
    found = outcomes["shared"]
    assert found["view"] == [7.0, 7.0]
    assert found["step"] == [[0.5, 0.5]] * 2


def test_globals_of_two_calls_cannot_share(outcomes):
    """UnsendableError names both globals, because the rank would have two copies of the objects that they share."""
    kind, text, *_ = outcomes["shared"]["step apart"]
    assert kind == "UnsendableError"
    assert "'apart_optimizer'" in text
    assert "'apart'" in text
    assert outcomes["shared"]["use apart again"] == [1, 1]


def test_views_of_two_calls_cannot_share_memory(outcomes):
    """A view of a tensor that the ranks have already would be a copy there."""
    kind, text, *_ = outcomes["shared"]["part"]
    assert kind == "UnsendableError"
    assert "'part'" in text
    assert "'rows'" in text


def test_an_argument_cannot_share_with_a_global(outcomes):
    """An argument that holds an object of a global is refused if the ranks have the global, and shared otherwise."""
    kind, text, *_ = outcomes["shared"]["argument"]
    assert kind == "UnsendableError"
    assert "that the global 'apart' holds too" in text
    assert text.startswith("an argument holds")
    assert outcomes["shared"]["first as argument"] == [True, True]


def test_an_object_that_changed_in_place_is_refused(outcomes):
    """A model that this process changed raises, because the ranks have their own. A copy of it replaces theirs."""
    found = outcomes["changed"]
    assert found["before"] is True
    assert found["trained"] == [4.0, 4.0]
    assert found["copied"] == [0.0, 0.0]
    assert found["box"] == [[[1], [1]], [[3], [3]]]
    for section, name, user in ("changed", "net, a Linear", "weight"), ("changed box", "box, a Box", "unbox"):
        kind, text, *_ = found[section]
        assert kind == "UnsendableError"
        name, _, rest = name.partition(",")
        assert f"the global {name!r},{rest}, was changed in place" in text
        assert f"and {user} uses it" in text


def test_a_global_assigned_on_both_sides_is_refused(outcomes):
    """UnsendableError names the global, its user, and the cure; after ``del`` here, that of the ranks counts."""
    found = outcomes["owned"]
    for (kind, text, *_), user in zip(found["both"], ["read", "read", "<lambda>"], strict=True):
        assert kind == "UnsendableError"
        assert f"the global 'both', which {user} uses, was assigned in the ranks" in text
        assert "del both" in text
    assert found["cured"] == [[1, 1], [1, 1]]
    assert found["mine"] == [[6, 6], [7, 7], 5]
    kind, text, *_ = found["mine here"]
    assert kind == "UnsendableError"
    assert "'mine'" in text


def test_a_global_that_cannot_be_pickled_is_named(outcomes):
    """Only globals that the call uses count. The ranks stay usable."""
    found = outcomes["refused"]
    expected = {
        "use_lock": ("the global 'LOCK'", "lock"),
        "<lambda>": ("the global 'LOCK'", "lock"),
        "use_locks": ("the global 'LOCKS'", "lock"),
        "use_ranks": ("the global 'ranks'", "Ranks"),
    }
    for use, (name, kind) in expected.items():
        assert found[use][0] == "UnsendableError"
        address, separator, reason = found[use][1].partition(" cannot be sent to another process: ")
        assert separator
        assert name in address
        assert reason.startswith(kind)
    assert "['rows'][0]" in found["use_locks"][1]
    assert found["unlocked"] == [5, 5]
    assert found["lacks"] == "KeyError"


def test_a_global_that_cannot_be_loaded_is_sent_again(outcomes):
    """The exception of the rank has a note. Other globals of that call arrive with the next one."""
    kind, _, *notes = outcomes["refused"]["use_cursed"]
    assert kind == "ValueError"
    assert "unpickled the function, its arguments, and its globals" in "\n".join(notes)
    assert outcomes["refused"]["cured"] == [[4, 3], [4, 3]]


def test_instances_of_classes_of_the_script(outcomes):
    """They keep their class as argument, as result, in a global of the rank, and between ranks."""
    assert outcomes["instances"] == {
        "points": [[True, True, 1], [True, True, 2]],
        "moved again": [2, 3],
        "last": [True, True],
        "gathered": [[3, 3], [3, 3]],
        "methods": [6, 6, 7, 7, 8, 9],
        "partial": [9, 10],
        "failure": ["text", True],
    }


def test_enums_of_the_script_keep_their_members(outcomes):
    assert outcomes["enums"] == {"colors": [[True, True, "dark RED", True, True, 1]] * 2}


def test_one_rank_may_come_first(outcomes):
    """A global that one call sends to one rank arrives at all; a global that one rank assigns stays there."""
    assert outcomes["order"] == {
        "one": [[3, "Base"], [[3, "Base"]] * 2, [3, "Base"]],
        "changed": [[4, "Base"], [[4, "Base"]] * 2],
        "closure": [5, [6, 6]],
        "evaluate": [8, 8],
        "assigned": [1, ["NameError", "name 'one' is not defined"]],
        "submitted": [[[step, 4]] * 2 for step in range(3)],
        "early": [[[5, "Base"]] * 2, [[6, "Base"]] * 2],
    }


def test_redefined_parts_of_containers_arrive(outcomes):
    """A registry of functions, as a cell fills it again, is sent with its new functions."""
    assert outcomes["references"]["registry"] == [1, 2]


def test_unusual_classes_of_the_script_arrive(outcomes):
    """Named tuples, typed dicts, generic classes, and classes that refer to each other."""
    assert outcomes["references"]["kinds"] == [True, {"depth": 2}, True, ["Sub"], True]


def test_changes_on_both_sides_are_refused(outcomes):
    """A class attribute, a list, or a global that the ranks and this process both change."""
    found = outcomes["references"]
    assert found["made"] == [1, 2, "UnsendableError"]
    assert found["changed there"] == "UnsendableError"
    assert found["owned"] == "UnsendableError"


def test_a_generator_goes_on_in_the_ranks(outcomes):
    assert outcomes["references"]["drawn"]


def test_defaults_and_closures_cannot_be_copies(outcomes):
    """A model that the ranks have already does not travel a second time in a function."""
    for kind, text in outcomes["references"]["apart"]:
        assert kind == "UnsendableError"
        assert "'linear'" in text


def test_a_module_made_by_hand_is_compared(outcomes):
    assert outcomes["references"]["rate"] == [1, 1, 2, 2]


def test_eval_reads_changed_globals(outcomes):
    assert outcomes["references"]["evaluated"] == [1, 1, 2, 2]


def test_a_dropped_call_leaves_its_globals(outcomes):
    """The globals that came with a cancelled call are there for later calls."""
    assert outcomes["references"]["after a dropped call"] == [2, 2]


def test_globals_that_share_a_list_travel_together(outcomes):
    """A container that the ranks have already is sent again with the one that refers to it."""
    assert outcomes["references"]["together"] == [1, 1]
