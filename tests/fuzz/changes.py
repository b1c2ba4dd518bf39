"""Changes that a user makes to a model between calls. Each is made to the model and to the oracle alike."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn

from tests.fuzz.models import KEEPERS, Buffers, Built, Holder, Mode

Change = Callable[[Built, Random], None]
CHANGES: dict[str, Change] = {}
WRITES_DATA = frozenset({"held_data", "data_mul", "data_new", "buffer_data", "ema"})


def change(function: Change) -> Change:
    """Enter a function into `CHANGES`."""
    CHANGES[function.__name__.removeprefix("change_")] = function
    return function


def scaled(module: nn.Module, args: Any, output: Any) -> Any:
    """Return a scaled output, as a hook."""
    return output * 1.125 if isinstance(output, torch.Tensor) else None


def _own(built: Built, kind: str, random: Random) -> list[tuple[nn.Module, str]]:
    """Return the places of parameters or buffers of floats, those of the blocks if there are any."""
    places = [
        (module, name)
        for module in built.modules()
        for name, value in getattr(module, kind).items()
        if value is not None and value.is_floating_point() and name not in ("seen", "room")
    ]
    in_blocks = [place for place in places if place[0] is not built.model]
    return in_blocks if in_blocks and random.random() < 0.9 else places


def _parameter(built: Built, random: Random) -> nn.Parameter:
    module, name = random.choice(_own(built, "_parameters", random))
    return module._parameters[name]


def _buffer(built: Built, random: Random) -> torch.Tensor:
    module, name = random.choice(_own(built, "_buffers", random))
    return module._buffers[name]


@change
def change_data_mul(built: Built, random: Random) -> None:
    _parameter(built, random).data.mul_(1.25)


@change
def change_data_new(built: Built, random: Random) -> None:
    parameter = _parameter(built, random)
    parameter.data = parameter.data * 0.75


@change
def change_buffer_data(built: Built, random: Random) -> None:
    _buffer(built, random).data.mul_(0.5)


@change
def change_ema(built: Built, random: Random) -> None:
    parameter = _parameter(built, random)
    parameter.data.mul_(0.9).add_(torch.randn_like(parameter), alpha=0.1)


@change
def change_write(built: Built, random: Random) -> None:
    with torch.no_grad():
        _parameter(built, random).mul_(1.125)


def _learnable(built: Built) -> list[torch.Tensor]:
    """Return the tensors that may require grad: parameters, and some buffers and plain tensors."""
    places = [block for block in built.blocks if isinstance(block, KEEPERS)]
    found = [value for module in built.modules() for value in module._parameters.values()]
    found += [value for block in built.blocks if isinstance(block, Buffers) for value in block.buffers()]
    found += [tensor for block in places for tensor in block.held()]
    return [tensor for tensor in found if tensor is not None and tensor.is_leaf]


@change
def change_freeze(built: Built, random: Random) -> None:
    random.choice(_learnable(built)).requires_grad_(False)


@change
def change_unfreeze(built: Built, random: Random) -> None:
    frozen = [tensor for tensor in _learnable(built) if not tensor.requires_grad]
    if frozen:
        random.choice(frozen).requires_grad_(True)


@change
def change_recast(built: Built, random: Random) -> None:
    built.model.float().double()


@change
def change_replace_parameter(built: Built, random: Random) -> None:
    module, name = random.choice(_own(built, "_parameters", random))
    setattr(module, name, nn.Parameter(module._parameters[name].detach() * 0.5 + 0.25))


@change
def change_replace_buffer(built: Built, random: Random) -> None:
    module, name = random.choice(_own(built, "_buffers", random))
    setattr(module, name, module._buffers[name].detach() * 0.5 + 0.25)


@change
def change_replace_part(built: Built, random: Random) -> None:
    holders = [block for block in built.blocks if isinstance(block, Holder)]
    if holders:
        random.choice(holders).swap(random.randrange(3), built.block((random.choice(("plain", "scratch")),)))


@change
def change_grow(built: Built, random: Random) -> None:
    holders = [block for block in built.blocks if isinstance(block, Holder)]
    if holders:
        random.choice(holders).grow(built.block((random.choice(("plain", "scratch")),)))


def _held(built: Built, random: Random) -> torch.Tensor:
    """Return a tensor in a plain attribute or object, or a buffer."""
    places = [block for block in built.blocks if isinstance(block, KEEPERS)]
    return random.choice(random.choice(places).held()) if places else _buffer(built, random)


@change
def change_held_data(built: Built, random: Random) -> None:
    _held(built, random).data.mul_(0.5)


@change
def change_held_write(built: Built, random: Random) -> None:
    with torch.no_grad():
        _held(built, random).mul_(0.5)


@change
def change_replace_attribute(built: Built, random: Random) -> None:
    places = [block for block in built.blocks if isinstance(block, KEEPERS)]
    if places and random.random() < 0.8:
        random.choice(places).replace(random)
    else:
        built.model.shift = random.choice([0.25, 0.75])


@change
def change_load(built: Built, random: Random, *, assign: bool = False) -> None:
    state = built.model.state_dict()
    new = {name: value.detach() * 0.5 if value.is_floating_point() else value for name, value in state.items()}
    built.model.load_state_dict(new, assign=assign)


@change
def change_load_assign(built: Built, random: Random) -> None:
    change_load(built, random, assign=True)


@change
def change_hook(built: Built, random: Random) -> None:
    built.handles.append(random.choice(built.modules()).register_forward_hook(scaled))


@change
def change_unhook(built: Built, random: Random) -> None:
    if built.handles:
        built.handles.pop().remove()
    else:
        hooked = [module for module in built.modules() if module._forward_hooks and type(module).__name__ == "Linear"]
        if hooked:
            hooked[0]._forward_hooks.clear()


@change
def change_train(built: Built, random: Random) -> None:
    built.model.train()


@change
def change_eval(built: Built, random: Random) -> None:
    built.model.eval()


@change
def change_sub_train(built: Built, random: Random) -> None:
    _part_with_mode(built, random).train()


@change
def change_sub_eval(built: Built, random: Random) -> None:
    _part_with_mode(built, random).eval()


def _part_with_mode(built: Built, random: Random) -> nn.Module:
    places = [block for block in built.blocks if isinstance(block, Mode)]
    return random.choice(places if places and random.random() < 0.7 else built.modules())
