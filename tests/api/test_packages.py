"""`parallel` with graphs of PyTorch Geometric."""

from __future__ import annotations

import pytest
import torch

from parawrap import parallel
from tests.helpers.tiers import require_packages

TWO = ["cpu"] * 2
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_graph_batch_is_cut_by_graph():
    """Outputs per graph have one row per graph. Outputs per node are declared "ragged"."""
    require_packages("torch_geometric")
    from torch_geometric.data import Batch, Data

    def graph(nodes):
        edges = torch.stack([torch.arange(nodes - 1), torch.arange(1, nodes)])
        return Data(x=torch.randn(nodes, 3), edge_index=edges)

    def convolve(batch):
        out = batch.x.clone().index_add_(0, batch.edge_index[1], batch.x[batch.edge_index[0]])
        pooled = torch.zeros(batch.num_graphs, 3).index_add_(0, batch.batch, out)
        return pooled, out

    batch = Batch.from_data_list([graph(nodes) for nodes in (2, 5, 3, 4, 6, 2, 7, 3, 2, 4)])
    with parallel(convolve, TWO, out_dims=(0, "ragged")) as p:
        torch.testing.assert_close(p(batch), convolve(batch))
