"""The walk over a target: which objects are copied, which are shared, and which are made after `copy.deepcopy`.

Identity decides which objects are the same, never ``==``. The walk is iterative: depth costs no recursion.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch

from parawrap.errors import ReplicaError
from parawrap.replicas._parts import FIXED, Kind, Part, is_native, is_shared, kind_of, parts_of, references_of

__all__ = ["Survey", "SurveyNode"]

_MODULES = frozenset({Kind.MODULE, Kind.COMPILED, Kind.SCRIPT})
_CONTAINERS = frozenset({Kind.DICT, Kind.LIST, Kind.SET, Kind.WEAK_DICT, Kind.INSTANCE})
_LATE = frozenset({Kind.FUNCTION, Kind.CELL, Kind.BUILTIN, Kind.CACHED, Kind.WEAK})

_PLAIN_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, type})


class SurveyNode:
    """One object of a target. It is `owned` unless only closures, arguments, and the like lead to it."""

    __slots__ = ("is_shared", "key", "kind", "owned", "parent", "value")

    def __init__(self, value: Any, kind: Kind, parent: SurveyNode | None, key: Any) -> None:
        self.value = value
        self.kind = kind
        self.parent = parent
        self.key = key
        self.owned = False
        self.is_shared = kind is Kind.INSTANCE and is_shared(value)

    @property
    def path(self) -> str:
        """The way from the target to the object, as Python code would write it."""
        return "" if self.parent is None else self.parent.path_of(self.key)

    def path_of(self, key: Any) -> str:
        """Return the way from the target to the part with that key."""
        steps = [self.place(key)]
        step = self
        while step.parent is not None:
            steps.append(step.parent.place(step.key))
            step = step.parent
        path = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", "".join(reversed(steps)))
        return path.lstrip(".")

    def place(self, key: Any) -> str:
        """Return how Python code names the part with that key."""
        match self.kind:
            case Kind.MODULE | Kind.COMPILED | Kind.SCRIPT | Kind.METHOD | Kind.BUILTIN | Kind.PARTIAL | Kind.CACHED:
                return f".{key}"
            case Kind.INSTANCE:
                return f".{key}" if isinstance(key, str) else ""
            case Kind.FUNCTION:
                return f" captures {key!r}"
            case Kind.CELL:
                return ""
            case Kind.WEAK:
                return "()"
            case _:
                return f"[{key!r}]"


class Survey:
    """Every object that a target leads to, and which of them a replica needs copies of.

    Raises:
        ReplicaError: If an object that cannot be copied leads to modules or tensors of the model. The message names it.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.nodes: dict[int, SurveyNode] = {}
        self._holders: dict[int, list[SurveyNode]] = {}
        self.atoms: dict[int, Any] = {}  # that `copy.deepcopy` would copy, or refuse
        self._walk(target)
        self.generators = tuple(value for value in self.atoms.values() if isinstance(value, torch.Generator))
        copied = self._find_leading_to(filter(_is_source, self.nodes.values()))
        self.copied = [node for key, node in self.nodes.items() if key in copied]
        self.shared = [node for key, node in self.nodes.items() if key not in copied]
        self.tensors = [node for node in self.copied if node.kind is Kind.TENSOR]
        self.modules = [node for node in self.copied if node.kind in _MODULES]
        self.late = self._find_late()
        self._refuse_distributed()
        self._refuse_opaque()

    def all_modules(self) -> Iterator[torch.nn.Module]:
        """Yield every module, with those inside scripted modules."""
        for node in self.modules:
            yield from node.value.modules() if node.kind is Kind.SCRIPT else (node.value,)

    def holders(self, value: Any) -> list[SurveyNode]:
        """Return the nodes that hold a value directly."""
        return self._holders.get(id(value), [])

    def replace(self, before: torch.Tensor, now: torch.Tensor) -> None:
        """Note that a tensor took the place of another, in all places where that was."""
        node = self.nodes[id(now)] = self.nodes.pop(id(before))
        node.value = now
        self._holders[id(now)] = self._holders.pop(id(before))

    @cached_property
    def has_cycle(self) -> bool:
        """True if a copied object leads to itself, so that reference counting alone does not free its copy."""
        holds = {id(node.value): 0 for node in self.copied}
        inside = {key: [id(each.value) for each in self._holders.get(key, ()) if id(each.value) in holds] for key in holds}
        for holders in inside.values():
            for holder in holders:
                holds[holder] += 1
        ends = [key for key, count in holds.items() if not count]
        for key in ends:  # grows
            for holder in inside[key]:
                holds[holder] -= 1
                if not holds[holder]:
                    ends.append(holder)
        return len(ends) < len(holds)

    def _walk(self, target: Any) -> None:
        owned: list[tuple[Any, SurveyNode | None, Any]] = [(target, None, None)]
        foreign: list[tuple[Any, SurveyNode | None, Any]] = []
        while owned or foreign:
            is_owned = bool(owned)
            value, parent, key = owned.pop() if is_owned else foreign.pop()
            node = self.nodes.get(id(value))
            if node is None:
                if (kind := _kind_of(value)) is Kind.ATOM:
                    if is_owned and type(value) not in _PLAIN_ATOMS:
                        self.atoms[id(value)] = value
                    continue
                node = self.nodes[id(value)] = SurveyNode(value, kind, parent, key)
            elif node.owned or not is_owned:
                self._hold(value, parent)
                continue
            self._hold(value, parent)
            node.owned = is_owned = is_owned or node.kind in _MODULES
            if not node.is_shared:
                (owned if is_owned else foreign).extend(_last_first(node, parts_of(value, node.kind)))
            foreign.extend(_last_first(node, references_of(value, node.kind, shared=node.is_shared)))

    def _hold(self, value: Any, parent: SurveyNode | None) -> None:
        if parent is not None:
            self._holders.setdefault(id(value), []).append(parent)

    def _find_leading_to(self, sources: Iterable[SurveyNode]) -> set[int]:
        found = {id(node.value) for node in sources}
        waiting = list(found)
        while waiting:
            for holder in self._holders.get(waiting.pop(), ()):
                key = id(holder.value)
                if key not in found and not (holder.is_shared and is_native(holder.value)):
                    found.add(key)
                    waiting.append(key)
        return found

    def _find_late(self) -> dict[int, SurveyNode]:
        """Find the objects that are made after `copy.deepcopy`: functions, and fixed objects that hold them."""
        late = {
            id(node.value): node
            for node in self.copied
            if node.kind in _LATE or (node.kind is Kind.TUPLE and type(node.value) not in (tuple, frozenset))
        }
        waiting = list(late)
        while waiting:
            for holder in self._holders.get(waiting.pop(), ()):
                key = id(holder.value)
                if holder.kind in FIXED and key not in late:
                    late[key] = holder
                    waiting.append(key)
        return late

    def _refuse_distributed(self) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        kinds = [torch.nn.parallel.DistributedDataParallel]
        kinds += [kind for name in ("FullyShardedDataParallel", "FSDPModule") if (kind := getattr(fsdp, name, None))]
        for node in self.modules:
            if isinstance(node.value, tuple(kinds)):
                place = f"submodule {node.path!r}" if node.parent else "the module"
                name = next(kind.__name__ for kind in kinds if isinstance(node.value, kind))
                msg = f"no replica of {place} can be made: {name} is parallel already; give what it wraps"
                raise ReplicaError(msg)

    def _refuse_opaque(self) -> None:
        """Refuse iterators, and objects that lead to the model and cannot be copied."""
        model = [node for node in self.copied if node.kind in _MODULES or node.kind is Kind.TENSOR]
        natives = [node for node in self.nodes.values() if node.is_shared and is_native(node.value)]
        leading = self._find_leading_to(model) if natives else set()
        for node in self.nodes.values():
            if node.owned and node.kind is Kind.INSTANCE and _is_iterator(node.value):
                msg = (
                    f"no replica can be made: {node.path or 'the target'} is an iterator ({_name(node.value)}), and "
                    "each lane would advance it. Keep its items in a list"
                )
                raise ReplicaError(msg)
        for node in natives:
            parts = {id(part) for _, part in references_of(node.value, node.kind, shared=True)}
            if parts & leading:
                held = next(each for each in model if parts & self._find_leading_to([each]))
                msg = (
                    f"no replica can be made: {node.path or 'the target'} ({_name(node.value)}) leads to "
                    f"{held.path or 'the target'} ({_name(held.value)}), and objects of this class cannot be "
                    "copied. Keep what it holds in a list, a dict, or an attribute"
                )
                raise ReplicaError(msg)


def _kind_of(value: Any) -> Kind:
    kind = kind_of(type(value))
    is_function_of_c = kind is Kind.BUILTIN and kind_of(type(value.__self__)) is Kind.ATOM
    return Kind.ATOM if is_function_of_c else kind


def _last_first(node: SurveyNode, parts: Iterable[Part]) -> Iterable[tuple[Any, SurveyNode, Any]]:
    """Return the parts in reverse, so that the walk meets the first one first."""
    return [(part, node, key) for key, part in parts][::-1]


def _is_source(node: SurveyNode) -> bool:
    """True for an object that is copied whatever it holds."""
    if node.kind is Kind.TENSOR:
        return node.owned or node.value.requires_grad
    return node.kind in _MODULES or (node.kind in _CONTAINERS and node.owned and not node.is_shared)


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _name(value: Any) -> str:
    return type(value).__name__
