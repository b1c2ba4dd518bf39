"""The fingerprint of a target: equal for equal weights, in every process and on every device."""

from __future__ import annotations

import argparse
import datetime as dt
import enum
import hashlib
import numbers
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

import torch

from parawrap.engine.columns import is_array
from parawrap.engine.join_rules import JoinRules
from parawrap.tree import PLAIN, UNDECLARED, tensors_in

Fingerprint = dict[str, str]
"""Digests of the weights and of the training flags, and the options, by these names."""

FindFingerprint = Callable[[], Fingerprint]
"""Returns the fingerprint of a target as it is now."""

# Values per sum. A product of a value of 32 bits and a factor of 11 bits has at most 43 bits, and a
# sum of 2**18 products at most 61, so no int64 overflows. Chunks of 2 MiB stay in the cache of a
# processor
_CHUNK = 1 << 18
# The factors by position count to this number, which has 11 bits. It is a prime: values that change
# places get other factors, unless the distance is a multiple of it
_PERIOD = 2039
_DIGEST_BYTES = 16  # enough to distinguish models, and short in a file
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
# Values with a repr that is the same in every process
_VALUES = (
    *PLAIN,
    numbers.Number,
    enum.Enum,
    PurePath,
    range,
    slice,
    dt.date,
    dt.time,
    dt.timedelta,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
# Their attributes are data. An attribute of any other object may be a cache
_RECORDS = (types.SimpleNamespace, argparse.Namespace)


def fingerprint_of(target: Any, rules: JoinRules) -> Fingerprint:
    """Return the fingerprint of a target, for its whole calls.

    It covers the parameters and buffers of the target's modules, their training flags, the
    arguments of a partial or a `build`, and the options of the block that change a whole output.
    Code and other attributes are not read.
    """
    weights = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    flags = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for place, part in _find_parts(target):
        if not isinstance(part, torch.nn.Module):
            weights.update(_encode(place))
            weights.update(_describe_value(part))
            continue
        # Tied weights count under each of their names: a model without the tie is another one
        for path, tensor in _weights_of(part):
            weights.update(_encode((place, path)))
            weights.update(_describe_value(tensor))
        for path, module in part.named_modules(remove_duplicate=False):
            flags.update(_encode((place, path, module.training)))
    # Options that do not change the output of an uncut call may differ between runs
    options = "" if rules.keep_single else _describe_rules(rules)
    return {"weights": weights.hexdigest(), "training flags": flags.hexdigest(), "options": options}


def _weights_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, the buffers, and the packed weights of quantized layers."""
    found: dict[str, torch.Tensor] = {}
    found.update(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    yield from found.items()
    for path, entry in module.state_dict().items():
        if path not in found:  # packed weights
            for tensor in tensors_in(entry):
                yield path, tensor


# The parts of a target


class _Part(NamedTuple):
    """An object that a target holds.

    Attributes:
        place: The way from the target to the object, as code names it.
        value: The object.
        is_argument: True for an argument of a partial or a `build`, and for objects in it.
    """

    place: str
    value: Any
    is_argument: bool = False


def _find_parts(target: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules of a target, and the arguments of a partial or a `build`, with places.

    Other values that a function closes over may be counters or caches, which change with each run.
    """
    # By id: the target keeps its parts alive, so two of them have different ids
    seen: set[int] = set()
    waiting = deque([_Part("", target)])
    while waiting:
        place, value, is_argument = waiting.popleft()
        # Plain values are not marked as seen: Python may have one object for two equal numbers
        if isinstance(value, (torch.Tensor, *_VALUES)) or is_array(value):
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
        # `build(load_model, ...)` is a tuple of a function and its arguments
        is_built = value is target and isinstance(value, tuple)
        waiting += _parts_of(value, place, has_arguments=is_argument or is_built)


def _parts_of(value: Any, place: str, *, has_arguments: bool) -> Iterator[_Part]:
    """Yield the parts of an object that may be called.

    With `has_arguments`, the items of a container and the fields of a dataclass are arguments.
    """
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
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield _Part(f"{place}[{key!r}]", item, has_arguments)
    elif isinstance(value, AbstractSet):
        for index, item in enumerate(sorted(value, key=repr)):  # a set has no order
            yield _Part(f"{place}[{index}]", item, has_arguments)
    elif not isinstance(value, (types.ModuleType, *_NAMED)):
        # An object that is called, such as a pipeline, may hold the model as an attribute
        is_record = is_dataclass(value) or isinstance(value, _RECORDS)
        for name, attribute in _attributes_of(value):
            yield _Part(f"{place}.{name}", attribute, has_arguments and is_record)


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object with their names, also those in slots."""
    attributes = getattr(value, "__dict__", {})
    yield from attributes.items()
    # By the descriptors of slots: unlike `getattr`, they run no code of the user's
    for base in type(value).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):  # an empty slot
                    yield name, member.__get__(value)


# Values as bytes


def _encode(value: Any) -> bytes:
    """Return the repr of plain values, or of containers of these: the same in every process."""
    return repr(value).encode()


def _describe_value(value: Any) -> bytes:
    """Return bytes for a value: its repr, or the form and the sums of a tensor."""
    name = type(value).__name__
    if is_array(value):  # its repr leaves out most of many items, and its bytes may be addresses
        content = value.tolist() if value.dtype.hasobject else value.tobytes()
        return _encode((name, value.shape, value.dtype.str, content))
    if not isinstance(value, torch.Tensor):
        return _encode((name, value))
    inner = getattr(value, "__tensor_flatten__", None)
    if inner is not None:  # a wrapper of tensors, such as quantized weights
        described = name.encode()
        names, _ = inner()
        for each in names:
            described += _describe_value(getattr(value, each))
        return described
    # A lazy parameter has no shape before the first call of its module
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
    return described + _encode(_sum_bits(value.detach()))


def _describe_scales(tensor: torch.Tensor) -> bytes:
    """Return bytes for the scales and the zero points of a quantized tensor."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return _encode((tensor.q_scale(), tensor.q_zero_point()))
    described = _encode(tensor.q_per_channel_axis())
    described += _describe_value(tensor.q_per_channel_scales())
    described += _describe_value(tensor.q_per_channel_zero_points())
    return described


def _sum_bits(tensor: torch.Tensor) -> list[list[int]]:
    """Return two sums of each chunk of a tensor. Its bits are read as integers.

    One sum is plain. The other has a factor by position, so values that change places change it.
    Integers add up exactly, so the order of additions, which differs by device, does not matter.
    """
    if tensor.is_meta or not tensor.numel():
        return []
    integers = _as_integers(tensor)
    longest = min(len(integers), _CHUNK)
    positions = torch.arange(longest, device=integers.device)
    factors = positions % _PERIOD + 1
    sums = []
    for chunk in integers.split(_CHUNK):
        values = chunk.to(torch.int64)
        weighted = values * factors[: len(values)]
        sums.append(torch.stack([values.sum(), weighted.sum()]))
    found: list[list[int]] = torch.stack(sums).tolist()  # here the host waits, once for all chunks
    return found


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's values as a vector of integers."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    # A conjugate or a negative may be a flag of the tensor, which its memory does not show
    tensor = tensor.resolve_conj().resolve_neg()
    plain = tensor.contiguous().reshape(-1)
    if plain.storage_offset():
        plain = plain.clone()  # an int32 must begin at a multiple of 4 bytes
    content = plain.view(torch.uint8)
    if len(content) % 4:
        return content
    return content.view(torch.int32)  # a quarter of the additions


def _describe_rules(rules: JoinRules) -> str:
    """Return the options that change the output of a whole call, such as `reduce="stack"`."""
    options = {"join": rules.join, "reduce": rules.reduce, "out_dims": rules.out_dims}
    written = [f"{name}={_describe_option(option)}" for name, option in options.items()]
    return ", ".join(written)


def _describe_option(option: Any) -> str:
    """Return an option as a text that is the same in every process."""
    if option is UNDECLARED:
        return "undeclared"
    if isinstance(option, dict):
        return str({key: _describe_option(each) for key, each in option.items()})
    if isinstance(option, tuple):
        return str([_describe_option(each) for each in option])
    if callable(option):  # its repr has an address, which differs in each process
        return getattr(option, "__qualname__", type(option).__qualname__)
    return repr(option)
