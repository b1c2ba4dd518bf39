"""A progress bar for `Parallel.map` that shows the rows per second of each lane."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sized
from types import TracebackType
from typing import Any, Self

from parawrap.engine import Ticket

__all__ = ["Progress"]


class Progress:
    """A tqdm bar that counts batches. Call it with each finished ticket."""

    def __init__(self, batches: Iterable[Any]) -> None:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            msg = "progress=True needs tqdm, which is not installed. Run pip install 'parawrap[cli]'"
            raise ImportError(msg) from error
        self._bar = tqdm(total=len(batches) if isinstance(batches, Sized) else None, unit="batch")
        self._rows: Counter[int] = Counter()
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def __call__(self, ticket: Ticket) -> None:
        self._rows[ticket.future.lane] += ticket.rows
        passed = time.perf_counter() - self._start
        speeds = {f"lane {lane}": f"{rows / passed:,.0f} rows/s" for lane, rows in sorted(self._rows.items())}
        self._bar.set_postfix(speeds, refresh=False)
        self._bar.update()
