"""`parallel` with values of transformers, tensordict, and PyTorch Geometric, on models with random weights."""

from __future__ import annotations

import pytest
import torch

from parawrap import parallel
from tests.helpers.tiers import require_packages

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
LANES = [["cpu"] * lanes for lanes in (2, 3, 4)]


@pytest.fixture(autouse=True)
def _packages():
    require_packages("transformers", "tensordict", "torch_geometric")
    torch.manual_seed(0)


def decoder(kind="GPT2"):
    import transformers

    if kind == "GPT2":
        config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config).eval()


def close(one, other):
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_a_decoder_returns_its_cache(kind, lanes):
    """With `use_cache=True`, logits and cache equal those of the plain call."""
    model, tokens = decoder(kind), torch.randint(0, 50, (9, 6))
    with torch.no_grad():
        plain = model(tokens, use_cache=True)
        with parallel(model, lanes):
            for _ in range(3):
                output = model(tokens, use_cache=True)
                close(output.logits, plain.logits)
                assert type(output.past_key_values) is type(plain.past_key_values)
                for layer, expected in zip(output.past_key_values.layers, plain.past_key_values.layers, strict=True):
                    close(layer.keys, expected.keys)
                    close(layer.values, expected.values)


@pytest.mark.parametrize("lanes", LANES)
def test_decoding_step_by_step_updates_the_cache_that_was_passed(lanes):
    """A loop that passes one cache object to every step has the logits of the plain loop and gets the same object back."""
    import transformers

    model, tokens = decoder("Llama"), torch.randint(0, 50, (10, 8))
    with torch.no_grad():
        expected = model(tokens).logits
        cache = transformers.DynamicCache()
        with parallel(model, lanes):
            for step in range(8):
                output = model(tokens[:, step : step + 1], past_key_values=cache, use_cache=True)
                close(output.logits[:, 0], expected[:, step])
                assert output.past_key_values is cache
        assert cache.get_seq_length() == 8


def test_generate_inside_a_block_equals_plain_generate():
    """Greedy decoding in `generate`, where every forward is cut, gives the plain tokens."""
    model, tokens = decoder(), torch.randint(0, 50, (7, 4))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected = model.generate(tokens, **options)
        with parallel(model, ["cpu", "cpu"]) as p:
            assert torch.equal(model.generate(tokens, **options), expected)
            assert p.stats().shards == (4, 3)


def test_generate_as_a_method_is_joined_with_padding():
    """With join="pad", `generate` as a parallel method returns the plain tokens."""
    model, tokens = decoder(), torch.randint(0, 50, (6, 4))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected = model.generate(tokens, **options)
        with parallel(model, ["cpu", "cpu"], methods=("generate",), out_dims=0, join="pad"):
            for _ in range(2):
                assert torch.equal(model.generate(tokens, **options), expected)


@pytest.mark.parametrize("lanes", LANES)
def test_a_tensordict_keeps_its_batch_size(lanes):
    """A TensorDict argument is cut on its batch dim, and the outputs are joined to one TensorDict."""
    from tensordict import TensorDict

    def double(batch):
        return TensorDict({"y": batch["x"] * 2, "deep": {"z": batch["x"].sum(1)}}, batch_size=batch.batch_size)

    batch = TensorDict({"x": torch.randn(10, 3)}, batch_size=[10])
    expected = double(batch)
    with parallel(double, lanes) as p:
        for _ in range(3):
            output = p(batch)
            assert output.batch_size == expected.batch_size
            close(output["y"], expected["y"])
            close(output["deep", "z"], expected["deep", "z"])


def test_a_graph_batch_is_cut_by_graph():
    """Outputs per graph have one row per graph. Outputs per node are declared "ragged"."""
    from torch_geometric.data import Batch, Data

    def graph(nodes):
        edges = torch.stack([torch.arange(nodes - 1), torch.arange(1, nodes)])
        return Data(x=torch.randn(nodes, 3), edge_index=edges)

    def convolve(batch):
        out = batch.x.clone().index_add_(0, batch.edge_index[1], batch.x[batch.edge_index[0]])
        pooled = torch.zeros(batch.num_graphs, 3).index_add_(0, batch.batch, out)
        return pooled, out

    batch = Batch.from_data_list([graph(nodes) for nodes in (2, 5, 3, 4, 6, 2, 7, 3, 2, 4)])
    expected = convolve(batch)
    with parallel(convolve, ["cpu", "cpu"], out_dims=(0, "ragged")) as p:
        for _ in range(3):
            close(p(batch), expected)


@pytest.mark.parametrize("name", ["Bert", "T5"])
def test_encoders_and_encoder_decoders_have_the_plain_outputs(name):
    """BERT with an attention mask, and T5, have the plain outputs in every call."""
    import transformers

    if name == "Bert":
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        model = transformers.BertModel(config).eval()
        inputs = {"input_ids": torch.randint(0, 50, (9, 6)), "attention_mask": torch.ones(9, 6, dtype=torch.long)}
    else:
        config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
        config.decoder_start_token_id = 0
        model = transformers.T5ForConditionalGeneration(config).eval()
        inputs = {"input_ids": torch.randint(0, 50, (9, 6)), "decoder_input_ids": torch.randint(0, 50, (9, 3))}
    with torch.no_grad():
        expected = model(**inputs)
        with parallel(model, ["cpu", "cpu"]):
            for _ in range(3):
                output = model(**inputs)
                for key in expected:
                    if isinstance(expected[key], torch.Tensor):
                        close(output[key], expected[key])
