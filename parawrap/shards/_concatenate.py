"""Concatenate the parts of an output: tensors, on the device of the output, and numpy arrays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from parawrap.shards._join_rules import CURE, JoinRules, Refusal, refuse

__all__ = ["concatenate", "concatenate_arrays", "have_one_scale", "shapes_of"]

_dtype_of = attrgetter("dtype")


def concatenate(parts: Sequence[torch.Tensor], dim: int, rules: JoinRules, device: torch.device | None) -> torch.Tensor:
    """Return the parts next to each other along `dim`, on `device` (None: where they are).

    Raises:
        Refusal: If dtypes differ, or shapes beyond `dim`.
    """
    if len(parts) > 1 and not have_one_scale(parts):
        refuse("the lanes returned tensors quantized with different scales, or per channel. Return tensor.dequantize()")
    if rules.join == "pad":
        parts = _pad(parts, dim, rules.pad_value)
    if len(set(map(_dtype_of, parts))) > 1:  # torch.cat would promote them
        refuse(f"the lanes returned tensors of {' and '.join(sorted({str(part.dtype) for part in parts}))}. {CURE}")
    if device is not None and _are_of_one_form(parts, dim, device):
        return _write_into_one(parts, dim, device)
    try:
        parts = parts if device is None else [part.to(device) for part in parts]
        return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]
    except (IndexError, RuntimeError) as error:
        raise Refusal(_why_no_cat(parts, dim)) from error


def have_one_scale(parts: Sequence[torch.Tensor]) -> bool:
    """True if parts are not quantized, or with one scale for all: torch.cat takes the scale of the first part."""
    if not parts[0].is_quantized:
        return True
    per_tensor = all(part.is_quantized and part.qscheme() == torch.per_tensor_affine for part in parts)
    return per_tensor and len({(part.q_scale(), part.q_zero_point()) for part in parts}) == 1


def concatenate_arrays(parts: Sequence[Any], dim: int) -> Any:
    """Return numpy arrays next to each other along `dim`."""
    if len({_other_sizes(part.shape, dim) for part in parts}) > 1:
        refuse(_why_no_cat(parts, dim))
    return sys.modules["numpy"].concatenate(parts, axis=dim)


def shapes_of(parts: Sequence[Any]) -> str:
    """Return the shapes for an error."""
    return ", ".join(str(tuple(part.shape)) for part in parts)


def _other_sizes(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    sizes = list(shape)
    if -len(sizes) <= dim < len(sizes):
        del sizes[dim]
    return tuple(sizes)


def _why_no_cat(parts: Sequence[Any], dim: int) -> str:
    if len({len(part.shape) for part in parts}) > 1 or not -len(parts[0].shape) <= dim < len(parts[0].shape):
        return f"the shapes {shapes_of(parts)} have no dim {dim} in common. {CURE}"
    if len({_other_sizes(part.shape, dim) for part in parts}) == 1:
        return f"torch.cat refused outputs of shape {shapes_of(parts)}. {CURE}"
    return f'the shapes {shapes_of(parts)} differ beyond dim {dim}. join="pad" pads them to the longest. {CURE}'


def _pad(parts: Sequence[torch.Tensor], dim: int, value: float) -> list[torch.Tensor]:
    """Pad every dim except `dim` at its end, to the longest part."""
    if len({part.ndim for part in parts}) > 1:
        refuse(_why_no_cat(parts, dim))
    dim %= parts[0].ndim
    longest = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [0 if each == dim else longest[each] - part.shape[each] for each in range(part.ndim)]
        ends = [pad for size in reversed(missing) for pad in (0, size)]
        padded.append(torch.nn.functional.pad(part, ends, value=value) if any(missing) else part)
    return padded


def _are_of_one_form(parts: Sequence[torch.Tensor], dim: int, device: torch.device) -> bool:
    """True if parts from elsewhere can be written into one tensor: their rows alone differ, and no graph records it."""
    first = parts[0]
    if len(parts) == 1 or all(part.device == device for part in parts):
        return False
    return all(
        type(part) is torch.Tensor
        and not (part.requires_grad and torch.is_grad_enabled())
        and part.is_contiguous()
        and part.dtype == first.dtype
        and _other_sizes(part.shape, dim) == _other_sizes(first.shape, dim)
        for part in parts
    )


def _write_into_one(parts: Sequence[torch.Tensor], dim: int, device: torch.device) -> torch.Tensor:
    """Copy each part once, straight to its place in one tensor on the device."""
    sizes = [part.shape[dim] for part in parts]
    shape = list(parts[0].shape)
    shape[dim] = sum(sizes)
    joined = torch.empty(shape, dtype=parts[0].dtype, device=device)
    for place, part in zip(joined.split(sizes, dim), parts, strict=True):
        place.copy_(part, non_blocking=device.type != "cpu")
    return joined
