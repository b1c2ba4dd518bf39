"""Each lane's part of backward in its lane.

On the CPU autograd walks a whole graph in the thread that calls backward(). Here the graph of each lane is cut off from its
outputs, and one node stands for all of them in the caller's graph. When its turn comes it hands each lane its own graph to
walk, and it returns what the lanes found.

A graph is cut off only where nobody can tell. So a lane, once it has run, looks through what it recorded; the outputs stay
as they are, and backward runs as ever, where

- a node is not the lane's own: another lane reaches it too, or it was there before, and may be walked from elsewhere;
- a node was written in Python: a custom Function, a module's backward hook, `checkpoint`. Its code may count on the calling
  thread, and may call backward itself;
- a saved tensor has hooks: `checkpoint` draws its random numbers again, from the one generator, which lanes share;
- a hook lies on a tensor at which a graph ends: it would see each lane's gradient as well as their sum;
- an input was computed from another, or from the parameters: the lane's graph and the one before it have common ends.

What a graph reaches is found by looking, so a tensor that requires grad may come from anywhere: a parameter, a global, an
argument. What a forward keeps for itself of what it computed may be part of the loss. But no gradient with regard to it can
be asked for, since the caller's graph does not lead there any more: a module with hooks that may keep it is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from threading import Lock
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules import module as modules

from parawrap.engine._recorded import (
    SHOWS_HOOKS,
    Inputs,
    Node,
    Part,
    are_apart,
    come_back,
    has_graph,
    has_watchers,
    part_of,
    sequence_number,
)
from parawrap.lanes import current_lane, sees_only_its_own_thread
from parawrap.shards import Shard

__all__ = ["LaneBackward"]

Works = Sequence[Callable[[], Any]]
Run = Callable[[Works], list[Any]]
_Grad = torch.Tensor | None

_C: Any = torch._C  # what torch tells of its graphs has no public name and no types
_will_run: Callable[[Node], bool] = getattr(_C, "_will_engine_execute_node", lambda _: True)
_keeps_graph: Callable[[], bool] = getattr(_C._autograd, "_get_current_graph_task_keep_graph", lambda: True)

_TWICE = (
    "Trying to backward through the graph a second time: the first time freed it. "
    "Specify retain_graph=True the first time if there is to be a second"
)
_muting = Lock()


class LaneBackward:
    """What the lanes record in one call of a target, for backward to run in the lanes as well.

    Made by the calling thread from the call's shards. The lanes run the works that `watched` gives; then the calling thread
    puts `regrown` outputs in the place of theirs, to be joined into new tensors: they are not for a user to write into.
    """

    def __init__(self, target: Callable[..., Any], shards: Sequence[Shard]) -> None:
        self._parts: list[Part | None] = [None] * len(shards)
        self._inputs = [Inputs(shard) for shard in shards] if _may_be_cut_off(target) else []

    def watched(self, works: Works) -> Works:
        """Works that return the same, and look through their graphs before they do."""
        if not self._inputs:
            return works
        return [partial(self._watch, lane, work) for lane, work in enumerate(works)]

    def regrown(self, outputs: list[Any], run: Run) -> list[Any]:
        """The lanes' outputs, with one node for all their graphs; or `outputs` itself, where backward is to run as ever.

        `run` runs work i in lane i, at backward, and raises what a work raises. If it is a method, or a partial of one, the
        graph does not keep the method's object alive: without it, whoever calls backward() runs one work after the other.
        """
        parts = [part for part in self._parts if part is not None]
        self._parts = []
        if len(parts) < len(outputs) or sum(bool(part.values) for part in parts) < 2 or not are_apart(parts):
            return outputs
        if not all(inputs.are_untouched() for inputs in self._inputs) or any(part.is_watched() for part in parts):
            return outputs
        if come_back([node for inputs in self._inputs for node in inputs.ends], parts):
            return outputs
        twins = iter(_grafted(_Graphs([_lane_of(part) for part in parts], _held_weakly(run)), parts))
        return [part.with_twins(twins) for part in parts]

    def _watch(self, lane: int, work: Callable[[], Any]) -> Any:
        begin = sequence_number()
        value = work()
        self._parts[lane] = part_of(value, self._inputs[lane].ends, begin)
        return value


def _may_be_cut_off(target: Callable[..., Any]) -> bool:
    """Whether graphs are recorded, and nothing is there already that looks into them."""
    return (
        SHOWS_HOOKS
        and torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_anomaly_enabled()
        and forward_ad._current_level < 0
        and not (isinstance(target, torch.nn.Module) and _has_hooks(target))
    )


def _has_hooks(module: torch.nn.Module) -> bool:
    """Whether a part of the module has a hook that sees what it returns or its gradient, or all modules have."""
    if modules._global_forward_hooks or modules._global_backward_hooks or modules._global_backward_pre_hooks:
        return True
    for part in module.modules():  # noqa: SIM110  # asked at every call: a loop costs half of what any() does
        if part._forward_hooks or part._backward_hooks or part._backward_pre_hooks:
            return True
    return False


class _Lane(NamedTuple):
    """The graph of one lane: where it begins, where it ends, and what lies there in the caller's graph."""

    outputs: list[GradientEdge]
    inputs: list[GradientEdge]
    tensors: list[torch.Tensor]
    nodes: list[Node]  # of those tensors


def _lane_of(part: Part) -> _Lane:
    inputs = [GradientEdge(node, number) for node, number in part.sources]
    nodes = [node for node, _ in part.sources]
    return _Lane([get_gradient_edge(value) for value in part.values], inputs, list(part.sources.values()), nodes)


class _Graphs:
    """The lanes' graphs behind one node, until a backward() that does not keep them. Safe to share between threads."""

    def __init__(self, lanes: list[_Lane], run: Callable[[], Run | None]) -> None:
        self.lanes = lanes
        self.run = run

    def gradients(self, grads: Sequence[_Grad]) -> list[_Grad]:
        """For each tensor at which a lane's graph ends, the gradient that comes from that lane, in the lanes' order."""
        lanes = self._taken()
        tensors = [tensor for lane in lanes for tensor in lane.tensors]
        passes = [_Pass(lane, own) for lane, own in zip(lanes, _dealt(grads, lanes), strict=True)]
        del lanes  # each lane frees its own graph then, unless it is kept
        return [grad for found in self._run(passes, tensors) for grad in found]

    def differentiable_gradients(self, grads: Sequence[_Grad]) -> list[_Grad]:
        """The same, as outputs of one more node, behind which lie the graphs of the lanes and of these gradients."""
        lanes = self._taken()
        tensors = [tensor for lane in lanes for tensor in lane.tensors]
        copies = [None if grad is None else grad.detach().requires_grad_(grad.requires_grad) for grad in grads]
        dealt = list(zip(lanes, _dealt(grads, lanes), _dealt(copies, lanes), strict=True))
        found = self._run([_Pass(lane, own, differentiably=True) for lane, _, own in dealt], tensors)
        lanes = [_further(*each, values) for each, values in zip(dealt, found, strict=True)]
        twins = iter(_grafted(_Graphs(lanes, self.run), found))
        return [next(twins) if has_graph(grad) else grad for own in found for grad in own]

    def _taken(self) -> list[_Lane]:
        lanes = self.lanes
        if not lanes:
            raise RuntimeError(_TWICE)
        if not _keeps_graph():
            self.lanes = []
        return lanes

    def _run(self, passes: Sequence[_Pass], tensors: Sequence[torch.Tensor]) -> list[list[_Grad]]:
        run = self.run()
        if run is None or current_lane() is not None or sees_only_its_own_thread():
            run = _in_turn
        watched = [tensor for tensor in tensors if has_watchers(tensor)]
        if not watched:
            return run(passes)
        with _unwatched(watched):
            return run(passes)


class _Pass:
    """One lane's part of a backward pass. Made by the thread that calls backward(), and run once."""

    __slots__ = ("_differentiably", "_grads", "_lane", "_wanted")

    def __init__(self, lane: _Lane, grads: Sequence[_Grad], *, differentiably: bool = False) -> None:
        self._grads = grads
        self._lane: _Lane | None = lane
        self._wanted = [_is_wanted(node) for node in lane.nodes]
        self._differentiably = differentiably

    def __call__(self) -> list[_Grad]:
        lane, self._lane = self._lane, None
        assert lane is not None, "a pass is run once"
        given = [(output, grad) for output, grad in zip(lane.outputs, self._grads, strict=True) if grad is not None]
        inputs = [end for end, wanted in zip(lane.inputs, self._wanted, strict=True) if wanted]
        if not given or not inputs:
            return [None] * len(self._wanted)
        # Freed node by node, it would be of no more use to a tensor that the forward kept for itself: it goes as a whole.
        found = torch.autograd.grad(
            [output for output, _ in given],
            inputs,
            [grad for _, grad in given],
            retain_graph=True,
            create_graph=self._differentiably,
            allow_unused=True,
        )
        rest = iter(found)
        return [next(rest) if wanted else None for wanted in self._wanted]


def _is_wanted(node: Node) -> bool:
    """Whether the backward pass that the calling thread is in asks for what comes to that node."""
    try:
        return _will_run(node)
    except RuntimeError:  # how torch says that torch.autograd.grad was asked for that leaf
        return True


def _in_turn(works: Works) -> list[Any]:
    return [work() for work in works]


def _dealt(grads: Sequence[_Grad], lanes: Sequence[_Lane]) -> list[list[_Grad]]:
    """To each lane the gradients of its outputs."""
    rest = iter(grads)
    return [list(islice(rest, len(lane.outputs))) for lane in lanes]


def _further(lane: _Lane, grads: Sequence[_Grad], copies: Sequence[_Grad], found: Sequence[_Grad]) -> _Lane:
    """The graph that a lane has when it has recorded its backward pass: it ends at what it was given for that, too."""
    outputs = [get_gradient_edge(value) for value in found if value is not None and value.requires_grad]
    inputs = [get_gradient_edge(copy) for copy in copies if copy is not None and copy.requires_grad]
    tensors = [grad for grad in grads if grad is not None and grad.requires_grad]
    nodes = [get_gradient_edge(tensor).node for tensor in tensors]
    return _Lane(outputs, lane.inputs + inputs, lane.tensors + tensors, lane.nodes + nodes)


@contextmanager
def _unwatched(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside the block nobody sees what comes to those tensors from one lane: they have got hooks since the forward."""
    with _muting:
        hooks = [(each, dict(each)) for tensor in tensors if (each := tensor._backward_hooks)]
        retained = [(tensor, tensor.grad) for tensor in tensors if tensor.retains_grad]
        for own, _ in hooks:
            own.clear()
        try:
            yield
        finally:
            for own, before in hooks:
                own.update(before)
            for tensor, grad in retained:
                tensor.grad = grad


def _grafted(graphs: _Graphs, returned: Sequence[Part] | Sequence[Sequence[_Grad]]) -> Sequence[torch.Tensor]:
    """Twins of what the lanes returned, whose graph is the one node."""
    values = [value for own in returned for value in (own.values if isinstance(own, Part) else own) if has_graph(value)]
    return _graft(graphs, values, *(tensor for lane in graphs.lanes for tensor in lane.tensors)) if values else ()


class _InLanes(torch.autograd.Function):
    """The node that stands for the lanes' graphs in the caller's."""

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, values: Sequence[torch.Tensor], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: _Grad) -> tuple[Any, ...]:
        ctx.saved_tensors  # noqa: B018  # there are none, but torch raises here what it says of a graph that was freed
        graphs: _Graphs = ctx.graphs
        if torch.is_grad_enabled():
            return (None, None, *graphs.differentiable_gradients(grads))
        return (None, None, *graphs.gradients(grads))


_graft: Callable[..., Sequence[torch.Tensor]] = _InLanes.apply


def _held_weakly(run: Run) -> Callable[[], Run | None]:
    method = run.func if isinstance(run, partial) else run
    if not isinstance(method, MethodType):
        return lambda: run
    reference: WeakMethod[Any] = WeakMethod(method)
    if not isinstance(run, partial):
        return reference
    args, kwargs = run.args, run.keywords
    return lambda: None if (alive := reference()) is None else partial(alive, *args, **kwargs)
