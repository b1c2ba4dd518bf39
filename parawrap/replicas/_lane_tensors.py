"""The tensors of one replica: links to parameters, and its own copies of tensors that do not require gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar
from weakref import ref

import torch

from parawrap.replicas._batched_copies import bytes_of, can_be_sent, copies_at, lasting
from parawrap.replicas._gradients import Mirror, link_view
from parawrap.replicas._ledger import Ledger
from parawrap.replicas._private_names import copy_all, version_of

__all__ = ["LaneTensors", "is_computed", "is_parameter"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_data: Any = torch.Tensor.data
_requires_grad = attrgetter("requires_grad")


class _LaneView(torch.Tensor):
    """A lane's view of a tensor that learns. Writes through its ``data`` advance the version of the original."""

    __torch_function__: Any = torch.nn.Parameter.__torch_function__  # operators treat the view as a plain tensor
    moves: ClassVar[int] = 0  # how often the ``data`` of any view was set

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _data.__set__(self, value)
        _LaneView.moves += 1


class _LaneParameter(_LaneView, torch.nn.Parameter):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A lane's view of a parameter. Its deep copy is a parameter, like a copy of the parameter."""

    def __deepcopy__(self, memo: dict[int, object]) -> torch.nn.Parameter:
        return _copy_of_parameter(self, memo)


def is_computed(tensor: torch.Tensor) -> bool:
    """True for the result of operations that gradients flow through: a weight that a hook computes, for instance."""
    return tensor.grad_fn is not None


def is_parameter(tensor: torch.Tensor) -> bool:
    """True for a parameter, and for any other tensor that learns."""
    return tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)


class LaneTensors:
    """The tensors of one replica. A lane may write its own copies; it never holds a leaf that requires gradients."""

    def __init__(
        self, device: torch.device, home: torch.device | None, mirror: Mirror | None, *, detach: bool = False
    ) -> None:
        self.device = device
        self.home = home
        self._mirror = mirror
        self._detach = detach
        self._origins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: dict[int, torch.Tensor] = {}
        self._views: list[torch.Tensor] = []  # of parameters
        self._frozen: list[torch.Tensor] = []  # views without gradients
        # Views that may be moved, each with the tensor that it is a view of
        self._placed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._moves = 0
        self.computed: list[torch.Tensor] = []
        self._originals: list[torch.Tensor] = []  # of the copies of the replica's own
        self._copies: list[torch.Tensor] = []
        self._ledger = Ledger((), ())
        self._together: dict[int, list[torch.Tensor]] = {}  # by an original: those that share its memory
        self._aliases: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def take(self, originals: Sequence[torch.Tensor]) -> None:
        """Make the replica's tensors for these originals."""
        own = [tensor for tensor in originals if not is_parameter(tensor)]
        self.computed = [tensor for tensor in originals if is_computed(tensor)]
        for tensor in originals:
            if is_computed(tensor):
                self._enter(tensor, self._brought(tensor))
            elif is_parameter(tensor):
                self._enter(tensor, self._view(tensor))
        with lasting():
            copies = self._copy(own)
        self._originals, self._copies = own, copies
        for tensor, copy in zip(own, copies, strict=True):
            self._enter(tensor, copy)
        self._look()

    def versions(self) -> list[int]:
        """Return the versions of the replica's parameters."""
        return [*map(version_of, self._views)]

    def written_parameter(self, versions: list[int]) -> torch.Tensor | None:
        """Return a parameter that the lane wrote since it had those versions; None if there is none.

        Other memory and another ``requires_grad`` count as writes, and are put back.
        """
        now = self.versions()
        if now == versions and self._moves == _LaneView.moves and not any(map(_requires_grad, self._frozen)):
            return None
        written = [view for view, before, after in zip(self._views, versions, now, strict=True) if before != after]
        return next((self._origins[id(view)][1] for view in (*written, *self.put_back())), None)

    def put_back(self) -> list[torch.Tensor]:
        """Give views their memory back, and freeze frozen ones. Return the views that a call changed."""
        self._moves = _LaneView.moves
        moved = [(view, base) for view, base in self._placed if not _have_same_memory(view, base)]
        for view, base in moved:
            _data.__set__(view, base.detach())
        learning = [*filter(_requires_grad, self._frozen)]
        for view in learning:
            view.requires_grad_(False)
        return [*learning, *(view for view, _ in moved)]

    def of(self, original: torch.Tensor) -> torch.Tensor:
        """Return the replica's tensor for one of the model's."""
        found = self._made.get(id(original))
        return self._brought(original) if found is None else found

    def original_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the model's tensor that this one is a view or a copy of; None for any other."""
        found = self._origins.get(id(tensor))
        return None if found is None else found[1]

    def held(self) -> Iterable[torch.Tensor]:
        """The replica's own copies."""
        return self._copies

    def written(self) -> list[torch.Tensor]:
        """Return the originals of the copies that the lane wrote, or gave other memory."""
        if self._ledger.unwritten() and self._ledger.same_form():
            return []
        changed = set(map(id, (*self._ledger.written(), *self._ledger.moved())))
        return [original for original, copy in zip(self._originals, self._copies, strict=True) if id(copy) in changed]

    def replace(self, before: torch.Tensor, now: torch.Tensor) -> None:
        """Take the copy of a tensor for that of another one, until the next `renew`."""
        copy = self._made.pop(id(before))
        self._originals = [now if each is before else each for each in self._originals]
        self._enter(now, copy)

    def renew(self, changed: Sequence[torch.Tensor], place: Callable[[torch.Tensor, torch.Tensor], bool]) -> int:
        """Make new copies of those originals, and `place` them; return the bytes copied.

        They are new because a graph that waits for its backward pass may hold the present ones. Computed tensors are
        brought from the model's device again, so that gradients flow through them in the modes of this call.
        """
        wanted = {id(each) for tensor in changed for each in self._together.get(id(tensor), (tensor,))}
        mine = [index for index, tensor in enumerate(self._originals) if id(tensor) in wanted]
        with lasting():
            copies = self._copy([self._originals[index] for index in mine])
        for index, copy in zip(mine, copies, strict=True):
            original = self._originals[index]
            if place(original, copy):
                self._origins.pop(id(self._copies[index]), None)
                self._copies[index] = copy
                self._enter(original, copy)
        if mine:
            self._look()
        for original in self.computed:
            if not self._is_at_home(original):
                self._origins.pop(id(self._made[id(original)]), None)
                self._enter(original, self._brought(original))
                place(original, self._made[id(original)])
        return sum(bytes_of(self._originals[index]) for index in mine)

    def renew_in_lane(self) -> None:
        """Copy the originals into the replica's own copies, as part of a lane's task on the model's device.

        It sees every write, also through ``tensor.data``, and like such a write it leaves versions alone.
        """
        with lasting():
            copy_all(*self._aliases)

    @property
    def renews_in_lane(self) -> bool:
        """True if the replica has copies on the model's device."""
        return self._mirror is None and bool(self._copies)

    def _look(self) -> None:
        """Note the versions and the memory of the copies, and alias them for `renew_in_lane`."""
        self._ledger = Ledger(self._copies, self._copies)
        pairs = zip(self._copies, self._originals, strict=True)
        same = [(copy.data, tensor.detach()) for copy, tensor in pairs if copy.device == tensor.device]
        self._aliases = [copy for copy, _ in same], [tensor for _, tensor in same]

    def _enter(self, original: torch.Tensor, tensor: torch.Tensor) -> None:
        self._made[id(original)] = tensor
        self._origins[id(tensor)] = tensor, original

    def _is_at_home(self, tensor: torch.Tensor) -> bool:
        return self._mirror is None or tensor.device != self.home

    def _view(self, original: torch.Tensor) -> torch.Tensor:
        base = original if self._mirror is None or self._is_at_home(original) else self._mirror.link(original)
        if not original.requires_grad and type(original) not in _PLAIN:
            return base  # a subclass may not have views; without gradients none is needed
        is_parameter = isinstance(original, torch.nn.Parameter)
        view: torch.Tensor
        with torch.inference_mode(False), torch.enable_grad():
            base = base.detach() if self._detach else base
            if type(original) in _PLAIN:
                view = link_view(base, _LaneParameter if is_parameter else _LaneView)
            else:
                view = base[...].as_subclass(type(original))
        vars(view).update(vars(original))
        if is_parameter and not issubclass(type(view), torch.nn.Parameter):
            # isinstance(view, torch.nn.Parameter) holds then, and deepcopy, which refuses views, gives a parameter.
            vars(view).update(_is_param=True, __deepcopy__=partial(_copy_of_reference, ref(view)))
        if not original.is_inference():
            self._views.append(view)
        if isinstance(view, _LaneView) and view.layout is torch.strided:
            self._placed.append((view, base))
        if not view.requires_grad:
            self._frozen.append(view)
        return view

    def _brought(self, tensor: torch.Tensor) -> torch.Tensor:
        brought = tensor if self._is_at_home(tensor) else tensor.to(self.device)
        return brought.detach() if self._detach else brought

    def _copy(self, originals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """New copies of tensors: on the replica's device, or where a tensor is if that is not the model's device.

        Tensors that share memory have copies that share memory.
        """
        values = [tensor.detach() for tensor in originals]
        shared = _group_sharing(values)
        for group in shared:
            members = [originals[index] for index in group]
            self._together.update((id(member), members) for member in members)
        inside = {index for group in shared for index in group}
        alone = [index for index in range(len(values)) if index not in inside]
        made = self._move([*(values[index] for index in alone), *(_whole_memory(values[group[0]]) for group in shared)])
        copies = dict(zip(alone, made, strict=False))
        for group, memory in zip(shared, made[len(alone) :], strict=True):
            for index in group:
                value = values[index]
                copies[index] = memory.as_strided(value.shape, value.stride(), value.storage_offset())
        for index, original in enumerate(originals):
            if hasattr(original, "__dict__"):
                vars(copies[index]).update(vars(original))
        return [copies[index] for index in range(len(values))]

    def _move(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors, straight to the replica's device if they are on the model's."""
        if self._mirror is None:
            return [tensor.clone() for tensor in values]
        arrived = iter(copies_at(self.device, [tensor for tensor in values if not self._is_at_home(tensor)]))
        return [tensor.clone() if self._is_at_home(tensor) else next(arrived) for tensor in values]


def _copy_of_reference(reference: Callable[[], Any], memo: dict[int, object]) -> torch.nn.Parameter:
    return _copy_of_parameter(reference(), memo)


def _copy_of_parameter(view: torch.Tensor, memo: dict[int, object]) -> torch.nn.Parameter:
    """Deep-copy a view of a parameter: the copy is a parameter, like a copy of the parameter."""
    with torch.no_grad():
        copy = torch.nn.Parameter(view.detach().clone(), view.requires_grad)
    memo[id(view)] = copy
    return copy


def _have_same_memory(view: torch.Tensor, base: torch.Tensor) -> bool:
    return view.data_ptr() == base.data_ptr() and view.shape == base.shape and view.stride() == base.stride()


def _group_sharing(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the indices of tensors that share memory, in groups that fill most of it."""
    found: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if can_be_sent(tensor) and not (tensor.is_conj() or tensor.is_neg()):
            found.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(index)
    groups = (group for (address, _), group in found.items() if address and len(group) > 1)
    return [group for group in groups if _whole_memory(tensors[group[0]]).nbytes <= sum(tensors[i].nbytes for i in group)]


def _whole_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return all memory that a tensor and its views share, as a vector."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
