"""Changes that a user makes to a model between calls.

Each is made to the model and to the oracle alike.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn

from tests.fuzz.models import Buffers, Built, Holder, Keeper, Mode

WRITES_PARAMETERS = frozenset({"data_mul", "data_new"})
"""Changes through ``.data`` that lanes on the model's own device see, because they hold its
parameters."""

WRITES_OTHERS = frozenset({"held_data", "buffer_data"})
"""Changes through ``.data`` that no lane sees."""


def scaled(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 1.125 if isinstance(output, torch.Tensor) else None


def _own(built: Built, kind: str, random: Random) -> tuple[nn.Module, str]:
    """Return the place of a parameter or buffer of floats, that of a block if there is any."""
    places = [
        (module, name)
        for module in built.modules()
        for name, value in getattr(module, kind).items()
        if value is not None and value.is_floating_point() and name not in ("seen", "room")
    ]
    in_blocks = [place for place in places if place[0] is not built.model]
    return random.choice(in_blocks if in_blocks and random.random() < 0.9 else places)


def _parameter(built: Built, random: Random) -> nn.Parameter:
    return getattr(*_own(built, "_parameters", random))


def _buffer(built: Built, random: Random) -> torch.Tensor:
    return getattr(*_own(built, "_buffers", random))


def _held(built: Built, random: Random) -> torch.Tensor:
    """Return a tensor in a plain attribute or object, or a buffer."""
    places = [block for block in built.blocks if isinstance(block, Keeper)]
    return random.choice(random.choice(places).held()) if places else _buffer(built, random)


def _learnable(built: Built, *, frozen: bool) -> list[torch.Tensor]:
    """Return the tensors that may require grad: parameters, and some buffers and plain tensors."""
    found = [value for module in built.modules() for value in module._parameters.values()]
    found += [
        value for block in built.blocks if isinstance(block, Buffers) for value in block.buffers()
    ]
    found += [
        tensor for block in built.blocks if isinstance(block, Keeper) for tensor in block.held()
    ]
    return [
        each
        for each in found
        if each is not None and each.is_leaf and not (frozen and each.requires_grad)
    ]


def _part_with_mode(built: Built, random: Random) -> nn.Module:
    places = [block for block in built.blocks if isinstance(block, Mode)]
    return random.choice(places if places and random.random() < 0.7 else built.modules())


def data_new(built: Built, random: Random) -> None:
    parameter = _parameter(built, random)
    parameter.data = parameter.data * 0.75


def write(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(1.125)


def unfreeze(built: Built, random: Random) -> None:
    frozen = _learnable(built, frozen=True)
    if frozen:
        random.choice(frozen).requires_grad_(True)


def replace_tensor(built: Built, random: Random, kind: str) -> None:
    module, name = _own(built, kind, random)
    new = getattr(module, kind)[name].detach() * 0.5 + 0.25
    setattr(module, name, nn.Parameter(new) if kind == "_parameters" else new)


def replace_part(built: Built, random: Random, *, grows: bool = False) -> None:
    holders = [block for block in built.blocks if isinstance(block, Holder)]
    if holders:
        part = built.block((random.choice(("plain", "scratch")),))
        holder = random.choice(holders)
        if grows:
            holder.grow(part)
        else:
            holder.swap(random.randrange(3), part)


def replace_attribute(built: Built, random: Random) -> None:
    places = [block for block in built.blocks if isinstance(block, Keeper)]
    if places and random.random() < 0.8:
        random.choice(places).replace(random)
    else:
        built.model.shift = random.choice([0.25, 0.75])


def unhook(built: Built, random: Random) -> None:
    if built.handles:
        built.handles.pop().remove()


CHANGES: dict[str, Callable[[Built, Random], Any]] = {
    "data_mul": lambda built, random: _parameter(built, random).data.mul_(1.25),
    "data_new": data_new,
    "buffer_data": lambda built, random: _buffer(built, random).data.mul_(0.5),
    "held_data": lambda built, random: _held(built, random).data.mul_(0.5),
    "write": lambda built, random: write(_parameter(built, random)),
    "held_write": lambda built, random: write(_held(built, random)),
    "freeze": lambda built, random: random.choice(_learnable(built, frozen=False)).requires_grad_(
        False
    ),
    "unfreeze": unfreeze,
    "recast": lambda built, random: built.model.float().double(),
    "replace_parameter": lambda built, random: replace_tensor(built, random, "_parameters"),
    "replace_buffer": lambda built, random: replace_tensor(built, random, "_buffers"),
    "replace_part": replace_part,
    "grow": lambda built, random: replace_part(built, random, grows=True),
    "replace_attribute": replace_attribute,
    "hook": lambda built, random: built.handles.append(
        random.choice(built.modules()).register_forward_hook(scaled)
    ),
    "unhook": unhook,
    "train": lambda built, random: built.model.train(),
    "eval": lambda built, random: built.model.eval(),
    "sub_train": lambda built, random: _part_with_mode(built, random).train(),
    "sub_eval": lambda built, random: _part_with_mode(built, random).eval(),
}
