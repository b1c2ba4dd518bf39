"""The fingerprint of a target: equal for equal weights, in every process and on every device."""

from __future__ import annotations

import hashlib
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from parawrap.engine.join_rules import JoinRules
from parawrap.tree import PLAIN, UNDECLARED, tensors_in

Fingerprint = dict[str, str]
"""The weights and the options that outputs depend on, by name."""

# Sums of 2**18 products of 32 and 11 bits fit in 63 bits, so no sum overflows. Chunks of 2 MiB stay
# in the cache of a processor.
_CHUNK = 1 << 18
# A prime: rows that change places have other weights, unless their length is a multiple of it.
_PERIOD = 2039
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)


def fingerprint_of(target: Any, rules: JoinRules) -> Fingerprint:
    """Return what the outputs of whole calls of a target depend on, as far as it is known.

    These are the parameters and buffers of its modules, their training flags, and the options of
    the block that change a whole output. Code and other attributes are not read.
    """
    # 128 bits: enough to tell models apart, and short in a file.
    weights = hashlib.blake2b(digest_size=16)
    flags = hashlib.blake2b(digest_size=16)
    for name, part in _find_parts(target):
        if not isinstance(part, torch.nn.Module):
            weights.update(_encode(name))
            weights.update(_describe_value(part))
            continue
        # Tied weights count under each of their names: a model without the tie is another one.
        for path, tensor in _weights_of(part):
            weights.update(_encode((name, path)))
            weights.update(_describe_value(tensor))
        for path, module in part.named_modules(remove_duplicate=False):
            flags.update(_encode((name, path, module.training)))
    # Options that do not touch the output of an uncut call may differ between runs.
    options = ""
    if not rules.keep_single:
        options = _describe_rules(rules)
    return {"weights": weights.hexdigest(), "training flags": flags.hexdigest(), "options": options}


def _weights_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, the buffers, and the packed weights of quantized layers."""
    found: dict[str, torch.Tensor] = {}
    found.update(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    yield from found.items()
    for path, entry in module.state_dict().items():
        if path in found:
            continue
        for tensor in tensors_in(entry):
            yield path, tensor


# The parts of a target


class _Part(NamedTuple):
    """An object that a target holds, and its place. Arguments of a partial or a `build` count."""

    place: str
    value: Any
    is_argument: bool = False


def _find_parts(target: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules of a target, and the arguments that a partial has for its function.

    Other values that a function closes over may be counters or caches, which change with each run.
    """
    seen: set[int] = set()
    waiting = deque([_Part("", target)])
    while waiting:
        place, value, is_argument = waiting.popleft()
        # Plain values are not marked as seen: Python may have one object for two equal numbers.
        if isinstance(value, (torch.Tensor, *PLAIN)):
            if is_argument:
                yield place, value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            yield place, value
            continue
        if is_argument and isinstance(value, _NAMED):
            yield place, f"{value.__module__}.{value.__qualname__}"
        is_target = value is target
        waiting += _parts_of(value, place, is_argument=is_argument, is_target=is_target)


def _parts_of(value: Any, place: str, *, is_argument: bool, is_target: bool) -> Iterator[_Part]:
    """Yield the objects that may belong to the function that an object is."""
    if isinstance(value, partial):
        yield _Part(f"{place}.func", value.func)
        yield _Part(f"{place}.args", value.args, is_argument=True)
        yield _Part(f"{place}.keywords", value.keywords, is_argument=True)
    elif isinstance(value, types.MethodType):
        yield _Part(f"{place}.__self__", value.__self__)
    elif isinstance(value, types.FunctionType):
        yield _Part(f"{place}.__defaults__", value.__defaults__)
        yield _Part(f"{place}.__kwdefaults__", value.__kwdefaults__)
        cells = value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, cells, strict=True):
            with suppress(ValueError):  # a name that is not assigned yet
                yield _Part(f"{place}.{name}", cell.cell_contents)
    elif isinstance(value, (Mapping, list, tuple)):
        # `build(load_model, ...)` is a tuple of a function and its arguments.
        counts = is_argument or is_target
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield _Part(f"{place}[{key!r}]", item, counts)
    elif not isinstance(value, (types.ModuleType, *_NAMED)):
        # An object that is called, such as a pipeline, may hold the model as an attribute.
        for name, attribute in _attributes_of(value):
            yield _Part(f"{place}.{name}", attribute)


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, also those in slots."""
    attributes = getattr(value, "__dict__", {})
    yield from attributes.items()
    for base in type(value).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):  # a slot that is empty
                    yield name, member.__get__(value)


# Values as bytes


def _encode(value: Any) -> bytes:
    """Return the repr of plain values, which is the same in every process."""
    return repr(value).encode()


def _describe_value(value: Any) -> bytes:
    """Return the type of a value, and its content or a sum of it."""
    name = type(value).__name__
    if not isinstance(value, torch.Tensor):
        return _encode((name, value))
    inner = getattr(value, "__tensor_flatten__", None)
    if inner is not None:  # a wrapper of tensors, such as quantized weights
        described = name.encode()
        names, _ = inner()
        for each in names:
            described += _describe_value(getattr(value, each))
        return described
    # A lazy parameter has no shape before the first call of its module.
    if torch.nn.parameter.is_lazy(value):
        return b"lazy"
    if value.is_nested and value.layout is torch.strided:
        described = b"nested"
        for part in value.unbind():
            described += _describe_value(part)
        return described
    described = _encode((tuple(value.shape), value.dtype, value.layout))
    if value.is_quantized:
        described += _describe_scales(value)
    sums = _sum_bits(value.detach())
    return described + _encode(sums)


def _describe_scales(tensor: torch.Tensor) -> bytes:
    """Return what the integers of a quantized tensor stand for."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return _encode((tensor.q_scale(), tensor.q_zero_point()))
    described = _encode(tensor.q_per_channel_axis())
    described += _describe_value(tensor.q_per_channel_scales())
    described += _describe_value(tensor.q_per_channel_zero_points())
    return described


def _sum_bits(tensor: torch.Tensor) -> list[list[int]]:
    """Return sums of the bits of a tensor as integers, for each chunk: plain, and by position.

    Sums of integers are exact, so the order of the additions, which depends on the device, does not
    matter.
    """
    if tensor.is_meta or not tensor.numel():
        return []
    integers = _as_integers(tensor)
    longest = min(len(integers), _CHUNK)
    positions = torch.arange(longest, device=integers.device)
    weights = positions % _PERIOD + 1
    sums = []
    for chunk in integers.split(_CHUNK):
        values = chunk.to(torch.int64)
        weighted = values * weights[: len(values)]
        both = torch.stack([values.sum(), weighted.sum()])
        sums.append(both)
    found: list[list[int]] = torch.stack(sums).tolist()  # one wait for the device
    return found


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as a vector of integers."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    # A conjugate or a negative may be a flag of the tensor, which its memory does not show.
    tensor = tensor.resolve_conj().resolve_neg()
    plain = tensor.contiguous().reshape(-1)
    if plain.storage_offset():
        plain = plain.clone()  # wider integers must begin at a multiple of their size
    content = plain.view(torch.uint8)
    if len(content) % 4:
        return content
    return content.view(torch.int32)  # a quarter of the additions


def _describe_rules(rules: JoinRules) -> str:
    """Return the options that change the output of a whole call, such as `reduce="stack"`."""
    options = {"join": rules.join, "reduce": rules.reduce, "out_dims": rules.out_dims}
    written = [f"{name}={_write(option)}" for name, option in options.items()]
    return ", ".join(written)


def _write(option: Any) -> str:
    """Return an option as a text that is the same in every process."""
    if option is UNDECLARED:
        return "undeclared"
    if isinstance(option, dict):
        return str({key: _write(each) for key, each in option.items()})
    if isinstance(option, tuple):
        return str([_write(each) for each in option])
    if callable(option):  # its repr has an address, which differs in each process
        return getattr(option, "__qualname__", type(option).__qualname__)
    return repr(option)


FindFingerprint = Callable[[], Fingerprint]
"""Returns the fingerprint of a target as it is now."""
