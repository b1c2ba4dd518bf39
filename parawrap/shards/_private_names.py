"""The private name of torch that cutting uses. CONTRIBUTING.md lists it."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch

__all__ = ["version_of"]

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")  # a tensor's count of writes in place
