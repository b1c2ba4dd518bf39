"""`compare`: measure a call as a plain call and in lanes."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple

import torch

from parawrap._public import public
from parawrap.api._check_arguments import is_platform
from parawrap.api._differences import Difference, difference, largest_of
from parawrap.api.other_programs import describe_other_programs, read_core_times
from parawrap.api.parallel import Parallel, parallel
from parawrap.backends import Devices, backend_of, ignore_speed_warnings
from parawrap.displays import Table
from parawrap.engine.lanes import intra_op_threads
from parawrap.engine.streams import as_call
from parawrap.errors import ShardError, add_note
from parawrap.tree import WholeLeaf, flatten, tensors_in

_ONE_THREAD = "plain, 1 thread"
_WORTH_A_SETTING = 1.2
"""The speed-up from which one thread is recommended, which is a setting for the whole process.

A smaller one may be an error of the measurement. Small calls in one thread seem up to 1.1 times as
fast as they are, because "plain" comes first in a round, right after the threads of lanes have
ended.
"""
_HEADER = (
    "way",
    "median ms",
    "middle half ms",
    "speed-up",
    "outputs differ",
    "gradients differ",
)


@dataclass(frozen=True, slots=True)
class Way:
    """Measurements of one way to run the call.

    Attributes:
        name: "plain", "plain, 1 thread", "map", or "lanes".
        seconds: The seconds per call, or per batch of `map`, in each round.
        outputs: The greatest difference of the outputs from the plain way.
        gradients: The greatest difference of the gradients from the plain way; None without
            `train`.
    """

    name: str
    seconds: tuple[float, ...]
    outputs: Difference
    gradients: Difference | None

    @property
    def quartiles(self) -> list[float]:
        """The quartiles of the times in seconds. The second one is the median."""
        return statistics.quantiles(self.seconds, n=4, method="inclusive")

    @property
    def median(self) -> float:
        """The median of the times in seconds."""
        return statistics.median(self.seconds)

    @property
    def is_plain(self) -> bool:
        """True if the call runs without a block."""
        return self.name in ("plain", _ONE_THREAD)

    def is_faster_than(self, other: Way) -> bool:
        """True if this way is faster, and the middle halves of the times do not overlap."""
        *_, slow_quartile = self.quartiles
        fast_quartile, *_ = other.quartiles
        return slow_quartile < fast_quartile

    def name_changes(self) -> str:
        """Return "outputs" or "gradients" if they differ by more than rounding; else ""."""
        if self.outputs.exceeds_rounding:
            return "outputs"
        if self.gradients is not None and self.gradients.exceeds_rounding:
            return "gradients"
        return ""


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Measurements of each way, "plain" first and "lanes" last. `print` shows a table.

    Attributes:
        title: The block, the mode, and the number of rounds and calls.
        ways: A `Way` for each row of the table.
        conclusion: A sentence that names the way to write. A line before it warns if other programs
            used the machine during the measurement. A line after it names each faster way that
            changes the results.
    """

    title: str
    ways: tuple[Way, ...]
    conclusion: str = ""

    def __repr__(self) -> str:
        medians = ", ".join(f"{way.name} {1e3 * way.median:.3g} ms" for way in self.ways)
        return f"<Comparison: {medians}. {' '.join(self.conclusion.splitlines())}>"

    def __str__(self) -> str:
        return str(self._table())

    # The method that notebooks look for
    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        has_gradients = self.ways[0].gradients is not None
        fastest = _fastest_plain(self.ways)
        rows = []
        for way in self.ways:
            low, median, high = (f"{1e3 * quartile:.3f}" for quartile in way.quartiles)
            speed_up = f"{fastest.median / way.median:.2f}"
            row = [way.name, median, f"{low} to {high}", speed_up, str(way.outputs)]
            if has_gradients:
                row.append(str(way.gradients))
            rows.append(row)
        header = _HEADER if has_gradients else _HEADER[:-1]  # the last column has the gradients
        return Table(self.title, header, rows, footer=self.conclusion)


def conclude(ways: Sequence[Way], places: str) -> str:
    """Return a sentence that names the way to write.

    It never names a way that changes the results. Another line names each such way that is faster
    than the plain ways.

    Args:
        ways: The measurements, "plain" first.
        places: "lanes" or "workers", for the text.
    """
    plain = _fastest_plain(ways)
    call = "call" if ways[0].gradients is None else "training step"
    subjects = {
        "plain": f"the plain {call}",
        _ONE_THREAD: f"the plain {call} with 1 thread",
        "map": f"map over {places}",
        "lanes": f"a {call} cut over {places}",
    }
    advice = {"map": "write p.map(batches)", "lanes": f"write the {call} inside the block"}
    keep = f"keep the plain {call}"
    if _needs_one_thread(plain, ways[0]):
        keep += " and write torch.set_num_threads(1) before it"

    blocks = [way for way in ways if not way.is_plain]
    usable = [way for way in blocks if not way.name_changes()]
    faster = [way for way in usable if way.is_faster_than(plain)]
    # Without a faster way, the conclusion compares the plain way with the best of the others
    candidates = faster or usable
    if not candidates:
        sentences = [f"Every way changes the results: {keep}."]
    else:
        best = min(candidates, key=attrgetter("median"))
        if best.is_faster_than(plain):
            speed_up = f"{plain.median / best.median:.2f} times as fast"
            than = f"the fastest plain way ({plain.name})"
            sentences = [f"{subjects[best.name]} is {speed_up} as {than}: {advice[best.name]}."]
        elif plain.is_faster_than(best):
            no_way = "No way that keeps the results" if len(usable) < len(blocks) else "No way"
            sentences = [f"{no_way} is faster than {subjects[plain.name]}: {keep}."]
        else:
            pair = f"{subjects[plain.name]} and {subjects[best.name]}"
            found = f"no difference was found between {pair} (their middle halves overlap)"
            sentences = [f"{found}: {keep}."]
    # Faster, but wrong
    for way in blocks:
        changed = way.name_changes()
        if changed and way.is_faster_than(plain):
            speed_up = f"{plain.median / way.median:.2f} times as fast"
            sentences.append(
                f"{subjects[way.name]} is {speed_up}, but changes the {changed} by more than "
                "rounding: find out why before you use it."
            )
    return "\n".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _needs_one_thread(fastest: Way, as_set: Way) -> bool:
    """True if one thread is worth a setting that holds for the whole process.

    Args:
        fastest: The fastest plain way.
        as_set: The plain way with the number of threads that the caller has set.
    """
    speed_up = as_set.median / fastest.median
    is_clear = speed_up > _WORTH_A_SETTING and fastest.is_faster_than(as_set)
    return is_clear and not fastest.name_changes()


def _fastest_plain(ways: Sequence[Way]) -> Way:
    plain_ways = [way for way in ways if way.is_plain]
    return min(plain_ways, key=attrgetter("median"))


@public
def compare(
    model: Callable[..., Any],
    batch: Any,
    devices: Devices = None,
    *,
    train: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    rounds: int = 5,
    calls: int = 10,
    show: bool = True,
    **options: Any,
) -> Comparison:
    """Run a call plainly and in lanes, and print a table of times and a conclusion.

    In the table, "plain" is the call as torch runs it, "lanes" is the call inside
    ``parallel(model, devices, **options)``, and "map" is a batch of its `map`, where each batch
    runs whole in one lane. On the CPU, "plain, 1 thread" is the plain call with one thread per
    operator. Speed-ups are against the fastest plain way.

    The line below the table names the way to write. It says that no difference was found if the
    middle halves of the times overlap, and it recommends no way that changes the results by more
    than rounding. On Linux, another line says if other programs used the cores during the
    measurement: stop them, because they slow torch's threads more than lanes.

    The ways alternate in turns. Each turn starts from the same buffers, training flags, `.grad`,
    and torch random states, and restores them at its end. Its first calls are not timed.

    The returned object has the fields `title`, `ways`, and `conclusion`. Each way has `name`,
    `seconds` (per call, in each round), the `quartiles` of `seconds`, and the differences from the
    plain way in `outputs` and `gradients`.

    Args:
        model: A module, compared in its current training mode, or another callable.
        batch: The arguments, as in `Parallel.map`: a tuple is ``model(*batch)``, a dict
            ``model(**batch)``.
        devices: The lanes, as in `parallel`.
        train: Compare training steps (forward, loss, backward) instead of forward calls under
            `torch.no_grad`.
        loss: A function that reduces the output to a scalar. By default the sum of all
            floating-point output tensors.
        rounds: The number of turns of each way, at least 2.
        calls: The number of timed calls per turn.
        show: Print the table.
        **options: Options of `parallel`. `methods` names the one method to compare.

    Raises:
        ShardError: If `rounds` or `calls` is too small, `methods` names several methods, or the
            output has no tensor for the default loss; and whenever `parallel` raises it.
        Exception: The error of a call, with a note that names the way.

    Example:
        >>> import torch
        >>> from parawrap import compare
        >>> comparison = compare(torch.nn.Linear(3, 2), torch.randn(9, 3), ["cpu", "cpu"])
        parallel(Linear, ['cpu', 'cpu']): forward in training mode, 5 rounds of 10 calls
                    way  median ms ...
        >>> [way.name for way in comparison.ways]
        ['plain', 'plain, 1 thread', 'map', 'lanes']
        >>> comparison.conclusion.splitlines()[-1]  # before it, a warning if the machine is busy
        'No ...: keep the plain call...
    """
    method, *others = options.get("methods", ("forward",))
    if rounds < 2 or calls < 1 or others:
        got = f"{rounds=}, {calls=}, methods={[method, *others]}"
        msg = f"compare needs rounds >= 2, calls >= 1, and one method. Got {got}"
        raise ShardError(msg)
    block = parallel(model, devices, **options)
    if not train:
        loss = None
    elif loss is None:
        loss = _sum_floating
    compared = _Compared(model, method, batch, block, loss)
    names = compared.names_of_ways()

    # Measure
    seconds: dict[str, list[float]] = {name: [] for name in names}
    answers: dict[str, _Answer] = {}  # of the last round
    # Workers on Ray are no children of this process, and would look like other programs
    start = None if is_platform(devices) else read_core_times()
    for _ in range(rounds):
        # In turns: if the machine is slow for a while, all ways are
        for name in names:
            with compared.turn(name), torch.set_grad_enabled(train):
                answers[name] = compared.answer(name)
                seconds[name].append(compared.time(name, calls))
    load = describe_other_programs(start, read_core_times(), needs_all_cores=compared.is_on_cpu)

    # Compare with the plain way
    plain = answers["plain"]
    largest_gradient = largest_of(plain.gradients)
    ways = []
    for name, answer in answers.items():
        outputs = difference(answer.outputs, plain.outputs)
        gradients = None
        if train:
            gradients = difference(answer.gradients, plain.gradients, largest=largest_gradient)
        ways.append(Way(name, tuple(seconds[name]), outputs, gradients))

    # Describe
    has_workers = is_platform(devices) or options.get("workers") == "process"
    conclusion = conclude(ways, "workers" if has_workers else "lanes")
    if load:
        conclusion = f"{load}\n{conclusion}"
    # The repr of a block is "parallel(name, devices)": the options go before its last parenthesis
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    title = f"{repr(block)[:-1]}{given}): {compared}, {rounds} rounds of {calls} calls"
    comparison = Comparison(title, tuple(ways), conclusion)
    if show:
        print(comparison)  # noqa: T201
    return comparison


def note_if_list(error: Exception, batch: object) -> None:
    """Add a note to the error of a plain call whose batch is a list, as a DataLoader returns it."""
    if isinstance(batch, list):
        note = (
            f"the batch is a list of {len(batch)} items, which is one argument. To give each item "
            "as an argument, pass tuple(batch). To leave out labels, pass batch[0]"
        )
        add_note(error, note)


class _Answer(NamedTuple):
    """Copies of the outputs of a call, and of the gradients after a training step, on the CPU."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]


class _SavedBuffer(NamedTuple):
    """A buffer of the user's module, and a copy of its values.

    The copy belongs to this object. The buffer is borrowed, and put back.
    """

    owner: torch.nn.Module
    name: str
    buffer: torch.Tensor
    values: torch.Tensor

    def restore(self) -> None:
        """Put back the same tensor, with the values that it had."""
        # Outside of inference mode, torch refuses writes of its tensors: no call has written it
        if not self.buffer.is_inference() or torch.is_inference_mode_enabled():
            self.buffer.copy_(self.values)
        setattr(self.owner, self.name, self.buffer)


class _Compared:
    """A model and a batch, with the ways to run a call. One thread uses it.

    With `loss`, a call is a training step; with None, a forward call.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        method: str,
        batch: Any,
        block: Parallel[Any],
        loss: Callable[[Any], torch.Tensor] | None,
    ) -> None:
        self._model = model
        self._method = method
        self._batch = batch
        self._block = block
        self._loss = loss
        owner: Any = getattr(model, "__self__", model)  # the module of a bound method
        self._has_module = isinstance(owner, torch.nn.Module)
        # A function has no state to restore: an empty module stands for it
        self._module: torch.nn.Module = owner if self._has_module else torch.nn.Module()
        self._args, self._kwargs = as_call(batch)
        held = [*self._module.parameters(), *_tensors([self._args, self._kwargs])]
        # The tensors that a training step gives gradients
        self._leaves = [tensor for tensor in held if tensor.is_leaf and tensor.requires_grad]
        used = {tensor.device for tensor in (*held, *self._module.buffers())}
        places = used.union(block.devices)
        # NeuronCores of compiled models are not torch devices
        devices = [place for place in places if isinstance(place, torch.device)]
        self._accelerators = [device for device in devices if device.type != "cpu"]
        self.is_on_cpu = places == {torch.device("cpu")}

    def __str__(self) -> str:
        call = "forward" if self._loss is None else "training step"
        mode = "training" if self._module.training else "eval"
        return f"{call} in {mode} mode" if self._has_module else call

    def names_of_ways(self) -> list[str]:
        """Return the names of the ways, in the order of their turns."""
        names = ["plain"]
        if self.is_on_cpu:
            names.append(_ONE_THREAD)
        if self._loss is None:  # `map` runs forward calls only
            names.append("map")
        return [*names, "lanes"]

    @contextlib.contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Open a block if the way needs it.

        At the end, put back what calls change: buffers, training flags, gradients, and the states
        of torch's random generators.
        """
        modes = {module: module.training for module in self._module.modules()}
        # With its owner, because a call may replace a buffer by another tensor
        saved = [
            _SavedBuffer(module, key, buffer, buffer.clone())
            for module in modes
            for key, buffer in module.named_buffers(recurse=False)
        ]
        gradients = [leaf.grad for leaf in self._leaves]
        backend = backend_of(self._accelerators[0].type if self._accelerators else "cpu")
        try:
            with contextlib.ExitStack() as prepared:
                if self._loss is not None:  # the user asked for gradients, also in eval mode
                    prepared.enter_context(ignore_speed_warnings())
                prepared.enter_context(backend.fork_rng(self._accelerators))
                prepared.enter_context(intra_op_threads(1 if name == _ONE_THREAD else None))
                if not name.startswith("plain"):
                    prepared.enter_context(self._block)
                yield
        except Exception as error:
            if name == "plain":
                note_if_list(error, self._batch)
            add_note(error, f"raised in the way {name!r} of parawrap.compare")
            raise
        finally:
            with torch.no_grad():
                for each in saved:
                    each.restore()
            # Not `train(mode)`, which a module may override, and which sets its submodules too
            for module, mode in modes.items():
                module.training = mode
            for leaf, gradient in zip(self._leaves, gradients, strict=True):
                leaf.grad = gradient

    def answer(self, name: str) -> _Answer:
        """Run a call that is not timed, and return its results.

        The first call of a turn starts the lanes.
        """
        if name == "map":
            # One batch per lane, so that each lane has its replica before the timed calls
            *_, output = self._block.map([self._batch] * len(self._block.devices))
        else:
            output = self._call(name)
        leaves = [] if self._loss is None else self._leaves
        gradients = [_gradient_of(leaf) for leaf in leaves]
        return _Answer(_copies(_tensors(output)), _copies(gradients))

    def time(self, name: str, calls: int) -> float:
        """Run a number of calls, and return the seconds per call."""
        start = self._clock()
        if name == "map":
            for _ in self._block.map([self._batch] * calls):
                pass
        else:
            for _ in range(calls):
                self._call(name)
        return (self._clock() - start) / calls

    def _call(self, name: str) -> Any:
        """Run a call or a training step, and return the output."""
        for leaf in self._leaves:
            leaf.grad = None  # as `zero_grad` of an optimizer does, in each timed step too
        target: Any = self._model
        # A block changes a module in place. Other callables are called through the block
        if name == "lanes" and self._model is not self._module:
            target = self._block
        function = target if self._method == "forward" else getattr(target, self._method)
        output = function(*self._args, **self._kwargs)
        if self._loss is not None:
            self._loss(output).backward()
        return output

    def _clock(self) -> float:
        """Wait until the accelerators are idle, and return the time in seconds."""
        for device in self._accelerators:
            torch.accelerator.synchronize(device)
        return perf_counter()


def _tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors in `value`, and its numbers as tensors."""
    found: list[torch.Tensor] = []
    leaves, _ = flatten(value)
    for leaf in leaves:
        if isinstance(leaf, WholeLeaf):
            found.extend(tensors_in(leaf.value))
        elif isinstance(leaf, (torch.Tensor, int, float)):
            found.append(torch.as_tensor(leaf))
    return found


def _gradient_of(leaf: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a leaf: zeros if the call does not use it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies on the CPU: a later call may write the tensors."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _sum_floating(output: object) -> torch.Tensor:
    """Return the default loss: the sum of all floating-point tensors that require gradients."""
    tensors = [tensor for tensor in _tensors(output) if tensor.is_floating_point()]
    parts = [tensor.sum() for tensor in tensors if tensor.requires_grad]
    if not parts:
        cure = "Pass loss=, a function of the output"
        msg = f"the output has no floating-point tensor that requires gradients. {cure}"
        raise ShardError(msg)
    first, *others = parts  # a model may leave its outputs on several devices
    return sum((part.to(first.device) for part in others), start=first)
