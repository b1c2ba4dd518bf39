"""The structure and the tensors of a target at one moment, and whether they changed since.

The checks run before every call, so they read lengths, keys, values, and addresses in C, and work out the differences
only if something changed. They use public operations only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter, eq, is_, is_not
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from parawrap.replicas._attributes import has_slots
from parawrap.replicas._batched_copies import lasting
from parawrap.replicas._copy_rules import Cell, Content, Dict, Function, Instance, List, Partial, Script, Set, Weak
from parawrap.replicas._copy_structure import Node
from parawrap.replicas._private_names import buffers_of, version_of
from parawrap.replicas._rule_by_class import ATOMS
from parawrap.replicas._torchscript import ScriptedState

__all__ = ["Change", "Ledger", "Lengths", "Watch", "is_watched_apart", "parts_of", "with_other_buffers"]

_PLAIN_DICTS = (dict, OrderedDict)
_requires_grad, _dtype = attrgetter("requires_grad"), attrgetter("dtype")

_optimizer_steps = 0


@cache
def _count_optimizer_steps() -> None:
    """Count the steps of all optimizers: fused ones write parameters and leave their versions alone."""

    def count(*_: object) -> None:
        global _optimizer_steps
        _optimizer_steps += 1

    register_optimizer_step_post_hook(count)


class Change(NamedTuple):
    """A value of a dict or an instance that was replaced by another."""

    node: Node
    key: Any
    before: Any
    now: Any

    @property
    def keeps_form(self) -> bool:
        """True if outputs keep their form: a train mode, a number of the same class, a tensor for a tensor."""
        if isinstance(self.before, torch.Tensor) and isinstance(self.now, torch.Tensor):
            return True
        return self.key == "training" or type(self.before) is type(self.now) is float

    @property
    def is_of_atoms(self) -> bool:
        """True if neither value has parts."""
        return type(self.before) in ATOMS and type(self.now) in ATOMS


class Lengths:
    """The lengths of dicts. Most dicts of a model are empty hooks, and their truth is read faster than their length."""

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        dicts = list(dicts)
        self._empty = [each for each in dicts if type(each) in _PLAIN_DICTS and not each]
        empty = set(map(id, self._empty))
        self._others = [each for each in dicts if id(each) not in empty]
        self._lengths = [*map(dict.__len__, self._others)]

    def intact(self) -> bool:
        """True if every dict has the length that it had."""
        return not any(self._empty) and [*map(dict.__len__, self._others)] == self._lengths


class Watch:
    """The objects in every dict, list, set, and closure of a structure, by identity.

    `growing` are further dicts; only their lengths are compared.
    """

    def __init__(self, nodes: Iterable[Node], growing: Iterable[dict[str, Any]] = ()) -> None:
        nodes = list(nodes)
        owners = [node for node in nodes if isinstance(node.content, Instance) and hasattr(node.value, "__dict__")]
        dicts = [node for node in nodes if isinstance(node.content, Dict)]
        self._instances = [node.value for node in owners]
        self._classes = [*map(type, self._instances)]
        self._own: list[Any] = [*map(vars, self._instances)]
        self._holders = owners + dicts
        self._dicts: list[dict[Any, Any]] = [*self._own, *(node.value for node in dicts)]
        self._lengths = [*map(dict.__len__, self._dicts)]
        self._sized = Lengths(self._dicts)
        self._growing = [*growing]
        self._sizes = [*map(len, self._growing)]
        # The views are live, so they are made once.
        filled = [each for each, length in zip(self._dicts, self._lengths, strict=True) if length]
        self._key_views = [_kind(each).keys(each) for each in filled]
        self._value_views = [_kind(each).values(each) for each in filled]
        self._keys = [*chain.from_iterable(self._key_views)]
        self._keys_are_names = {str}.issuperset(map(type, self._keys))
        self._values = [*chain.from_iterable(self._value_views)]
        self._others = [node for node in nodes if is_watched_apart(node)]
        self._parts = [parts_of(node, node.value) for node in self._others]
        self._scripts = [ScriptedState(node.value) for node in nodes if isinstance(node.content, Script)]

    def intact(self) -> bool:
        """True if every object still holds the same objects under the same keys."""
        same_values = self._sized.intact() and all(map(is_, chain.from_iterable(self._value_views), self._values))
        return same_values and self._same_frame()

    def changes(self) -> list[Change] | None:
        """Return the values of dicts and instances that were replaced; None if anything else changed."""
        if not self._sized.intact() or not self._same_frame():
            return None
        nodes = chain.from_iterable([node] * length for node, length in zip(self._holders, self._lengths, strict=True))
        rows = zip(nodes, self._keys, self._values, chain.from_iterable(self._value_views), strict=True)
        return [Change(*row) for row in rows if row[2] is not row[3]]

    def accept(self) -> None:
        """Take the values of now for those of the structure."""
        self._values = [*chain.from_iterable(self._value_views)]

    def _same_frame(self) -> bool:
        """True if all but the values of dicts is what it was. The dicts have their lengths."""
        return (
            self._same_keys()
            and [*map(len, self._growing)] == self._sizes
            and all(map(is_, map(type, self._instances), self._classes))
            and all(map(is_, map(vars, self._instances), self._own))
            and (not self._others or self._others_are_intact())
            and (not self._scripts or all(state.intact() for state in self._scripts))
        )

    def _same_keys(self) -> bool:
        keys = chain.from_iterable(self._key_views)
        if self._keys_are_names:  # equal strings are one key, and lists are compared in C
            return [*keys] == self._keys
        return all(map(is_, keys, self._keys))

    def _others_are_intact(self) -> bool:
        for node, before in zip(self._others, self._parts, strict=True):
            now = parts_of(node, node.value)
            if len(now) != len(before) or any(map(is_not, now, before)):
                return False
        return True


def is_watched_apart(node: Node) -> bool:
    """True if an object keeps parts elsewhere than in a dict."""
    content: Content = node.content
    if isinstance(content, List | Set | Weak | Cell | Function | Partial):
        return True
    return isinstance(content, Instance) and has_slots(type(node.value))


def _kind(own: dict[Any, Any]) -> Any:
    """The class with the methods that read a dict: an OrderedDict has its own order; other overrides do not count."""
    return OrderedDict if isinstance(own, OrderedDict) else dict


def parts_of(node: Node, value: Any) -> list[Any]:
    """Return the parts of an object, or of its copy; of an instance, the names and the values of its attributes."""
    if isinstance(node.content, List):
        return list(value)
    parts = (*node.content.parts(value), *node.content.references(value))
    return [*chain.from_iterable(parts)] if isinstance(node.content, Instance) else [part for _, part in parts]


class Ledger:
    """Tensors, and the memory, dtype, and version that each of them had.

    An alias of each tensor keeps its memory from being used again, so that equal memory means the same memory. A write
    through ``tensor.data`` changes neither memory nor version. Versions are kept of the tensors that are copied.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], copied: Iterable[torch.Tensor]) -> None:
        _count_optimizer_steps()
        with lasting():
            pairs = [(tensor, tensor.detach()) for tensor in tensors]
        strided = [(tensor, alias) for tensor, alias in pairs if _can_be_compared(tensor, alias)]
        self._strided = [tensor for tensor, _ in strided]
        self._aliases = [alias for _, alias in strided]
        self._tensors = list(tensors)
        self._grads = [*map(_requires_grad, tensors)]
        self._dtypes = [*map(_dtype, tensors)]
        copied = list(copied)
        self.unversioned = [tensor for tensor in copied if tensor.is_inference()]
        self._copied = [tensor for tensor in copied if not tensor.is_inference()]
        self.enter_versions()

    def same_form(self) -> bool:
        """True if every tensor has the memory, the dtype, and the ``requires_grad`` that it had."""
        try:
            return (
                all(map(torch.Tensor.is_set_to, self._strided, self._aliases))
                and [*map(_requires_grad, self._tensors)] == self._grads
                and all(map(is_, map(_dtype, self._tensors), self._dtypes))
            )
        except RuntimeError:  # from is_set_to: a tensor is on another device
            return False

    def unwritten(self) -> bool:
        """True if every copied tensor has the version that it had."""
        return not (self.unversioned or self._suspects) and [*map(version_of, self._copied)] == self._versions

    @property
    def has_seen_steps(self) -> bool:
        """True if an optimizer made a step since `enter_versions`. Any copied tensor may have changed then."""
        return self._steps != _optimizer_steps

    def suspect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these copied tensors as written until `enter_versions`, whatever their versions."""
        self._suspects.update((id(tensor), tensor) for tensor in tensors)

    def written(self) -> list[torch.Tensor]:
        """The copied tensors with another version, the suspects, and tensors of inference mode, which have no versions."""
        now = map(version_of, self._copied)
        same = map(eq, now, self._versions)
        written = [tensor for tensor, intact in zip(self._copied, same, strict=True) if not intact]
        return [*self.unversioned, *self._suspects.values(), *written]

    def moved(self) -> list[torch.Tensor]:
        """The tensors with other memory than they had."""
        pairs = zip(self._strided, self._aliases, strict=True)
        return [tensor for tensor, alias in pairs if tensor.device != alias.device or not tensor.is_set_to(alias)]

    def enter_versions(self) -> None:
        """Take the versions of now."""
        self._steps = _optimizer_steps
        self._suspects: dict[int, torch.Tensor] = {}
        self._versions = [*map(version_of, self._copied)]


def with_other_buffers(written: Iterable[torch.Tensor], modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Add the other buffers of each module that has a written buffer.

    Batch norm writes its statistics in C++ and leaves their versions alone; only that of its count of batches advances.
    """
    found = {id(tensor): tensor for tensor in written}
    for module in modules:
        buffers = [buffer for buffer in buffers_of(module).values() if buffer is not None]
        if any(id(buffer) in found for buffer in buffers):
            found |= {id(buffer): buffer for buffer in buffers}
    return [*found.values()]


def _can_be_compared(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not tensor.is_quantized and tensor.is_set_to(alias)
