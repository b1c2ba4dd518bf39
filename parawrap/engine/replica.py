"""One replica: `copy.deepcopy` of the target with a seeded memo.

The memo has what the lane uses in the place of each tensor, and it says who owns what. What the
copy made, the replica owns: it may write and empty that. What deepcopy got from elsewhere, such as
a registry or a cache, belongs to the process, and the replica leaves it alone.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, TypeVar

import torch

from parawrap._private_names import (
    CHILDREN,
    COMPILED_CALL,
    PARAMETERS,
    compiled_original,
    copy_all,
    is_compiled_module,
    recompile_copy,
    version_of,
)
from parawrap.engine.batched_copies import lasting
from parawrap.engine.copy_checks import Key, PlainPart, set_plain_values
from parawrap.engine.model_state import Snapshot
from parawrap.engine.places import has_rules_for_copies, read_slot
from parawrap.engine.survey import Survey, storage_of, vars_of
from parawrap.errors import ReplicaError

_form_of = attrgetter("shape", "dtype", "device")
_CURE = (
    "Let its __deepcopy__ copy all attributes with copy.deepcopy(value, memo), or remove the method"
)

T = TypeVar("T")
Writers = list[list[Callable[[Any], None]]]
"""For each of some tensors, the functions that put another one into its places."""


class Replica:
    """The copy of the target that one lane runs.

    `known` has further copies, by the id of the original.

    Attributes:
        target: The copy of the whole target.
        params: What the lane has in place of the survey's parameters, in the same order.
        tensors: The lane's own copies of the survey's other tensors, in the same order.
        versioned: Those that have versions: all but inference tensors.
        snapshot: What the containers of the copy must hold before a call.
        is_dirty: True if a call may have left something that the next call must not find.
        has_graph: True if a graph may lead here: checkpointing calls the modules again in a
            backward pass.
        is_lent: True if an output may call a layer of the copy later.
        are_tensors_held: True if a graph, an output, or code of the user's may hold one of the
            lane's own tensors. Each run of the copy sets it that does not exclude all three; new
            tensors reset it.
        writes_unseen: True if forward may write the lane's own tensors without a new version.
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
        self.is_dirty = self.has_graph = self.is_lent = False
        self.are_tensors_held = self.writes_unseen = False
        # The tensors of TorchScript modules that have copies on another device, and these copies
        self._of_scripts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions_of_scripts: list[int] = []
        self._of_process: set[int] = set()  # none are known while parts are copied
        self.params = [*params]
        self.tensors = tensors
        # The memo has ids, and the survey keeps the originals alive: no later object gets one
        self._memo: dict[int, Any] = {id(each): each for each in survey.shared}
        self._memo.update(known)
        originals = [*survey.params, *survey.tensors]
        copies = [*params, *tensors]
        self._memo.update(zip(map(id, originals), copies, strict=True))
        # The first call may be in inference mode, and what a copy makes there could never learn
        with lasting(grad=torch.is_grad_enabled()):
            self._copy_target()
            self._of_process = self._find_parts_of_process()
        self.target: Any = self.of(survey.target)
        self.snapshot = Snapshot(survey.places, self._own_copy)
        self.note_versions()

    def of(self, value: Any) -> Any:
        """Return the copy of a part of the target, or the part itself if all lanes use it."""
        return self._memo.get(id(value), value)

    def copy_other(self, survey: Survey) -> Any:
        """Return a copy of another target for this lane.

        Parts of the model in it are the lane's.
        """
        own = self._without_copies(survey.tensors)
        copies = dict(self._memo)
        copies.update(zip(map(id, own), clone_all(own), strict=True))
        tensors = [copies[id(tensor)] for tensor in survey.tensors]
        params = [*map(self.of, survey.params)]
        # The copy outlives its replica, which nothing else needs: it has no calls that write
        return Replica(survey, self.device, params, tensors, copies).target

    def set_plain_values(self, parts: Sequence[PlainPart]) -> Key | None:
        """Set numbers, flags, and texts to those of the model.

        Return the key of a place that holds something else; None if there is none.
        """
        return set_plain_values(self.snapshot, parts, self._memo.get)

    # The lane's own tensors

    def note_versions(self) -> None:
        """Note the versions of the lane's own tensors."""
        self.versioned = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._versions = [*map(version_of, self.versioned)]
        # Most calls need none of these, so they are read from the tensors at the first use: their
        # shapes, dtypes, and devices; the addresses of their memory; and the originals by the id of
        # the copy
        self._forms: list[Any] | None = None
        self._memory: set[int] | None = None
        self._origins: dict[int, Any] | None = None

    def write_tensors(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Write the values of the survey's tensors into the lane's own. False if they do not fit.

        The caller ensures that nothing else holds the lane's own.
        """
        if self._forms is None:
            self._forms = [*map(_form_of, self.tensors)]
        if [*map(_form_of, tensors)] != self._forms:
            return False  # the model has other data: ``buffer.data = ...``
        if self.tensors:
            with lasting():
                copy_all(self.tensors, [*tensors])
        self._versions = [*map(version_of, self.versioned)]
        return True

    def is_written(self) -> bool:
        """True if a call wrote one of the lane's own tensors in place."""
        return [*map(version_of, self.versioned)] != self._versions

    def find_written(self) -> set[int]:
        """Return the ids of the lane's own tensors that a call wrote in place."""
        pairs = zip(self.versioned, self._versions, strict=True)
        return {id(tensor) for tensor, before in pairs if version_of(tensor) != before}

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is one of the lane's own, or a view of one."""
        if self._memory is None:
            self._memory = set(map(storage_of, self.tensors)) - {0}
        return bool(self._memory) and storage_of(tensor) in self._memory

    def is_buffer_of_model(self, tensor: torch.Tensor) -> bool:
        """True for a buffer, or another tensor that does not learn, of the model itself."""
        return any(map(is_, self.survey.tensors, repeat(tensor)))

    def replace_params(self, new: Sequence[torch.Tensor]) -> bool:
        """Put new tensors into the places of the parameters. False if a place cannot change."""
        return self._replace(self.survey.params, self.params, self._writers_of_params, new)

    def replace_tensors(self, new: Sequence[torch.Tensor]) -> bool:
        """Put new tensors into the places of the lane's own. False if a place cannot change."""
        return self._replace(self.survey.tensors, self.tensors, self._writers_of_tensors, new)

    def _replace(
        self,
        originals: Sequence[torch.Tensor],
        mine: list[torch.Tensor],
        writers: Writers | None,
        new: Sequence[torch.Tensor],
    ) -> bool:
        if writers is None:
            return False
        for tensor, write_each in zip(new, writers, strict=True):
            for write in write_each:
                write(tensor)
        self._memo.update(zip(map(id, originals), new, strict=True))
        mine[:] = new
        self._origins = None
        self.snapshot.note()
        return True

    # The places are looked up once: the survey has the same for as long as it lives

    @cached_property
    def _writers_of_params(self) -> Writers | None:
        return self._find_writers(self.survey.params)

    @cached_property
    def _writers_of_tensors(self) -> Writers | None:
        return self._find_writers(self.survey.tensors)

    def _find_writers(self, originals: Sequence[torch.Tensor]) -> Writers | None:
        """Return, for each tensor, the functions that write its entries in the copy.

        None if a place cannot change, such as one in a tuple.
        """
        found: Writers = []
        for original in originals:
            writers: list[Callable[[Any], None]] = []
            for holder in self.survey.holders.get(id(original), ()):
                if holder is None:
                    return None
                writers += self.snapshot.writers_of(holder.place, holder.key)
            found.append(writers)
        return found

    # What the replica owns

    def original_of(self, value: Any) -> Any:
        """Return the model's own object that a part of this replica is a copy of, or None.

        A tensor that the lane has written is not the model's.
        """
        if self._origins is None:
            self._origins = {}
            for key, copied in self._memo.items():
                original = self.survey.owned.get(key)
                if original is not None and key not in self._of_process:
                    self._origins[id(copied)] = original
        found = self._origins.get(id(value))
        if found is None or id(value) in self.find_written():
            return None
        # A write without a new version shows in the values alone
        may_differ = self.writes_unseen and isinstance(value, torch.Tensor)
        if may_differ and self._has_other_values(value, found):
            return None
        return found

    def _has_other_values(self, tensor: torch.Tensor, original: torch.Tensor) -> bool:
        """True for one of the lane's own tensors with other values than the model's."""
        is_own = any(tensor is each for each in self.tensors)
        if not is_own or tensor.layout is not torch.strided:
            return False
        same_form = tensor.shape == original.shape and tensor.dtype == original.dtype
        here = original.to(tensor.device)
        return not (same_form and torch.allclose(tensor, here, 0, 0, equal_nan=True))

    def owns(self, value: Any) -> bool:
        """True for an object that the copy made."""
        original = self.original_of(value)
        return original is not None and original is not value

    def _own_copy(self, value: Any) -> Any:
        """Return the copy of a part of the target that this replica owns; None if it owns none."""
        copied = self._memo.get(id(value), value)
        return None if copied is value or id(value) in self._of_process else copied

    def _find_parts_of_process(self) -> set[int]:
        """Return the ids of the parts whose copies belong to the process.

        A registry or a cache holds such a copy too, and so a second copy is the same object. Only
        classes with rules of their own for copies can do that.
        """
        found = set()
        # Others need no look: nothing but a container is written, emptied, or put back
        owners = {id(place.owner): place.owner for place in self.survey.places}
        for key, owner in owners.items():
            copied = self._memo.get(key)
            if copied is None or copied is owner or not has_rules_for_copies(type(owner)):
                continue
            # Without its own entry, the owner is copied once more; its parts have copies already
            del self._memo[key]
            try:
                if copy.deepcopy(owner, self._memo) is copied:
                    found.add(key)
            finally:
                self._memo[key] = copied
        return found

    def restore(self) -> None:
        """Put back the containers as they were."""
        self.snapshot.restore()
        self.is_dirty = False

    def clear(self) -> None:
        """Let go of everything: no cycle and no reference to this replica keeps tensors alive."""
        self.snapshot.clear()
        # A frame of a traceback, or a callback, may hold this object for long
        vars(self).clear()

    # The copy

    def _copy_target(self) -> None:
        survey, memo = self.survey, self._memo
        self._copy_scripts()
        # `copy.deepcopy` would take these parts apart wrongly. Each gets an empty copy first, which
        # the copies around it refer to, and is filled once all parts exist
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
        for module, name in survey.left_out:
            # Copies of a module leave this attribute out. Forward may read it, so lanes share it
            of_copy = vars(memo[id(module)])
            if of_copy.get(name) is None:
                of_copy[name] = vars(module).get(name)
        known = set(map(id, memo.values()))
        for module in survey.modules:
            self._check_module(module, known)

    def _without_copies(self, parts: Iterable[T]) -> list[T]:
        """Return the parts that have no copy yet: `known` may have some."""
        return [part for part in parts if id(part) not in self._memo]

    def _copy_scripts(self) -> None:
        """Copy TorchScript modules to another device.

        Lanes on their device share them: they have no state in Python.
        """
        survey = self.survey
        if not survey.scripts or all(self.of(each) is each for each in survey.params):
            return
        # A submodule is copied with the module around it
        inner: set[int] = set()
        for script in survey.scripts:
            inner.update(id(child) for child in script.modules() if child is not script)
        for script in survey.scripts:
            if id(script) in inner:
                continue
            if torch.is_grad_enabled() and any(each.requires_grad for each in script.parameters()):
                msg = (
                    f"no replica of {survey.path_of(script)!r} can be made on {self.device}: "
                    "gradients do not flow through the copy of a TorchScript module. For "
                    "inference, call it in torch.no_grad(). To train, use the module that it was "
                    "made from, or lanes on the device of the model alone"
                )
                raise ReplicaError(msg)
            copied = copy.deepcopy(script).to(self.device)
            self._memo.update(zip(map(id, script.modules()), copied.modules(), strict=True))
            originals = chain(script.parameters(), script.buffers())
            copies = chain(copied.parameters(), copied.buffers())
            for original, tensor in zip(originals, copies, strict=True):
                if not tensor.is_inference():  # it has no version
                    self._of_scripts.append((original, tensor))
        self._versions_of_scripts = [version_of(copied) for _, copied in self._of_scripts]

    def find_written_script(self) -> torch.Tensor | None:
        """Return a tensor of a TorchScript module whose copy was written; None if there is none."""
        versions = self._versions_of_scripts
        for (original, copied), before in zip(self._of_scripts, versions, strict=True):
            if version_of(copied) != before:
                return original
        return None

    def _make_twin(self, function: types.FunctionType) -> types.FunctionType:
        """Make the lane's own function for one that captures parts of the model.

        Its cells are filled once all parts have copies.
        """
        for cell in function.__closure__ or ():
            if self._is_part(read_slot(cell)):
                self._memo.setdefault(id(cell), types.CellType())
        closure = tuple(map(self.of, function.__closure__ or ()))
        return types.FunctionType(
            function.__code__, function.__globals__, function.__name__, None, closure
        )

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
        # Python 3.14 copies functions without a look at the memo
        for holder in self.survey.holders.get(id(function), ()):
            if holder is None:
                continue
            owner = self._own_copy(holder.place.owner)
            if owner is not None:
                holder.place.container(owner)[holder.key] = twin

    def _is_part(self, value: Any) -> bool:
        """True if the target leads to a value that a function holds, or to its object."""
        owner = value.__self__ if isinstance(value, types.MethodType) else value
        return id(owner) in self.survey.owned

    def _copy_part(self, value: Any) -> Any:
        if id(value) in self._memo or not self._is_part(value):
            return self.of(value)
        return copy.deepcopy(value, self._memo)

    def _fill_namespace(self, value: Any, copied: Any) -> None:
        """Fill the copy of a dict that deepcopy would take apart wrongly.

        Such a dict is its own ``__dict__``, or has a ``__getattr__`` that raises KeyError.
        """
        entries = {key: copy.deepcopy(part, self._memo) for key, part in [*dict.items(value)]}
        dict.update(copied, entries)
        own = vars_of(value)
        if own is value:
            object.__setattr__(copied, "__dict__", copied)
        elif own:
            vars(copied).update(copy.deepcopy(own, self._memo))

    def _name_uncopied_part(self, error: Exception) -> ReplicaError:
        """Return the error that names the part that deepcopy cannot copy."""
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
                copy.deepcopy(value, dict(self._memo))
            except Exception:  # noqa: BLE001  # code of the user's
                msg = (
                    f"no replica can be made: {self.survey.path_of(value)!r} is a "
                    f"{type(value).__name__}, which cannot be copied ({type(error).__name__}: "
                    f"{error}). Make it in forward, or give its class a __deepcopy__"
                )
                return ReplicaError(msg)
        msg = f"no replica can be made: copy.deepcopy raises {type(error).__name__}: {error}"
        return ReplicaError(msg)

    def _check_module(self, module: torch.nn.Module, known: set[int]) -> None:
        """Refuse a module that its ``__deepcopy__`` shares, and parts that this made."""
        copied = self.of(module)
        path = self.survey.paths[id(module)]
        name_of_module = repr(path) if path else "the module"
        what = f"no replica of {name_of_module} can be made: its copy"
        if copied is module:
            msg = f"{what} is the module itself. {_CURE}"
            raise ReplicaError(msg)
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


def clone_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return lasting copies of tensors on their device.

    Those that share memory are copied together.
    """
    memory = [*filter(None, map(storage_of, tensors))]
    with lasting():
        if len(set(memory)) == len(memory):
            found = [tensor.detach().clone() for tensor in tensors]
        else:
            found = copy.deepcopy([tensor.detach() for tensor in tensors])
    for tensor, each in zip(tensors, found, strict=True):
        if own := vars_of(tensor):
            vars(each).update(own)
    return found


def _has_known_parameters(part: Any, known: set[int]) -> bool:
    """True for a module that a copy made, if all its parameters are the lane's.

    Modules of e3nn make submodules from code in ``__setstate__``.
    """
    return isinstance(part, torch.nn.Module) and all(
        id(each) in known for each in part.parameters()
    )
