"""Parse the `devices` argument into torch devices, one per lane."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parawrap.backends._backend_registry import backend_of, best_backend, not_there, torch_kind
from parawrap.backends._neuron_devices import neuron_is_device
from parawrap.errors import DeviceListError, DeviceUnavailableError

DeviceLike = int | str | torch.device
Devices = int | str | torch.device | Sequence[DeviceLike] | None


def resolve_devices(devices: Devices) -> tuple[torch.device, ...]:
    """Return one available device per lane, all of one type.

    None and "auto" select every visible accelerator, or one CPU lane if there is none. A kind such as "cuda" selects all
    its devices. A number selects that many devices of the best kind. A sequence has one entry per lane; entries may repeat.
    "gpu" and "cuda" mean the same, and case does not matter, as in `Platform`.

    Raises:
        DeviceListError: If `devices` is empty, mixes device types, or has an entry that is not a device.
        DeviceUnavailableError: If this process does not see a device.
    """
    if devices is None or (isinstance(devices, str) and devices.lower() == "auto"):
        backend = best_backend()
        return backend.first(1) if backend.type == "cpu" else backend.every_device()
    if isinstance(devices, (bool, bytes)) or not isinstance(devices, (int, str, torch.device, Sequence)):
        msg = (
            f"devices={devices!r} is not a list of devices: pass a number, a kind such as 'cuda', or a sequence of devices"
        )
        raise DeviceListError(msg)
    if isinstance(devices, int):
        return _first(devices)
    if isinstance(devices, str):
        return (resolve_device(devices),) if ":" in devices else _all_of(devices)
    if isinstance(devices, torch.device):
        return (resolve_device(devices),)
    return _each(devices)


def names_cores(devices: object) -> bool:
    """True if `devices` names a NeuronCore for compiled models: "nc", "nc:0", or a sequence with one of these.

    "neuron" and "neuron:0" mean the same, unless torch has devices of kind "neuron".
    """
    entries = devices if isinstance(devices, Sequence) and not isinstance(devices, str) else [devices]
    kinds = {torch_kind(str(entry).partition(":")[0]) for entry in entries}  # str of a NeuronCore is "nc:0"
    return "nc" in kinds or ("neuron" in kinds and not neuron_is_device())


def resolve_device(device: DeviceLike) -> torch.device:
    """Return one available device, with its index if its kind has indices. An int is the index of an accelerator.

    Raises:
        DeviceListError: If `device` is not a device.
        DeviceUnavailableError: If this process does not see the device.
    """
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        msg = f"{device!r} is not a device: pass an index, a string such as 'cuda:0', or a torch.device"
        raise DeviceListError(msg)
    if isinstance(device, int):
        backend = best_backend()
        if backend.type == "cpu":
            msg = (
                f"device index {device} selects an accelerator, but this machine has none. Use 'cpu' for a lane on the CPU"
            )
            raise DeviceUnavailableError(msg)
        return backend.device(device)
    if isinstance(device, str):
        return _parse_device(device)
    return backend_of(device.type).device(device.index)


def _parse_device(name: str) -> torch.device:
    given, separator, digits = name.partition(":")
    if not given or (separator and not digits.isdecimal()):
        msg = f"{name!r} is not a device: pass a kind, or a kind with an index, as in 'cuda:0'"
        raise DeviceListError(msg)
    backend, index = backend_of(given), int(digits) if digits else None
    try:
        return backend.device(index)
    except DeviceUnavailableError:
        if given.lower() == backend.type:
            raise
        raise not_there(backend.type, index, backend.count(), name) from None  # "gpu:7", as the user wrote it


def _all_of(kind: str) -> tuple[torch.device, ...]:
    if not kind:
        msg = "devices is an empty string: pass a kind such as 'cuda', or omit it to use every visible accelerator"
        raise DeviceListError(msg)
    backend = backend_of(kind)
    if backend.count() == 0:
        _parse_device(kind)  # raises DeviceUnavailableError
    return backend.every_device()


def _first(lanes: int) -> tuple[torch.device, ...]:
    if lanes < 1:
        msg = f"devices={lanes}: pass a number of at least 1"
        raise DeviceListError(msg)
    return best_backend().first(lanes)


def _each(devices: Sequence[DeviceLike]) -> tuple[torch.device, ...]:
    if not devices:
        msg = "devices is empty: name at least one device, or omit it to use every visible accelerator"
        raise DeviceListError(msg)
    resolved = tuple(resolve_device(device) for device in devices)
    kinds = sorted({device.type for device in resolved})
    if len(kinds) > 1:
        msg = f"devices={list(map(str, resolved))} mixes the types {kinds}: use one type for all lanes of a block"
        raise DeviceListError(msg)
    return resolved
