"""Cut and join batches of PyTorch Geometric. The package is not imported.

Its private `_slice_dict` holds where the attributes of each graph begin, `_inc_dict` its first node.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from parawrap.engine.rules.splitter import Splitter, refuse_split, spans


def graph_rules(cls: type) -> Splitter | None:
    """Return the rules of a class of graph batches; None for any other class."""
    name = ("torch_geometric.data.batch", "Batch")
    is_batch = any((base.__module__, base.__qualname__) == name for base in cls.__mro__)
    return Splitter(_split_graphs, _join_graphs, _graph_rows) if is_batch else None


def _graph_rows(batch: Any) -> int:
    if not hasattr(batch, "_slice_dict"):
        refuse_split(batch, "it has no record of where each graph begins; make it by Batch.from_data_list")
    return int(batch.num_graphs)


def _split_graphs(batch: Any, sizes: Sequence[int]) -> list[Any]:
    graphs = _graphs(batch)
    return [_batch_graphs([batch], graphs[start:end]) for start, end in spans(sizes)]


def _join_graphs(parts: Sequence[Any]) -> Any:
    return _batch_graphs(parts, [graph for part in parts for graph in _graphs(part)])


def _graphs(batch: Any) -> list[Any]:
    """Return the single graphs. Refuse attributes that no longer lie where `Batch.from_data_list` put them."""
    _graph_rows(batch)
    for store in batch.stores:
        slices = _of_store(batch._slice_dict, store)
        for name, value in store.items():
            if name in slices and not _fits(batch, store, name, value, slices[name]):
                refuse_split(batch, f"its {name} is sparse, or of another size than Batch.from_data_list made it")
    if not all(_edges_stay_inside(batch, store) for store in batch.edge_stores if "edge_index" in store):
        refuse_split(batch, "its edge_index has edges between two graphs, or not in the order of the graphs")
    try:
        graphs: list[Any] = batch.to_data_list()
    except KeyError as error:
        refuse_split(batch, f"Batch.from_data_list left no record of where each graph begins in its {error}")
    return graphs


def _of_store(noted: Any, store: Any) -> Any:
    """Return the entries of one store, by attribute."""
    return noted if store._key is None else noted.get(store._key, {})


def _fits(batch: Any, store: Any, name: str, value: Any, slices: Any) -> bool:
    """True if an attribute is as large as its slices say."""
    if isinstance(value, torch.Tensor):
        dim = batch.__cat_dim__(name, value, store) or 0
        return value.layout == torch.strided and not value.is_nested and value.size(dim) == int(slices[-1])
    if isinstance(slices, dict):
        return value.keys() == slices.keys() and all(_fits(batch, store, n, value[n], slices[n]) for n in value)
    if isinstance(slices, list):
        return len(value) == len(slices) and all(map(partial(_fits, batch, store, name), value, slices))
    return isinstance(value, list) and len(value) == int(slices[-1])


def _edges_stay_inside(batch: Any, store: Any) -> bool:
    """True if both ends of each edge lie in the graph that the slices assign the edge to."""
    slices = _of_store(batch._slice_dict, store).get("edge_index")
    if slices is None:
        return True  # `_batch_graphs` refuses an attribute that was set later
    edges: torch.Tensor = store.edge_index
    graphs = torch.repeat_interleave(slices.diff()).to(edges.device)
    starts = _of_store(batch._inc_dict, store)["edge_index"].to(edges.device)  # one per graph, or one per graph and end
    starts = starts.reshape(len(starts), -1).T.expand(len(edges), -1).contiguous()
    found = [torch.bucketize(nodes.contiguous(), first, right=True) - 1 for nodes, first in zip(edges, starts, strict=True)]
    return all(torch.equal(each, graphs) for each in found)


def _batch_graphs(parts: Sequence[Any], graphs: list[Any]) -> Any:
    """Return one Batch of the class and with the attributes of `parts`."""
    first: Any = parts[0]
    followed = {name for store in first.stores for name in _of_store(first._slice_dict, store) if f"{name}_ptr" in store}
    base: Any = type(first).__bases__[0]  # the class that the user called; the other base is that of one graph
    made = base.from_data_list(graphs, follow_batch=sorted(followed))
    for part in parts:
        for old, new in zip(part.stores, made.stores, strict=True):
            if changed := set(old.keys()) ^ set(new.keys()):
                refuse_split(part, f"its {', '.join(sorted(changed))} was set or deleted after Batch.from_data_list")
    devices = [store.batch.device for store in first.stores if "batch" in store]
    helpers = [f"{name}{end}" for name in followed for end in ("_batch", "_ptr")]
    return made.to(devices[0], "batch", "ptr", *helpers) if devices else made  # made on the CPU for all but CUDA
