"""How many times as fast as the plain call a call could be at most, by what stands in the way.

Each is computed from what was measured beside the figure that it limits.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["cores_limit", "faults_limit", "interpreter_limit", "listed"]


def cores_limit(plain: float, one_thread: float, cores: int) -> float:
    """Where the work of a call at one thread is shared out over all cores without loss.

    >>> cores_limit(plain=3.0, one_thread=4.0, cores=2)
    1.5
    """
    return plain / (one_thread / cores)


def interpreter_limit(plain: float, one_thread: float, one_row: float, lanes: int) -> float:
    """Where lanes share one interpreter. A call of one row at one thread is taken for what does not shrink with the rows.

    Of that every lane has its own, and they hold the interpreter's lock one after the other; and no lane is done before its
    own and its share of the rest.

    >>> interpreter_limit(plain=4.0, one_thread=4.0, one_row=1.0, lanes=2)
    1.6
    >>> interpreter_limit(plain=4.0, one_thread=4.0, one_row=3.0, lanes=2)
    0.6666666666666666
    """
    rest = max(0.0, one_thread - one_row)
    return plain / max(lanes * one_row, one_row + rest / lanes)


def faults_limit(plain: float, kept: float) -> float:
    """Where the process keeps the memory that it frees, and nothing else is different."""
    return plain / kept


def listed(limits: Mapping[str, object]) -> str:
    """For a table's cell; what is no figure is told as it is."""
    return "<br>".join(
        f"{name}: {value:.2f}" if isinstance(value, float) else f"{name}: {value}" for name, value in limits.items()
    )
