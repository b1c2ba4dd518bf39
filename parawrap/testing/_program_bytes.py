"""A compiled program as bytes: its inputs and outputs as JSON, and its TorchScript with the weights inside.

This file handles the byte format and has no code for cores. The bytes are a uint8 tensor, "the NEFF", in a buffer of the
module that `trace` makes. Saving, loading, or copying the module thus includes its program.
"""

from __future__ import annotations

import copy
import ctypes
import io
import json
from collections.abc import Sequence

import torch

from parawrap.backends.neuron import Signature, TensorSpec, quiet_about_torchscript
from parawrap.testing._emulated_cores import Run

__all__ = ["Program", "is_neff", "pack", "signature_of"]

_MAGIC = b"PWNEFF01"
_LENGTH = 8  # bytes that hold the length of the JSON


class Program:
    """A program, read from its bytes and ready to run. Immutable; any number of cores and threads may run it at once."""

    __slots__ = ("_expected", "nbytes", "run", "signature")

    def __init__(self, neff: torch.Tensor) -> None:
        header, code = _split(neff)
        with quiet_about_torchscript(), torch.inference_mode(False):
            script = torch.jit.load(io.BytesIO(code))
        self.run: Run = _on_a_copy(script) if list(script.buffers()) else script.forward
        self.nbytes = neff.nbytes
        self.signature = _signature(header)
        self._expected = [(torch.Size(spec.shape), spec.dtype) for spec in self.signature.inputs]

    def takes(self, inputs: Sequence[torch.Tensor]) -> bool:
        """True if the inputs are CPU tensors with the compiled shapes and dtypes."""
        for tensor, (shape, dtype) in zip(inputs, self._expected, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_cpu:
                return False
        return True


def pack(script: torch.jit.ScriptModule, signature: Signature) -> torch.Tensor:
    """Return the bytes of a program that takes and returns a flat list of tensors."""
    header = json.dumps({kind: [_as_json(spec) for spec in specs] for kind, specs in signature._asdict().items()}).encode()
    code = io.BytesIO()
    with quiet_about_torchscript():
        torch.jit.save(script, code)
    whole = bytearray(_MAGIC + len(header).to_bytes(_LENGTH, "little") + header + code.getvalue())
    return torch.frombuffer(whole, dtype=torch.uint8)


def is_neff(tensor: torch.Tensor | None) -> bool:
    """True if the tensor holds the bytes of a program."""
    if tensor is None or tensor.dtype is not torch.uint8 or tensor.ndim != 1:
        return False
    return bytes(tensor[: len(_MAGIC)].tolist()) == _MAGIC


def signature_of(neff: torch.Tensor) -> Signature:
    """Return the signature of a program without loading its code."""
    return _signature(_split(neff)[0])


def _on_a_copy(script: torch.jit.ScriptModule) -> Run:
    """Run each inference on a fresh copy of the program, so its writes to its own buffers do not persist."""

    def run(*staged: torch.Tensor) -> Sequence[torch.Tensor]:
        outputs: Sequence[torch.Tensor] = copy.deepcopy(script)(*staged)
        return outputs

    return run


def _split(neff: torch.Tensor) -> tuple[memoryview, memoryview]:
    here = neff.cpu()
    whole = memoryview(ctypes.string_at(here.data_ptr(), here.nbytes))  # Tensor.numpy needs numpy, an optional dependency
    start = len(_MAGIC) + _LENGTH
    end = start + int.from_bytes(whole[len(_MAGIC) : start], "little")
    return whole[start:end], whole[end:]


def _signature(header: memoryview) -> Signature:
    kinds = json.loads(bytes(header))
    return Signature(*(tuple(_from_json(*spec) for spec in kinds[kind]) for kind in Signature._fields))


def _as_json(spec: TensorSpec) -> tuple[list[int], str, str]:
    return list(spec.shape), str(spec.dtype).removeprefix("torch."), spec.address


def _from_json(shape: list[int], dtype: str, address: str) -> TensorSpec:
    return TensorSpec(tuple(shape), getattr(torch, dtype), address)
