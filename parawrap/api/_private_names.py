"""The private name of torch that this package uses. CONTRIBUTING.md lists it."""

from __future__ import annotations

from typing import Any

import torch

# Without it, `tree_map` of torch takes the parts of a batch as one leaf.
register_pytree_node: Any = getattr(getattr(torch.utils, "_pytree", None), "register_pytree_node", lambda *_: None)
