"""The private names of torch that helpers of ranks use. CONTRIBUTING.md lists them."""

from __future__ import annotations

from typing import Any

from parawrap._private_name import private_name

# The base class of all batch norms, also of a user's own
BatchNorm: Any = private_name("torch.nn.modules.batchnorm._BatchNorm", "checks for batch norm")
# The attribute of a module from torch.compile that holds the user's module
COMPILED = "_orig_mod"
