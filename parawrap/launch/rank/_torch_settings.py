"""The settings of torch that hold for a whole process. Ranks adopt those of the script."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

__all__ = ["TorchSettings"]

# Attributes of torch. An entry comes after those that set it too. Releases of torch lack some.
_FLAGS = (
    "utils.deterministic.fill_uninitialized_memory",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.benchmark_limit",
    "backends.cudnn.deterministic",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.fp32_precision",
    "backends.cudnn.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.mkldnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
)


@dataclass(frozen=True)
class TorchSettings:
    """The seed, and the settings that change what a function computes.

    Attributes:
        seed: The seed of torch's default generator.
        dtype: The default dtype.
        deterministic: True for deterministic algorithms, and True if they only warn.
        finds_anomalies: True for anomaly detection, and True if it looks for NaN.
        has_gradients: True if the launching thread records gradients.
        precision: The precision of float32 matrix products. None if newer flags set it.
        allows_tf32: True if convolutions may use TF32. None if newer flags set it.
        flags: The values of `_FLAGS`.
    """

    seed: int
    dtype: torch.dtype
    deterministic: tuple[bool, bool]
    finds_anomalies: tuple[bool, bool]
    has_gradients: bool
    precision: str | None
    allows_tf32: bool | None
    flags: dict[str, Any]

    @classmethod
    def here(cls) -> TorchSettings:
        """Return the settings of this process."""
        flags = {}
        for name in _FLAGS:
            with contextlib.suppress(AttributeError):
                flags[name] = attrgetter(name)(torch)
        return cls(
            torch.initial_seed(),
            torch.get_default_dtype(),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            torch.is_grad_enabled(),
            _precision(flags),
            _allows_tf32(flags),
            flags,
        )

    def take_over(self) -> None:
        """Apply the settings that differ from those of this process."""
        here = TorchSettings.here()
        torch.default_generator.manual_seed(self.seed)  # the other generators are seeded from it
        torch.set_default_dtype(self.dtype)
        torch.set_grad_enabled(self.has_gradients)
        if self.deterministic != here.deterministic:  # the first call takes a second
            torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        if self.finds_anomalies != here.finds_anomalies:
            torch.autograd.set_detect_anomaly(*self.finds_anomalies)
        with warnings.catch_warnings():  # torch has warned in the script
            warnings.simplefilter("ignore")
            if self.precision not in (None, here.precision):
                torch.set_float32_matmul_precision(self.precision)
            if self.allows_tf32 not in (None, here.allows_tf32):
                torch.backends.cudnn.allow_tf32 = self.allows_tf32
            for name, value in self.flags.items():
                parent, _, flag = name.rpartition(".")
                with contextlib.suppress(AttributeError):  # the torch of another machine
                    owner = attrgetter(parent)(torch)
                    if value is not None and getattr(owner, flag) != value:
                        setattr(owner, flag, value)


def _precision(flags: dict[str, Any]) -> str | None:
    """Return the precision of float32 matrix products, or None if newer flags set it.

    Some releases warn if it is read. After the script has set it to "high" or "medium", they have warned.
    """
    if flags.get("backends.cuda.matmul.fp32_precision", "tf32") != "tf32":
        return None
    with contextlib.suppress(RuntimeError):  # refused if the newer flags have a value that it cannot express
        return torch.get_float32_matmul_precision()
    return None


def _allows_tf32(flags: dict[str, Any]) -> bool | None:
    """Return True if convolutions may use TF32, which is the default. Return None if newer flags set it."""
    if flags.get("backends.cudnn.conv.fp32_precision") == "tf32":
        return None
    with contextlib.suppress(RuntimeError):
        return torch.backends.cudnn.allow_tf32
    return None
