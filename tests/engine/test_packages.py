"""Built-in rules for transformers caches, TensorDict, and PyTorch Geometric batches."""

from __future__ import annotations

import copy
from operator import is_

import pytest
import torch

from parawrap import parallel
from parawrap.engine.rules.geometric_graphs import graph_rules
from parawrap.engine.rules.registry import list_contents, splitter_of, update_argument
from parawrap.engine.rules.tensordicts import tensordict_rules
from parawrap.engine.rules.transformers_caches import cache_rules
from parawrap.errors import GatherError, ShardError
from parawrap.tree import flatten
from tests.helpers.cures import options_in_error, options_of
from tests.helpers.same import assert_same
from tests.helpers.tiers import require_packages

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def _packages():
    require_packages("transformers", "tensordict", "torch_geometric")


def rule_for(cls):
    return cache_rules(cls) or tensordict_rules(cls) or graph_rules(cls)


def cut(value, sizes):
    rule = rule_for(type(value))
    assert rule.rows(value) in (sum(sizes), 0)
    parts = rule.split(value, sizes)
    assert len(parts) == len(sizes)
    return parts


def join(parts):
    return rule_for(type(parts[0])).join(parts)


def tensors_of(cache):
    """Return the tensors of each layer of a cache by name."""
    found = [
        {name: each for name, each in vars(layer).items() if isinstance(each, torch.Tensor)}
        for layer in cache.layers
    ]
    return [tensors for tensors in found if tensors]


def assert_same_cache(one, other):
    assert type(one) is type(other)
    assert tensors_of(one) != []
    torch.testing.assert_close(tensors_of(one), tensors_of(other))


def tiny(window=None):
    import transformers as t

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 11,
    }
    config = t.MistralConfig(
        num_key_value_heads=1, sliding_window=window, max_position_embeddings=32, **sizes
    )
    return t.MistralForCausalLM(config).eval()


def new_cache(kind, model):
    import transformers as t

    if kind == "static":
        return t.StaticCache(config=model.config, max_cache_len=12)
    return t.DynamicCache(config=model.config) if kind == "config" else t.DynamicCache()


def tokens(rows, length):
    return torch.randint(
        3, 11, (rows, length), generator=torch.Generator().manual_seed(rows * 100 + length)
    )


def filled(model, cache, rows=5, length=6):
    with torch.no_grad():
        model(tokens(rows, length), past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize(("window", "kind"), [(None, "dynamic"), (4, "config"), (4, "static")])
def test_decoding_with_parts_of_a_cache(window, kind):
    """From an empty cache on, parts have the logits of the whole cache, and `update` writes to the
    caller's objects.
    """
    model = tiny(window)
    whole, cache = new_cache(kind, model), new_cache(kind, model)
    rule, layers, keys = rule_for(type(cache)), cache.layers, None
    for text in (tokens(5, 6), tokens(5, 1), tokens(5, 2)[:, 1:]):
        before = copy.deepcopy(tensors_of(cache))
        parts = cut(cache, [2, 3])
        if rule.rows(cache):
            assert_same_cache(join(parts), cache)
            assert [rule.rows(part) for part in parts] == [2, 3]
        with torch.no_grad():
            expected = model(text, past_key_values=whole, use_cache=True).logits
            got = [
                model(rows, past_key_values=part, use_cache=True).logits
                for rows, part in zip(text.split([2, 3]), parts, strict=True)
            ]
        torch.testing.assert_close(torch.cat(got), expected)
        # Lanes do not write to the caller's cache
        torch.testing.assert_close(tensors_of(cache), before)
        rule.update(cache, rule.join(parts))
        assert_same_cache(cache, whole)
        assert rule.rows(cache) == 5
        assert cache.layers is layers
        if kind == "static":  # compiled models hold the addresses of its tensors
            assert keys is None or cache.layers[0].keys is keys
            assert (cache.layers[0].batch_size, [part.layers[0].batch_size for part in parts]) == (
                5,
                [2, 3],
            )
        keys = cache.layers[0].keys


def test_caches_of_caches():
    """Both caches of an encoder-decoder model are cut, with gradients, and the caller's caches stay
    the same objects.
    """
    import transformers as t

    keys = torch.randn(4, 1, 3, 8, requires_grad=True)
    cache = t.EncoderDecoderCache(
        t.DynamicCache([(keys, keys * 2)]), t.DynamicCache([(keys, keys)])
    )
    inner, rule = (cache.self_attention_cache, cache.cross_attention_cache), rule_for(type(cache))
    parts = cut(cache, [1, 3])
    assert parts[0].is_updated == cache.is_updated
    assert parts[0].cross_attention_cache.layers[0].keys.shape == (1, 1, 3, 8)
    for part in parts:
        part.self_attention_cache.update(keys[: rule.rows(part)], keys[: rule.rows(part)], 0)
    rule.update(cache, rule.join(parts))
    assert (cache.self_attention_cache, cache.cross_attention_cache) == inner
    assert (cache.get_seq_length(), inner[1].get_seq_length()) == (6, 3)
    inner[1].layers[0].keys.sum().backward()
    torch.testing.assert_close(keys.grad, torch.ones_like(keys))


def test_calls_with_a_cache():
    """The caller's cache is returned.

    An error names a cache that the lanes filled differently, or returned. An empty cache is filled
    also if it is declared as whole, as no lane has rows of another one.
    """
    import transformers as t

    def keys(x, *, differ):
        return torch.zeros(len(x), 1, len(x) if differ else 2, 4)

    def fills(x, cache, *, differ):
        cache.update(keys(x, differ=differ), keys(x, differ=differ), 0)
        return x, cache

    def makes(x):
        return {"past": t.DynamicCache([(keys(x, differ=True), keys(x, differ=True))])}

    x, cache = torch.zeros(7, 2), t.DynamicCache()
    with parallel(fills, ["cpu"] * 2) as p:
        for length in (2, 4):
            assert p(x, cache, differ=False)[1] is cache
            assert cache.layers[0].keys.shape == (7, 1, length, 4)
        with pytest.raises(GatherError, match=r"args\[1\] was changed differently"):
            p(x, cache, differ=True)
    cache = t.DynamicCache()
    with parallel(fills, ["cpu"] * 2, in_dims={"cache": None}) as p:
        assert p(x, cache, differ=False)[1] is cache
        assert cache.layers[0].keys.shape == (7, 1, 2, 4)
    with (
        parallel(makes, ["cpu"] * 2) as p,
        pytest.raises(
            GatherError, match=r'output\["past"\].*shapes of keys.*use_cache=False.*join="list"'
        ),
    ):
        p(x)


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
IMAGES = {"image_size": 8, "patch_size": 4}


def clip():
    import transformers as t

    text = t.CLIPTextConfig(
        **SMALL, num_hidden_layers=2, vocab_size=50, bos_token_id=48, eos_token_id=49
    )
    vision = t.CLIPVisionConfig(**SMALL, **IMAGES, num_hidden_layers=2)
    return t.CLIPModel(
        t.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    ).eval()


@torch.no_grad()
@pytest.mark.parametrize("with_loss", [False, True])
def test_models_comparing_texts_with_images(with_loss):
    """No option joins its outputs or its loss.

    Its encoders run in lanes, and their outputs are compared after it.
    """
    model, ids, pixels = clip(), tokens(9, 6).clamp(max=47), torch.randn(9, 3, 8, 8)
    plain = model(ids, pixels).logits_per_image
    with (
        parallel(model, ["cpu"] * 2),
        pytest.raises(GatherError, match="no option can join such") as refused,
    ):
        model(ids, pixels, return_loss=with_loss)
    assert 'output["logits_per_image"] and output["logits_per_text"]' in str(refused.value)
    assert "reduce=" not in str(refused.value)
    with parallel(model, ["cpu"] * 2, methods=("get_text_features", "get_image_features")):
        texts = model.get_text_features(ids).pooler_output
        images = model.get_image_features(pixels).pooler_output
    texts, images = (each / each.norm(dim=-1, keepdim=True) for each in (texts, images))
    torch.testing.assert_close(images @ texts.T * model.logit_scale.exp(), plain)


@torch.no_grad()
def test_frames_of_all_videos():
    """VideoPrism puts the frames of all videos on dim 0."""
    import transformers as t

    sizes = {"image_size": 8, "num_frames": 4, "tubelet_size": [1, 4, 4]}
    config = t.VideoPrismVisionConfig(**SMALL, **sizes, num_spatial_layers=2, num_temporal_layers=1)
    model, videos = t.VideoPrismVisionModel(config).eval(), torch.randn(9, 4, 3, 8, 8)
    plain = model(videos)
    with parallel(model, ["cpu"] * 2) as p:
        cure = options_in_error(lambda: p(videos))
    assert set(cure["out_dims"].values()) == {"ragged"}
    with parallel(model, ["cpu"] * 2, **cure):
        output = model(videos)
    torch.testing.assert_close(dict(output), dict(plain))


@torch.no_grad()
def test_patches_of_all_images():
    """Pixtral puts the patches of all images next to each other on dim 1."""
    import transformers as t

    config = t.PixtralVisionConfig(**SMALL, **IMAGES, num_hidden_layers=2)
    model, pixels = t.PixtralVisionModel(config).eval(), torch.randn(9, 3, 8, 8)
    sizes = torch.full((9, 2), 8)
    plain = model(pixels, image_sizes=sizes).last_hidden_state
    with parallel(model, ["cpu"] * 2), pytest.raises(GatherError, match=r"4 on dim 1") as refused:
        model(pixels, image_sizes=sizes)
    assert 'torch.cat([each["last_hidden_state"] for each in outputs], 1)' in str(refused.value)
    with parallel(model, ["cpu"] * 2, **options_of(str(refused.value))):
        outputs = model(pixels, image_sizes=sizes)
    torch.testing.assert_close(torch.cat([each["last_hidden_state"] for each in outputs], 1), plain)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_workers_fill_a_cache(kind):
    """The caller's cache gets the new keys, of a cut call and of a whole one."""
    model = tiny()
    plain, text = copy.deepcopy(model), tokens(5, 1)
    expected = filled(plain, new_cache(kind, model))
    wanted = plain(text, past_key_values=expected, use_cache=True).logits.detach()
    with torch.no_grad(), parallel(model, ["cpu"] * 2, workers="process") as p:
        for call in p, lambda *args, **kwargs: p.submit(*args, **kwargs).result():
            cache = filled(plain, new_cache(kind, model))
            output = call(text, past_key_values=cache, use_cache=True)
            torch.testing.assert_close(output.logits, wanted)
            assert output.past_key_values is cache
            assert_same_cache(cache, expected)


def test_unknown_caches_are_refused():
    """Unknown tensors, other layouts, and quantized layers raise errors that name the type and
    `register_split`.
    """
    import transformers
    from transformers.cache_utils import DynamicLayer, Fp8QuantizedLayer

    class Sideways(DynamicLayer):
        def reorder_cache(self, beam_idx):
            self.keys = self.keys[:, beam_idx]

    def dynamic(*rows):
        return transformers.DynamicCache([(torch.randn(each, 1, 3, 8),) * 2 for each in rows])

    noted, streamed = dynamic(5), dynamic(5)
    noted.notes, streamed.lock = torch.zeros(5, 3), object()
    for cache, words in (
        (noted, "DynamicCache cannot be cut: the rows of its notes"),
        (streamed, "its lock is of type object"),
        (dynamic(4, 3), r"different row counts: \[3, 4\]"),
        (transformers.Cache(layers=[Sideways()]), "Sideways cannot be cut"),
        (transformers.Cache(layers=[Fp8QuantizedLayer()]), "Fp8QuantizedLayer cannot be cut"),
    ):
        with pytest.raises(ShardError, match=rf"{words}.*register_split"):
            rule_for(type(cache)).rows(cache)


def test_moved_values_name_their_device():
    """A static layer stores the device of the tensors that it creates.

    A TensorDict may have no device.
    """
    import tensordict as td

    model = tiny()
    cache = filled(model, new_cache("static", model))
    moved = rule_for(type(cache)).to(cache, META)
    assert {each.device for tensors in tensors_of(moved) for each in tensors.values()} == {META}
    assert (moved.layers[0].device, cache.layers[0].device) == (META, CPU)
    for device, moved_to in ((None, None), (CPU, META)):
        whole = td.TensorDict({"a": torch.zeros(2)}, batch_size=[2], device=device)
        moved = rule_for(type(whole)).to(whole, META)
        assert (moved.device, moved["a"].device, whole["a"].device) == (moved_to, META, CPU)


def test_tensordicts_are_cut_and_joined():
    """Batch size, names, locks, nested TensorDicts, lazy stacks, and non-tensor
    entries are kept.
    """
    import tensordict as td

    lazy = td.lazy_stack([td.TensorDict({"w": torch.full((i + 1,), float(i))}) for i in range(5)])
    inner = td.TensorDict({"b": torch.randn(5, 3, 4)}, batch_size=[5, 3], names=["row", "time"])
    values = {
        "a": torch.randn(5, 2),
        "inner": inner,
        "lazy": lazy,
        "name": "x",
        "words": td.NonTensorStack(*"abcde"),
    }
    whole = td.TensorDict(values, batch_size=[5], names=["row"]).lock_()
    parts = cut(whole, [2, 3])
    assert [tuple(part.batch_size) for part in parts] == [(2,), (3,)]
    assert list(parts[1]["words"]) == ["c", "d", "e"]
    joined = join(parts)
    assert all(each.is_locked for each in (whole, *parts, joined))
    assert (joined.batch_size, joined.names, joined.device) == (whole.batch_size, ["row"], None)
    assert (joined["inner"].batch_size, joined["inner"].names) == (
        torch.Size([5, 3]),
        ["row", "time"],
    )
    assert isinstance(joined.get("lazy"), td.LazyStackedTensorDict)
    assert [one["w"].tolist() for one in joined.get("lazy").tensordicts] == [
        [float(i)] * (i + 1) for i in range(5)
    ]
    assert (joined["name"], list(joined["words"])) == ("x", list("abcde"))
    torch.testing.assert_close(joined["a"], whole["a"])
    torch.testing.assert_close(joined["inner", "b"], whole["inner", "b"])
    columns = td.lazy_stack(
        [td.TensorDict({"w": torch.randn(5, i + 1)}, batch_size=[5]) for i in range(3)], 1
    )
    joined = join(cut(columns, [1, 4]))
    assert (joined.stack_dim, joined.batch_size) == (1, columns.batch_size)
    for one, other in zip(joined.tensordicts, columns.tensordicts, strict=True):
        torch.testing.assert_close(one["w"], other["w"])


def test_tensordicts_that_are_refused():
    import tensordict as td

    with pytest.raises(ShardError, match=r"batch_size is empty.*register_split"):
        rule_for(td.TensorDict).rows(td.TensorDict({"a": torch.zeros(5)}))
    whole = td.TensorDict({"a": torch.zeros(5), "m": td.MetaData([1])}, batch_size=[5])
    whole["u"] = td.UnbatchedTensor(torch.ones(2))
    assert join(cut(whole, [2, 3])).batch_size == whole.batch_size
    for change in (
        {"m": td.MetaData([2])},
        {"u": td.UnbatchedTensor(torch.zeros(2))},
        {"new": torch.zeros(2)},
    ):
        parts = cut(whole, [2, 3])
        parts[0].update(change)
        with pytest.raises(GatherError, match="TensorDict cannot be joined"):
            join(parts)
    assert rule_for(td.TensorDictParams) is None  # a module


def graph(nodes):
    from torch_geometric.data import Data

    edges = torch.randint(0, nodes, (2, 2 * nodes))
    return Data(
        x=torch.randn(nodes, 3),
        edge_index=edges,
        y=torch.tensor([nodes]),
        name=f"g{nodes}",
        weight=0.5,
    )


def hetero(nodes):
    from torch_geometric.data import HeteroData

    data = HeteroData()
    data["a"].x, data["b"].x, data.y = (
        torch.randn(nodes, 2),
        torch.randn(nodes + 1, 3),
        torch.tensor([nodes]),
    )
    data["a", "to", "b"].edge_index = torch.stack([torch.arange(nodes), torch.arange(nodes) + 1])
    return data


def assert_same_batch(one, other):
    assert type(one) is type(other)
    assert one.num_graphs == other.num_graphs
    for left, right in zip(one.stores, other.stores, strict=True):
        assert_same(dict(sorted(left.items())), dict(sorted(right.items())))


@pytest.mark.parametrize("make", [graph, hetero])
def test_graphs_are_cut_and_joined(make):
    """Graphs may have different sizes, no edges, graph attributes, and follow_batch; a class of
    batches is kept.
    """
    from torch_geometric.data import Batch

    class Own(Batch):
        pass

    graphs = [make(nodes) for nodes in (2, 3, 1, 4, 5)]
    if make is graph:
        graphs[1].edge_index = torch.empty(2, 0, dtype=torch.long)
    whole = Own.from_data_list(graphs, follow_batch=["x"])
    parts = cut(whole, [2, 3])
    for part, expected in zip(parts, (graphs[:2], graphs[2:]), strict=True):
        assert_same_batch(part, Own.from_data_list(expected, follow_batch=["x"]))
    assert_same_batch(join(parts), whole)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_calls_with_graphs():
    """Outputs per graph have one row per graph. Outputs per node are declared "ragged"."""
    from torch_geometric.data import Batch

    def summed(batch):
        out = batch.x.clone().index_add_(0, batch.edge_index[1], batch.x[batch.edge_index[0]])
        return torch.zeros(batch.num_graphs, 3).index_add_(0, batch.batch, out), out

    batch = Batch.from_data_list([graph(nodes) for nodes in (2, 5, 3, 4, 6, 2, 7, 3, 2, 4)])
    with parallel(summed, ["cpu"] * 2, out_dims=(0, "ragged")) as p:
        torch.testing.assert_close(p(batch), summed(batch))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_changed_batches_are_refused():
    """torch_geometric would drop attributes that were added later, and cut replaced attributes at
    the old positions.
    """
    from torch_geometric.data import Batch, Data

    def changed(change):
        batch = Batch.from_data_list([graph(n) for n in (3, 1, 4)])
        change(batch)
        return batch

    unconnected = Batch.from_data_list([Data(x=torch.zeros(n, 1)) for n in (3, 1, 4)])
    unconnected.edge_index = torch.tensor([[0], [1]])
    sparse = [Data(x=torch.zeros(2, 1), adj=torch.eye(2).to_sparse()) for _ in range(3)]
    nested = Batch.from_data_list(
        [Data(x=torch.zeros(2, 1), held={"a": torch.zeros(2)}) for _ in range(3)]
    )
    nested.held["a"] = torch.zeros(9)
    for batch, words in (
        (nested, "its held is sparse, or of another size"),
        (changed(lambda batch: setattr(batch, "z", torch.zeros(8))), "its z was set or deleted"),
        (changed(lambda batch: delattr(batch, "ptr")), "its ptr was set or deleted"),
        (
            changed(lambda batch: setattr(batch, "x", torch.zeros(9, 3))),
            "its x is sparse, or of another size",
        ),
        (
            changed(lambda batch: setattr(batch, "edge_index", batch.edge_index.flip(1))),
            "its edge_index has edges",
        ),
        (unconnected, "its edge_index was set"),
        (Batch.from_data_list(sparse), "its adj is sparse"),
        (
            Batch(x=torch.zeros(3, 2), batch=torch.tensor([0, 0, 1])),
            "make it by Batch.from_data_list",
        ),
    ):
        with pytest.raises(ShardError, match=rf"{type(batch).__name__}.*{words}.*register_split"):
            rule_for(type(batch)).split(batch, [1, 2])


# -- changes by forward


def changed(value, sizes, change):
    """Change the parts of an argument, as forward does, and give the argument the joined state.

    Assert that the contents of each part show the change, and nothing without one.
    """
    flatten(value)  # finds the rules of the class
    before = copy.copy(list_contents(value))
    parts = cut(value, sizes)
    for part in parts:
        old = list_contents(part)
        assert is_same(old, list_contents(part))
        change(part)
        assert not is_same(old, list_contents(part))
    update_argument(value, splitter_of(value).join(parts))
    assert not is_same(before, list_contents(value))
    return value


def is_same(before, after):
    return len(before) == len(after) and all(map(is_, before, after))


def test_tensordicts_take_changes():
    """Entries are set and removed, also in nested and locked ones; others stay the same objects."""
    import tensordict as td

    def change(part):
        was_locked = part.is_locked
        part.unlock_()
        part["h"] = part["a"] + 1
        part["inner", "b"] = part["inner", "b"] * 2
        part["inner", "new"] = torch.ones(len(part))
        part["name"] = "y"
        part["words"] = td.NonTensorStack(*(word.upper() for word in part["words"]))
        del part["old"]
        if was_locked:
            part.lock_()

    for is_locked in (False, True):
        values = {"a": torch.randn(5, 2), "old": torch.zeros(5), "inner": {"b": torch.ones(5)}}
        values |= {"name": "x", "words": td.NonTensorStack(*"abcde")}
        whole = td.TensorDict(values, batch_size=[5])
        if is_locked:
            whole.lock_()
        a, inner = whole["a"], whole["inner"]
        found = changed(whole, [2, 3], change)
        assert found["a"] is a
        assert found["inner"] is inner
        assert sorted(found.keys()) == ["a", "h", "inner", "name", "words"]
        assert (found["name"], list(found["words"])) == ("y", list("ABCDE"))
        torch.testing.assert_close(found["h"], a + 1)
        assert (inner["b"].tolist(), inner["new"].tolist()) == ([2] * 5, [1] * 5)
        assert (found.is_locked, inner.is_locked) == (is_locked, is_locked)


def test_lazy_tensordicts_take_changes():
    import tensordict as td

    rows = [td.TensorDict({"w": torch.full((i + 1,), float(i))}) for i in range(4)]
    lazy = td.lazy_stack(rows)
    changed(lazy, [1, 3], lambda part: [row.set("k", row["w"] + 1) for row in part.tensordicts])
    assert [row["k"].tolist() for row in rows] == [[i + 1.0] * (i + 1) for i in range(4)]
    assert all(map(is_, lazy.tensordicts, rows))

    @td.tensorclass
    class Sample:
        x: torch.Tensor
        y: torch.Tensor | None = None
        name: str = "a"

    sample = Sample(torch.zeros(4, 2), batch_size=[4])
    x = sample.x

    def fill(part):
        part.y = part.x.sum(1) + 1
        part.name = "b"

    changed(sample, [1, 3], fill)
    assert sample.x is x
    assert (sample.y.tolist(), sample.name) == ([1] * 4, "b")


def test_tensordicts_that_refuse_changes():
    import tensordict as td

    whole = td.TensorDict({"a": torch.zeros(4)}, batch_size=[4])
    with pytest.raises(GatherError, match=r"3 rows, not 4\. Return it instead"):
        update_argument(whole, td.TensorDict({"a": torch.zeros(3)}, batch_size=[3]))
    root = td.TensorDict({"inner": whole}, batch_size=[4]).lock_()
    with pytest.raises(GatherError, match=r"part of a locked graph.*Return it instead"):
        update_argument(root["inner"], td.TensorDict({"b": torch.zeros(4)}, batch_size=[4]))


@pytest.mark.parametrize("make", [graph, hetero])
def test_graphs_take_changes(make):
    """Attributes are set and deleted, and the batch can be cut again."""
    from torch_geometric.data import Batch

    batch = Batch.from_data_list([make(nodes) for nodes in (2, 3, 1, 4, 5)])
    y = batch.y

    def change(part):
        for store in part.node_stores:
            store.h = store.x.sum(1)
            store.x = store.x[:, :2] * 2
        if make is graph:
            del part.weight
        else:
            del part["a", "to", "b"].edge_index

    plain = copy.deepcopy(batch)
    change(plain)
    changed(batch, [2, 3], change)
    assert_same_batch(batch, plain)
    assert batch.y is y
    assert_same_batch(join(cut(batch, [4, 1])), plain)


def test_changes_of_graphs_that_are_refused():
    """An attribute that is not per node, or that counts nodes; a pooled batch."""
    from torch_geometric.data import Batch

    def pool(part):
        part.x, part.batch = part.x[::2], part.batch[::2]

    for change, words in (
        (
            lambda part: setattr(part, "z", torch.zeros(7)),
            "its z, which is not a tensor with one row",
        ),
        (
            lambda part: setattr(part, "names", ["a"]),
            "its names, which is not a tensor with one row",
        ),
        (
            lambda part: setattr(part, "node_index", torch.arange(part.num_nodes)),
            "its node_index, which is not",
        ),
        (lambda part: delattr(part, "ptr"), "forward deleted its ptr"),
        (pool, "its x is sparse, or of another size"),
    ):
        batch = Batch.from_data_list([graph(nodes) for nodes in (3, 1, 4)])
        with pytest.raises(GatherError, match=rf"parts of a DataBatch cannot be joined: .*{words}"):
            changed(batch, [1, 2], change)


def test_caches_show_changes():
    """Tensors that layers write in place count their writes; inference tensors always count."""
    model = tiny()
    for kind, inference in (("dynamic", False), ("static", False), ("static", True)):
        with torch.inference_mode(inference):
            cache = filled(model, new_cache(kind, model))
            before = list_contents(cache)
            assert is_same(before, list_contents(cache)) != inference
            with torch.no_grad():
                model(tokens(5, 1), past_key_values=cache, use_cache=True)
            assert not is_same(before, list_contents(cache))
