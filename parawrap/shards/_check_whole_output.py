"""Check the output of a call that ran whole by the rules of a cut one."""

from __future__ import annotations

from typing import Any

from parawrap.errors import GatherError
from parawrap.shards._output_options import LEARN, JoinRules, declared_below
from parawrap.shards._reduce_numbers import is_number
from parawrap.tree import addresses, flatten_outside_sequences

__all__ = ["check_whole"]


def check_whole(output: Any, rows: int, rules: JoinRules) -> None:
    """Refuse numbers without `reduce`, as a cut call of the same kind does.

    Raises:
        GatherError: If an output is a number that is neither reduced nor declared.
    """
    if rules.reduce is None:
        _check(output, rows, "output", rules.out_dims)


def _check(output: Any, rows: int, place: str, declared: Any) -> None:
    leaves, spec = flatten_outside_sequences(output)
    below = [declared] if spec.is_leaf() else declared_below(declared, spec)
    where = [place] if spec.is_leaf() else addresses(spec, (place,))
    for leaf, each, at in zip(leaves, below, where, strict=True):
        if type(leaf) in (list, tuple):
            if len(leaf) != rows and each is LEARN:
                for index, item in enumerate(leaf):
                    _check(item, rows, f"{at}[{index}]", each)
        elif each is LEARN and is_number(leaf):
            msg = (
                f"{at} is a number, and lanes would each return one. Use reduce="
                '"mean", "sum", "stack", or a function, or out_dims=None for a value that is the same in every lane'
            )
            raise GatherError(msg)
