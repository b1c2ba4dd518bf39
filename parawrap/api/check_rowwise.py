"""`check_rowwise`: check that a model treats the rows of a batch independently."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parawrap.api._differences import difference, largest_of, rounding_of
from parawrap.api.compare import note_if_list
from parawrap.api.parallel import parallel
from parawrap.backends import ignore_speed_warnings
from parawrap.engine.columns import is_array
from parawrap.engine.streams import as_call
from parawrap.errors import ShardError, VerifyError
from parawrap.tree import WholeLeaf, addresses, flatten, tensors_in, unflatten

# Each number puts the cuts at other rows. With 8 lanes, shards have few rows, so that mixed rows
# differ most. A guess that no test has contradicted
_LANES = (2, 3, 8)
# Of a parameter's gradient, in roundings of the largest gradient. Normalizations and softmax leave
# 0.4 of one in gradients that would be zero in exact arithmetic
_ROUNDINGS = 8
_MOST_NAMED = 4  # differences that a message names: more would not fit a terminal


def check_rowwise(
    model: torch.nn.Module,
    batch: Any,
    *,
    rtol: float | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    **options: Any,
) -> None:
    """Check that a model is row-wise: row i of each output depends only on row i of each input.

    The check compares a plain call with calls that are cut in several ways: outputs, gradients, and
    buffers. `parallel` raises an error if the sizes of outputs show that a model mixes rows. Sizes
    do not show a softmax over the batch or ``x - x.mean(0)``; this check finds both.

    The check uses copies of the model, and does not change the model. It runs on the model's
    device, in the modes of the caller. It cuts the batch for 2, 3, and 8 lanes. Give at least 5
    rows: without `out_dims`, fewer are not cut.

    Args:
        model: The model, in train or eval mode. Random numbers differ between cuts, so use eval
            mode for dropout.
        batch: One batch, as for `Parallel.map`: a tuple is ``model(*batch)``, a dict
            ``model(**batch)``.
        rtol: The largest difference allowed, relative to the largest value of the same tensor. By
            default the square root of the machine epsilon of the tensor's dtype: 3.5e-4 for
            float32. Parameters' gradients may also differ by a few roundings of the largest one:
            that of a bias before a normalization is zero but for rounding.
        loss: A function that reduces the output to a scalar. By default, a sum of all
            floating-point values with random weights.
        options: Options of `parallel`, such as `in_dims`, `out_dims`, `reduce`, and `methods`.

    Raises:
        VerifyError: If an output, a gradient, or a buffer differs. The message names the value, the
            cut, and the difference.
        ShardError: If no call was cut, for instance because the batch has fewer than 5 rows; and
            whenever `parallel` raises it.
        GatherError, ReplicaError: Whenever `parallel` raises it.
        TypeError: If `model` is not a module.

    Example:
        >>> import torch
        >>> from parawrap.testing import check_rowwise
        >>> check_rowwise(torch.nn.Linear(3, 2), torch.randn(11, 3))
        >>> check_rowwise(torch.nn.Softmax(dim=0), torch.randn(11, 3))
        Traceback (most recent call last):
        parawrap.errors.VerifyError: Softmax mixes rows. With 11 rows cut as 6 + 5, ...
    """
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__qualname__
        msg = f"model is a {kind}, not a torch.nn.Module. Call the function in forward of a module"
        raise TypeError(msg)
    method, *_ = options.get("methods", ("forward",))
    # Copied before the random state is read, because `__deepcopy__` may draw numbers too
    plain = copy.deepcopy(model)
    random_state = torch.get_rng_state()
    try:
        expected = _run_call(plain, method, batch, loss)
    except Exception as error:
        note_if_list(error, batch)
        raise
    draws_numbers = not torch.equal(random_state, torch.get_rng_state())
    held = [*model.parameters(), *model.buffers()]
    device = held[0].device if held else torch.device("cpu")
    gradients = {_name_gradient(name) for name, _ in model.named_parameters()}
    was_cut = False
    for lanes in _LANES:
        # A copy for each cut: a call in train mode changes buffers
        cut = copy.deepcopy(model)
        with ignore_speed_warnings(), parallel(cut, [device] * lanes, **options) as block:
            found = _run_call(cut, method, batch, loss)
        sizes = block.stats().shards
        was_cut = was_cut or len(sizes) > 1
        differences = list(_describe_differences(found, expected, gradients, rtol))
        if differences:
            named = differences[:_MOST_NAMED]
            unnamed = len(differences) - _MOST_NAMED
            if unnamed > 0:
                named.append(f"{unnamed} more")
            kind = type(model).__name__
            cut_as = " + ".join(map(str, sizes))
            msg = f"{kind} mixes rows. With {sum(sizes)} rows cut as {cut_as}, {'; '.join(named)}"
            if draws_numbers:
                msg += ". It draws random numbers, which differ between cuts. Use eval mode"
            raise VerifyError(msg)
    if not was_cut:
        msg = (
            "the batch was not cut, so there was nothing to compare. Give a batch of 5 rows or "
            "more, as tensors"
        )
        raise ShardError(msg)


def _run_call(
    model: torch.nn.Module, method: str, batch: Any, loss: Callable[[Any], torch.Tensor] | None
) -> dict[str, Any]:
    """Run a call and its backward pass with copies of the batch's tensors.

    Return by name all values to compare: the output, the gradients, the inputs, and the buffers.
    Numbers are returned as tensors.
    """
    # A model may write its inputs. With copies, each call gets the same ones
    leaves, spec = flatten(batch)
    given: list[Any] = []
    # Each floating-point tensor as the model gets it, with the leaf of autograd behind it
    inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for leaf in leaves:
        copied = _copy_leaf(leaf)
        if isinstance(copied, torch.Tensor) and copied.is_floating_point():
            source = copied
            if torch.is_grad_enabled():
                # Autograd refuses a write into a leaf that requires gradients
                copied = source.requires_grad_().clone()
            inputs.append((copied, source))
        given.append(copied)
    args, kwargs = as_call(unflatten(spec, given))
    # Only the call of the module itself runs its hooks
    call = model if method == "forward" else getattr(model, method)
    output = call(*args, **kwargs)
    outputs, output_spec = flatten(output)
    total = _weigh(outputs) if loss is None else loss(output)
    if total is not None and total.requires_grad:
        total.backward()

    values: dict[str, Any] = {}
    for place, leaf in zip(addresses(output_spec, "output"), outputs, strict=True):
        values |= _name_values(place, leaf)
    for name, parameter in model.named_parameters():
        values[_name_gradient(name)] = parameter.grad
    for index, (tensor, source) in enumerate(inputs):
        values[f"the gradient of input {index}"] = source.grad
        values[f"input {index} after the call"] = tensor
    for name, buffer in model.named_buffers():
        values[f"buffer {name!r}"] = buffer
    return {name: _as_result(value) for name, value in values.items() if value is not None}


def _name_gradient(parameter: str) -> str:
    return f"the gradient of {parameter!r}"


def _copy_leaf(leaf: Any) -> Any:
    """Return a copy of a tensor, or of a container that is kept whole; else the leaf itself."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    if not isinstance(leaf, WholeLeaf):
        return leaf
    # deepcopy takes the tensors in this dict as copies that it has made. It refuses tensors that
    # have a graph
    copies = {id(tensor): tensor.detach().clone() for tensor in tensors_in(leaf)}
    return copy.deepcopy(leaf, copies)


def _as_result(value: Any) -> Any:
    """Return a copy of a tensor, a number as a tensor, and any other value as it is."""
    if isinstance(value, torch.Tensor | bool | int | float):
        return torch.as_tensor(value).detach().clone()
    return value


def _name_values(place: str, leaf: Any) -> dict[str, Any]:
    """Return the values in a leaf of the output, by name.

    A container kept whole, such as a cache, has several: its tensors. An array becomes a tensor.
    """
    if isinstance(leaf, WholeLeaf):
        tensors = enumerate(tensors_in(leaf))
        return {f"{place}, tensor {index}": tensor for index, tensor in tensors}
    # Booleans and numbers. Torch has no dtypes for arrays of texts, objects, or dates
    if is_array(leaf) and leaf.dtype.kind in "biufc":
        return {place: torch.from_numpy(leaf.copy())}
    return {place: leaf}


def _weigh(leaves: list[Any]) -> torch.Tensor | None:
    """Return the sum of the values of an output with random weights; None if it has no gradient.

    Without weights, differences could cancel out.
    """
    total = None
    # Its own generator gives the same weights in each call, and leaves the caller's numbers alone
    generator = torch.Generator().manual_seed(0)
    for leaf in leaves:
        # Complex outputs are compared, but have no part in the loss
        is_floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        if is_floating and leaf.requires_grad:
            weights = torch.rand(leaf.shape, generator=generator).to(leaf)
            part = (leaf * weights).sum()
            total = part if total is None else total + part
    return total


def _describe_differences(
    found: dict[str, Any], expected: dict[str, Any], gradients: set[str], rtol: float | None
) -> Iterator[str]:
    """Yield a description of each difference, in the order of the names.

    `gradients` has the names of the parameters' gradients.
    """
    largest = largest_of([expected[name].cpu() for name in gradients & expected.keys()])
    for name in expected | found:
        if name not in found:
            yield f"{name} is missing in the cut call"
        elif name not in expected:
            yield f"{name} is missing in the plain call"
        elif isinstance(expected[name], torch.Tensor):
            of_all = largest if name in gradients else 0.0
            yield from _describe_gap(name, found[name], expected[name], rtol, of_all)
        elif isinstance(expected[name], str | bytes) and found[name] != expected[name]:
            yield f"{name} is {found[name]!r}, not {expected[name]!r}"
        # Values of other types may lack a meaningful equality, and are not compared


def _describe_gap(
    name: str, ours: torch.Tensor, plain: torch.Tensor, rtol: float | None, largest: float
) -> Iterator[str]:
    """Yield a description of the difference of two tensors, if they differ.

    `largest` is the largest value of all parameters' gradients; 0 for a tensor that is none.
    """
    if ours.shape != plain.shape:
        yield f"{name} has shape {tuple(ours.shape)}, not {tuple(plain.shape)}"
        return
    allowed = rounding_of(plain.dtype)
    if rtol is not None and allowed > 0:  # integers must be equal
        allowed = rtol
    gap = difference([ours], [plain])
    # 0 for integers too, which are no gradients
    rounding = _ROUNDINGS * torch.finfo(plain.dtype).eps * largest if largest else 0.0
    if gap.relative > allowed and gap.absolute > rounding:
        size = f"{gap.absolute:.1e}, {gap.relative:.1e} of its largest value"
        yield f"{name} differs by up to {size}"
