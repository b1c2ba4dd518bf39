"""Keep pytest from the scripts, which it would run to look for doctests."""

from __future__ import annotations

collect_ignore = ["scripts"]
