"""A contract case: a target that owns containers, borrows its arguments, and hands over outputs.

The oracle is the plain call of an equal target with equal arguments. Compared are the outputs, the
arguments afterwards, and which containers are one object. Outputs and arguments are kept, and
compared again after later calls and after the block. `Rule` says which calls may be refused;
refusing any other one is wrong.
"""

from __future__ import annotations

import dataclasses
import typing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from random import Random
from typing import Any, NamedTuple

import torch

from parawrap import parallel
from parawrap.engine.shard_sizes import sizes_of_block
from tests.fuzz.cases import (
    MODES,
    Outcome,
    Refused,
    Wrong,
    agree,
    attempt,
    backward,
    compare,
    drawn_devices,
    leaves_of,
    outcome_of,
    require_one_end,
)
from tests.fuzz.contract_targets import (
    AUX,
    COPY,
    EARLY,
    FLYWEIGHT,
    FORMS,
    OUTPUTS,
    OWN,
    SHARED,
    STEPS,
    VALUES,
    VALUES_OF_ROWS,
    WRITES_TENSORS,
    WRITES_WHOLE,
    Arguments,
    Box,
    Step,
    Target,
)

CALLS = ("grad", "grad", "no_grad", "late", "late", "inference", "few", "map", "map", "submit")
CHANGES = ("factor", "shift", "container", "load", "data", "train", "eval", "wrap", "unwrap")

TIMES = 3
"""How often each call is made, with new arguments."""

_FOR_GOOD = ("for_good", "for_good_in_place")
_BUFFERS_BACK = ("seen", "room")  # what lane 0 writes comes back in training mode
_MADE_BY_LANES = ("loss", "number")  # which `reduce` joins
_NEVER_JOINED = ("made_text", "buffer_view", "table")
_UNDECLARED = "batch.extra = {}"  # an attribute of a dataclass that is not one of its fields
_HOLD_ROWS = frozenset({"rows", "half", "vector", "pair", "holding", "result", "box"})


@dataclasses.dataclass(frozen=True)
class ContractCase:
    """All that a run depends on. Its repr is the code that makes it again."""

    seed: int
    target: str
    form: str
    aux: str
    own: str
    shared: str
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    reduce: str | None
    declares_rows: bool
    training: bool
    input_grad: bool
    devices: tuple[str, ...]
    home: str
    events: tuple[tuple[str, int], ...]


def _drawn_steps(random: Random, form: str, aux: str, *, is_home: bool) -> Iterator[Step]:
    adds, changes = FORMS[form].adds + AUX[aux].adds, FORMS[form].changes + AUX[aux].changes
    writes = {
        "tensor": (EARLY,),
        "registered": (),
    }  # torch refuses writes to the views that a split returns
    changes += writes.get(form, WRITES_TENSORS)
    hardly_refused = [name for name in VALUES if name not in ("loss", "number", "made_text")]
    values = VALUES_OF_ROWS * 2
    if form != "registered":  # whose own join puts tensors together
        values += (*hardly_refused * 2, *VALUES)
    names = [*STEPS]
    if not is_home:
        names.remove("weight_grad")  # copies of parameters have no .grad
    for line in random.sample(adds, min(len(adds), random.choice((0, 1, 1, 2)))):
        yield Step(line, random.choice(values), random.random() < 0.3)
    for line in random.sample(changes, min(len(changes), random.choice((0, 0, 1, 2)))):
        yield Step(line, "", random.random() < 0.3)
    if random.random() < 0.6:
        yield Step("fill", "", random.random() < 0.3)
    if random.random() < 0.4:
        name, only_wide = random.choice(names), random.random() < 0.5
        # A write for good is seen in the first call of a structure, whatever the columns
        yield Step(name, "", only_wide and name not in _FOR_GOOD)


def drawn_contract_case(random: Random, kind: str = "cpu") -> ContractCase:
    """Draw a case. `random` may be one of hypothesis, which then shrinks the case."""
    devices, home = drawn_devices(random, kind)
    form, aux = random.choice(list(FORMS)), random.choice(list(AUX))
    steps = [*_drawn_steps(random, form, aux, is_home=set(devices) == {home})]
    random.shuffle(steps)
    likely = ("rows", "rows", "batch", "batch", "inner", "aux", "own", "own", "holding", "box")
    outputs = random.choices((*likely, *likely, *OUTPUTS), k=random.choice((1, 1, 2, 3)))
    names = {step.line for step in steps}
    given = {*outputs, *(step.value for step in steps if step.value)}
    has_rows_alone = given <= {*VALUES_OF_ROWS, "batch"} and aux == "missing"
    return ContractCase(
        seed=random.randrange(10**6),
        target=random.choice(("module", "module", "method", "function")),
        form=form,
        aux=aux,
        own=random.choice(list(OWN)),
        shared=random.choice((*SHARED, *["none"] * len(SHARED))),
        steps=tuple(steps),
        outputs=tuple(outputs),
        reduce=random.choice(("mean", None)) if given & {*_MADE_BY_LANES} else None,
        declares_rows=has_rows_alone and random.random() < 0.4,
        training=random.random() < 0.3,
        input_grad=random.random() < 0.4 and not names & {"input_grad", "weight_grad"},
        devices=devices,
        home=home,
        events=tuple(_drawn_events(random)),
    )


def _drawn_events(random: Random) -> Iterator[tuple[str, int]]:
    for _ in range(random.randint(2, 5)):
        if random.random() < 0.4:
            yield random.choice(CHANGES), random.randrange(10**6)
        yield random.choice(CALLS), random.randrange(10**6)


def smaller(case: ContractCase) -> Iterator[ContractCase]:
    """Yield cases with one part less."""
    for name in ("events", "steps", "outputs", "devices"):
        parts = getattr(case, name)
        least = {"outputs": 1, "devices": 2}.get(name, 0)
        for index in range(len(parts)) if len(parts) > least else ():
            yield dataclasses.replace(case, **{name: (*parts[:index], *parts[index + 1 :])})
    plain = {
        "shared": "none",
        "aux": "missing",
        "own": "dict",
        "input_grad": False,
        "target": "module",
    }
    uses_aux = any("aux" in step.line for step in case.steps)
    for name, value in plain.items():
        if getattr(case, name) != value and not (name == "aux" and uses_aux):
            yield dataclasses.replace(case, **{name: value})


# Values, opened


def opened(value: Any, leaf: Callable[[Any], Any] = lambda each: each) -> Any:
    """Return dicts, lists, and tuples in place of all containers, and ``leaf(each)`` for leaves."""
    if isinstance(value, deque):
        return f"deque of {value.maxlen}", [opened(each, leaf) for each in value]
    if isinstance(value, Box) or dataclasses.is_dataclass(value):
        held = sorted(vars(value).items())
        return type(value).__name__, {name: opened(each, leaf) for name, each in held}
    if isinstance(value, dict):
        return type(value).__name__, {key: opened(each, leaf) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(opened(each, leaf) for each in value)
    if isinstance(value, float):  # which rounding may change
        return "float", torch.tensor(value, dtype=torch.float64)
    return leaf(value)


def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each container, object, and leaf in a value with its path."""
    yield path, value
    if isinstance(value, Box) or dataclasses.is_dataclass(value):
        parts = [(f".{name}", each) for name, each in vars(value).items()]
    elif isinstance(value, dict):
        parts = [(f"[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, (list, tuple, deque)):
        parts = [(f"[{index}]", each) for index, each in enumerate(value)]
    else:
        parts = []
    for step, each in parts:
        yield from walk(each, path + step)


def ids_in(value: Any, path: str) -> dict[str, int]:
    return {place: id(each) for place, each in walk(value, path)}


def is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, deque, Box)) or dataclasses.is_dataclass(value)


class Before:
    """The containers and leaves of arguments before a call. They stay alive, so ids stay theirs."""

    def __init__(self, args: Any) -> None:
        self.nodes = [*walk(args, "args")]
        self.ids = {path: id(each) for path, each in self.nodes}
        self.paths: dict[int, str] = {}
        self.containers = [each for _, each in self.nodes if is_container(each)]
        for path, each in self.nodes:
            if is_container(each):
                self.paths.setdefault(id(each), path)

    def identities(self, output: Any, args: Any) -> dict[str, str | None]:
        """Return which containers are those of before, and which tensors are still in place."""
        found: dict[str, str | None] = {}
        for path, each in (*walk(output, "output"), *walk(args, "args")):
            if is_container(each):
                found[path] = self.paths.get(id(each), "new")
            elif isinstance(each, torch.Tensor) and path.startswith("args"):
                found[path] = "kept" if self.ids.get(path) == id(each) else "new"
        return found


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def address_of(value: Any) -> int:
    """Return where a tensor's memory begins; 0 for other values and for tensors without memory."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


class Kept:
    """An output and the arguments of a call, and what they must be from then on.

    A tensor of the model in them may follow the model, as in the plain call, or be a copy.
    """

    def __init__(self, actual: Any, expected: Any, model: torch.nn.Module, place: str) -> None:
        memory = {*map(address_of, model.parameters()), *map(address_of, model.buffers())}
        self.actual, self.place = actual, place
        self.then = opened(expected, copied)
        leaves = leaves_of(opened(expected))
        self.now = [detached(each) if address_of(each) in memory else None for each in leaves]

    def check(self) -> None:
        place = f"kept result of {self.place} "
        actual = opened(self.actual, detached)
        mine, then = leaves_of(actual), leaves_of(self.then)
        if len(mine) != len(then) or not any(each is not None for each in self.now):
            compare(actual, self.then, place)
            return
        for index, (each, old, now) in enumerate(zip(mine, then, self.now, strict=True)):
            try:
                compare(each, old, f"leaf {index} of {place}")
            except Wrong:
                if now is None:
                    raise
                compare(each, now, f"leaf {index} of {place}")


class Mode(NamedTuple):
    """The model as a call finds it: its training flag, and if an event has wrapped its forward."""

    training: bool
    wrapped: bool


class Rule(NamedTuple):
    """What a call may do.

    `is_cut` says that lanes share its rows, and `is_sure` that this is known: a wrapper of forward
    may turn a call into a plain one, and the first lane runs a call that is not cut if the model is
    elsewhere.
    """

    is_cut: bool
    is_sure: bool
    may_refuse: bool
    must_refuse: bool


def rule_of(case: ContractCase, rows: int, *, wide: bool, whole: bool, mode: Mode) -> Rule:
    """Return the rule of a call with these rows; `whole` if it is one of a stream.

    Lanes cannot join numbers without `reduce`, texts that they made, tensors that are not rows,
    what equal sizes do not prove, and whole tensors and buffers that they wrote. A tuple or list of
    texts alone may have one per row. A parameter that is written for good must be refused.
    """
    steps = [step for step in case.steps if wide or not step.only_wide]
    lines, given = {step.line for step in steps}, {step.value for step in steps} | {*case.outputs}
    writes_for_good = not lines.isdisjoint(_FOR_GOOD)
    written = lines & {"seen", "tick", "room"}  # some come back in training mode
    # A narrow call clears what a wide one has filled, which is a write too
    unparted = {step.line for step in case.steps} & {"fill", "last"}
    parts_state = mode.training and written and len(written | unparted) > 1
    choose = sizes_of_block(1, are_uneven=not case.declares_rows)
    sizes = choose(rows, len(case.devices))
    if whole or len(sizes) == 1:
        is_elsewhere = case.devices[0] != case.home or (whole and {*case.devices} != {case.home})
        writes_whole = not lines.isdisjoint(WRITES_WHOLE)
        may_refuse = writes_for_good or (is_elsewhere and (writes_whole or parts_state))
        is_plain = not (whole or is_elsewhere)
        return Rule(
            is_cut=False,
            is_sure=is_plain and not mode.wrapped,
            may_refuse=bool(may_refuse) and not is_plain,
            must_refuse=writes_for_good and whole,
        )
    may_refuse = (
        writes_for_good
        or not given.isdisjoint(_NEVER_JOINED)
        or (case.reduce is None and not given.isdisjoint(_MADE_BY_LANES))
        or not lines.isdisjoint((_UNDECLARED, *WRITES_WHOLE))
        or ("text" in given and len(case.outputs) > 1 and _HOLD_ROWS.isdisjoint(case.outputs))
        or any(step.value == "text" and step.adds_to_list for step in steps)
        or (len(set(sizes)) == 1 and any(step.value for step in steps))
        or ("room" in lines and not mode.training)
        or ("seen" in given and "seen" in lines)
        or parts_state
    )
    must_refuse = writes_for_good and not mode.wrapped
    return Rule(True, not mode.wrapped, bool(may_refuse), must_refuse)


PLAIN = Rule(is_cut=False, is_sure=True, may_refuse=False, must_refuse=False)


def has_races(case: ContractCase) -> bool:
    """True if forward itself races on a device: lanes write one tensor."""
    return any(step.line in (*_FOR_GOOD, *WRITES_WHOLE) for step in case.steps)


class ContractRun:
    """One case as it runs: the target in its block, and the oracle."""

    def __init__(self, case: ContractCase) -> None:
        self.case = case
        home = torch.device(case.home)
        self.mine, self.oracle = Target(case, home), Target(case, home)
        self.start = {name: each.clone() for name, each in self.mine.model.state_dict().items()}
        self.kept: list[Kept] = []
        self.refusals: list[str] = []
        self.shared = self._shared_state()
        self.names = set(vars(self.mine.model))
        options: dict[str, Any] = {"reduce": case.reduce}
        if case.aux == "whole":
            options["in_dims"] = {"aux": None}
        if case.declares_rows:
            options["out_dims"] = 0
        self.p = parallel(self.mine.called, list(case.devices), **options)
        self.target = self.mine.called if case.target == "module" else self.p

    def run(self) -> None:
        self.place = "opening the block"
        try:
            with self.p:
                for name, number in self.case.events:
                    self.place = f"wrapped {name}" if self.is_wrapped else name
                    self.event(name, Random(number), number)
                    self._check_kept()
            self.place = "closing the block"
            self._check_kept()
            self._check_restored()
            self.place, self.target = "after the block", self.mine.called
            self.call("no_grad", 5, 1, is_open=False)
            self._check_kept()
        except Wrong as error:
            raise Wrong(f"{error}, in {self.place}") from error
        if self.refusals:
            raise Refused(self.refusals[0])

    def event(self, name: str, random: Random, number: int) -> None:
        if name in ("map", "submit"):
            self.stream(name, random, number)
        elif name in CALLS:
            self.call(name, random.randrange(2) if name == "few" else random.randint(2, 17), number)
        else:
            for side in (self.mine, self.oracle):
                self.change(side, name, Random(number))

    @property
    def is_wrapped(self) -> bool:
        return self.mine.forward is not None

    def change(self, side: Target, name: str, random: Random) -> None:
        model, number = side.model, random.choice((0.5, 0.75))
        if name == "factor":
            model.factor = number
        elif name == "shift":
            model.shifts["shift"] = model.shifts["shift"] * number
        elif name == "container":
            model.shifts, model.found = (
                {"shift": model.shifts["shift"] + 1},
                OWN[self.case.own].make(),
            )
        elif name == "load":
            state = model.state_dict().items()
            model.load_state_dict({key: each * number for key, each in state})
        elif name == "data":
            model.given.data.mul_(number)
            model.layer.weight.data.mul_(number)
            if side is self.mine:
                self.p.refresh()
        elif name in ("train", "eval"):
            model.train(name == "train")
        elif name == "wrap" and self.case.target == "module" and side.forward is None:
            inner = side.forward = model.forward
            model.forward = lambda *args: {"wrapped": inner(*args)}
        elif name == "unwrap" and side.forward is not None:
            model.forward, side.forward = side.forward, None

    # Calls

    def rule(self, rows: int, *, wide: bool, whole: bool) -> Rule:
        mode = Mode(self.mine.model.training, self.is_wrapped)
        return rule_of(self.case, rows, wide=wide, whole=whole, mode=mode)

    def call(self, name: str, rows: int, number: int, *, is_open: bool = True) -> None:
        """Call both targets several times."""
        wide = Random(number).random() < 0.5
        rule = self.rule(rows, wide=wide, whole=False) if is_open else PLAIN
        is_cut = rule.is_cut and rule.is_sure
        if name == "late" and not is_cut:  # the next plain call writes what a plain call returned
            name = "no_grad"
        if name == "inference" and not (is_cut and self._may_run_in_inference()):
            name = "no_grad"
        ends = [self._call_once(name, rows, number, rule, wide=wide) for _ in range(TIMES)]
        require_one_end(ends, "this event")

    def _may_run_in_inference(self) -> bool:
        """True if forward computes no gradients, which inference mode forbids."""
        return {"input_grad", "weight_grad"}.isdisjoint(step.line for step in self.case.steps)

    def _call_once(self, name: str, rows: int, number: int, rule: Rule, *, wide: bool) -> str:
        theirs, mine = (Arguments(self.case, rows, number, wide=wide) for _ in range(2))
        their_before, before = Before(theirs.args), Before(mine.args)
        buffers, marks = self._buffers(), self._marks()
        with MODES.get(name, torch.enable_grad if name != "late" else torch.no_grad)():
            expected, their_error = self._expect(theirs)
            actual, error = attempt(self.target, *mine.args)
        if rule.must_refuse and error is None:
            raise Wrong("a parameter was written for good")
        self._settle(buffers, rule, has_failed=error is not None)
        if rule.is_cut and rule.is_sure:
            compare(self._marks(), marks, "state of the model ")
        try:
            is_answered = agree(error, their_error, "the call")
        except Refused as refusal:
            self._check_refusal(refusal, rule)
            compare(ids_in(mine.args, "args"), before.ids, "ids in refused arguments")
            return f"refused by {type(error).__name__}"
        if not is_answered:
            return f"raised {error!r}"
        results = (expected, theirs), (actual, mine)
        if name != "late":
            self._compare(results, their_before, before, by_value=name in MODES)
        if rule.is_cut and rule.is_sure:
            kept = (actual, mine.args, mine.tensors), (expected, theirs.args, theirs.tensors)
            self.kept.append(Kept(*kept, self.oracle.model, name))
        if name not in ("late", *MODES):
            self._compare_gradients(results)
        return "answered"

    def _expect(self, arguments: Arguments) -> tuple[Any, BaseException | None]:
        """Call the oracle, and give it a new container: what it returned is handed over."""
        result = attempt(self.oracle.called, *arguments.args)
        self.oracle.model.found = OWN[self.case.own].make()
        return result

    def stream(self, name: str, random: Random, number: int) -> None:
        """Run several whole batches through the lanes, and keep everything until all have run."""
        count = 1 if has_races(self.case) else random.randint(1, 6)  # others run on after a refusal
        drawn = [(random.randint(1, 9), random.random() < 0.5) for _ in range(count)]
        rules = [self.rule(rows, wide=wide, whole=True) for rows, wide in drawn]
        ends = []
        for _ in range(TIMES):
            theirs, mine = [
                [
                    Arguments(self.case, rows, number + index, wide=wide)
                    for index, (rows, wide) in enumerate(drawn)  # the same values on both sides
                ]
                for _ in range(2)
            ]
            ends.append(self._stream_once(name, theirs, mine, rules))
        require_one_end(ends, "this event")

    def _stream_once(self, name: str, theirs: Any, mine: Any, rules: list[Rule]) -> str:
        earlier = [[Before(each.args) for each in calls] for calls in (theirs, mine)]
        expected, buffers, marks = [], self._buffers(), self._marks()
        with torch.no_grad():
            for each in theirs:
                expected.append(self._expect(each))
                self._put_back(buffers)  # a whole call gives nothing back
            actual, error = attempt(self._streamed, name, [each.args for each in mine])
        errors = [each for _, each in expected if each is not None]
        if error is None and any(rule.must_refuse for rule in rules):
            raise Wrong("a parameter was written for good")
        self._settle(buffers, None, has_failed=error is not None)
        compare(self._marks(), marks, "state of the model ")
        try:
            if not agree(error, errors[0] if errors else None, "the stream"):
                return f"raised {error!r}"
        except Refused as refusal:
            rule = next((rule for rule in rules if rule.may_refuse), PLAIN)
            self._check_refusal(refusal, rule)
            return "refused"
        sides = zip(actual, expected, theirs, mine, *earlier, strict=True)
        for output, (value, _), one, other, *before in sides:
            self._compare(((value, one), (output, other)), *before, by_value=True)
            kept = (output, other.args, other.tensors), (value, one.args, one.tensors)
            self.kept.append(Kept(*kept, self.oracle.model, name))
        return "answered"

    def _streamed(self, name: str, calls: list[Any]) -> list[Any]:
        if name == "map":
            return list(self.p.map(calls))
        futures = [self.p.submit(*args) for args in calls]
        wait(futures)
        return [future.result() for future in futures]

    # What must hold afterwards

    def _check_refusal(self, refusal: Refused, rule: Rule) -> None:
        if not rule.may_refuse:
            raise Wrong(f"refused without a reason: {refusal}") from refusal
        self.refusals.append(str(refusal))
        if any(step.line in _FOR_GOOD for step in self.case.steps):
            self.p.refresh()  # waits for the lanes
            for side in (self.mine, self.oracle):
                side.model.load_state_dict(self.start)
            self.p.refresh()

    def _compare(self, results: Any, theirs: Before, mine: Before, *, by_value: bool) -> None:
        (expected, their_call), (actual, call) = results
        leaf = detached if by_value else lambda each: each
        for what, one, other in (
            ("output ", actual, expected),
            ("arguments ", call.args, their_call.args),
            ("argument tensors ", call.tensors, their_call.tensors),
            ("containers of arguments ", mine.containers, theirs.containers),
        ):
            compare(opened(one, leaf), opened(other, leaf), what)
        found, wanted = (
            mine.identities(actual, call.args),
            theirs.identities(expected, their_call.args),
        )
        for path, name in wanted.items():
            if found[path] != name:
                shown = path.replace("[", " [", 1)
                raise Wrong(f"identity of {shown} is {found[path]} and must be {name}")
        nodes = dict((*walk(actual, "output"), *walk(call.args, "args")))
        for path, each in (*walk(expected, "output"), *walk(their_call.args, "args")):
            is_own = nodes[path] is self.mine.model.given or self.case.reduce is not None
            if each is self.oracle.model.given and not is_own:
                raise Wrong(f"parameter in {path} is not the model's own")

    def _compare_gradients(self, results: Any) -> None:
        (_, wanted), (_, found) = [
            attempt(backward, opened((output, call.args, call.tensors)))
            for output, call in results  # all that the caller has in hand
        ]
        if agree(found, wanted, "the backward pass"):
            (_, their_call), (_, call) = results
            for one, other in zip(call.leaves, their_call.leaves, strict=True):
                compare(one.grad, other.grad, "gradient of arguments")
            parameters = dict(self.oracle.model.named_parameters())
            for name, one in self.mine.model.named_parameters():
                compare(one.grad, parameters[name].grad, f"gradient of {name}")
        for side in (self.mine, self.oracle):
            side.model.zero_grad()

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in self.oracle.model.named_buffers()}

    def _put_back(self, buffers: dict[str, torch.Tensor]) -> None:
        for name, each in buffers.items():
            if name != "kept":  # an output may be this buffer
                self.oracle.model._buffers[name] = each.clone()

    def _settle(self, buffers: dict[str, Any], rule: Rule | None, *, has_failed: bool) -> None:
        """Bring the oracle's buffers to what the call must leave, and compare both models' tensors.

        `rule` is None for a stream, which gives nothing back. In training mode, what a failed call
        wrote may have come back or not. Of the rows that lanes wrote, those of lane 0 come back.
        """
        model, training = self.mine.model, self.mine.model.training
        own = {name: each.detach().clone() for name, each in model.named_buffers()}
        if rule is None:
            self._put_back(buffers)
        elif not rule.is_sure or (has_failed and training):
            self._put_back(own)
        elif rule.is_cut and training:
            self._put_back({"tick": buffers["tick"], "room": own["room"]})
        elif rule.is_cut:
            self._put_back(buffers)
        for name, each in self.oracle.model.state_dict().items():
            if name != "given" or not has_failed:
                compare(model.state_dict()[name], each, f"{name} of the model")

    def _marks(self) -> dict[str, int]:
        """Return the ids of the attributes of the model, and of what its containers hold."""
        model = self.mine.model
        names = ("found", "last", "shifts", "shared")
        found: dict[str, int] = {}
        for name in names:
            found |= ids_in(getattr(model, name), name)
        return found

    def _shared_state(self) -> Any:
        shared = self.mine.model.shared
        if self.case.shared == "typing":
            return typing.get_args(shared)
        held = [vars(each) for each in (shared, COPY, FLYWEIGHT) if each is not None]
        return [sorted(ids_in(each, "").items()) for each in held]

    def _check_kept(self) -> None:
        for each in self.kept:
            each.check()

    def _check_restored(self) -> None:
        try:
            shared = self._shared_state()
        except Exception as error:
            raise Wrong(f"shared object of the process is broken: {error!r}") from error
        if shared != self.shared:
            raise Wrong(f"shared object of the process has changed: {self.case.shared}")
        names = set(vars(self.mine.model)) - {"forward"}  # which events may have set
        if names != self.names - {"forward"}:
            raise Wrong(f"names of the model are {names} and must be {self.names}")


def run_contract(case: ContractCase) -> Outcome:
    """Run a case, and return how it ended: "refused" if a call was that may be."""
    return outcome_of(lambda: ContractRun(case).run())
