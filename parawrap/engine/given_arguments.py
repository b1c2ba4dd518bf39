"""Arguments of a call that another process runs: changes there are made here too.

The other process lends its copies to forward, as lanes of this process do. `read_changes` returns
what forward changed in them, and `mark_arguments` replaces arguments in the output by marks. Both
travel back. `Given` makes the same changes in the caller's arguments, and replaces the marks by
these arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from parawrap.engine.borrowed import Loan
from parawrap.engine.lent_containers import (
    EntriesAfter,
    are_same_objects,
    enter_entries,
    follow_path,
    paths_of_containers,
    read_entries,
    replace_parts,
)
from parawrap.engine.rules.registry import list_contents, update_argument
from parawrap.tree import WholeLeaf, flatten

_NUMBERS = (type(None), bool, int, float, complex)


class SentBack:
    """The mark of an argument in values that travel.

    Both processes number the arguments of each kind in the order of the flattened call.

    Attributes:
        kind: "leaf" for a tensor, "container", or "object" for an object with rules.
        number: The number of the argument among those of its kind.
    """

    __slots__ = ("kind", "number")

    def __init__(self, kind: str, number: int) -> None:
        self.kind = kind
        self.number = number


class ArgumentChanges(NamedTuple):
    """Changes by forward in copies of arguments. Each list is in the order of the arguments.

    Attributes:
        containers: The entries of each container after the call; None if it is unchanged.
        objects: Each object with rules, as it is after the call; None if it is unchanged.
    """

    containers: Sequence[EntriesAfter | None]
    objects: Sequence[Any]


def read_changes(loan: Loan) -> ArgumentChanges | None:
    """Return what forward changed in the copies of a loan, for `Given.replay`; None for nothing."""
    if loan.is_unchanged():
        return None
    find_mark = _find_marks(loan)

    def mark(value: Any) -> Any:
        return replace_parts(value, find_mark)

    containers: list[EntriesAfter | None] = []
    for before in loan.containers:
        after = read_entries(before)
        # A new entry may be an argument too, or hold one
        containers.append(None if after is None else after.replace_new(mark))
    # A changed object travels whole: the rules of its class merge it into the caller's own
    objects: list[Any] = []
    for index, before_call in loan.objects.items():
        part = loan.leaves[index]
        is_unchanged = are_same_objects(list_contents(part), before_call)
        objects.append(None if is_unchanged else part)
    return ArgumentChanges(containers, objects)


def mark_arguments(output: Any, loan: Loan) -> Any:
    """Return an output with marks in place of arguments, which would travel as copies."""
    if not (loan.containers or loan.objects):
        # Every call of plain tensors comes here: one look at the leaves, and no walk in Python
        leaves = (output,) if type(output) is torch.Tensor else flatten(output)[0]
        if set(map(id, loan.leaves)).isdisjoint(map(id, leaves)):
            return output
    return replace_parts(output, _find_marks(loan))


def _find_marks(loan: Loan) -> Callable[[Any], SentBack | None]:
    """Return a function that takes a value, and returns the mark of an argument, or None."""
    # By id. The loan keeps the arguments alive, so no other object has the id of one
    marks: dict[int, SentBack] = {}
    # A number gets no mark: all code shares the small ones, so one in the output need not be the
    # argument. A text that has arrived is a new object. Others that all code shares, such as
    # dtypes, may have marks, since they are the caller's objects too
    for number, leaf in enumerate(loan.leaves):
        if not isinstance(leaf, _NUMBERS):
            marks[id(leaf)] = SentBack("leaf", number)
    for number, before in enumerate(loan.containers):
        marks[id(before.container)] = SentBack("container", number)
    # Last: a tensor with rules is a leaf too, and its mark as an object replaces that of the leaf
    for number, index in enumerate(loan.objects):
        marks[id(loan.leaves[index])] = SentBack("object", number)

    def find_mark(node: Any) -> SentBack | None:
        return marks.get(id(node))

    return find_mark


class Given:
    """The caller's arguments of a call that another process runs.

    `call` is ``(args, kwargs)`` when it is sent: the caller may replace entries before the answer.

    Attributes:
        leaves: The leaves of the call.
        objects: The leaves that are objects with rules.
        containers: The containers that forward may change, outer ones first.
    """

    def __init__(self, call: Any) -> None:
        self.leaves, spec = flatten(call)
        self.objects = [leaf.value for leaf in self.leaves if isinstance(leaf, WholeLeaf)]
        self.containers = [follow_path(call, path) for path in paths_of_containers(spec)]

    def replay(self, changes: ArgumentChanges) -> None:
        """Make the changes of `read_changes` in the caller's arguments.

        Raises:
            ValueError: If the arguments have another structure than the copies.
            KeyError: If an entry of a container was removed here.
        """
        # Lists, so that unequal lengths raise before the first write
        containers = [*zip(self.containers, changes.containers, strict=True)]
        objects = [*zip(self.objects, changes.objects, strict=True)]
        for container, after in containers:
            if after is not None:
                enter_entries(container, after.replace_new(self.resolve))
        for value, part in objects:
            if part is not None:
                update_argument(value, part)

    def resolve(self, output: Any) -> Any:
        """Return an output with the caller's arguments in the places of their marks."""
        return replace_parts(output, self._find_argument)

    def _find_argument(self, node: Any) -> Any:
        """Return the argument of a mark; None for any other value."""
        if type(node) is not SentBack:
            return None
        arguments = {"container": self.containers, "object": self.objects, "leaf": self.leaves}
        return arguments[node.kind][node.number]
