"""Parse the `devices` argument into torch devices, one per lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from parawrap.backends._backend_registry import backend_of, best_backend, torch_kind
from parawrap.backends._neuron_devices import neuron_is_device
from parawrap.errors import DeviceListError, DeviceUnavailableError

DeviceLike = int | str | torch.device
Devices = int | str | torch.device | Sequence[DeviceLike] | None


def resolve_devices(devices: Devices) -> tuple[torch.device, ...]:
    """Return one available device per lane, all of one type.

    None and "auto" select every visible accelerator, or one CPU lane if there is none. A kind such
    as "cuda" selects all its devices. A number selects that many devices of the best kind. A
    sequence has one entry per lane; entries may repeat. "gpu" and "cuda" mean the same, and case
    does not matter, as in `Platform`.

    Raises:
        DeviceListError: If `devices` is empty, mixes device types, or has an entry that is not a
            device.
        DeviceUnavailableError: If this process does not see a device.
    """
    if devices is None or (isinstance(devices, str) and devices.lower() == "auto"):
        backend = best_backend()
        return backend.first(1) if backend.type == "cpu" else backend.every_device()
    if isinstance(devices, int) and not isinstance(devices, bool):
        if devices < 1:
            msg = f"devices={devices}: pass a number of at least 1"
            raise DeviceListError(msg)
        return best_backend().first(devices)
    if isinstance(devices, str) and devices and ":" not in devices:
        backend = backend_of(devices)
        # If there are none, `device` raises the error that lists the devices of this machine
        return backend.every_device() or (backend.device(None),)
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Sequence):
        # One device, or another value such as bytes, which `resolve_device` refuses
        return (resolve_device(cast("DeviceLike", devices)),)
    if not devices:
        msg = (
            "devices is empty: name at least one device, or omit it to use every visible "
            "accelerator"
        )
        raise DeviceListError(msg)
    resolved = tuple(map(resolve_device, devices))
    kinds = sorted({device.type for device in resolved})
    if len(kinds) > 1:
        msg = (
            f"devices={list(map(str, resolved))} mixes the types {kinds}: use one type for all "
            "lanes of a block"
        )
        raise DeviceListError(msg)
    return resolved


def names_cores(devices: object) -> bool:
    """True if `devices` names a NeuronCore for compiled models, such as "nc", "nc:0", or ["nc:1"].

    "neuron" and "neuron:0" mean the same, unless torch has devices of kind "neuron".
    """
    entries: Sequence[object] = [devices]
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        entries = devices
    # An entry may also be a `NeuronCore`, a class that this package does not know. Its text is
    # "nc:0"
    kinds = {torch_kind(str(entry).partition(":")[0]) for entry in entries}
    return "nc" in kinds or ("neuron" in kinds and not neuron_is_device())


def resolve_device(device: DeviceLike) -> torch.device:
    """Return one available device, with its index if its kind has indices.

    An int is the index of an accelerator.

    Raises:
        DeviceListError: If `device` is not a device.
        DeviceUnavailableError: If this process does not see the device.
    """
    if isinstance(device, torch.device):
        return backend_of(device.type).device(device.index)
    if isinstance(device, str):
        kind, separator, digits = device.partition(":")
        if not kind or (separator and not digits.isdecimal()):
            msg = (
                f"{device!r} is not a device: pass a kind, or a kind with an index, as in 'cuda:0'"
            )
            raise DeviceListError(msg)
        return backend_of(kind).device(int(digits) if digits else None)
    if isinstance(device, bool) or not isinstance(device, int):
        msg = (
            f"{device!r} is not a device: pass an index, a string such as 'cuda:0', or a "
            "torch.device"
        )
        raise DeviceListError(msg)
    backend = best_backend()
    if backend.type == "cpu":
        msg = (
            f"device index {device} selects an accelerator, but this machine has none. Use 'cpu' "
            "for a lane on the CPU"
        )
        raise DeviceUnavailableError(msg)
    return backend.device(device)
