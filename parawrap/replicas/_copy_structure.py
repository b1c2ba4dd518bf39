"""The structure of a target: every object that it leads to, and copies of it that share no mutable object.

Identity decides which objects are the same, never ``==``. The walk is iterative: depth costs no recursion.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from parawrap.errors import ReplicaError
from parawrap.replicas._attributes import clear_attributes
from parawrap.replicas._copy_rules import (
    Cell,
    Content,
    Dict,
    Function,
    Instance,
    List,
    Module,
    Opaque,
    Partial,
    Script,
    Set,
    TensorContent,
    Tuple,
)
from parawrap.replicas._rule_by_class import ATOMS, content_of, is_sentinel

__all__ = ["Copy", "Node", "Survey"]


class Node:
    """One object of the structure. `owned` is False if only closures, arguments, and the like lead to it."""

    __slots__ = ("content", "key", "owned", "parent", "value")

    def __init__(self, value: Any, content: Content, parent: Node | None, key: Any) -> None:
        self.value = value
        self.content = content
        self.parent = parent
        self.key = key
        self.owned = False


class Survey:
    """Every object that a target leads to, and which of them a replica needs copies of.

    Raises:
        ReplicaError: If an object that cannot be copied leads to modules or tensors of the model. The message names it.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.nodes: dict[int, Node] = {}
        self._holders: dict[int, list[Node]] = {}
        self._is_tree = True
        self._walk(target)
        copied = self._leading_to(filter(_is_source, self.nodes.values()))
        self.copied = [node for key, node in self.nodes.items() if key in copied]
        self.tensors = [node for node in self.copied if type(node.content) is TensorContent]
        self.fixed = [node for node in self.copied if node.content.is_fixed]
        self._fixed_ids = {id(node.value) for node in self.fixed}
        rest = (node for node in self.copied if not node.content.is_fixed and type(node.content) is not TensorContent)
        self.makeable = sorted(rest, key=lambda node: node.content.turn)
        self.modules = [node for node in self.copied if isinstance(node.content, Module | Script)]
        owned = (node.value for node in self.nodes.values() if node.owned)
        self.generators = tuple(value for value in owned if type(value) is torch.Generator)
        self._refuse_opaque()
        self.has_cycle = not self._is_tree and self._find_cycle()

    def all_modules(self) -> Iterator[torch.nn.Module]:
        """Yield every module, with those inside scripted modules."""
        for node in self.modules:
            yield from node.value.modules() if isinstance(node.content, Script) else (node.value,)

    def holders(self, value: Any) -> list[Node]:
        """Return the nodes that hold a value directly."""
        return self._holders.get(id(value), [])

    def fixed_parts(self, node: Node) -> list[Node]:
        """Return the parts of an object that are themselves copied from their parts."""
        parts = (*node.content.parts(node.value), *node.content.references(node.value))
        found = (self.nodes.get(id(part)) for _, part in parts)
        return [part for part in found if part is not None and id(part.value) in self._fixed_ids]

    def path(self, node: Node) -> str:
        """Return the way from the target to an object, as Python code would write it."""
        steps: list[str] = []
        step = node
        while step.parent is not None:
            steps.append(step.parent.content.place(step.key))
            step = step.parent
        return _shortened("".join(reversed(steps)))

    def _walk(self, target: Any) -> None:
        owned: list[tuple[Any, Node | None, Any]] = [(target, None, None)]
        foreign: list[tuple[Any, Node | None, Any]] = []
        while owned or foreign:
            is_owned = bool(owned)
            value, parent, key = owned.pop() if is_owned else foreign.pop()
            node = self.nodes.get(id(value))
            if node is None:
                content = content_of(value)
                if content is None:
                    continue
                node = self.nodes[id(value)] = Node(value, content, parent, key)
            else:
                self._is_tree = self._is_tree and type(node.content) is TensorContent
                if node.owned or not is_owned:
                    self._hold(value, parent)
                    continue
            self._hold(value, parent)
            node.owned = is_owned = is_owned or isinstance(node.content, Module | Script)
            (owned if is_owned else foreign).extend(self._open(node, node.content.parts(value)))
            foreign.extend(self._open(node, node.content.references(value)))

    def _hold(self, value: Any, parent: Node | None) -> None:
        if parent is not None:
            self._holders.setdefault(id(value), []).append(parent)

    def _open(self, node: Node, parts: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Node, Any]]:
        """Return the parts that are not atoms, last first, so that the walk meets the first one first."""
        found: list[tuple[Any, Node, Any]] = [(part, node, key) for key, part in parts if type(part) not in ATOMS]
        return found[::-1]

    def _leading_to(self, sources: Iterable[Node]) -> set[int]:
        found = {id(node.value) for node in sources}
        waiting = list(found)
        while waiting:
            for holder in self._holders.get(waiting.pop(), ()):
                key = id(holder.value)
                if key not in found and not isinstance(holder.content, Opaque):
                    found.add(key)
                    waiting.append(key)
        return found

    def _find_cycle(self) -> bool:
        """True if a copied object leads to itself, so that reference counting alone does not free its copy."""
        holds = {id(node.value): 0 for node in self.copied}
        for key in holds:
            for holder in self._holders.get(key, ()):
                if id(holder.value) in holds:
                    holds[id(holder.value)] += 1
        ends = [key for key, count in holds.items() if not count]
        for key in ends:  # grows
            for holder in self._holders.get(key, ()):
                if id(holder.value) in holds:
                    holds[id(holder.value)] -= 1
                    if not holds[id(holder.value)]:
                        ends.append(id(holder.value))
        return len(ends) < len(holds)

    def _refuse_opaque(self) -> None:
        opaque = [node for node in self.nodes.values() if isinstance(node.content, Opaque)]
        model = [node for node in self.copied if isinstance(node.content, Module | Script | TensorContent)]
        leading = self._leading_to(model) if opaque else set()
        for node in opaque:
            parts = {id(part) for _, part in node.content.references(node.value)}
            if node.owned and isinstance(node.value, Iterator) and not isinstance(node.value, io.IOBase):
                msg = (
                    f"no replica can be made: {self.path(node) or 'the target'} is an iterator ({_name(node.value)}), and "
                    "each lane would advance it. Keep its items in a list"
                )
                raise ReplicaError(msg)
            if parts & leading:
                held = next(each for each in model if parts & self._leading_to([each]))
                msg = (
                    f"no replica can be made: {self.path(node) or 'the target'} ({_name(node.value)}) leads to "
                    f"{self.path(held) or 'the target'} ({_name(held.value)}), and objects of this class cannot be "
                    "copied. Keep what it holds in a list, a dict, or an attribute"
                )
                raise ReplicaError(msg)


def _is_source(node: Node) -> bool:
    """True for an object that is copied whatever it holds."""
    if type(node.content) is TensorContent:
        return node.owned or node.value.requires_grad
    return isinstance(node.content, Module | Script) or (node.content.is_own and node.owned and not is_sentinel(node.value))


def _name(value: Any) -> str:
    return type(value).__name__


def _shortened(path: str) -> str:
    """A path without the names of the dicts of a module."""
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", path).lstrip(".")


class Copy:
    """One replica's copy of the structure. `tensor` returns the replica's tensor for one of the model's."""

    def __init__(self, survey: Survey, tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.survey = survey
        self._made: dict[int, Any] = {id(node.value): tensor(node.value) for node in survey.tensors}
        for node in survey.makeable:
            self._make(node)
        for node in survey.fixed:
            self._make_fixed(node)
        for node in survey.makeable:
            node.content.fill(node.value, self._made[id(node.value)], self.of)

    @property
    def target(self) -> Any:
        """The copy of the whole target."""
        return self.of(self.survey.target)

    def of(self, value: Any) -> Any:
        """Return the copy of an object, or the object itself if it is shared."""
        return self._made.get(id(value), value)

    def put(self, node: Node, key: Any, value: Any) -> None:
        """Set one value of a copied dict, or one attribute of a copied instance."""
        copy = self.of(node.value)
        if isinstance(node.content, Dict):
            dict.__setitem__(copy, key, value)
        elif key in getattr(copy, "__dict__", ()):
            vars(copy)[key] = value
        else:
            object.__setattr__(copy, key, value)

    def replace(self, original: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Put another tensor into the places of an original. If a place cannot change, write the present tensor instead."""
        present = self.of(original)
        if any(
            isinstance(holder.content, Tuple | Partial | Set | Cell | Function) for holder in self.survey.holders(original)
        ):
            with torch.no_grad():
                present.copy_(tensor)
            return False
        self._made[id(original)] = tensor
        for holder in self.survey.holders(original):
            copy = self.of(holder.value)
            if isinstance(holder.content, Script):
                holder.content.fill(holder.value, copy, self.of)
            elif isinstance(holder.content, List):
                holder.content.put_back(copy, [self.of(part) for part in holder.value])
            elif isinstance(holder.content, Dict | Instance):
                for key, part in holder.content.parts(holder.value):
                    if part is original:
                        self.put(holder, key, tensor)
        return True

    def make(self, node: Node) -> Any:
        """Make another copy of a container, for the same parts."""
        self._make(node)
        copy = self._made[id(node.value)]
        node.content.fill(node.value, copy, self.of)
        return copy

    def clear(self) -> None:
        """Empty the containers, so that cycles in the structure keep nothing alive."""
        for node in self.survey.makeable:
            copy = self._made[id(node.value)]
            if isinstance(copy, dict | list | set):
                copy.clear()
            elif isinstance(node.content, Instance):
                clear_attributes(copy)
            elif isinstance(node.content, Cell):
                del copy.cell_contents
        self._made = {}

    def _make(self, node: Node) -> None:
        self._made[id(node.value)] = node.content.new(node.value, self.of)

    def _make_fixed(self, node: Node) -> None:
        """Make a copy that needs the copies of its parts, and before it these copies."""
        waiting = [node]
        while waiting:
            missing = [part for part in self.survey.fixed_parts(waiting[-1]) if id(part.value) not in self._made]
            if missing:
                waiting += missing
            elif id((last := waiting.pop()).value) not in self._made:
                self._make(last)
