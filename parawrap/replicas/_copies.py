"""One replica's copy of a target: `copy.deepcopy` with a filled memo, then the objects that deepcopy leaves as they are."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NoReturn

import torch

from parawrap.errors import ReplicaError
from parawrap.replicas._parts import FIXED, Kind, fill_function, parts_of, rebuild, references_of, replace_part, slots_of
from parawrap.replicas._private_names import (
    COMPILED_CALL,
    IS_REPLICA,
    NOT_CALLED,
    children_of,
    is_compiled_function,
    recompile_copy,
)
from parawrap.replicas._survey import Survey, SurveyNode
from parawrap.replicas._torchscript import fill_script, new_script

__all__ = ["Copies"]

_CANNOT_CHANGE = FIXED | {Kind.SET, Kind.CELL, Kind.FUNCTION, Kind.WEAK_DICT}


class Copies:
    """The copies of the objects of a target, for one replica. `tensor_of` returns its tensor for one of the model's.

    Raises:
        ReplicaError: If the copy shares a module with the target, or has a parameter that is not the replica's.
    """

    def __init__(self, survey: Survey, tensor_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.survey = survey
        tensors = {id(node.value): tensor_of(node.value) for node in survey.tensors}
        shells = {id(node.value): _shell(node) for node in survey.copied if _needs_shell(node)}
        self._memo: dict[int, Any] = {id(node.value): node.value for node in (*survey.shared, *survey.late.values())}
        for module in survey.modules:
            self._memo |= {id(part): part for name, part in vars(module.value).items() if name in NOT_CALLED}
        self._memo |= {**survey.atoms, **tensors, **shells}
        for node in reversed(survey.modules):  # the deepest first, so that depth costs no recursion
            self._copy(node.value)
        self._copy(survey.target)
        self._make_late()
        for key, shell in shells.items():
            self._fill(survey.nodes[key], shell)
        self._put_late()
        self._mark_modules()
        self._check({*map(id, tensors.values())})
        if self.of(survey.target) is survey.target and survey.nodes.get(id(survey.target)) in survey.modules:
            self._refuse(survey.nodes[id(survey.target)], f"the copy of {_name(survey.target)} is the module itself")
        self._memo = {key: self._memo[key] for key in survey.nodes if key in self._memo}  # drops temporary objects

    @property
    def target(self) -> Any:
        """The copy of the whole target."""
        return self.of(self.survey.target)

    def of(self, value: Any) -> Any:
        """Return the copy of an object, or the object itself if it is shared."""
        return self._memo.get(id(value), value)

    def pairs(self) -> Iterator[tuple[SurveyNode, Any]]:
        """Yield each object of the target that has a copy, and the copy."""
        for node in self.survey.copied:
            copy = self.of(node.value)
            if copy is not node.value:
                yield node, copy

    def take(self, before: torch.Tensor, now: torch.Tensor) -> None:
        """Take the copy of a tensor for that of another one, which took its place in the target."""
        self._memo[id(now)] = self._memo.pop(id(before))

    def replace(self, original: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Put another tensor into the places of an original. If a place cannot change, write the present tensor instead."""
        holders = self.survey.holders(original)
        if any(holder.kind in _CANNOT_CHANGE for holder in holders):
            with torch.no_grad():
                self.of(original).copy_(tensor)
            return False
        self._memo[id(original)] = tensor
        for holder in holders:
            if (copy := self.of(holder.value)) is not holder.value:
                replace_part(holder.value, holder.kind, copy, original, tensor, self.of)
        return True

    def clear(self) -> None:
        """Empty the copies, so that cycles among them keep nothing alive."""
        for node, copy in self.pairs():
            if node.kind in (Kind.DICT, Kind.LIST, Kind.SET):
                copy.clear()
            elif node.kind is Kind.CELL:
                del copy.cell_contents
            elif node.kind in (Kind.MODULE, Kind.COMPILED, Kind.INSTANCE):
                getattr(copy, "__dict__", {}).clear()
                for _, slot in slots_of(type(copy)):
                    with contextlib.suppress(AttributeError):
                        slot.__delete__(copy)
        self._memo = {}

    def _copy(self, value: Any) -> Any:
        return deepcopy(value, self._memo)

    def _fill(self, node: SurveyNode, shell: Any) -> None:
        match node.kind:
            case Kind.SCRIPT:
                fill_script(node.value, shell, self._copy)
            case Kind.WEAK_DICT:
                shell.update({self._copy(key): self._copy(part) for key, part in node.value.items()})
            case Kind.COMPILED:
                recompile_copy(shell, node.value, self._copy)
                hooks = {name: self._copy(part) for name, part in vars(node.value).items() if name.endswith("_hooks")}
                vars(shell).update(hooks)
            case _:
                vars(shell).update({name: self._copy(part) for name, part in vars(node.value).items()})

    def _make_late(self) -> None:
        """Make functions, weak references, and the fixed objects that hold them, from the copies of their parts."""
        late = self.survey.late
        waiting = dict(late)
        cells = [node.value for node in late.values() if node.kind is Kind.CELL]
        functions = [n.value for n in late.values() if n.kind is Kind.FUNCTION and not is_compiled_function(n.value)]
        self._memo.update((id(cell), types.CellType()) for cell in cells)
        for function in functions:
            self._memo[id(function)] = rebuild(function, Kind.FUNCTION, self._copy)
        for value in (*cells, *functions):
            del waiting[id(value)]
        for node in late.values():
            self._make_fixed(node, waiting)
        for function in functions:
            fill_function(function, self._memo[id(function)], self._copy)
        for cell in cells:
            self._memo[id(cell)].cell_contents = self._copy(cell.cell_contents)

    def _make_fixed(self, node: SurveyNode, waiting: dict[int, SurveyNode]) -> None:
        """Make the copy of a fixed object, and before it those of its parts that wait too."""
        if waiting.pop(id(node.value), None) is None:
            return
        for _, part in (*parts_of(node.value, node.kind), *references_of(node.value, node.kind)):
            if id(part) in waiting:
                self._make_fixed(waiting[id(part)], waiting)
        self._memo[id(node.value)] = rebuild(node.value, node.kind, self._copy)

    def _put_late(self) -> None:
        """Put the objects that were made late into the places where their originals are."""
        for key, node in self.survey.late.items():
            for holder in self.survey.holders(node.value):
                copy = self.of(holder.value)
                if id(holder.value) in self.survey.late or copy is holder.value or holder.kind is Kind.WEAK_DICT:
                    continue
                found = replace_part(holder.value, holder.kind, copy, node.value, self._memo[key], self._copy)
                if not found and holder.kind is Kind.INSTANCE:
                    msg = f"{holder.path!r} holds {node.path!r}, and a copy of a {_name(holder.value)} cannot hold another"
                    raise ReplicaError(msg)

    def _mark_modules(self) -> None:
        for node, copy in self.pairs():
            if node.kind in (Kind.MODULE, Kind.COMPILED):
                own = vars(copy)
                own[IS_REPLICA] = True
                if own.get(COMPILED_CALL) is not None:
                    own[COMPILED_CALL] = None  # compiled code of the original
            elif node.kind is Kind.DICT and getattr(node.value, "__dict__", None) is node.value:
                object.__setattr__(copy, "__dict__", copy)  # its items are its attributes

    def _check(self, tensors: set[int]) -> None:
        """Refuse modules that are shared, and modules and parameters that a ``__deepcopy__`` made."""
        copies = {id(node.value): self._memo.get(id(node.value)) for node in self.survey.modules}
        known = {*map(id, copies.values())}
        for node in self.survey.modules:
            copy = copies[id(node.value)]
            if not isinstance(copy, torch.nn.Module) or node.kind is Kind.SCRIPT:
                continue
            for name, child in children_of(copy).items():
                if id(child) in copies:
                    self._refuse(self.survey.nodes[id(child)], f"the copy of {_name(child)} is the module itself")
                if issubclass(type(child), torch.nn.Module) and id(child) not in known:
                    self._refuse(node, f"its copy has another submodule {name!r}")
            for name, parameter in copy.named_parameters(recurse=False):
                if id(parameter) not in tensors:
                    self._refuse(node, f"its copy has another parameter {name!r}")

    def _refuse(self, node: SurveyNode, reason: str) -> NoReturn:
        cure = "Let its __deepcopy__ copy all attributes with copy.deepcopy(value, memo), or remove the method"
        msg = f"no replica of {repr(node.path) if node.parent else 'the module'} can be made: {reason}. {cure}"
        raise ReplicaError(msg)


def _needs_shell(node: SurveyNode) -> bool:
    """True if the copy of an object is made empty before `copy.deepcopy`, and filled after it."""
    return node.kind in (Kind.SCRIPT, Kind.COMPILED, Kind.WEAK_DICT) or _is_graph(node)


def _shell(node: SurveyNode) -> Any:
    if node.kind is Kind.SCRIPT:
        return new_script(node.value)
    return object.__new__(type(node.value)) if node.kind is not Kind.WEAK_DICT else type(node.value)()


def _is_graph(node: SurveyNode) -> bool:
    """True for a module of torch.fx. Its own ``__deepcopy__`` registers parameters, which cannot be views."""
    return node.kind is Kind.MODULE and isinstance(node.value, torch.fx.GraphModule)


def _name(value: Any) -> str:
    return type(value).__name__
