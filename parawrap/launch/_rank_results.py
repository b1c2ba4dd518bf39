"""The results of a launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from parawrap._public import public
from parawrap.displays import Table, safe_repr, shorten, spell_count

_LONGEST = 100  # characters of a value
_MOST_SHOWN = 8  # ranks

R = TypeVar("R", covariant=True)


@public
class RankResults(tuple[R, ...]):
    """A tuple with one result per rank: ``results[0]`` is the value that rank 0 returned.

    >>> RankResults(["a", "b"])[1]
    'b'
    """

    __slots__ = ()

    def __new__(cls, values: Iterable[R]) -> RankResults[R]:
        return super().__new__(cls, tuple(values))

    def __repr__(self) -> str:
        shown = [shorten(safe_repr(value), _LONGEST) for value in self[:_MOST_SHOWN]]
        if len(self) > _MOST_SHOWN:
            shown.append(f"... {len(self)} ranks")
        return f"RankResults({', '.join(shown)})"

    def _repr_html_(self) -> str:
        rows = [
            (f"{rank}", type(value).__name__, shorten(safe_repr(value), _LONGEST))
            for rank, value in enumerate(self)
        ]
        title = f"results of {spell_count(len(self), 'rank')}"
        return Table(title, ("rank", "type", "value"), rows, texts=("type", "value")).html()
