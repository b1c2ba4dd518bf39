"""Plans in a file: one JSON document with a record for each machine, release of torch, set of devices and target."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from parawrap.engine.plan._record import Record
from parawrap.errors import PlanError

__all__ = ["default_path", "merged", "read", "write"]

_FORMAT = "parawrap plans"
_VERSION = 1
_LEFT_BEHIND_S = 3600  # nobody takes that long to write a file
_KEY = ("machine", "torch", "devices", "target", "rule")


def default_path() -> Path:
    """plans.json in PARAWRAP_CACHE_DIR, or else where the user's caches are (XDG_CACHE_HOME, ~/.cache)."""
    named = os.environ.get("PARAWRAP_CACHE_DIR")
    if named:
        return Path(named).expanduser() / "plans.json"
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "parawrap" / "plans.json"


def read(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        PlanError: it cannot be read, or is no file of plans.
    """
    cure = "save one with p.plan.save(path)"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"no plan can be read from {path}: {error}; {cure}"
        raise PlanError(msg) from error
    except (ValueError, RecursionError) as error:
        msg = f"{path} is no file of plans: {error}; {cure}"
        raise PlanError(msg) from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        msg = f"{path} is no file of plans; {cure}"
        raise PlanError(msg)
    if document.get("version") != _VERSION:
        msg = f"{path} has plans of version {document.get('version')!r}, and this parawrap reads {_VERSION}; {cure} again"
        raise PlanError(msg)
    records = document.get("plans")
    if not isinstance(records, list) or not all(
        isinstance(one, dict) and {*_KEY, "cases"} <= one.keys() for one in records
    ):
        msg = f"{path} is a file of plans that lacks some of its parts; {cure} again"
        raise PlanError(msg)
    return records


def merged(old: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    """All of them; those with the same key are one, and of two of its cases that are the same the new one stays."""
    found: dict[tuple[str, ...], Record] = {}
    for one in (*old, *new):
        key = tuple(json.dumps(one[name]) for name in _KEY)
        before = found[key]["cases"] if key in found else []
        cases = {json.dumps(case["case"]): case for case in (*before, *one["cases"])}
        found[key] = {**one, "cases": list(cases.values())}
    return list(found.values())


def write(path: Path, records: Sequence[Record]) -> None:
    """Put the records into the file in one piece: whoever reads meanwhile finds what was there, or all of this.

    Raises:
        PlanError: the folder or the file cannot be written to.
    """
    document = {"format": _FORMAT, "version": _VERSION, "plans": list(records)}
    written = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_up(path)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=_prefix(path), delete=False
        ) as file:
            written = file.name
            json.dump(document, file, indent=1)
            file.write("\n")
        Path(written).replace(path)
        written = ""
    except OSError as error:
        msg = f"the plan cannot be saved to {path}: {error}; name another place, or set PARAWRAP_CACHE_DIR"
        raise PlanError(msg) from error
    finally:
        if written:
            Path(written).unlink(missing_ok=True)


def _clear_up(path: Path) -> None:
    """Remove what processes left behind that were killed while they wrote."""
    for left in path.parent.iterdir():
        with contextlib.suppress(OSError):  # it is gone already, or another's
            if left.name.startswith(_prefix(path)) and time.time() - left.stat().st_mtime > _LEFT_BEHIND_S:
                left.unlink()


def _prefix(path: Path) -> str:
    return f".{path.name}."
