"""The private name of torch that cutting uses. CONTRIBUTING.md lists it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from parawrap._private_name import private_reader

__all__ = ["version_of"]

version_of: Callable[[torch.Tensor], int] = private_reader("torch.Tensor._version", "batches")  # counts writes in place
