"""Scripted modules whose code writes nothing: any number of lanes may run one of them at once, without replicas of it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

from parawrap.replicas._stand_in import without_stand_ins

__all__ = ["writes_nothing"]

# What has no effect but its outputs; of torch's own operators it is all that name no argument as written, `(a!)`.
_HARMLESS = {
    "prim::Constant",
    "prim::DictConstruct",
    "prim::GetAttr",
    "prim::If",
    "prim::ListConstruct",
    "prim::ListUnpack",
    "prim::Loop",
    "prim::NumToTensor",
    "prim::RaiseException",
    "prim::TupleConstruct",
    "prim::TupleIndex",
    "prim::TupleSlice",
    "prim::TupleUnpack",
    "prim::Uninitialized",
    "prim::device",
    "prim::dtype",
    "prim::is_cuda",
    "prim::layout",
    "prim::max",
    "prim::min",
    "prim::unchecked_cast",
}
_NORMS = ("batch_norm", "instance_norm")  # whose schemas keep to themselves that running statistics are written
_BATCH_NORM, _ITS_TRAINING = "aten::batch_norm", 5


def writes_nothing(module: torch.nn.Module) -> bool:
    """Whether it is scripted, and none of its methods writes an attribute, a buffer or an argument, as its code tells.

    In doubt it is said to write: what operators of others do is not known, nor what a call does that is not inlined.
    """
    if not isinstance(module, torch.jit.ScriptModule) or _has_python(module):
        return False
    cpp: Any = module._c
    if cpp._get_forward_hooks() or cpp._get_forward_pre_hooks():
        return False
    return all(map(_is_harmless, (node for name in cpp._method_names() for node in _inlined(cpp._get_method(name).graph))))


def _has_python(module: torch.nn.Module) -> bool:
    """Whether some way into it is no compiled one: of a class of the user's, or a method that was left to Python."""
    of_torch = type(module).__module__.partition(".")[0] == "torch"
    own = without_stand_ins(vars(module)).values()
    return not of_torch or any(isinstance(value, types.MethodType | types.FunctionType) for value in own)


def _inlined(graph: Any) -> Iterator[Any]:
    """Every node of a method, with those of the functions and methods that it calls."""
    whole = graph.copy()
    inline: Any = torch._C._jit_pass_inline
    inline(whole)
    return _nodes(whole)


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _is_harmless(node: Any) -> bool:
    kind = node.kind()
    if kind in _HARMLESS:
        return True
    if kind == _BATCH_NORM:
        return node.inputsAt(_ITS_TRAINING).toIValue() is False
    in_place = "!" in node.schema() or (kind.endswith("_") and not kind.endswith("__"))
    return kind.startswith("aten::") and not in_place and not any(norm in kind for norm in _NORMS)
