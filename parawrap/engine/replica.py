"""One replica: `copy.deepcopy` of the target with a seeded memo, which has what the lane uses in place of each tensor."""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from parawrap._private_names import (
    BUFFERS,
    CHILDREN,
    COMPILED_CALL,
    PARAMETERS,
    compiled_original,
    is_compiled_module,
    recompile_copy,
    version_of,
)
from parawrap.engine.batched_copies import lasting
from parawrap.engine.holdings import Holdings, Place, read_slot
from parawrap.engine.survey import Survey, storage_of, vars_of
from parawrap.errors import ReplicaError

_CURE = "Let its __deepcopy__ copy all attributes with copy.deepcopy(value, memo), or remove the method"
is_dirty = attrgetter("is_dirty")


class Replica:
    """The copy of the target that one lane runs. `known` has further copies, by the id of the original.

    Attributes:
        target: The copy of the whole target.
        params: What the lane has in place of the survey's parameters, in the same order.
        tensors: The lane's own copies of the survey's other tensors, in the same order.
        is_dirty: True if a call may have left something that the next call must not find.
        has_graph: True if a graph may lead here: checkpointing calls the modules again in a backward pass.
    """

    def __init__(
        self,
        survey: Survey,
        device: torch.device,
        params: Sequence[torch.Tensor],
        tensors: list[torch.Tensor],
        known: Mapping[int, Any],
    ) -> None:
        self.survey = survey
        self.device = device
        self.is_dirty = self.has_graph = False
        self.params, self.tensors = [*params], tensors
        self._memo: dict[int, Any] = {**{id(each): each for each in survey.shared}, **known}
        originals, copies = [*survey.params, *survey.tensors], [*params, *tensors]
        self._memo |= {id(original): each for original, each in zip(originals, copies, strict=True)}
        self._copy_target()
        self.target: Any = self.of(survey.target)
        self.holdings = Holdings(survey.places, partial(_own_copy, self._memo))
        self.note_versions()

    def of(self, value: Any) -> Any:
        """Return the copy of a part of the target, or the part itself if all lanes use it."""
        return self._memo.get(id(value), value)

    def copy_other(self, survey: Survey) -> Any:
        """Return a copy of another target for this lane. Parts of the model in it are the lane's."""
        own = [tensor for tensor in survey.tensors if id(tensor) not in self._memo]
        copies = self._memo | dict(zip(map(id, own), clone_all(own), strict=True))
        tensors = [copies[id(tensor)] for tensor in survey.tensors]
        return Replica(survey, self.device, [*map(self.of, survey.params)], tensors, copies).target

    def note_versions(self) -> None:
        """Note the versions of the lane's own tensors."""
        self._versioned = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._versions = [*map(version_of, self._versioned)]
        self._origins: dict[int, Any] | None = None

    def is_written(self) -> bool:
        """True if a call wrote one of the lane's own tensors in place."""
        return [*map(version_of, self._versioned)] != self._versions

    def find_written(self) -> set[int]:
        """Return the ids of the lane's own tensors that a call wrote in place."""
        pairs = zip(self._versioned, self._versions, strict=True)
        return {id(tensor) for tensor, before in pairs if version_of(tensor) != before}

    def original_of(self, value: Any) -> Any:
        """Return the model's own object that a part of this replica is a copy of; None for any other."""
        if self._origins is None:
            owned = self.survey.owned
            self._origins = {id(copied): owned[key] for key, copied in self._memo.items() if key in owned}
        found = self._origins.get(id(value))
        return None if found is None or id(value) in self.find_written() else found  # a written one is not the model's

    def replace(self, originals: Sequence[torch.Tensor], mine: list[torch.Tensor], new: Sequence[torch.Tensor]) -> bool:
        """Put new tensors into the places of those in `mine`. Return False if a place cannot change."""
        places: list[tuple[Place, Any, torch.Tensor]] = []
        for original, tensor in zip(originals, new, strict=True):
            for holder in self.survey.holders.get(id(original), ()):
                if holder is None:
                    return False
                places.append((*holder, tensor))
        for place, key, tensor in places:
            self.holdings.put(place, key, tensor)
        self._memo.update(zip(map(id, originals), new, strict=True))
        mine[:] = new
        self._origins = None
        self.holdings.note()
        return True

    def restore(self) -> None:
        """Put back the containers as they were."""
        self.holdings.restore()
        self.is_dirty = False

    def clear(self) -> None:
        """Let go of everything, so that neither a cycle nor a reference to this replica keeps tensors alive."""
        self.holdings.clear()
        vars(self).clear()

    # The copy

    def _copy_target(self) -> None:
        survey, memo = self.survey, self._memo
        if survey.scripts and any(self.of(each) is not each for each in survey.params):
            msg = (
                f"no replica of {survey.path_of(survey.scripts[0])!r} can be made on {self.device}: a TorchScript module "
                "cannot be copied there. Use the module that it was made from, or lanes on the device of the model alone"
            )
            raise ReplicaError(msg)
        twins = [function for function in survey.twins if id(function) not in memo]
        compiled = [module for module in survey.modules if is_compiled_module(module) and id(module) not in memo]
        memo |= {id(function): self._make_twin(function) for function in twins}
        memo |= {id(module): object.__new__(type(module)) for module in compiled}
        try:
            for module in reversed(survey.modules):  # the deepest first, so that depth costs no recursion
                copy.deepcopy(module, memo)
            copy.deepcopy(survey.target, memo)
            for module in compiled:
                recompile_copy(memo[id(module)], module, copy.deepcopy(compiled_original(module), memo))
            for function in twins:
                self._fill_twin(function, memo[id(function)])
        except ReplicaError:
            raise
        except Exception as error:
            raise self._why_uncopied(error) from error
        known = set(map(id, memo.values()))
        for module in survey.modules:
            self._check_module(module, known)

    def _make_twin(self, function: types.FunctionType) -> types.FunctionType:
        """Make the lane's own function for one that captures parts of the model, with cells that are filled later."""
        for cell in function.__closure__ or ():
            if self._is_part(read_slot(cell)):
                self._memo.setdefault(id(cell), types.CellType())
        closure = tuple(map(self.of, function.__closure__ or ()))
        return types.FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)

    def _fill_twin(self, function: types.FunctionType, twin: types.FunctionType) -> None:
        for cell, own in zip(function.__closure__ or (), twin.__closure__ or (), strict=True):
            if own is not cell:
                own.cell_contents = self._copy_part(cell.cell_contents)
        twin.__defaults__ = function.__defaults__ and tuple(map(self._copy_part, function.__defaults__))
        names = {name: self._copy_part(part) for name, part in (function.__kwdefaults__ or {}).items()}
        twin.__kwdefaults__ = names or None
        twin.__qualname__, twin.__module__, twin.__doc__ = function.__qualname__, function.__module__, function.__doc__
        twin.__annotations__ = function.__annotations__
        vars(twin).update({name: self._copy_part(part) for name, part in vars(function).items()})
        for holder in self.survey.holders.get(id(function), ()):  # Python 3.14 copies functions without a look at the memo
            if holder is not None and (owner := _own_copy(self._memo, holder[0].owner)) is not None:
                holder[0].container(owner)[holder[1]] = twin

    def _is_part(self, value: Any) -> bool:
        """True if the target leads to a value that a function holds, or to the object of a method."""
        return id(value.__self__ if isinstance(value, types.MethodType) else value) in self.survey.owned

    def _copy_part(self, value: Any) -> Any:
        if id(value) in self._memo or not self._is_part(value):
            return self.of(value)
        return copy.deepcopy(value, self._memo)

    def _why_uncopied(self, error: Exception) -> ReplicaError:
        """Return the error that names the part that deepcopy cannot copy."""
        if isinstance(error, RecursionError):
            msg = "the model is nested too deeply to be copied. Raise the limit with sys.setrecursionlimit"
            return ReplicaError(msg)
        for value in self.survey.opaque:
            try:
                copy.deepcopy(value, dict(self._memo))
            except Exception:  # noqa: BLE001  # code of the user's
                msg = (
                    f"no replica can be made: {self.survey.path_of(value)!r} is a {type(value).__name__}, which cannot be "
                    f"copied ({type(error).__name__}: {error}). Make it in forward, or give its class a __deepcopy__"
                )
                return ReplicaError(msg)
        msg = f"no replica can be made: copy.deepcopy raises {type(error).__name__}: {error}"
        return ReplicaError(msg)

    def _check_module(self, module: torch.nn.Module, known: set[int]) -> None:
        """Refuse modules that a ``__deepcopy__`` shares, and modules and parameters that it made."""
        copied, path = self.of(module), self.survey.paths[id(module)]
        what = f"no replica of {repr(path) if path else 'the module'} can be made: its copy"
        if copied is module:
            msg = f"{what} is the module itself. {_CURE}"
            raise ReplicaError(msg)
        if not isinstance(copied, torch.nn.Module) or is_compiled_module(module):
            return
        if vars(copied).get(COMPILED_CALL) is not None:
            vars(copied)[COMPILED_CALL] = None  # compiled code of the original
        for table, kind in ((CHILDREN, "submodule"), (PARAMETERS, "parameter")):
            for name, part in vars(copied)[table].items():
                if part is not None and id(part) not in known and not _is_bare(part, known):
                    msg = f"{what} has another {kind} {name!r}. {_CURE}"
                    raise ReplicaError(msg)


def clone_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return lasting copies of tensors on their device. Those that share memory are copied together."""
    memory = [storage for tensor in tensors if (storage := storage_of(tensor))]
    with lasting():
        if len(set(memory)) == len(memory):
            found = [tensor.detach().clone() for tensor in tensors]
        else:
            found = copy.deepcopy([tensor.detach() for tensor in tensors])
    for tensor, each in zip(tensors, found, strict=True):
        if own := vars_of(tensor):
            vars(each).update(own)
    return found


def _own_copy(memo: Mapping[int, Any], value: Any) -> Any:
    """Return the lane's copy of a part of the target; None if all lanes use the part itself."""
    copied = memo.get(id(value), value)
    return None if copied is value else copied


def _is_bare(part: Any, known: set[int]) -> bool:
    """True for a module that only holds the copies of submodules: torchvision's graphs make such modules anew."""
    if type(part) is not torch.nn.Module or vars(part)[PARAMETERS] or vars(part)[BUFFERS]:
        return False
    return all(id(each) in known or _is_bare(each, known) for each in vars(part)[CHILDREN].values())
