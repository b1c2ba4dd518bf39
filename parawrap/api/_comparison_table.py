"""The result of `compare`: measurements of each way, and a table of them."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

import torch

from parawrap.displays import Table

__all__ = ["Comparison", "Difference", "Way", "difference"]

_HEADER = "way", "median ms", "middle half ms", "speed-up", "extra MiB", "page faults", "outputs differ", "gradients differ"


class Difference(NamedTuple):
    """The greatest difference from the plain way: absolute, and relative to the largest value of the same tensor."""

    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"{self.absolute:.1e} ({self.relative:.1e})" if self.absolute else "0"


@dataclass(frozen=True, slots=True)
class Way:
    """Measurements of one way to run the call.

    Attributes:
        name: "plain" or "lanes".
        seconds: The time of each timed call.
        extra_bytes: The growth of memory up to its peak, in the last turn; None if the peak cannot be read.
        page_faults: Page faults of the process per timed call.
        outputs: The greatest difference of the outputs from the plain way.
        gradients: The greatest difference of the gradients from the plain way; None without `train`.
    """

    name: str
    seconds: tuple[float, ...]
    extra_bytes: int | None
    page_faults: float
    outputs: Difference
    gradients: Difference | None

    @property
    def quartiles(self) -> list[float]:
        """The quartiles of the times in seconds. The second one is the median."""
        return statistics.quantiles(self.seconds, n=4, method="inclusive")


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Measurements of each way, the plain one first; returned by `compare`. `print` shows a table.

    Example:
        >>> import torch
        >>> from parawrap import compare
        >>> comparison = compare(torch.nn.Linear(3, 2), torch.randn(9, 3), ["cpu", "cpu"], show=False)
        >>> [way.name for way in comparison.ways]
        ['plain', 'lanes']
    """

    title: str
    ways: tuple[Way, ...]

    def __repr__(self) -> str:
        return f"<Comparison: {', '.join(f'{way.name} {1e3 * way.quartiles[1]:.3g} ms' for way in self.ways)}>"

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        rows = []
        for way in self.ways:
            low, median, high = (f"{1e3 * quartile:.3f}" for quartile in way.quartiles)
            speed_up = f"{self.ways[0].quartiles[1] / way.quartiles[1]:.2f}"
            extra = "unknown" if way.extra_bytes is None else f"{way.extra_bytes / 2**20:.1f}"
            numbers = way.name, median, f"{low} to {high}", speed_up, extra, f"{way.page_faults:.0f}"
            rows.append((*numbers, str(way.outputs), str(way.gradients)))
        if self.ways[0].gradients:
            return Table(self.title, _HEADER, rows)
        return Table(self.title, _HEADER[:-1], [row[:-1] for row in rows])


def difference(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> Difference:
    """Return the greatest difference, infinite if shapes or positions of NaNs differ."""
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in plain]:
        return Difference(math.inf, math.inf)
    greatest = Difference(0.0, 0.0)
    for pair in zip(ours, plain, strict=True):
        one, other = (tensor.to(torch.promote_types(tensor.dtype, torch.float64)) for tensor in pair)
        gap = (one - other).abs()[(one != other) & ~(one.isnan() & other.isnan())].nan_to_num(nan=math.inf)
        if gap.numel():
            relative = (gap.max() / other.abs().nan_to_num(posinf=0.0).max()).item()
            greatest = Difference(max(greatest.absolute, gap.max().item()), max(greatest.relative, relative))
    return greatest
