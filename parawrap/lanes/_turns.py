"""Decide which lanes of a call run one after another, so that a seed gives the same random numbers at each run.

Lanes of one device share its random generator; all CPU lanes do. With gradients they run in turns, in lane order, each with
all threads of torch: checkpointing then recomputes the same masks. Without gradients they run at the same time, and a call
that draws random numbers gets a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from parawrap.backends import backend_of, warn_caller

__all__ = ["Turns", "TurnsOf"]

TurnsOf = Literal["all", "device"]
"""The lanes that run their tasks one after another: all, or those of each device."""

_TENSOR = frozenset({torch.Tensor})


class Turns:
    """The turns of the lanes on `devices`, and the warnings of one session. Thread-safe: at worst a warning appears twice.

    `share_generators` is False for lanes in separate processes.
    """

    def __init__(self, devices: Sequence[torch.device], *, share_generators: bool = True) -> None:
        lanes = Counter(devices)
        self._shared = [device for device, count in lanes.items() if count > 1] if share_generators else []
        accelerators = [device for device in self._shared if device.type != "cpu"]
        self._drawn_from = [torch.device("cpu"), *accelerators] if share_generators and len(devices) > 1 else []
        self._is_on_cpu = devices[0].type == "cpu"
        self._has_warned_of_draws = False
        self._has_warned_of_turns = False

    def decide(
        self, leaves: Sequence[Any], generators: Iterable[torch.Generator], *, learns: bool, target: object
    ) -> TurnsOf | None:
        """Return the lanes that run in turns: "all", those of each "device", or None.

        `leaves` are the arguments of the call, `generators` those that the model holds. `learns` is True if a tensor of the
        model requires gradients.
        """
        only_tensors = _TENSOR.issuperset(map(type, leaves))
        if torch.are_deterministic_algorithms_enabled() or any(generators):
            return "all"
        if not only_tensors and any(type(leaf) is torch.Generator for leaf in leaves):
            return "all"
        if not self._shared:
            return None
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            return "device"  # also without gradients: a reentrant checkpoint runs forward without, and once more with them
        if not learns or not torch.is_grad_enabled():
            return None
        if self._is_on_cpu and not self._has_warned_of_turns and getattr(target, "training", True) is False:
            self._has_warned_of_turns = True
            warn_caller(
                "a model in eval mode is called with gradients enabled, so its lanes on the CPU run one after another. For "
                "inference, call it inside torch.inference_mode(), where they run at the same time"
            )
        return "device"

    def read_generators(self) -> list[bytes]:
        """Return the states of the generators that lanes share; nothing once a warning was given."""
        states: list[bytes] = []
        for device in () if self._has_warned_of_draws else self._drawn_from:
            is_cpu = device.type == "cpu"
            state = torch.default_generator.get_state() if is_cpu else backend_of(device.type).rng_state(device)
            if state is not None:
                states.append(_bytes_of(state))
        return states

    def warn_of_draws(self, before: list[bytes]) -> None:
        """Warn once if lanes that ran at the same time drew from a shared generator."""
        if before and before != self.read_generators():
            self._has_warned_of_draws = True
            warn_caller(
                "lanes that share a random generator drew from it at the same time, so a seed does not reproduce this "
                "call. With torch.use_deterministic_algorithms(True), lanes run one after another, in order. If the call "
                "draws no random numbers, another thread did"
            )


def _bytes_of(state: torch.Tensor) -> bytes:
    """Return the bytes of a state. Comparing bytes takes a tenth of the time of torch.equal."""
    try:
        return state.numpy().tobytes()
    except RuntimeError:  # numpy is not installed
        return bytes(state.untyped_storage())
