"""Copy a target for one lane: `copy.deepcopy` with a seeded memo.

The memo maps the id of an original to the object that the lane uses in its place. It is seeded with
the lane's tensors and with the objects that all lanes share. deepcopy would not copy closures,
compiled modules, dicts that are their own ``__dict__``, and TorchScript modules rightly. So the
functions below copy them.
"""

from __future__ import annotations

import copy
import functools
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
    tensors_of_scripts = copier.copy_scripts(device)
    copier.copy_parts()
    for module, name in survey.left_out:
        # Copies of a module leave this attribute out. Forward may read it, so lanes share it
        entries = vars(memo[id(module)])
        if entries.get(name) is None:
            entries[name] = vars(module).get(name)
    ids_of_copies = set(map(id, memo.values()))
    for module in survey.modules:
        copier.finish_module(module, ids_of_copies)
    return tensors_of_scripts


def find_parts_of_process(survey: Survey, memo: dict[int, Any]) -> set[int]:
    """Return the ids of the parts with copies that belong to the process, not to the replica.

    Such a copy comes from a registry or a cache of its class, so a second copy is the same object.
    Only classes with their own rules for copies can do that.
    """
    found = set()
    # The replica writes, empties, and puts back nothing but containers
    owners = {id(place.owner): place.owner for place in survey.places}
    for key, owner in owners.items():
        copied = memo.get(key)
        if copied is None or copied is owner or not has_rules_for_copies(type(owner)):
            continue
        # Without its entry in the memo, deepcopy copies the owner again, and none of its parts
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
        # First, an empty copy of each part that deepcopy would not copy rightly. deepcopy finds it
        # in the memo, and puts it into the copies of the objects around the part
        closures = self._without_copies(survey.closures)
        for function in closures:
            memo[id(function)] = self._make_closure(function)
        compiled = self._without_copies(filter(is_compiled_module, survey.modules))
        for module in compiled:
            memo[id(module)] = object.__new__(type(module))
        namespaces = self._without_copies(survey.namespaces)
        for value in namespaces:
            memo[id(value)] = dict.__new__(type(value))
        try:
            # The deepest modules first: their copies are in the memo when the module around them is
            # copied, so a deep model needs no deep recursion
            for module in reversed(survey.modules):
                copy.deepcopy(module, memo)
            copy.deepcopy(survey.target, memo)
            # All other parts have copies now, so the empty copies can be filled
            for module in compiled:
                inner = copy.deepcopy(compiled_original(module), memo)
                recompile_copy(memo[id(module)], module, inner)
            for function in closures:
                self._fill_closure(function, memo[id(function)])
            for value in namespaces:
                self._fill_namespace(value, memo[id(value)])
        except ReplicaError:
            raise
        except Exception as error:
            raise self._name_uncopied_part(error) from error

    def _without_copies(self, parts: Iterable[T]) -> list[T]:
        """Return the parts that have no copy yet. The seeded memo may have copies of some."""
        return [part for part in parts if id(part) not in self.memo]

    def copy_scripts(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy TorchScript modules to another device; return their tensors, each with its copy.

        Lanes on their device share them: they have no state in Python.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Lanes on the model's device use its own parameters, and those of scripts are among them
        uses_originals = all(self.of(each) is each for each in self.survey.params)
        scripts = self.survey.scripts
        if not scripts or uses_originals:
            return pairs
        # A submodule is copied with the module around it
        inner: set[int] = set()
        for script in scripts:
            inner.update(id(child) for child in script.modules() if child is not script)
        for script in scripts:
            if id(script) in inner:
                continue
            learns = any(each.requires_grad for each in script.parameters())
            if torch.is_grad_enabled() and learns:
                msg = (
                    f"no replica of {self.survey.path_of(script)!r} can be made on {device}: "
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

    def _make_closure(self, function: types.FunctionType) -> types.FunctionType:
        """Make the lane's own function for one that captures parts of the model.

        Its new cells are empty, until `_fill_closure` fills them.
        """
        cells = function.__closure__ or ()
        for cell in cells:
            if self._is_part(read_slot(cell)):
                self.memo.setdefault(id(cell), types.CellType())
        closure = tuple(map(self.of, cells))
        code, name = function.__code__, function.__name__
        return types.FunctionType(code, function.__globals__, name, closure=closure)

    def _fill_closure(self, function: types.FunctionType, copied: types.FunctionType) -> None:
        """Give the lane's own function all that the original has besides its code."""
        cells = zip(function.__closure__ or (), copied.__closure__ or (), strict=True)
        for original, cell in cells:
            if cell is not original:  # lanes share a cell without a part of the model
                cell.cell_contents = self._copy_part(original.cell_contents)
        if function.__defaults__:
            copied.__defaults__ = tuple(map(self._copy_part, function.__defaults__))
        if function.__kwdefaults__:
            copied.__kwdefaults__ = self._copy_entries(function.__kwdefaults__)
        # Its names, text, and annotations. From Python 3.14 on, these are copied unevaluated: they
        # may name what exists for type checkers alone
        for name in functools.WRAPPER_ASSIGNMENTS:
            setattr(copied, name, getattr(function, name))
        vars(copied).update(self._copy_entries(vars(function)))
        # Again into each container: deepcopy of Python 3.14 does not look for functions in the memo
        for holder in self.survey.holders.get(id(function), ()):
            if holder is None:
                continue
            owner = self.of(holder.place.owner)
            if owner is not holder.place.owner:  # an owner that lanes share keeps the original
                holder.place.container(owner)[holder.key] = copied

    def _is_part(self, value: Any) -> bool:
        """True if the target leads to a captured value, or to the object of a captured method."""
        return id(owner_of(value)) in self.survey.objects

    def _copy_part(self, value: Any) -> Any:
        """Return the copy of a captured value, or the value if lanes share it."""
        if id(value) in self.memo or not self._is_part(value):
            return self.of(value)
        return copy.deepcopy(value, self.memo)

    def _copy_entries(self, captured: dict[str, Any]) -> dict[str, Any]:
        return {name: self._copy_part(value) for name, value in captured.items()}

    def _fill_namespace(self, value: Any, copied: Any) -> None:
        """Fill the copy of a dict that deepcopy would not copy rightly.

        Such a dict is its own ``__dict__``, or has a ``__getattr__`` that raises KeyError.
        """
        entries = {key: copy.deepcopy(part, self.memo) for key, part in [*dict.items(value)]}
        dict.update(copied, entries)
        attributes = vars_of(value)
        if attributes is value:
            object.__setattr__(copied, "__dict__", copied)
        elif attributes:
            vars(copied).update(copy.deepcopy(attributes, self.memo))

    def _name_uncopied_part(self, error: Exception) -> ReplicaError:
        """Return the error that names the part that deepcopy cannot copy."""
        # The search below would fail in the same way for each part
        if isinstance(error, RecursionError):
            msg = (
                "the model is nested too deeply to be copied. Raise the limit with "
                "sys.setrecursionlimit"
            )
            return ReplicaError(msg)
        owners = [place.owner for place in reversed(self.survey.places)]  # the innermost first
        instances = [owner for owner in owners if not isinstance(owner, torch.nn.Module)]
        for value in [*self.survey.opaque, *instances]:
            try:
                # A copy of the memo: the search must leave no copies in it
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

    def finish_module(self, module: torch.nn.Module, ids_of_copies: set[int]) -> None:
        """Remove the original's compiled code from the copy of a module, and check the copy.

        Raises:
            ReplicaError: If the copy is the module itself, or holds other parts than the lane's
                copies. Then a class of the user's has a ``__deepcopy__``, or the like.
        """
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
        entries = vars(copied)
        if entries.get(COMPILED_CALL) is not None:
            entries[COMPILED_CALL] = None
        for table, kind in ((CHILDREN, "submodule"), (PARAMETERS, "parameter")):
            for name, part in entries[table].items():
                if part is None or id(part) in ids_of_copies:
                    continue
                is_original = id(part) in self.survey.objects
                if is_original or not _has_only_copies(part, ids_of_copies):
                    msg = f"{what} has another {kind} {name!r}. {_CURE}"
                    raise ReplicaError(msg)


def _has_only_copies(part: Any, ids_of_copies: set[int]) -> bool:
    """True for a module with parameters that are all the lane's copies.

    A ``__setstate__`` may make such a module, as those of e3nn do.
    """
    if not isinstance(part, torch.nn.Module):
        return False
    return ids_of_copies.issuperset(map(id, part.parameters()))
