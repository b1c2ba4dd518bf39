"""`compare`: measure a call as a plain call and in lanes. torch.utils.benchmark times it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch.utils.benchmark import Timer

from parawrap._public import public
from parawrap.api._check_arguments import is_platform
from parawrap.api._comparison_table import Comparison, Way, difference
from parawrap.api._process_figures import cores_of_others, isolate_turn, memory_growth, page_faults
from parawrap.api.parallel import parallel
from parawrap.backends import Devices, ignore_speed_warnings
from parawrap.engine.call import intra_op_threads
from parawrap.engine.streams import as_call
from parawrap.errors import ShardError
from parawrap.tree import WholeLeaf, flatten, tensors_in

__all__ = ["compare"]

_ONE_THREAD = "plain, 1 thread"


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
    """Run a call plainly and in lanes, print a table of times, memory, and differences, and return the measurements.

    In the table, "plain" is the call as torch runs it, "lanes" is the call inside ``parallel(model, devices, **options)``,
    and "map" is a batch of its `map`, where each batch runs whole in one lane. On the CPU, "plain, 1 thread" is the plain
    call with one thread per operator. Speed-ups are against the fastest plain way.
    The ways alternate in turns. Each turn starts from the same buffers, training flags, `.grad`, and torch random states,
    and restores them at its end. Its first calls are not timed. A remark below the table says if other processes used the
    cores meanwhile, or if the times of lanes and of the plain call overlap.

    The returned object has the fields `title`, `ways`, and `busy_cores`: the average number of cores that other processes
    used, or None if that is unknown. Each way has `name`, `seconds` (per call, in each round), `quartiles` of these,
    `extra_bytes`, `page_faults`, `outputs`, and `gradients`.

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
    owner = getattr(model, "__self__", model)  # the module of a bound method
    module = owner if isinstance(owner, torch.nn.Module) else torch.nn.Module()
    args, kwargs = as_call(batch)
    held = [*module.parameters(), *_tensors([args, kwargs])]
    leaves = [tensor for tensor in held if tensor.is_leaf and tensor.requires_grad]
    places = {tensor.device for tensor in (*held, *module.buffers())}.union(block.devices)
    accelerators = [place for place in places if isinstance(place, torch.device) and place.type != "cpu"]
    ways: dict[str, AbstractContextManager[Any]] = {"plain": contextlib.nullcontext(model)}
    if places == {torch.device("cpu")}:
        ways[_ONE_THREAD] = ways["plain"]
    if not train:  # a stream of batches keeps no gradients
        ways["map"] = block
    ways["lanes"] = block
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    faults = dict.fromkeys(ways, 0)
    answers: dict[str, tuple[list[torch.Tensor], ...]] = {}
    extra: dict[str, int | None] = {}
    counts: list[int] = []  # page faults at each reading of the clock

    def step(target: Any) -> Any:
        for leaf in leaves:
            leaf.grad = None
        output = (target if method == "forward" else getattr(module, method))(*args, **kwargs)
        if train:
            (loss or _sum)(output).backward()
        return output

    def clock() -> float:
        for device in accelerators:
            torch.accelerator.synchronize(device)
        counts.append(page_faults())
        return perf_counter()

    busy_cores = cores_of_others()
    for _ in range(rounds):
        for name, way in ways.items():
            growth = memory_growth(accelerators)
            quiet = ignore_speed_warnings() if train else contextlib.nullcontext()  # an eval mode with gradients is meant
            threads = intra_op_threads(1 if name == _ONE_THREAD else None)
            with (
                quiet,
                isolate_turn(name, module, leaves, accelerators),
                threads,
                way as opened,
                torch.set_grad_enabled(train),
            ):
                target = model if module is model else opened
                if name == "map":
                    *_, output = opened.map([batch] * len(block.devices))  # not timed
                    answers.setdefault(name, (_copies(_tensors(output)), _copies(map(_gradient, leaves))))
                    seconds[name].append(_time_of_batch(clock, opened.map([batch] * calls), calls))
                    faults[name] += counts[-1] - counts[-2]
                    extra[name] = growth()
                    continue
                if name not in answers:
                    answers[name] = _copies(_tensors(step(target))), _copies(map(_gradient, leaves))
                given = {"step": step, "target": target}
                timer = Timer("step(target)", timer=clock, globals=given, num_threads=torch.get_num_threads())
                seconds[name].append(timer.timeit(calls).median)
                faults[name] += counts[-1] - counts[-2]
            extra[name] = growth()
    rows = []
    for name, times in seconds.items():
        outputs, gradients = map(difference, answers[name], answers["plain"])
        per_call = faults[name] / (rounds * calls)
        rows.append(Way(name, tuple(times), extra[name], per_call, outputs, gradients if train else None))
    what = "training step" if train else "forward"
    mode = f" in {'training' if module.training else 'eval'} mode" if module is owner else ""
    title = f"{block!r}: {what}{mode}, {rounds} rounds of {calls} calls"
    comparison = Comparison(title, tuple(rows), None if is_platform(devices) else busy_cores())  # Ray's workers are others
    if show:
        print(comparison)  # noqa: T201
    return comparison


def _time_of_batch(clock: Callable[[], float], outputs: Iterator[Any], count: int) -> float:
    """Return the time per batch of a stream, whose outputs are dropped as they come."""
    start = clock()
    for _ in outputs:
        pass
    return (clock() - start) / count


def _tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors in `value`, and its numbers as tensors."""
    leaves = flatten(value)[0]
    inside = (tensors_in(leaf.value) if isinstance(leaf, WholeLeaf) else (leaf,) for leaf in leaves)
    return [torch.as_tensor(leaf) for leaf in chain(*inside) if isinstance(leaf, (torch.Tensor, int, float))]


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros(()).expand(leaf.shape) if leaf.grad is None else leaf.grad.to_dense()


def _copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _sum(output: object) -> torch.Tensor:
    parts = [tensor.sum() for tensor in _tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not parts:
        msg = "the output has no floating-point tensor that requires gradients. Pass loss=, a function of the output"
        raise ShardError(msg)
    return sum((part.to(parts[0].device) for part in parts[1:]), start=parts[0])
