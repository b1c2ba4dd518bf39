"""hypothesis without limits of time, which a busy machine may exceed."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

__all__ = ["assume", "given", "st"]

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "patient", parent=settings.default, deadline=None, suppress_health_check=SLOW
)
settings.load_profile("patient")
