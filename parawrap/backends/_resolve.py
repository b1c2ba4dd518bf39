"""From what a user writes for devices to a tuple of torch devices, one a lane."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parawrap.backends._registry import CORE_KINDS, backend_of, best_backend
from parawrap.errors import DeviceListError, DeviceUnavailableError

__all__ = ["DeviceLike", "Devices", "names_cores", "resolve_device", "resolve_devices"]

DeviceLike = int | str | torch.device
Devices = int | str | torch.device | Sequence[DeviceLike] | None


def resolve_devices(devices: Devices) -> tuple[torch.device, ...]:
    """The devices of the lanes, each of them there, all of one type.

    None and "auto" are every visible accelerator; without one, a single CPU lane. A kind such as "cuda" is every device of
    it; a number is that many of the best kind; a sequence is one entry per lane, and may repeat a device.

    Raises:
        DeviceListError: If the list is empty, of mixed types, or has an entry that is not a device.
        DeviceUnavailableError: If this process does not see a device.
    """
    if devices is None or devices == "auto":
        backend = best_backend()
        return backend.first(1) if backend.type == "cpu" else backend.every_device()
    if isinstance(devices, (bool, bytes)) or not isinstance(devices, (int, str, torch.device, Sequence)):
        msg = f"devices={devices!r} names no devices: give a number, a kind such as 'cuda', or a sequence of devices"
        raise DeviceListError(msg)
    if isinstance(devices, int):
        return _first(devices)
    if isinstance(devices, str):
        return (resolve_device(devices),) if ":" in devices else _all_of(devices)
    if isinstance(devices, torch.device):
        return (resolve_device(devices),)
    return _each(devices)


def names_cores(devices: object) -> bool:
    """Whether what a user writes for devices names NeuronCores: "nc", "neuron", "nc:0", or a sequence with one of these."""
    entries = devices if isinstance(devices, Sequence) and not isinstance(devices, str) else [devices]
    return any(str(entry).partition(":")[0] in CORE_KINDS for entry in entries)  # a NeuronCore is written as it is named


def resolve_device(device: DeviceLike) -> torch.device:
    """One device, with its index where its kind has indices; a bare number is an accelerator's index."""
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        msg = f"{device!r} is no device: give an index, a string such as 'cuda:0', or a torch.device"
        raise DeviceListError(msg)
    if isinstance(device, int):
        backend = best_backend()
        if backend.type == "cpu":
            msg = f"device index {device} names an accelerator and this machine has none; 'cpu' is a lane on the CPU"
            raise DeviceUnavailableError(msg)
        return backend.device(device)
    if isinstance(device, str):
        kind, separator, index = device.partition(":")
        if not kind or (separator and not index.isdecimal()):
            msg = f"{device!r} is no device: write a kind, or a kind, a colon and an index, as in 'cuda:0'"
            raise DeviceListError(msg)
        return backend_of(kind).device(int(index) if index else None)
    return backend_of(device.type).device(device.index)


def _all_of(kind: str) -> tuple[torch.device, ...]:
    if not kind:
        msg = "devices is an empty string: name a kind, such as 'cuda', or leave it out to take the best there is"
        raise DeviceListError(msg)
    backend = backend_of(kind)
    if backend.count() == 0:
        backend.device(None)  # raises, naming what is there
    return backend.every_device()


def _first(lanes: int) -> tuple[torch.device, ...]:
    if lanes < 1:
        msg = f"devices={lanes}: a number of devices is at least 1"
        raise DeviceListError(msg)
    return best_backend().first(lanes)


def _each(devices: Sequence[DeviceLike]) -> tuple[torch.device, ...]:
    if not devices:
        msg = "devices is empty: name at least one, or leave it out to take every visible one"
        raise DeviceListError(msg)
    resolved = tuple(resolve_device(device) for device in devices)
    kinds = sorted({device.type for device in resolved})
    if len(kinds) > 1:
        msg = f"devices={list(map(str, resolved))} mixes the types {kinds}: the lanes of one block share one type"
        raise DeviceListError(msg)
    return resolved
