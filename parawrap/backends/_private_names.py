"""The private names of torch that backends use. CONTRIBUTING.md lists them."""

from __future__ import annotations

from parawrap._private_name import private_reader

# The parts of a sparse tensor. The public `Tensor.indices` and `Tensor.values` refuse a tensor that is not coalesced.
indices_of = private_reader("torch.Tensor._indices", "transfers of sparse tensors")
values_of = private_reader("torch.Tensor._values", "transfers of sparse tensors")
