"""Copy a target for one lane: `copy.deepcopy` with a seeded memo.

The memo has what the lane uses in the place of each tensor and of each shared object. Closures,
compiled modules, dicts that are their own ``__dict__``, and TorchScript modules are copied around
deepcopy, which would take them apart wrongly.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeVar

import torch

from parawrap._private_names import (
    CHILDREN,
    COMPILED_CALL,
    PARAMETERS,
    compiled_original,
    is_compiled_module,
    recompile_copy,
)
from parawrap.engine.places import has_rules_for_copies, read_slot
from parawrap.engine.survey import Survey, owner_of, vars_of
from parawrap.errors import ReplicaError

_CURE = (
    "Let its __deepcopy__ copy all attributes with copy.deepcopy(value, memo), or remove the method"
)
T = TypeVar("T")


def copy_target(
    survey: Survey, memo: dict[int, Any], device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Enter a copy of each part of a target into the memo.

    Return the tensors of TorchScript modules, each with its copy on this device.

    Raises:
        ReplicaError: If a part cannot be copied.
    """
    copier = _Copier(survey, memo)
    of_scripts = copier.copy_scripts(device)
    copier.copy_parts()
    for module, name in survey.left_out:
        # Copies of a module leave this attribute out. Forward may read it, so lanes share it
        of_copy = vars(memo[id(module)])
        if of_copy.get(name) is None:
            of_copy[name] = vars(module).get(name)
    known = set(map(id, memo.values()))
    for module in survey.modules:
        copier.check_module(module, known)
    return of_scripts


def find_parts_of_process(survey: Survey, memo: dict[int, Any]) -> set[int]:
    """Return the ids of the parts with copies that belong to the process.

    A registry or a cache holds such a copy too, and so a second copy is the same object. Only
    classes that say how they are copied can do that.
    """
    found = set()
    # Others need no look: nothing but a container is written, emptied, or put back
    owners = {id(place.owner): place.owner for place in survey.places}
    for key, owner in owners.items():
        copied = memo.get(key)
        if copied is None or copied is owner or not has_rules_for_copies(type(owner)):
            continue
        # Without its own entry, the owner is copied once more; its parts have copies already
        del memo[key]
        try:
            if copy.deepcopy(owner, memo) is copied:
                found.add(key)
        finally:
            memo[key] = copied
    return found


class _Copier:
    """Fills the memo with copies of the parts of a target."""

    def __init__(self, survey: Survey, memo: dict[int, Any]) -> None:
        self.survey = survey
        self.memo = memo

    def of(self, value: Any) -> Any:
        """Return the copy of a part, or the part itself if it has none."""
        return self.memo.get(id(value), value)

    def copy_parts(self) -> None:
        """Enter a copy of each part of the target into the memo."""
        survey, memo = self.survey, self.memo
        # `copy.deepcopy` would take these parts apart wrongly. Each gets an empty copy first, to
        # which the copies around it refer, and which is filled once all parts exist
        twins = self._without_copies(survey.twins)
        for function in twins:
            memo[id(function)] = self._make_twin(function)
        compiled = self._without_copies(filter(is_compiled_module, survey.modules))
        for module in compiled:
            memo[id(module)] = object.__new__(type(module))
        namespaces = self._without_copies(survey.namespaces)
        for value in namespaces:
            memo[id(value)] = dict.__new__(type(value))
        try:
            # The deepest first, so that depth costs no recursion
            for module in reversed(survey.modules):
                copy.deepcopy(module, memo)
            copy.deepcopy(survey.target, memo)
            for module in compiled:
                inner = copy.deepcopy(compiled_original(module), memo)
                recompile_copy(memo[id(module)], module, inner)
            for function in twins:
                self._fill_twin(function, memo[id(function)])
            for value in namespaces:
                self._fill_namespace(value, memo[id(value)])
        except ReplicaError:
            raise
        except Exception as error:
            raise self._name_uncopied_part(error) from error

    def _without_copies(self, parts: Iterable[T]) -> list[T]:
        """Return the parts that have no copy yet: `known` may have some."""
        return [part for part in parts if id(part) not in self.memo]

    def copy_scripts(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy TorchScript modules to another device; return their tensors, each with its copy.

        Lanes on their device share them: they have no state in Python.
        """
        survey = self.survey
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not survey.scripts or all(self.of(each) is each for each in survey.params):
            return pairs
        # A submodule is copied with the module around it
        inner: set[int] = set()
        for script in survey.scripts:
            inner.update(id(child) for child in script.modules() if child is not script)
        for script in survey.scripts:
            if id(script) in inner:
                continue
            if torch.is_grad_enabled() and any(each.requires_grad for each in script.parameters()):
                msg = (
                    f"no replica of {survey.path_of(script)!r} can be made on {device}: "
                    "gradients do not flow through the copy of a TorchScript module. For "
                    "inference, call it in torch.no_grad(). To train, use the module that it was "
                    "made from, or lanes on the device of the model alone"
                )
                raise ReplicaError(msg)
            copied = copy.deepcopy(script).to(device)
            self.memo.update(zip(map(id, script.modules()), copied.modules(), strict=True))
            originals = chain(script.parameters(), script.buffers())
            copies = chain(copied.parameters(), copied.buffers())
            pairs += zip(originals, copies, strict=True)
        return pairs

    def _make_twin(self, function: types.FunctionType) -> types.FunctionType:
        """Make the lane's own function for one that captures parts of the model.

        Its cells are filled once all parts have copies.
        """
        for cell in function.__closure__ or ():
            if self._is_part(read_slot(cell)):
                self.memo.setdefault(id(cell), types.CellType())
        closure = tuple(map(self.of, function.__closure__ or ()))
        code, name = function.__code__, function.__name__
        return types.FunctionType(code, function.__globals__, name, closure=closure)

    def _fill_twin(self, function: types.FunctionType, twin: types.FunctionType) -> None:
        for cell, own in zip(function.__closure__ or (), twin.__closure__ or (), strict=True):
            if own is not cell:  # a cell without a part of the model is shared
                own.cell_contents = self._copy_part(cell.cell_contents)
        if function.__defaults__:
            twin.__defaults__ = tuple(map(self._copy_part, function.__defaults__))
        if function.__kwdefaults__:
            defaults = function.__kwdefaults__.items()
            twin.__kwdefaults__ = {name: self._copy_part(part) for name, part in defaults}
        twin.__qualname__ = function.__qualname__
        twin.__module__ = function.__module__
        twin.__doc__ = function.__doc__
        twin.__annotations__ = function.__annotations__
        vars(twin).update({name: self._copy_part(part) for name, part in vars(function).items()})
        # Again into each container: Python 3.14 copies functions without a look at the memo
        for holder in self.survey.holders.get(id(function), ()):
            if holder is None:
                continue
            owner = self.of(holder.place.owner)
            if owner is not holder.place.owner:  # one that lanes share keeps the original
                holder.place.container(owner)[holder.key] = twin

    def _is_part(self, value: Any) -> bool:
        """True if the target leads to a value that a function holds, or to its object."""
        return id(owner_of(value)) in self.survey.owned

    def _copy_part(self, value: Any) -> Any:
        """Return the copy of a value that a function holds, or the value if lanes share it."""
        if id(value) in self.memo or not self._is_part(value):
            return self.of(value)
        return copy.deepcopy(value, self.memo)

    def _fill_namespace(self, value: Any, copied: Any) -> None:
        """Fill the copy of a dict that deepcopy would take apart wrongly.

        Such a dict is its own ``__dict__``, or has a ``__getattr__`` that raises KeyError.
        """
        entries = {key: copy.deepcopy(part, self.memo) for key, part in [*dict.items(value)]}
        dict.update(copied, entries)
        own = vars_of(value)
        if own is value:
            object.__setattr__(copied, "__dict__", copied)
        elif own:
            vars(copied).update(copy.deepcopy(own, self.memo))

    def _name_uncopied_part(self, error: Exception) -> ReplicaError:
        """Return the error that names the part that deepcopy cannot copy."""
        # Before the search below, which would fail in the same way for any part
        if isinstance(error, RecursionError):
            msg = (
                "the model is nested too deeply to be copied. Raise the limit with "
                "sys.setrecursionlimit"
            )
            return ReplicaError(msg)
        instances = [
            place.owner
            for place in self.survey.places
            if not isinstance(place.owner, torch.nn.Module)
        ]
        for value in [*self.survey.opaque, *reversed(instances)]:  # the innermost first
            try:
                copy.deepcopy(value, dict(self.memo))
            except Exception:  # noqa: BLE001  # code of the user's
                msg = (
                    f"no replica can be made: {self.survey.path_of(value)!r} is a "
                    f"{type(value).__name__}, which cannot be copied ({type(error).__name__}: "
                    f"{error}). Make it in forward, or give its class a __deepcopy__"
                )
                return ReplicaError(msg)
        msg = f"no replica can be made: copy.deepcopy raises {type(error).__name__}: {error}"
        return ReplicaError(msg)

    def check_module(self, module: torch.nn.Module, known: set[int]) -> None:
        """Refuse a module that its ``__deepcopy__`` shares, and parts that this made."""
        copied = self.of(module)
        path = self.survey.paths[id(module)]
        name_of_module = repr(path) if path else "the module"
        what = f"no replica of {name_of_module} can be made: its copy"
        if copied is module:
            msg = f"{what} is the module itself. {_CURE}"
            raise ReplicaError(msg)
        # A compiled module has no parts but the module in it, which has its own check
        if not isinstance(copied, torch.nn.Module) or is_compiled_module(module):
            return
        if vars(copied).get(COMPILED_CALL) is not None:
            vars(copied)[COMPILED_CALL] = None  # compiled code of the original
        for table, kind in ((CHILDREN, "submodule"), (PARAMETERS, "parameter")):
            for name, part in vars(copied)[table].items():
                if part is None or id(part) in known:
                    continue
                is_original = id(part) in self.survey.owned
                if is_original or not _has_known_parameters(part, known):
                    msg = f"{what} has another {kind} {name!r}. {_CURE}"
                    raise ReplicaError(msg)


def _has_known_parameters(part: Any, known: set[int]) -> bool:
    """True for a module that a copy made, if all its parameters are the lane's.

    Modules of e3nn make submodules from code in ``__setstate__``.
    """
    return isinstance(part, torch.nn.Module) and all(
        id(each) in known for each in part.parameters()
    )
