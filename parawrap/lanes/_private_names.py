"""The private names of torch that lanes use. CONTRIBUTING.md lists them."""

from __future__ import annotations

from typing import Any

from torch.autograd import forward_ad

from parawrap._private_name import private_attribute, private_name

__all__ = [
    "DeviceContext",
    "dispatch_modes",
    "forward_ad_level",
    "function_modes",
    "functorch_level",
    "profiler_runs",
    "saved_tensor_hooks",
]


def _name(path: str) -> Any:
    return private_name(path, "lanes")


def forward_ad_level() -> int:
    """Return the level of forward-mode autograd, -1 outside it. All threads share it."""
    level: int = private_attribute(forward_ad, "_current_level", "lanes")
    return level


# Modes and hooks of the calling thread
DeviceContext: Any = _name("torch.utils._device.DeviceContext")
function_modes = _name("torch.overrides._get_current_function_mode_stack")
dispatch_modes = _name("torch._C._len_torch_dispatch_stack")
saved_tensor_hooks = _name("torch._C._autograd._top_saved_tensors_default_hooks")
functorch_level = _name("torch._C._functorch.peek_interpreter_stack")
profiler_runs = _name("torch._C._autograd._profiler_enabled")
