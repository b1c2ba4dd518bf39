"""A case is a model, devices, and events in a block.

The oracle is the plain call of an equal model after equal events.

Every call is made six times. `run` returns the end of a case: "answered" if every value and
gradient was right, "refused" if parawrap raised the same ParawrapError six times and everything
before was right, else "wrong". So a case is wrong, too, if one of six equal calls ends in another
way than the others.
"""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from parawrap import parallel
from parawrap.errors import ParawrapError
from tests.fuzz.changes import CHANGES, WRITES_OTHERS, WRITES_PARAMETERS
from tests.fuzz.models import (
    OUTPUT_TREES,
    WIDTH,
    Counter,
    RowWise,
    Spec,
    build,
    drawn_body,
    drawn_output,
    float64_on,
)

FORMS = ("positional", "keyword", "list", "nested", "items")
SCALES = ("missing", "number", "zero_dim", "one_row", "string")
CALLS = ("backward", "backward", "no_grad", "inference", "few", "map", "submit", "step", "fail")
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}

TIMES = 6
"""How often each call is made."""

_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class Case:
    """All that a run depends on. Its repr is the code that makes it again."""

    seed: int
    body: Spec
    outputs: Spec
    form: str
    scale: str
    input_grad: bool
    frozen: bool
    devices: tuple[str, ...]
    home: str
    events: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a case: "answered", "refused", or "wrong"; and the error of a refusal, or the
    difference.
    """

    end: str
    detail: str = ""

    @property
    def kind(self) -> str:
        """The end and some words of the detail: outcomes of one kind have one cause, most of the
        time.
        """
        text = self.detail.partition(" raised ")[2] or self.detail
        words = [word for word in text.split() if not any(letter.isdigit() for letter in word)]
        return f"{self.end}: {' '.join(words[:5])}"


class Wrong(Exception):
    """A result that differs from the oracle's."""


class Refused(Exception):
    """A call that parawrap refused."""


def drawn_devices(random: Random, kind: str) -> tuple[tuple[str, ...], str]:
    lanes = random.randint(2, 4)
    if kind == "cpu":
        return ("cpu",) * lanes, "cpu"
    devices = tuple(f"sim:{random.randrange(4)}" for _ in range(lanes))
    return devices, random.choice([devices[0], devices[0], "sim:0", "cpu"])


def drawn_events(random: Random, changes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Draw events: mostly a call after each change, and often the same call as before."""
    call = random.choice(("backward", "no_grad"))
    yield call, random.randrange(10**6)
    for _ in range(random.randint(1, 4)):
        if random.random() < 0.75:
            yield random.choice(changes), random.randrange(10**6)
        call = call if random.random() < 0.3 else random.choice(CALLS)
        yield call, random.randrange(10**6)


def changes_of(body: Spec, *, frozen: bool) -> list[str]:
    """Return the names of changes. A name that matters to the body appears more than once."""
    names = set(_names_in(body))
    found = [*CHANGES]
    if names & {"buffers", "eval_norm"}:
        found += ["buffer_data"] * 4
    if "mode" in names:
        found += ["sub_eval", "sub_train", "eval"]
    if names & {"attributes", "enclosed"}:
        found += ["replace_attribute", "held_data", "held_write"] * 2
    if frozen:
        found += ["unfreeze"] * 4
    return found


def _names_in(spec: Spec) -> Iterator[str]:
    name, *parts = spec
    yield name
    for part in parts:
        yield from _names_in(part)


def drawn_case(random: Random, kind: str = "cpu") -> Case:
    """Draw a case. `random` may be one of hypothesis, which then shrinks the case."""
    devices, home = drawn_devices(random, kind)
    body, frozen = drawn_body(random), random.random() < 0.3
    return Case(
        seed=random.randrange(10**6),
        body=body,
        outputs=drawn_output(random),
        form=random.choice(FORMS),
        scale=random.choice(SCALES),
        input_grad=random.random() < 0.5,
        frozen=frozen,
        devices=devices,
        home=home,
        events=tuple(drawn_events(random, changes_of(body, frozen=frozen))),
    )


def inputs_of(case: Case, rows: int, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the arguments of a call with that many rows."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.home)
        return tensor.requires_grad_(case.input_grad)

    x: Any = made(rows, WIDTH)
    if case.form == "list":
        x = [x, made(rows, WIDTH)]
    elif case.form == "nested":
        x = {"a": (x, {"b": made(rows, 1)}), "c": ["a string", made(rows)], "n": 3, "nothing": None}
    elif case.form == "items":
        x = [made(WIDTH) for _ in range(rows)]
    scales = {"number": 0.5, "zero_dim": made(), "one_row": made(1, WIDTH), "string": "a string"}
    keywords = {} if case.scale == "missing" else {"scale": scales[case.scale]}
    if case.form == "keyword":
        return (), {"x": x, **keywords}
    return (x, *keywords.values()), {}


def leaves_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves_of(part)]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in leaves_of(part)]
    return [value]


def detached(value: Any) -> list[Any]:
    """Return the leaves, parameters as plain tensors: a whole call may return its lane's view of a
    parameter.
    """
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves_of(value)]


def backward(output: Any) -> None:
    """Run the backward pass of a weighted sum. Every element has another weight."""
    losses = [
        (
            leaf
            * torch.linspace(0.5, 1.5, leaf.numel(), dtype=leaf.dtype, device=leaf.device).view(
                leaf.shape
            )
        ).sum()
        for leaf in leaves_of(output)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if losses:
        sum(losses).backward()


def compare(actual: Any, expected: Any, place: str) -> None:
    """Raise Wrong if types, structures, or values differ."""
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        _compare_tensors(actual, expected, place)  # a lane's view of a parameter is a plain tensor
    elif type(actual) is not type(expected):
        raise Wrong(f"{place} is {_shown(actual)} and must be {_shown(expected)}")
    elif isinstance(expected, dict):
        compare(list(actual), list(expected), f"keys of {place}")
        for key, value in expected.items():
            compare(actual[key], value, f"{place}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            raise Wrong(f"{place} has {len(actual)} items and must have {len(expected)}")
        for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            compare(mine, theirs, f"{place}[{index}]")
    elif actual != expected:
        raise Wrong(f"{place} is {actual!r} and must be {expected!r}")


def _compare_tensors(actual: torch.Tensor, expected: torch.Tensor, place: str) -> None:
    for name in ("shape", "dtype", "requires_grad"):
        if getattr(actual, name) != getattr(expected, name):
            raise Wrong(
                f"{name} of {place} is {getattr(actual, name)} and must be "
                f"{getattr(expected, name)}"
            )
    mine, theirs = actual.detach().cpu(), expected.detach().cpu()
    close = torch.isclose(mine, theirs, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
    if not bool(close.all()):
        at = tuple(int(index) for index in (~close).nonzero()[0])
        raise Wrong(
            f"value of {place} at {at} is {float(mine[at])} and must be {float(theirs[at])}"
        )


def _shown(value: Any) -> str:
    return (
        type(value).__name__
        if isinstance(value, (torch.Tensor, list, tuple, dict))
        else repr(value)
    )


def attempt(
    call: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, BaseException | None]:
    try:
        return call(*args, **kwargs), None
    except TimeoutError:
        raise
    except Exception as error:
        return None, error


def agree(actual: BaseException | None, expected: BaseException | None, place: str) -> bool:
    """Return True if neither raised.

    Raise Refused for an error of parawrap, and Wrong for errors of other classes.

    Torch refuses the tensors that a closure keeps on another device than the lane's.
    """
    if isinstance(actual, ParawrapError) or "on the same device" in str(actual):
        raise Refused(f"{type(actual).__name__}: {actual}") from actual
    if type(actual) is not type(expected):
        raise Wrong(f"{place} raised {actual!r} and must raise {expected!r}") from actual
    return actual is None


def require_one_end(ends: Sequence[str], place: str) -> None:
    if len(set(ends)) > 1:
        raise Wrong(f"equal calls in {place} ended in several ways: {ends}")


def _has_texts_alone(outputs: Spec) -> bool:
    """True if an output holds a list or tuple of texts: lanes may have made any number of them."""
    name, *parts = outputs
    leaves = {*_names_in(outputs)} - {*OUTPUT_TREES}
    is_of_texts = name in ("list", "tuple") and "string" in leaves and leaves <= {"string", "none"}
    return is_of_texts or any(map(_has_texts_alone, parts))


class Run:
    """One case as it runs: the model in its block, and the oracle."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.home = torch.device(case.home)
        made = case.body, case.outputs, case.seed, self.home
        self.mine, self.oracle = build(*made), build(*made)
        if case.frozen:
            for _, tensor in (*list(self.mine.tensors())[::3], *list(self.oracle.tensors())[::3]):
                if isinstance(tensor, nn.Parameter):
                    tensor.requires_grad_(False)
        in_dims = {"x": "items"} if case.form == "items" else None
        self.p = parallel(self.mine.model, list(case.devices), in_dims=in_dims)

    def run(self) -> None:
        with self.p:
            try:
                for name, number in self.case.events:
                    self.place = name
                    self.event(name, number)
            except Refused as error:
                if self._may_be_refused():
                    raise
                raise Wrong(
                    f"{self.place} was refused, and every output follows the rows: {error}"
                ) from error
        self.place = "after the block"
        self._check_restored()
        self.call("no_grad", 5, 1)
        self._compare_tensors()

    def _may_be_refused(self) -> bool:
        """True for outputs and buffers that no rule joins, and for a tensor that lanes elsewhere
        cannot have.
        """
        names = {*_names_in(self.case.body), *_names_in(self.case.outputs)}
        is_unclear = bool(names & {"table", "written_buffer"}) or _has_texts_alone(
            self.case.outputs
        )
        return is_unclear or self._has_tensors_elsewhere()

    def _has_tensors_elsewhere(self) -> bool:
        """True if lanes share tensors of closures that are on another device."""
        return set(self.case.devices) != {self.case.home} and "enclosed" in _names_in(
            self.case.body
        )

    def event(self, name: str, number: int) -> None:
        random = Random(number)
        if name in CHANGES:
            self.change(name, number)
        elif name == "fail":
            self.fail(random, number)
        elif name in ("map", "submit"):
            self.stream(name, random, number)
        else:
            self.call(name, random.randrange(2) if name == "few" else random.randint(2, 17), number)

    def change(self, name: str, number: int) -> None:
        for built in (self.oracle, self.mine):
            torch.manual_seed(number)
            with float64_on(self.home):
                CHANGES[name](built, Random(number))
        if name in WRITES_OTHERS or (
            name in WRITES_PARAMETERS and set(self.case.devices) != {self.case.home}
        ):
            self.p.refresh()

    def forward(self, mode: str, rows: int, number: int) -> list[tuple[Any, list[Any]]] | None:
        """Call both models six times, and compare.

        Return the outputs and inputs of the last call of both, or None if both raised.
        """
        ends, place = [], f"{self.place} of {rows} rows"
        for _ in range(TIMES):
            sides = []
            with MODES.get(mode, torch.enable_grad)():
                for built in (self.oracle, self.mine):
                    args, kwargs = inputs_of(self.case, rows, number)
                    sides.append((attempt(built.model, *args, **kwargs), leaves_of([args, kwargs])))
            (expected, theirs), inputs = sides[0]
            (actual, error), own_inputs = sides[1]
            ends.append(repr(error))
            if not isinstance(error, ParawrapError) and agree(error, theirs, place):
                compare(actual, expected, f"output of {place}")
        require_one_end(ends, place)
        return [(expected, inputs), (actual, own_inputs)] if agree(error, theirs, place) else None

    def call(self, name: str, rows: int, number: int) -> None:
        """Call both models, in training with a backward pass, and compare outputs, gradients, and
        counters.
        """
        learns = name in ("backward", "few", "step")
        sides = self.forward("grad" if learns else name, rows, number)
        if sides is not None and learns and self._backward([output for output, _ in sides]):
            compare(
                *_gradients([inputs for _, inputs in reversed(sides)]),
                f"gradients of inputs after {self.place}",
            )
            self._compare_gradients()
            if name == "step":
                self._step()
        self._clear()
        if not any(module.training for module in self.mine.model.modules()):
            self._forget_counts()  # in evaluation mode, nothing comes back
        self._compare_tensors()

    def fail(self, random: Random, number: int) -> None:
        """Make a call that raises. Writes of such a call may or may not come back."""
        args, kwargs = inputs_of(self.case, random.randint(2, 17), number)
        ends = []
        with torch.set_grad_enabled(random.random() < 0.5):
            for _ in range(TIMES):
                errors = [
                    attempt(built.model, *args, **kwargs, flags="fail")[1]
                    for built in (self.mine, self.oracle)
                ]
                ends.append(repr(errors[0]))
        require_one_end(ends, "a call that fails")
        agree(*errors, "a call that fails")
        self._forget_counts()

    def _forget_counts(self) -> None:
        for block in (*self.mine.blocks, *self.oracle.blocks):
            if isinstance(block, Counter):
                block.seen.zero_()

    def stream(self, name: str, random: Random, number: int) -> None:
        """Run several whole batches through the lanes."""
        # An error of torch, in the lanes that happen to take a batch
        if self._has_tensors_elsewhere():
            return
        counts = [random.randint(1, 9) for _ in range(random.randint(1, 5))]
        with torch.no_grad():
            batches = [
                inputs_of(self.case, rows, number + index) for index, rows in enumerate(counts)
            ]
            expected = [attempt(self.oracle.model, *args, **kwargs) for args, kwargs in batches]
            if any(error is not None for _, error in expected):
                return
            ends = []
            for _ in range(TIMES):
                batches = [
                    inputs_of(self.case, rows, number + index) for index, rows in enumerate(counts)
                ]
                actual, error = attempt(self._streamed, name, batches)
                ends.append(repr(error))
                if error is None:
                    compare(
                        detached(actual),
                        detached([each for each, _ in expected]),
                        f"outputs of {name}",
                    )
        require_one_end(ends, name)
        agree(error, None, name)
        self._forget_counts()  # nothing comes back

    def _streamed(self, name: str, batches: Sequence[tuple[Any, dict[str, Any]]]) -> list[Any]:
        if name == "map":
            return list(self.p.map([kwargs or args for args, kwargs in batches]))
        futures = [self.p.submit(*args, **kwargs) for args, kwargs in batches]
        return [future.result() for future in futures]

    def _backward(self, outputs: Sequence[Any]) -> bool:
        """Run both backward passes; return False if both raised."""
        (_, expected), (_, actual) = [attempt(backward, output) for output in outputs]
        return agree(actual, expected, f"backward of {self.place}")

    def _compare_gradients(self) -> None:
        for (name, mine), (_, theirs) in zip(
            self.mine.tensors(), self.oracle.tensors(), strict=True
        ):
            if mine.is_leaf and theirs.is_leaf:
                compare(mine.grad, theirs.grad, f"gradient of {name} after {self.place}")

    def _compare_tensors(self) -> None:
        for (name, mine), (_, theirs) in zip(
            self.mine.tensors(), self.oracle.tensors(), strict=True
        ):
            compare(mine.detach(), theirs.detach(), f"{name} after {self.place}")

    def _check_restored(self) -> None:
        model = self.mine.model
        if type(model) is not RowWise or type(vars(model)) is not dict:
            raise Wrong(f"the model is a {type(model)} with a {type(vars(model))} after the block")
        compare(list(vars(model)), list(vars(self.oracle.model)), "the names in vars(model)")

    def _step(self) -> None:
        for built in (self.oracle, self.mine):
            unique = {
                id(tensor): tensor
                for _, tensor in built.tensors()
                if tensor.requires_grad and tensor.is_leaf
            }
            if unique:
                torch.optim.SGD(list(unique.values()), lr=0.05).step()

    def _clear(self) -> None:
        for built in (self.oracle, self.mine):
            for _, tensor in built.tensors():
                if tensor.is_leaf:
                    tensor.grad = None


def _gradients(sides: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [[leaf.grad for leaf in leaves if isinstance(leaf, torch.Tensor)] for leaves in sides]


def run(case: Case) -> Outcome:
    """Run a case, and return how it ended."""
    return outcome_of(lambda: Run(case).run())


def outcome_of(run_case: Callable[[], None]) -> Outcome:
    """Return how a run ended. What it raises says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run_case()
            end, detail = "answered", ""
        except Refused as error:
            end, detail = "refused", str(error)
        except ParawrapError as error:
            end, detail = "refused", f"{type(error).__name__}: {error}"
        except Wrong as error:
            end, detail = "wrong", str(error)
        except Exception as error:
            trace = traceback.extract_tb(error.__traceback__)[-1]
            end, detail = "wrong", f"{error!r} in {Path(trace.filename).name}:{trace.lineno}"
    return Outcome(end, detail)
