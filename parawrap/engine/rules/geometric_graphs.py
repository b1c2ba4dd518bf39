"""Cut and join batches of PyTorch Geometric. The package is not imported.

A batch has one *store* of attributes, or one per type of nodes and edges. It also has a private
*record*, two dicts by the names of attributes:

- `_slice_dict`: where each graph begins in the attribute, and where the last one ends
- `_inc_dict`: the number of each graph's first node

If the batch has types, both dicts have one dict per type. A batch that was made with
``follow_batch=["x"]`` also has ``x_batch`` and ``x_ptr``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from parawrap.engine.rules.object_state import is_unchanged, list_state
from parawrap.engine.rules.splitter import (
    Splitter,
    refuse_split,
    refuse_to_join,
    refuse_update,
    spans,
)

Refuse = Callable[[object, str], NoReturn]
"""`refuse_split` or `refuse_to_join`: raises an error about a batch, with the reason."""

_BATCH = ("torch_geometric.data.batch", "Batch")


def graph_rules(cls: type) -> Splitter | None:
    """Return the rules of a class of graph batches; None for any other class."""
    # PyTorch Geometric makes a class for each type of graph, so only the base has a known name.
    for base in cls.__mro__:
        if (base.__module__, base.__qualname__) == _BATCH:
            return _RULES
    return None


def _graph_rows(batch: Any) -> int:
    """Return the number of graphs, each of which is a row."""
    _refuse_without_record(batch, refuse_split)
    return int(batch.num_graphs)


def _split_graphs(batch: Any, sizes: Sequence[int]) -> list[Any]:
    graphs = _graphs(batch, refuse_split)
    parts = [_make_batch(batch, graphs[start:end]) for start, end in spans(sizes)]
    # All parts are made in one way, so the first one shows which attributes are lost or new
    for old, new in zip(batch.stores, parts[0].stores, strict=True):
        changed = set(old.keys()) ^ set(new.keys())
        if changed:
            names = ", ".join(sorted(changed))
            refuse_split(batch, f"its {names} was set or deleted after Batch.from_data_list")
    return parts


def _join_graphs(parts: Sequence[Any]) -> Any:
    """Return one batch, with node attributes that forward set, and without those it deleted."""
    kept = [_forget_deleted(part) for part in parts]
    graphs: list[Any] = []
    for part in kept:
        graphs += _graphs(part, refuse_to_join)
    joined = _make_batch(kept[0], graphs)
    for index, store in enumerate(joined.stores):
        stores = [part.stores[index] for part in kept]
        names: set[str] = set()
        for each in stores:
            names.update(each.keys())
        joined_names = set(store.keys())
        missing = ", ".join(sorted(joined_names - names))
        if missing:
            refuse_to_join(parts[0], f"forward deleted its {missing}")
        # Sorted, so that errors and attributes have the same order in every process
        for name in sorted(names - joined_names):
            _add_node_attribute(joined, store, name, kept, stores)
    return joined


# The graphs of a batch


def _refuse_without_record(batch: Any, refuse: Refuse) -> None:
    """Refuse a batch without a record."""
    if not hasattr(batch, "_slice_dict"):
        why = "it has no record of where each graph begins; make it by Batch.from_data_list"
        refuse(batch, why)


def _graphs(batch: Any, refuse: Refuse) -> list[Any]:
    """Return the single graphs. Refuse attributes that are not where `from_data_list` put them."""
    _refuse_without_record(batch, refuse)
    for store in batch.stores:
        slices = _of_store(batch._slice_dict, store)
        for name, value in store.items():
            # An attribute without slices was set later, and the single graphs do not get it
            if name not in slices:
                continue
            if not _fits(batch, store, name, value, slices[name]):
                why = f"its {name} is sparse, or of another size than Batch.from_data_list made it"
                refuse(batch, why)
    for store in batch.edge_stores:
        if "edge_index" in store and not _edges_stay_inside(batch, store):
            why = "its edge_index has edges between two graphs, or not in the order of the graphs"
            refuse(batch, why)
    try:
        graphs: list[Any] = batch.to_data_list()
    except KeyError as error:
        why = f"Batch.from_data_list left no record of where each graph begins in its {error}"
        refuse(batch, why)
    return graphs


def _of_store(record: Any, store: Any) -> Any:
    """Return the entries for one store in one of the dicts of the record, by attribute."""
    key = store._key
    if key is None:  # the one store of a batch without types, or that of its global attributes
        return record
    return record.get(key, {})


def _fits(batch: Any, store: Any, name: str, value: Any, slices: Any) -> bool:
    """True if an attribute is as large as its slices say.

    An attribute may be a dict or a list of values; its slices are then a dict or a list too.
    """
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested:
            return False
        # The method returns None if the tensors of the graphs are stacked on a new dim 0
        dim = batch.__cat_dim__(name, value, store) or 0
        return value.ndim > 0 and value.size(dim) == int(slices[-1])
    if isinstance(slices, dict):
        if not isinstance(value, dict) or value.keys() != slices.keys():
            return False
        return all(_fits(batch, store, key, each, slices[key]) for key, each in value.items())
    if isinstance(slices, list):
        if len(value) != len(slices):
            return False
        fits = partial(_fits, batch, store, name)
        return all(map(fits, value, slices))
    if not isinstance(value, list):
        return False
    return len(value) == int(slices[-1])


def _edges_stay_inside(batch: Any, store: Any) -> bool:
    """True if both ends of each edge lie in the graph that the slices assign the edge to."""
    slices = _of_store(batch._slice_dict, store).get("edge_index")
    if slices is None:
        return True  # set after the batch was made, which `_split_graphs` and `_join_graphs` refuse
    edges: torch.Tensor = store.edge_index
    device = edges.device
    # The slices lie on the CPU, whatever the device of the batch is
    edges_per_graph = slices.diff()
    graph_of_edge = torch.repeat_interleave(edges_per_graph).to(device)  # 0, 0, 1, 1, 1, 2, ...
    first_nodes = _of_store(batch._inc_dict, store)["edge_index"].to(device)
    # The record has one number per graph, or one per graph and end of edges. Here: one row per end
    by_end = first_nodes.reshape(len(first_nodes), -1).T
    by_end = by_end.expand(len(edges), -1).contiguous()
    for nodes, firsts in zip(edges, by_end, strict=True):
        # The last graph that begins at the node or before it
        graph_of_node = torch.bucketize(nodes.contiguous(), firsts, right=True) - 1
        if not torch.equal(graph_of_node, graph_of_edge):
            return False
    return True


def _make_batch(like: Any, graphs: list[Any]) -> Any:
    """Return a batch of these graphs, of the class and on the device of the batch `like`."""
    followed: set[str] = set()  # the names in `follow_batch`
    for store in like.stores:
        for name in _of_store(like._slice_dict, store):
            if f"{name}_ptr" in store:
                followed.add(name)
    # PyTorch Geometric derives the class of a batch from two bases: `Batch` or its subclass, and
    # the class of the graphs. Only the first base has `from_data_list`
    base: Any = type(like).__bases__[0]
    made = base.from_data_list(graphs, follow_batch=sorted(followed))
    for store in made.stores:
        key = store._key
        if key is not None:  # a type without attributes has no record
            made._slice_dict.setdefault(key, {})
            made._inc_dict.setdefault(key, {})
    devices = [store.batch.device for store in like.stores if "batch" in store]
    if not devices:
        return made
    # `from_data_list` makes these on the CPU, unless the graphs lie on CUDA
    helpers = ["batch", "ptr"]
    for name in followed:
        helpers += [f"{name}_batch", f"{name}_ptr"]
    return made.to(devices[0], *helpers)


# Changes by forward


def _list_attributes(batch: Any) -> list[Any]:
    """Return the names and values of the attributes of all stores."""
    found: list[Any] = []
    for store in batch.stores:
        for name, value in store.items():
            found.append(name)
            # Without rules for the values in it: PyTorch Geometric itself cuts them
            found += list_state(value)
    return found


def _forget_deleted(part: Any) -> Any:
    """Return a shallow copy whose record has only the attributes that the batch still has."""
    _refuse_without_record(part, refuse_to_join)
    stores = {store._key: store for store in part.stores}

    def keep_present(record: Any) -> dict[Any, Any]:
        # If the batch has types, the record has one dict per type, next to global attributes
        kept: dict[Any, Any] = {}
        for key, entry in record.items():
            if key in stores:  # a type of nodes or edges
                store = stores[key]
                kept[key] = {name: found for name, found in entry.items() if name in store}
            # An attribute of the store without a type, if the batch has one
            elif None not in stores or key in stores[None]:
                kept[key] = entry
        return kept

    kept = copy.copy(part)  # the model may keep the part itself
    kept._slice_dict = keep_present(part._slice_dict)
    kept._inc_dict = keep_present(part._inc_dict)
    return kept


def _add_node_attribute(
    joined: Any, store: Any, name: str, parts: Sequence[Any], stores: Sequence[Any]
) -> None:
    """Join an attribute that forward set in the lanes' `stores`, and enter it in the record.

    `store` is the store of the `joined` batch, and `stores` are those of the `parts`.
    """
    for part, each in zip(parts, stores, strict=True):
        if name in each and _is_per_node(part, each, name):
            continue
        why = f"forward set its {name}, which is not a tensor with one row per node in every lane"
        refuse_to_join(parts[0], f"{why}. Return it instead")
    store[name] = torch.cat([each[name] for each in stores])
    # A later call cuts the attribute by the record
    starts = store.ptr.cpu()
    slices = _of_store(joined._slice_dict, store)
    slices[name] = starts
    increments = _of_store(joined._inc_dict, store)
    increments[name] = torch.zeros_like(starts[1:])


def _is_per_node(part: Any, store: Any, name: str) -> bool:
    """True for a tensor with one row per node that does not refer to nodes by their numbers."""
    value = store[name]
    if "ptr" not in store or not isinstance(value, torch.Tensor):
        return False
    if not value.ndim or value.layout != torch.strided:
        return False
    nodes = int(store.ptr[-1])
    if value.size(0) != nodes:
        return False
    # PyTorch Geometric adds the count of earlier nodes to attributes such as "cluster_index"
    increment = part.__inc__(name, value, store)
    if not isinstance(increment, int) or increment != 0:
        return False
    dim = part.__cat_dim__(name, value, store)
    return bool(dim == 0)


def _update_graphs(batch: Any, joined: Any) -> None:
    """Put the attributes of joined parts into the argument, which the caller owns."""
    types = [store._key for store in batch.stores]
    joined_types = [store._key for store in joined.stores]
    if types != joined_types:
        refuse_update(batch, "its joined parts have other types of nodes or edges")
    for old, new in zip(batch.stores, joined.stores, strict=True):
        deleted = set(old.keys()) - set(new.keys())
        for name in deleted:
            del old[name]
        for name, value in new.items():
            if name not in old or not is_unchanged(old[name], value):
                old[name] = value
    # A later call cuts the new attributes by their record
    batch._slice_dict = joined._slice_dict
    batch._inc_dict = joined._inc_dict


_RULES = Splitter(
    _split_graphs, _join_graphs, _graph_rows, update=_update_graphs, contents=_list_attributes
)
