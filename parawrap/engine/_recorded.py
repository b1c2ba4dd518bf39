"""What the lanes recorded in one call, and whether a lane's graph can be cut off without anybody telling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from parawrap.shards import Shard
from parawrap.tree import Opaque, TreeSpec, flatten, flatten_call, unflatten

__all__ = [
    "SHOWS_HOOKS",
    "Inputs",
    "Node",
    "Part",
    "are_apart",
    "come_back",
    "has_graph",
    "has_watchers",
    "part_of",
    "sequence_number",
]

Node = Any
"""One of a graph; their classes are made by torch, and have nothing in common that a type checker knows."""

_C: Any = torch._C  # what torch tells of its graphs has no public name and no types
SHOWS_HOOKS = hasattr(_C._autograd.SavedTensor, "unpack_hook")
"""Whether hooks on saved tensors can be told; else nothing is cut off."""
sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr
"""The number of the next node that the calling thread records."""

_LEAF: type = _C._functions.AccumulateGrad
_PYTHON_NODE: type = _C._FunctionBase
_SCRIPTED = "DifferentiableGraphBackward"
_FARTHEST = 10_000
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_saved_names: dict[type, tuple[str, ...]] = {}


class Inputs:
    """The tensors of one shard at which the lane's graph ends, by node and output, as they were before the lane ran.

    A leaf is not among them: it is known by its node wherever it is reached.
    """

    __slots__ = ("ends",)

    def __init__(self, shard: Shard) -> None:
        self.ends: dict[Node, dict[int, torch.Tensor]] = {}
        for leaf in flatten_call(shard.args, shard.kwargs)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                self.ends.setdefault(leaf.grad_fn, {})[leaf.output_nr] = leaf

    def are_untouched(self) -> bool:
        """Whether the tensors still are what they were: one that was written in place has another history."""
        return all(
            tensor.grad_fn is node and tensor.output_nr == number
            for node, outputs in self.ends.items()
            for number, tensor in outputs.items()
        )


class Part(NamedTuple):
    """What one lane returned, and what its graph is made of."""

    leaves: list[Any]
    spec: TreeSpec
    values: list[torch.Tensor]  # those of the leaves that have a graph
    nodes: set[Node]
    sources: dict[tuple[Node, int], torch.Tensor]  # where the graph ends

    def is_watched(self) -> bool:
        """Whether a gradient that comes to where the graph ends would be seen on its way, or be of a kind of its own."""
        return any(type(tensor) not in _PLAIN or has_watchers(tensor) for tensor in self.sources.values())

    def with_twins(self, twins: Iterator[torch.Tensor]) -> Any:
        """What the lane returned, with a twin in the place of each value."""
        return unflatten(self.spec, [next(twins) if has_graph(leaf) else leaf for leaf in self.leaves])


def part_of(value: Any, ends: dict[Node, dict[int, torch.Tensor]], begin: int) -> Part | None:
    """What the calling thread has recorded since `begin` and returns now; None where it cannot be cut off."""
    leaves, spec = flatten(value)
    values = [leaf for leaf in leaves if has_graph(leaf)]
    if any(isinstance(leaf, Opaque) for leaf in leaves) or not all(map(_is_plain_output, values)):
        return None
    walk = _Walk(ends)
    for each in values:
        walk.meet(each.grad_fn, each.output_nr)
    return Part(leaves, spec, values, walk.nodes, walk.sources) if walk.stays_within(begin) else None


def has_graph(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _is_plain_output(value: torch.Tensor) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and not value.is_leaf and not value.retains_grad


def has_watchers(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks) or tensor.retains_grad


class _Walk:
    """The nodes of a graph, from its outputs to where it ends."""

    def __init__(self, ends: dict[Node, dict[int, torch.Tensor]]) -> None:
        self.nodes: set[Node] = set()
        self.sources: dict[tuple[Node, int], torch.Tensor] = {}
        self._ends = ends
        self._ahead: list[Node] = []
        self._strays = False

    def meet(self, node: Node, number: int) -> None:
        """Come to the output of that number of a node."""
        if node in self._ends:
            tensor = self._ends[node].get(number)
            if tensor is None:
                self._strays = True
            else:
                self.sources[node, number] = tensor
        elif type(node) is _LEAF:
            self.sources[node, 0] = cast("Any", node).variable
        elif node not in self.nodes:
            self.nodes.add(node)
            self._ahead.append(node)

    def stays_within(self, begin: int) -> bool:
        """Walk on, and say whether all nodes were recorded by the calling thread since `begin`, and may be cut off."""
        end = sequence_number()
        while self._ahead and not self._strays:
            node = self._ahead.pop()
            # Each thread counts its nodes for itself: those of another are told by their number, but for a coincidence.
            if not begin <= node._sequence_nr() < end or not _may_run_in_a_lane(node):
                return False
            for child, number in node.next_functions:
                if child is not None and child not in self.nodes:
                    self.meet(child, number)
        return not self._strays


def _may_run_in_a_lane(node: Node) -> bool:
    """Whether a node is torch's own, and has its saved tensors at hand."""
    kind: type = type(node)
    names = _saved_names.get(kind)
    if names is None:
        if issubclass(kind, _PYTHON_NODE):
            return False
        names = _saved_names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    if kind.__name__ == "CppFunction" and not node.name().endswith(_SCRIPTED):
        return False  # from an extension: what it saved cannot be seen
    for name in names:  # asked of every node of every call
        saved = getattr(node, name)
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            if each is not None and each.unpack_hook is not None:
                return False
    return True


def are_apart(parts: Sequence[Part]) -> bool:
    """Whether no node belongs to two lanes' graphs."""
    seen: set[Node] = set()
    for part in parts:
        if not seen.isdisjoint(part.nodes):
            return False
        seen |= part.nodes
    return True


def come_back(ends: Sequence[Node], parts: Sequence[Part]) -> bool:
    """Whether what lies behind the inputs leads to where the lanes' graphs end; or it is too much to look through.

    autograd, asked for the gradient of a tensor, takes every way to it, also one that goes on behind another such tensor.
    """
    sources = {node for part in parts for node, _ in part.sources}
    ahead, seen = list(ends), set(ends)
    while ahead:
        for child, _ in ahead.pop().next_functions:
            if child in sources:
                return True
            if child is not None and child not in seen:
                seen.add(child)
                ahead.append(child)
        if len(seen) > _FARTHEST:
            return True
    return False
