"""`check_rowwise`: check that a model treats the rows of a batch independently."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parawrap.api._comparison_table import difference
from parawrap.api.parallel import parallel
from parawrap.backends import ignore_speed_warnings
from parawrap.engine.streams import as_call
from parawrap.errors import ShardError, VerifyError
from parawrap.tree import addresses, flatten, mismatch, unflatten

_LANES = (2, 3, 8)
_MOST_NAMED = 4  # parts in a message: more would not fit a terminal
Parts = dict[str, torch.Tensor]


def check_rowwise(
    model: torch.nn.Module,
    batch: Any,
    *,
    rtol: float | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    **options: Any,
) -> None:
    """Check that a model is row-wise: that row i of each output depends only on row i of each input.

    The check compares a plain call with calls that are cut in several ways: outputs, gradients, and buffers. `parallel`
    raises an error if the sizes of outputs show that a model mixes rows. Sizes do not show a softmax over the batch or
    ``x - x.mean(0)``; this check finds both.

    The check uses copies of the model, and does not change the model. It runs on the model's device, in the modes of the
    caller. It cuts the batch for 2, 3, and 8 lanes. Give at least 3 rows: without `out_dims`, fewer rows are not cut.

    Args:
        model: The model, in train or eval mode. Random numbers differ between cuts, so use eval mode for dropout.
        batch: One batch, as for `Parallel.map`: a tuple is ``model(*batch)``, a dict ``model(**batch)``.
        rtol: The largest difference allowed, relative to the largest value of the same tensor. By default the square root
            of the machine epsilon of the tensor's dtype: 3.5e-4 for float32.
        loss: A function of the output. By default, a sum of all floating-point values with random weights.
        options: Options of `parallel`, such as `in_dims`, `out_dims`, `reduce`, and `methods`.

    Raises:
        VerifyError: If an output, a gradient, or a buffer differs. The message names it, the cut, and the difference.
        ShardError: If no call was cut, for instance because the batch has fewer than 3 rows; and as for `parallel`.
        GatherError, ReplicaError: As for `parallel`.

    Example:
        >>> import torch
        >>> from parawrap.testing import check_rowwise
        >>> check_rowwise(torch.nn.Linear(3, 2), torch.randn(11, 3))
        >>> check_rowwise(torch.nn.Softmax(dim=0), torch.randn(11, 3))
        Traceback (most recent call last):
        parawrap.errors.VerifyError: Softmax mixes rows. With 11 rows cut as 6 + 5, output differs by up to ...
    """
    method, *_ = options.get("methods", ("forward",))
    weights = torch.Generator().manual_seed(0)
    plain = copy.deepcopy(model)
    before = torch.get_rng_state()
    expected = _parts_of(plain, _call(plain, method, batch, loss, weights))
    draws = not torch.equal(before, torch.get_rng_state())
    is_cut = False
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    for lanes in _LANES:
        cut = copy.deepcopy(model)
        with ignore_speed_warnings(), parallel(cut, [device] * lanes, **options) as block:
            found = _parts_of(cut, _call(cut, method, batch, loss, weights.manual_seed(0)))
        sizes = block.stats().shards
        is_cut = is_cut or len(sizes) > 1
        problems = [*_problems(found, expected, rtol)]
        if problems:
            raise VerifyError(_message(model, problems, sizes, draws=draws))
    if not is_cut:
        msg = "the batch was not cut, so there was nothing to compare. Give a batch of 3 rows or more, as tensors"
        raise ShardError(msg)


def _call(
    model: torch.nn.Module,
    method: str,
    batch: Any,
    loss: Callable[[Any], torch.Tensor] | None,
    weights: torch.Generator,
) -> tuple[Any, list[torch.Tensor]]:
    """Call the model with copies of the batch's tensors, and run the backward pass; return the output and the inputs."""
    leaves, spec = flatten(batch)
    copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    inputs = [leaf for leaf in copies if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if torch.is_grad_enabled():
        for leaf in inputs:
            leaf.requires_grad_()
    args, kwargs = as_call(unflatten(spec, copies))
    output = getattr(model, method)(*args, **kwargs) if method != "forward" else model(*args, **kwargs)
    total = _weigh(output, weights) if loss is None else loss(output)
    if total is not None and total.requires_grad:
        total.backward()
    return output, inputs


def _weigh(output: Any, weights: torch.Generator) -> torch.Tensor | None:
    """Return the sum of all values of an output with random weights, so that differences do not cancel out."""
    total = None
    for leaf in flatten(output)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            part = (leaf * torch.rand(leaf.shape, generator=weights).to(leaf)).sum()
            total = part if total is None else total + part
    return total


def _parts_of(model: torch.nn.Module, called: tuple[Any, list[torch.Tensor]]) -> tuple[Any, Parts]:
    """Return the structure of the output, and all outputs, gradients, and buffers by name."""
    output, inputs = called
    leaves, spec = flatten(output)
    names = addresses(spec, ("output",))
    parts = {name: torch.as_tensor(leaf) for name, leaf in zip(names, leaves, strict=True) if _is_number(leaf)}
    gradients = {f"the gradient of {name!r}": parameter.grad for name, parameter in model.named_parameters()}
    gradients |= {f"the gradient of input {index}": leaf.grad for index, leaf in enumerate(inputs)}
    parts |= {name: gradient for name, gradient in gradients.items() if gradient is not None}
    parts |= {f"buffer {name!r}": buffer for name, buffer in model.named_buffers()}
    return spec, {name: part.detach().clone() for name, part in parts.items()}


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | bool | int | float)


def _problems(found: tuple[Any, Parts], expected: tuple[Any, Parts], rtol: float | None) -> Iterator[str]:
    """Yield a description of each difference."""
    differ = mismatch([found[0], expected[0]], "output")
    if differ is not None:
        place, (cut, whole) = differ
        yield f"{place} is {cut} in the cut call, and {whole} in the plain call"
        return
    for name in dict.fromkeys((*expected[1], *found[1])):
        ours, plain = found[1].get(name), expected[1].get(name)
        if ours is None or plain is None:
            yield f"{name} is missing in the {'cut' if ours is None else 'plain'} call"
            continue
        gap = difference([ours.to_dense()], [plain.to_dense()])
        exact = not (plain.is_floating_point() or plain.is_complex())
        if ours.shape != plain.shape:
            yield f"{name} has shape {tuple(ours.shape)}, not {tuple(plain.shape)}"
        elif gap.relative > (0 if exact else torch.finfo(plain.dtype).eps ** 0.5 if rtol is None else rtol):
            yield f"{name} differs by up to {gap.absolute:.1e}, {gap.relative:.1e} of its largest value"


def _message(model: torch.nn.Module, problems: list[str], sizes: tuple[int, ...], *, draws: bool) -> str:
    more = [f"{len(problems) - _MOST_NAMED} more"] if len(problems) > _MOST_NAMED else []
    cut = " + ".join(map(str, sizes))
    drawn = ". It draws random numbers, which differ between cuts. Use eval mode" if draws else ""
    listed = "; ".join([*problems[:_MOST_NAMED], *more])
    return f"{type(model).__name__} mixes rows. With {sum(sizes)} rows cut as {cut}, {listed}{drawn}"
