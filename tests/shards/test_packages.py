"""Built-in rules for transformers caches, TensorDict, and PyTorch Geometric batches."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Mapping

import pytest
import torch

from parawrap.errors import GatherError, ShardError
from parawrap.shards._geometric_batches import graph_rules
from parawrap.shards._tensordicts import tensordict_rules
from parawrap.shards._transformers_caches import cache_rules
from tests.helpers.tiers import require_packages

CPU = torch.device("cpu")
MODELS = ("llama", "mistral")  # mistral has a sliding window
CACHES = ("dynamic", "config", "static")


@pytest.fixture(autouse=True)
def _packages():
    require_packages("transformers", "tensordict", "torch_geometric")


def rule_for(cls):
    """Return the built-in rules of a class."""
    return cache_rules(cls) or tensordict_rules(cls) or graph_rules(cls)


def cut(value, sizes):
    rule = rule_for(type(value))
    assert rule.rows(value) in (sum(sizes), 0)
    parts = rule.split(value, sizes)
    assert len(parts) == len(sizes)
    return parts


def join(parts):
    return rule_for(type(parts[0])).join(parts)


def tensors_of(state):
    """Return every tensor of a cache by its path."""
    if isinstance(state, torch.Tensor):
        return {"": state}
    if isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    else:
        items = vars(state).items() if "transformers" in type(state).__module__ or hasattr(state, "layers") else ()
    return {f"{key}.{path}": tensor for key, item in items for path, tensor in tensors_of(item).items()}


def assert_same_cache(one, other):
    assert type(one) is type(other)
    left, right = tensors_of(one), tensors_of(other)
    assert left.keys() == right.keys() != set()
    for path, tensor in left.items():
        torch.testing.assert_close(tensor, right[path], msg=lambda text, path=path: f"{path}: {text}")


def tiny(kind):
    import transformers as t

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 11}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(num_key_value_heads=1, max_position_embeddings=32, **sizes, **ends)).eval()
    if kind == "mistral":
        config = t.MistralConfig(num_key_value_heads=1, sliding_window=4, max_position_embeddings=32, **sizes, **ends)
        return t.MistralForCausalLM(config).eval()
    config = t.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=11, decoder_start_token_id=0)
    return t.T5ForConditionalGeneration(config).eval()


def new_cache(kind, model):
    import transformers as t

    if kind == "dynamic":
        return t.DynamicCache()
    if kind == "config":
        return t.DynamicCache(config=model.config)
    return t.StaticCache(config=model.config, max_cache_len=12)


def tokens(rows, length):
    return torch.randint(3, 11, (rows, length), generator=torch.Generator().manual_seed(rows * 100 + length))


def filled(model, cache, rows=5, length=6):
    with torch.no_grad():
        model(tokens(rows, length), past_key_values=cache, use_cache=True)
    return cache


# --- transformers ---


@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("kind", MODELS)
def test_decoding_with_the_parts(kind, cache_kind):
    """Decoding with the parts has the logits of the whole cache, and `update` writes the state to the caller's cache."""
    model = tiny(kind)
    whole, cache = (filled(model, new_cache(cache_kind, model)) for _ in range(2))
    rule = rule_for(type(cache))
    layers = list(cache.layers)
    for step in range(2):
        token = tokens(5, step + 1)[:, -1:]
        before = {path: tensor.clone() for path, tensor in tensors_of(cache).items()}
        parts = cut(cache, [2, 3])
        assert_same_cache(join(parts), cache)
        assert [rule.rows(part) for part in parts] == [2, 3]
        with torch.no_grad():
            expected = model(token, past_key_values=whole, use_cache=True).logits
            got = [
                model(rows, past_key_values=part, use_cache=True).logits
                for rows, part in zip(token.split([2, 3]), parts, strict=True)
            ]
        torch.testing.assert_close(torch.cat(got), expected)
        torch.testing.assert_close(tensors_of(cache), before)  # lanes do not write to the caller's cache
        rule.update(cache, rule.join(parts))
        assert_same_cache(cache, whole)
        assert cache.get_seq_length() == whole.get_seq_length() == 7 + step
        assert all(one is other for one, other in zip(cache.layers, layers, strict=True))


@pytest.mark.parametrize("cache_kind", CACHES)
def test_empty_caches_have_empty_parts(cache_kind):
    """Each lane fills its own empty cache, and `update` writes the joined state to the caller's cache."""
    model = tiny("llama")
    cache, whole = new_cache(cache_kind, model), filled(model, new_cache(cache_kind, model))
    rule, layers = rule_for(type(cache)), cache.layers
    assert rule.rows(cache) == 0
    parts = cut(cache, [2, 3])
    for part, rows in zip(parts, tokens(5, 6).split([2, 3]), strict=True):
        with torch.no_grad():
            model(rows, past_key_values=part, use_cache=True)
    rule.update(cache, rule.join(parts))
    assert cache.layers is layers
    assert_same_cache(cache, whole)
    assert rule.rows(cache) == 5


def test_static_caches_keep_addresses():
    """Compiled models hold the addresses of a static cache, so `update` writes to the same tensors."""
    model = tiny("llama")
    cache = filled(model, new_cache("static", model))
    rule, keys = rule_for(type(cache)), cache.layers[0].keys
    parts = cut(cache, [2, 3])
    filled(model, parts[0], 2, 1), filled(model, parts[1], 3, 1)
    rule.update(cache, rule.join(parts))
    assert cache.layers[0].keys is keys
    assert cache.layers[0].batch_size == 5
    assert [part.layers[0].batch_size for part in parts] == [2, 3]
    assert int(cache.get_seq_length()) == 7


def test_caches_initialised_early():
    model = tiny("llama")
    static = new_cache("static", model)
    static.early_initialization(4, 1, 8, torch.float32, CPU)
    assert rule_for(type(static)).rows(static) == 4
    assert_same_cache(join(cut(static, [1, 3])), static)
    dynamic = new_cache("config", model)
    dynamic.early_initialization(4, 1, 8, torch.float32, CPU)  # stores only dtype and device
    assert rule_for(type(dynamic)).rows(dynamic) == 0
    assert all(part.layers[0].is_initialized for part in cut(dynamic, [1, 3]))


@pytest.mark.parametrize("empty", [False, True])
def test_encoder_decoder_caches(empty):
    """Both caches of a T5 decoder are cut, and the caller's caches stay the same objects."""
    import transformers as t

    model = tiny("t5")
    source, target = tokens(5, 4), tokens(5, 3)

    def run(ids, cache, rows=slice(None)):
        with torch.no_grad():
            return model(input_ids=source[rows], decoder_input_ids=ids[rows], past_key_values=cache, use_cache=True)

    whole, cache = (t.EncoderDecoderCache(t.DynamicCache(), t.DynamicCache()) for _ in range(2))
    if not empty:
        run(target, whole), run(target, cache)
    inner, rule = (cache.self_attention_cache, cache.cross_attention_cache), rule_for(type(cache))
    parts = cut(cache, [2, 3])
    expected = run(tokens(5, 1), whole).logits
    got = [run(tokens(5, 1), part, rows).logits for part, rows in zip(parts, (slice(0, 2), slice(2, 5)), strict=True)]
    torch.testing.assert_close(torch.cat(got), expected)
    rule.update(cache, rule.join(parts))
    assert (cache.self_attention_cache, cache.cross_attention_cache) == inner
    assert cache.is_updated == whole.is_updated
    assert_same_cache(cache, whole)


def test_gradients_flow_to_the_cache():
    import transformers

    keys = torch.randn(4, 1, 3, 8, requires_grad=True)
    cache = transformers.DynamicCache([(keys, keys * 2)])
    join(cut(cache, [1, 3])).layers[0].values.sum().backward()
    torch.testing.assert_close(keys.grad, torch.full_like(keys, 2))


def test_moved_static_layers():
    """A static layer stores the device of the tensors that it creates, and `to` updates it."""
    model = tiny("llama")
    cache = filled(model, new_cache("static", model))
    moved = rule_for(type(cache)).to(cache, torch.device("meta"))
    assert moved is not cache
    assert {tensor.device.type for tensor in tensors_of(moved).values()} == {"meta"}
    assert moved.layers[0].device == torch.device("meta")
    assert cache.layers[0].device == CPU


def test_subclasses_keep_attributes():
    import transformers

    class Mine(transformers.DynamicCache):
        def __init__(self, label):
            super().__init__()
            self.label = label
            self.counts = {"calls": [0]}

    cache = filled(tiny("llama"), Mine("a"))
    parts = cut(cache, [2, 3])
    parts[0].counts["calls"].append(1)
    assert cache.counts == {"calls": [0]}
    with pytest.raises(GatherError, match="Mine"):
        join(parts)
    joined = join(cut(cache, [2, 3]))
    assert type(joined) is Mine
    assert (joined.label, joined.counts) == ("a", {"calls": [0]})


def test_unknown_caches_are_refused():
    """Unknown tensors, other layouts, and quantized layers raise errors that name the type and `register_split`."""
    import transformers
    from transformers.cache_utils import DynamicLayer, Fp8QuantizedLayer

    class Sideways(DynamicLayer):
        def reorder_cache(self, beam_idx):
            self.keys = self.keys[:, beam_idx]

    model = tiny("llama")
    noted = filled(model, new_cache("dynamic", model))
    noted.notes = torch.zeros(5, 3)
    streamed = filled(model, new_cache("dynamic", model))
    streamed.lock = object()
    ragged = new_cache("config", model)
    for index, rows in enumerate((4, 3)):
        ragged.update(torch.randn(rows, 1, 3, 8), torch.randn(rows, 1, 3, 8), index)
    sideways = transformers.Cache(layers=[Sideways()])
    quantized = transformers.Cache(layers=[Fp8QuantizedLayer()])
    for cache, words in (
        (noted, "DynamicCache cannot be cut: the rows of its notes"),
        (streamed, "its lock is of type object"),
        (ragged, r"different row counts: \[3, 4\]"),
        (sideways, "Sideways cannot be cut"),
        (quantized, "Fp8QuantizedLayer cannot be cut"),
    ):
        rule = rule_for(type(cache))
        with pytest.raises(ShardError, match=words) as refused:
            rule.rows(cache)
        assert "register_split" in str(refused.value)


def test_parts_that_differ_are_refused():
    model = tiny("mistral")
    for kind in CACHES:
        parts = cut(filled(model, new_cache(kind, model)), [2, 3])
        filled(model, parts[0], 2, 1)
        with pytest.raises(GatherError, match="cannot be joined"):
            join(parts)


# --- TensorDict ---


def new_tensordict():
    import tensordict as td

    lazy = td.lazy_stack([td.TensorDict({"w": torch.full((i + 1,), float(i))}) for i in range(5)])
    inner = td.TensorDict({"b": torch.randn(5, 3, 4)}, batch_size=[5, 3], names=["row", "time"])
    values = {"a": torch.randn(5, 2), "inner": inner, "lazy": lazy, "name": "x", "words": td.NonTensorStack(*"abcde")}
    return td.TensorDict(values, batch_size=[5], names=["row"])


def test_tensordicts_are_cut_and_joined():
    """Batch size, names, nested TensorDicts, lazy stacks, and non-tensor entries are kept."""
    import tensordict as td

    whole = new_tensordict()
    parts = cut(whole, [2, 3])
    assert [tuple(part.batch_size) for part in parts] == [(2,), (3,)]
    assert list(parts[1]["words"]) == ["c", "d", "e"]
    joined = join(parts)
    assert (joined.batch_size, joined.names, joined.device) == (whole.batch_size, ["row"], None)
    assert (joined["inner"].batch_size, joined["inner"].names) == (torch.Size([5, 3]), ["row", "time"])
    assert isinstance(joined.get("lazy"), td.LazyStackedTensorDict)
    assert [one["w"].tolist() for one in joined.get("lazy").tensordicts] == [[float(i)] * (i + 1) for i in range(5)]
    assert (joined["name"], list(joined["words"])) == ("x", list("abcde"))
    torch.testing.assert_close(joined["a"], whole["a"])
    torch.testing.assert_close(joined["inner", "b"], whole["inner", "b"])


def test_lazy_stacks_on_another_dim():
    import tensordict as td

    whole = td.lazy_stack([td.TensorDict({"w": torch.randn(5, i + 1)}, batch_size=[5]) for i in range(3)], 1)
    joined = join(cut(whole, [1, 4]))
    assert (joined.stack_dim, joined.batch_size) == (1, whole.batch_size)
    for one, other in zip(joined.tensordicts, whole.tensordicts, strict=True):
        torch.testing.assert_close(one["w"], other["w"])


def test_locked_tensordicts_stay_locked():
    whole = new_tensordict().lock_()
    parts = cut(whole, [2, 3])
    assert all(part.is_locked for part in parts)
    assert whole.is_locked
    assert join(parts).is_locked


@pytest.mark.parametrize("style", ["decorator", "base class"])
def test_tensorclasses_keep_their_class(style):
    import tensordict as td

    namespace = {"__annotations__": {"a": torch.Tensor, "label": str}, "__module__": __name__}
    bases = (td.TensorClass,) if style == "base class" else ()
    cls = types.new_class("Pair", bases, exec_body=lambda body: body.update(namespace))
    cls = cls if bases else td.tensorclass(cls)
    whole = cls(a=torch.arange(5.0), label="x", batch_size=[5])
    joined = join(cut(whole, [4, 1]))
    assert type(joined) is cls
    assert joined.batch_size == whole.batch_size
    assert joined.label == "x"
    torch.testing.assert_close(joined.a, whole.a)


def test_moved_tensordicts_without_device():
    import tensordict as td

    whole = td.TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    moved = rule_for(type(whole)).to(whole, torch.device("meta"))
    assert (moved.device, moved["a"].device.type, whole["a"].device.type) == (None, "meta", "cpu")
    placed = td.TensorDict({"a": torch.zeros(2)}, batch_size=[2], device="cpu")
    assert rule_for(type(placed)).to(placed, torch.device("meta")).device == torch.device("meta")


def test_tensordicts_that_are_refused():
    import tensordict as td

    with pytest.raises(ShardError, match=r"batch_size is empty.*register_split"):
        rule_for(td.TensorDict).rows(td.TensorDict({"a": torch.zeros(5)}))
    whole = td.TensorDict({"a": torch.zeros(5), "m": td.MetaData([1])}, batch_size=[5])
    whole["u"] = td.UnbatchedTensor(torch.ones(2))
    assert join(cut(whole, [2, 3])).batch_size == whole.batch_size
    for change in ({"m": td.MetaData([2])}, {"u": td.UnbatchedTensor(torch.zeros(2))}, {"new": torch.zeros(2)}):
        parts = cut(whole, [2, 3])
        parts[0].update(change)
        with pytest.raises(GatherError, match="TensorDict cannot be joined"):
            join(parts)
    assert rule_for(td.TensorDictParams) is None  # a module


# --- torch_geometric ---


def graph(nodes, **more):
    from torch_geometric.data import Data

    edges = torch.randint(0, nodes, (2, 2 * nodes))
    return Data(x=torch.randn(nodes, 3), edge_index=edges, y=torch.tensor([nodes]), name=f"g{nodes}", weight=0.5, **more)


def assert_same_batch(one, other):
    assert type(one) is type(other)
    assert one.num_graphs == other.num_graphs
    for left, right in zip(one.stores, other.stores, strict=True):
        assert set(left.keys()) == set(right.keys())
        for key, value in left.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, right[key], rtol=0, atol=0)
            else:
                assert value == right[key]


def test_graphs_are_cut_and_joined():
    """Graphs may have different sizes, no edges, graph attributes, and follow_batch."""
    from torch_geometric.data import Batch

    lonely = graph(2)
    lonely.edge_index = torch.empty(2, 0, dtype=torch.long)
    graphs = [graph(3), lonely, graph(1), graph(4), graph(5)]
    whole = Batch.from_data_list(graphs, follow_batch=["x"])
    parts = cut(whole, [2, 3])
    for part, expected in zip(parts, (graphs[:2], graphs[2:]), strict=True):
        assert_same_batch(part, Batch.from_data_list(expected, follow_batch=["x"]))
    assert parts[1].name == ["g1", "g4", "g5"]
    assert parts[1].y.tolist() == [1, 4, 5]
    assert_same_batch(join(parts), whole)


def test_heterogeneous_graphs():
    from torch_geometric.data import Batch, HeteroData

    def hetero(nodes):
        data = HeteroData()
        data["a"].x, data["b"].x, data.y = torch.randn(nodes, 2), torch.randn(nodes + 1, 3), torch.tensor([nodes])
        data["a", "to", "b"].edge_index = torch.stack([torch.arange(nodes), torch.arange(nodes) + 1])
        return data

    graphs = [hetero(n) for n in (2, 1, 3)]
    whole = Batch.from_data_list(graphs)
    parts = cut(whole, [2, 1])
    assert_same_batch(parts[1], Batch.from_data_list(graphs[2:]))
    assert_same_batch(join(parts), whole)


def test_classes_of_the_user():
    from torch_geometric.data import Batch, Data

    class Paired(Data):
        def __inc__(self, key, value, *args, **kwargs):
            return self.x.size(0) if key == "pair" else super().__inc__(key, value, *args, **kwargs)

    class Own(Batch):
        pass

    graphs = [Paired(x=torch.zeros(n, 2), pair=torch.arange(n), parts={"z": torch.zeros(n)}) for n in (2, 3, 1)]
    whole = Own.from_data_list(graphs)
    parts = cut(whole, [1, 2])
    assert parts[1].pair.tolist() == [0, 1, 2, 3]
    joined = join(parts)
    assert type(joined) is type(whole)
    assert joined.pair.tolist() == whole.pair.tolist()
    assert joined.parts["z"].shape == (6,)


def test_edges_between_kinds_of_nodes():
    from torch_geometric.data import Batch, Data
    from torch_geometric.data.hypergraph_data import HyperGraphData

    class Bipartite(Data):
        def __inc__(self, key, value, *args, **kwargs):
            if key == "edge_index":
                return torch.tensor([[self.x_s.size(0)], [self.x_t.size(0)]])
            return super().__inc__(key, value, *args, **kwargs)

    two = []
    for n in (2, 1, 3):
        edges = torch.tensor([[0, n - 1], [n + 1, 1]])
        two.append(Bipartite(x_s=torch.zeros(n, 1), x_t=torch.zeros(n + 2, 1), edge_index=edges, num_nodes=2 * n + 2))
    hyper = [HyperGraphData(x=torch.zeros(n, 1), edge_index=torch.tensor([[0, 0, n - 1], [0, 1, 2]])) for n in (2, 3, 2)]
    for graphs in (two, hyper):
        whole = Batch.from_data_list(graphs)
        parts = cut(whole, [1, 2])
        assert parts[1].edge_index.tolist() == Batch.from_data_list(graphs[1:]).edge_index.tolist()
        assert_same_batch(join(parts), whole)


def test_assignments_follow_the_device():
    """Parts have `batch` and `ptr` on the batch's device, although torch_geometric may create them on the CPU."""
    from torch_geometric.data import Batch

    whole = Batch.from_data_list([graph(n) for n in (3, 1)])
    whole.batch, whole.ptr = whole.batch.to("meta"), whole.ptr.to("meta")
    del whole.edge_index
    part = cut(whole, [1, 1])[0]
    assert (part.batch.device.type, part.ptr.device.type, part.x.device.type) == ("meta", "meta", "cpu")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_changed_batches_are_refused():
    """torch_geometric would drop attributes that were added later, and cut replaced attributes at the old positions."""
    from torch_geometric.data import Batch, Data

    def changed(change):
        batch = Batch.from_data_list([graph(n) for n in (3, 1, 4)])
        change(batch)
        return batch

    unconnected = Batch.from_data_list([Data(x=torch.zeros(n, 1)) for n in (3, 1, 4)])
    unconnected.edge_index = torch.tensor([[0], [1]])
    sparse = [Data(x=torch.zeros(2, 1), adj=torch.eye(2).to_sparse()) for _ in range(3)]
    for batch, words in (
        (changed(lambda batch: setattr(batch, "z", torch.zeros(8))), "its z was set or deleted"),
        (changed(lambda batch: delattr(batch, "ptr")), "its ptr was set or deleted"),
        (changed(lambda batch: setattr(batch, "x", torch.zeros(9, 3))), "its x is sparse, or of another size"),
        (changed(lambda batch: setattr(batch, "edge_index", batch.edge_index.flip(1))), "its edge_index has edges"),
        (unconnected, "its edge_index was set"),
        (Batch.from_data_list(sparse), "its adj is sparse"),
        (Batch(x=torch.zeros(3, 2), batch=torch.tensor([0, 0, 1])), "make it by Batch.from_data_list"),
    ):
        rule = rule_for(type(batch))
        with pytest.raises(ShardError, match=words) as refused:
            rule.split(batch, [1, 2])
        assert "register_split" in str(refused.value)
        assert type(batch).__name__ in str(refused.value)


# --- recognition ---


def test_other_classes_have_no_rule():
    import transformers
    from torch_geometric.data import Data

    for cls in (int, list, torch.Tensor, torch.nn.Module, Data, transformers.modeling_outputs.BaseModelOutput):
        assert rule_for(cls) is None


def test_the_rules_import_no_package():
    """The rules use packages only if the program has already imported them."""
    code = (
        "import sys; from parawrap.shards._tensordicts import tensordict_rules; assert tensordict_rules(dict) is None;"
        "import parawrap; assert not {'transformers', 'tensordict', 'torch_geometric'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
