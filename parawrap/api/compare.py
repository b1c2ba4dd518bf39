"""`compare`: measure a call as a plain call and in lanes."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

import torch

from parawrap._public import public
from parawrap.api.parallel import Parallel, parallel
from parawrap.backends import Devices, backend_of, ignore_speed_warnings
from parawrap.displays import Table
from parawrap.engine.lanes import intra_op_threads
from parawrap.engine.streams import as_call
from parawrap.errors import ShardError, add_note
from parawrap.tree import WholeLeaf, flatten, tensors_in

_ONE_THREAD = "plain, 1 thread"
_HEADER = "way", "median ms", "middle half ms", "speed-up", "outputs differ", "gradients differ"


class Difference(NamedTuple):
    """The greatest difference from the plain way: absolute, and relative to the largest value of the same tensor."""

    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"{self.absolute:.1e} ({self.relative:.1e})" if self.absolute else "0"


@dataclass(frozen=True, slots=True)
class Way:
    """Measurements of one way to run the call.

    Attributes:
        name: "plain", "plain, 1 thread", "map", or "lanes".
        seconds: The time per call, or per batch of `map`, in each round.
        outputs: The greatest difference of the outputs from the plain way.
        gradients: The greatest difference of the gradients from the plain way; None without `train`.
    """

    name: str
    seconds: tuple[float, ...]
    outputs: Difference
    gradients: Difference | None

    @property
    def quartiles(self) -> list[float]:
        """The quartiles of the times in seconds. The second one is the median."""
        return statistics.quantiles(self.seconds, n=4, method="inclusive")


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Measurements of each way, "plain" first and "lanes" last. `print` shows a table.

    Attributes:
        title: The block, the mode, and the number of rounds and calls.
        ways: A `Way` for each row of the table.
    """

    title: str
    ways: tuple[Way, ...]

    def __repr__(self) -> str:
        return f"<Comparison: {', '.join(f'{way.name} {1e3 * way.quartiles[1]:.3g} ms' for way in self.ways)}>"

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        rows = []
        fastest = min(way.quartiles[1] for way in self.ways if way.name.startswith("plain"))
        for way in self.ways:
            low, median, high = (f"{1e3 * quartile:.3f}" for quartile in way.quartiles)
            speed_up = f"{fastest / way.quartiles[1]:.2f}"
            rows.append((way.name, median, f"{low} to {high}", speed_up, str(way.outputs), str(way.gradients)))
        columns = len(_HEADER) if self.ways[0].gradients else len(_HEADER) - 1
        return Table(self.title, _HEADER[:columns], [row[:columns] for row in rows])


def difference(ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> Difference:
    """Return the greatest difference, infinite if shapes, dtypes, or positions of NaNs differ."""
    if [(each.shape, each.dtype) for each in ours] != [(each.shape, each.dtype) for each in plain]:
        return Difference(math.inf, math.inf)
    greatest = Difference(0.0, 0.0)
    for pair in zip(ours, plain, strict=True):
        dense = [each.cpu().to_dense() for each in pair]
        one, other = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in dense)
        is_exact = not (dense[0].is_floating_point() or dense[0].is_complex())  # large integers are rounded in float64
        is_same = dense[0] == dense[1] if is_exact else (one == other) | (one.isnan() & other.isnan())
        if not is_same.all():
            gaps = (one - other).abs().nan_to_num(math.inf, math.inf).clamp(min=1.0 if is_exact else 0.0)
            gap = float(gaps.masked_fill(is_same, 0.0).max())
            largest = float(other.abs().nan_to_num(0.0, posinf=0.0).max())
            relative = gap / largest if largest else math.inf
            greatest = Difference(max(greatest.absolute, gap), max(greatest.relative, relative))
    return greatest


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
    """Run a call plainly and in lanes, print a table of times and differences, and return the measurements.

    In the table, "plain" is the call as torch runs it, "lanes" is the call inside ``parallel(model, devices, **options)``,
    and "map" is a batch of its `map`, where each batch runs whole in one lane. On the CPU, "plain, 1 thread" is the plain
    call with one thread per operator. Speed-ups are against the fastest plain way.
    The ways alternate in turns. Each turn starts from the same buffers, training flags, `.grad`, and torch random states,
    and restores them at its end. Its first calls are not timed. Stop other programs before: they slow torch's threads more
    than lanes.

    The returned object has the fields `title` and `ways`. Each way has `name`, `seconds` (per call, in each round),
    `quartiles` of these, `outputs`, and `gradients`.

    Args:
        model: A module, compared in its current training mode, or another callable.
        batch: The arguments, as in `Parallel.map`: a tuple is ``model(*batch)``, a dict ``model(**batch)``.
        devices: The lanes, as in `parallel`.
        train: Compare training steps (forward, loss, backward) instead of forward calls under `torch.no_grad`.
        loss: A function that reduces the output to a scalar. By default the sum of all floating-point output tensors.
        rounds: The number of turns of each way, at least 2.
        calls: The number of timed calls per turn.
        show: Print the table.
        **options: Options of `parallel`. `methods` names the one method to compare.

    Raises:
        ShardError: If `rounds` or `calls` is too small, `methods` names several methods, or the output has no tensor for
            the default loss.

    Example:
        >>> import torch
        >>> from parawrap import compare
        >>> comparison = compare(torch.nn.Linear(3, 2), torch.randn(9, 3), ["cpu", "cpu"])
        parallel(Linear, ['cpu', 'cpu']): forward in training mode, 5 rounds of 10 calls
                    way  median ms ...
        >>> [way.name for way in comparison.ways]
        ['plain', 'plain, 1 thread', 'map', 'lanes']
    """
    method, *others = options.get("methods", ("forward",))
    if rounds < 2 or calls < 1 or others:
        msg = f"compare needs rounds >= 2, calls >= 1, and one method. Got {rounds=}, {calls=}, methods={[method, *others]}"
        raise ShardError(msg)
    block = parallel(model, devices, **options)
    compared = _Compared(model, method, batch, block, (loss or _sum) if train else None)
    names = ["plain", *([_ONE_THREAD] if compared.is_on_cpu else []), *([] if train else ["map"]), "lanes"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    answers: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for _ in range(rounds):
        for name in names:
            with compared.turn(name), torch.set_grad_enabled(train):
                answers[name] = compared.answer(name)
                seconds[name].append(compared.time(name, calls))
    rows = []
    for name, times in seconds.items():
        outputs, gradients = map(difference, answers[name], answers["plain"])
        rows.append(Way(name, tuple(times), outputs, gradients if train else None))
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    title = f"{repr(block)[:-1]}{given}): {compared}, {rounds} rounds of {calls} calls"
    comparison = Comparison(title, tuple(rows))
    if show:
        print(comparison)  # noqa: T201
    return comparison


class _Compared:
    """A model and a batch, with the ways to run a call. With `loss`, a call is a training step."""

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
        owner = getattr(model, "__self__", model)  # the module of a bound method
        self._has_module = isinstance(owner, torch.nn.Module)
        self._module = owner if isinstance(owner, torch.nn.Module) else torch.nn.Module()
        self._args, self._kwargs = as_call(batch)
        held = [*self._module.parameters(), *_tensors([self._args, self._kwargs])]
        self._leaves = [tensor for tensor in held if tensor.is_leaf and tensor.requires_grad]
        places = {tensor.device for tensor in (*held, *self._module.buffers())}.union(block.devices)
        self._accelerators = [place for place in places if isinstance(place, torch.device) and place.type != "cpu"]
        self.is_on_cpu = places == {torch.device("cpu")}

    def __str__(self) -> str:
        mode = f" in {'training' if self._module.training else 'eval'} mode" if self._has_module else ""
        return ("forward" if self._loss is None else "training step") + mode

    @contextlib.contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Prepare a way. Restore the state of the model and of torch's random numbers at the end."""
        owners = [(owner, owner.training) for owner in self._module.modules()]
        buffers = [(owner, key, old, old.clone()) for owner, _ in owners for key, old in owner.named_buffers(recurse=False)]
        gradients = [leaf.grad for leaf in self._leaves]
        backend = backend_of(self._accelerators[0].type if self._accelerators else "cpu")
        try:
            with contextlib.ExitStack() as prepared:
                if self._loss is not None:  # an eval mode with gradients is meant
                    prepared.enter_context(ignore_speed_warnings())
                prepared.enter_context(backend.fork_rng(self._accelerators))
                prepared.enter_context(intra_op_threads(1 if name == _ONE_THREAD else None))
                if not name.startswith("plain"):
                    prepared.enter_context(self._block)
                yield
        except Exception as error:
            add_note(error, f"raised in the way {name!r} of parawrap.compare")
            raise
        finally:
            with torch.no_grad():
                for owner, key, old, value in buffers:
                    setattr(owner, key, old.copy_(value))
            for owner, training in owners:
                owner.training = training
            for leaf, gradient in zip(self._leaves, gradients, strict=True):
                leaf.grad = gradient

    def answer(self, name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return copies of the outputs and gradients of a call, which is not timed."""
        if name == "map":
            *_, output = self._block.map([self._batch] * len(self._block.devices))
        else:
            output = self._call(name)
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves]
        return _copies(_tensors(output)), _copies(gradients)

    def time(self, name: str, calls: int) -> float:
        """Return the seconds per call."""
        start = self._clock()
        called = self._block.map([self._batch] * calls) if name == "map" else (self._call(name) for _ in range(calls))
        for _ in called:
            pass
        return (self._clock() - start) / calls

    def _call(self, name: str) -> Any:
        for leaf in self._leaves:
            leaf.grad = None
        target: Any = self._model if self._module is self._model or name != "lanes" else self._block
        output = (target if self._method == "forward" else getattr(target, self._method))(*self._args, **self._kwargs)
        if self._loss is not None:
            self._loss(output).backward()
        return output

    def _clock(self) -> float:
        for device in self._accelerators:
            torch.accelerator.synchronize(device)
        return perf_counter()


def _tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors in `value`, and its numbers as tensors."""
    leaves = flatten(value)[0]
    inside = (tensors_in(leaf.value) if isinstance(leaf, WholeLeaf) else (leaf,) for leaf in leaves)
    return [torch.as_tensor(leaf) for leaf in chain(*inside) if isinstance(leaf, (torch.Tensor, int, float))]


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _sum(output: object) -> torch.Tensor:
    parts = [tensor.sum() for tensor in _tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not parts:
        msg = "the output has no floating-point tensor that requires gradients. Pass loss=, a function of the output"
        raise ShardError(msg)
    return sum((part.to(parts[0].device) for part in parts[1:]), start=parts[0])
