"""Models of transformers with random weights in a block, compared with the plain calls."""

from __future__ import annotations

import copy

import pytest
import torch

from parawrap import parallel
from parawrap.errors import GatherError
from tests.helpers.tiers import require_packages

# Of transformers and of torch, on the CPU and with few weights.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
TWO, THREE = ["cpu"] * 2, ["cpu"] * 3
SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
TEXT = {**SIZE, "vocab_size": 12}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ROWS = 9


@pytest.fixture(autouse=True)
def _transformers():
    require_packages("transformers")
    torch.manual_seed(0)


def build(name):
    """Return a small model in eval mode."""
    import transformers as t

    wide = {"initializer_range": 1.0}  # texts of different lengths
    starts = {"vocab_size": 12, **ENDS, "decoder_start_token_id": 0}
    makers = {
        "bert": lambda: t.BertForSequenceClassification(t.BertConfig(attn_implementation="eager", **TEXT)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=12, n_embd=16, n_head=2, n_layer=2, **wide, **ENDS)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(num_key_value_heads=1, **TEXT, **ENDS)),
        "gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(num_key_value_heads=1, head_dim=8, sliding_window=4, **TEXT, **ENDS)
        ),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **starts)
        ),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(image_size=8, patch_size=4, **SIZE)),
        "yolos": lambda: t.YolosForObjectDetection(
            t.YolosConfig(image_size=[16, 16], patch_size=8, num_detection_tokens=4, **SIZE)
        ),
        "xlnet": lambda: t.XLNetLMHeadModel(t.XLNetConfig(vocab_size=12, d_model=16, n_layer=1, n_head=2, d_inner=16)),
    }
    return makers[name]().eval()


def tokens(length=6):
    return torch.randint(3, 12, (ROWS, length), generator=torch.Generator().manual_seed(length))


def padded_left(length=6):
    """Return an attention mask with up to three padded positions per row."""
    return (torch.arange(length) >= torch.arange(ROWS)[:, None] % 4).long()


def inputs_of(name):
    """Return the arguments of a plain call."""
    return {
        "t5": lambda: {"input_ids": tokens(), "attention_mask": padded_left(), "decoder_input_ids": tokens(3)},
        "vit": lambda: {"pixel_values": torch.randn(ROWS, 3, 8, 8)},
        "yolos": lambda: {"pixel_values": torch.randn(ROWS, 3, 16, 16)},
    }.get(name, lambda: {"input_ids": tokens(), "attention_mask": padded_left()})()


def tensors_in(value, path=""):
    """Return every tensor of an output by its path, with those of caches."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        items = vars(value).items() if type(value).__module__ == "transformers.cache_utils" else ()
    return {place: tensor for key, item in items for place, tensor in tensors_in(item, f"{path}.{key}").items()}


def assert_same(one, other):
    assert type(one) is type(other)
    left, right = tensors_in(one), tensors_in(other)
    assert left.keys() == right.keys() != set()
    for path, tensor in left.items():
        torch.testing.assert_close(tensor, right[path], atol=1e-4, rtol=1e-4, msg=lambda text, path=path: f"{path}: {text}")


def assert_as_plain(model, lanes, inputs, **options):
    """Compare two calls in a block with the plain call."""
    with torch.no_grad():
        plain = model(**copy.deepcopy(inputs))
        with parallel(model, lanes, **options) as p:
            for _ in range(2):
                assert_same(model(**copy.deepcopy(inputs)), plain)
            assert len(p.stats().shards) == len(lanes)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma2", "t5", "vit", "yolos"])
def test_models_have_plain_outputs(name):
    """All outputs, with caches and padded masks, and the output class equal those of the plain call."""
    assert_as_plain(build(name), THREE, inputs_of(name))


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [("bert", None), ("t5", None), ("llama", {"use_reentrant": False}), ("llama", {"use_reentrant": True})],
    ids=["bert", "t5", "checkpoint", "reentrant"],
)
def test_training_step(name, checkpointing):
    """With reduce="mean", loss and gradients are the plain ones, also with checkpointing and tied weights."""
    model, inputs = build(name), inputs_of(name)
    inputs.pop("decoder_input_ids", None)
    inputs["labels"] = torch.randint(0, 2, (ROWS,)) if name == "bert" else tokens()
    if checkpointing:
        inputs["use_cache"] = False
        model.train()
        model.lm_head.weight = model.model.embed_tokens.weight
    parameters = list(model.parameters())
    plain = model(**inputs).loss
    expected = torch.autograd.grad(plain, parameters, allow_unused=True)
    if checkpointing:
        model.gradient_checkpointing_enable(checkpointing)
    with parallel(model, TWO, reduce="mean"):
        loss = model(**inputs).loss
        loss.backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close([parameter.grad for parameter in parameters], list(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_generate_in_lanes_is_padded(name):
    """Lanes that end at different lengths have the plain tokens with join="pad"."""
    model, inputs = build(name), {"input_ids": tokens(), "attention_mask": padded_left(), "max_new_tokens": 12}
    inputs |= {"eos_token_id": [2, 4, 5, 6], "do_sample": False}
    plain = model.generate(**inputs)
    ends = [part.ne(0).any(0).sum().item() for part in plain.tensor_split(3)]
    assert len(set(ends)) > 1 or name == "t5"
    with parallel(model, THREE, methods=("generate",), join="pad", pad_value=0) as p:
        for _ in range(2):
            assert torch.equal(model.generate(**inputs), plain)
        assert len(p.stats().shards) == 3


def test_several_sequences_per_prompt():
    """`num_return_sequences` is refused until out_dims="ragged" declares it, and has the plain order."""
    model = build("gpt2")
    inputs = {"input_ids": tokens(), "max_new_tokens": 3, "min_new_tokens": 3, "num_beams": 3, "num_return_sequences": 2}
    plain = model.generate(**inputs, do_sample=False)
    with parallel(model, TWO, methods=("generate",), out_dims="ragged"):
        assert torch.equal(model.generate(**inputs, do_sample=False), plain)
    with parallel(model, TWO, methods=("generate",)), pytest.raises(GatherError, match='"ragged" for rows in order'):
        model.generate(**inputs, do_sample=False)


@pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_generate_around_a_block(options):
    """Without `methods`, the tokens are those of the plain call, and attributes are those of the model."""
    model, inputs = build("gpt2"), {"input_ids": tokens(), "attention_mask": padded_left(), "max_new_tokens": 4}
    inputs |= {"do_sample": False, "disable_compile": True} | options
    torch.manual_seed(1)
    plain = model.generate(**inputs)
    with parallel(model, TWO) as p:
        torch.manual_seed(1)
        assert torch.equal(model.generate(**inputs), plain)
        assert model.get_input_embeddings() is model.transformer.wte
        assert len(p.stats().shards) == 2


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_decoding_with_one_cache(name, kind):
    """Sliding windows, static, and mixed layers have the plain logits at each step, and the state of the plain cache."""
    import transformers as t

    model, text = build(name), tokens(8)

    def new_cache():
        layout = {"config": model.config}
        return t.DynamicCache(**layout) if kind == "dynamic" else t.StaticCache(max_cache_len=12, **layout)

    cache, whole, plain = new_cache(), new_cache(), copy.deepcopy(model)
    with torch.no_grad(), parallel(model, THREE):
        for step in range(8):
            token = text[:, step : step + 1]
            output = model(token, past_key_values=cache, use_cache=True)
            assert output.past_key_values is cache
            expected = plain(token, past_key_values=whole, use_cache=True).logits
            torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)
    assert_same(cache, whole)


def test_caches_that_differ_are_refused():
    """The error names the place of the returned cache and what to do, or the argument that the lanes filled."""
    import transformers

    def keys(x):
        return torch.zeros(len(x), 1, len(x), 4)  # as many tokens as rows: lanes differ

    def cache_of(x):
        return {"past_key_values": transformers.DynamicCache([(keys(x), keys(x))])}

    def fills(x, cache):
        cache.update(keys(x), keys(x), 0)
        return x

    place_and_remedy = r'output\["past_key_values"\].*shapes of keys.*join="list"'
    with parallel(cache_of, TWO) as p, pytest.raises(GatherError, match=place_and_remedy):
        p(torch.zeros(ROWS, 2))
    cache = transformers.DynamicCache([(torch.zeros(7, 1, 2, 4), torch.zeros(7, 1, 2, 4))])
    with parallel(fills, TWO) as p, pytest.raises(GatherError, match=r"args\[1\] was changed differently"):
        p(torch.zeros(7, 2), cache)


def test_rows_on_another_dim():
    """The memories of XLNet have their rows on dim 1."""
    model = build("xlnet")
    with torch.no_grad(), pytest.raises(GatherError, match=r'output\["mems"\]\[0\]'), parallel(model, TWO):
        model(tokens())
    assert_as_plain(model, TWO, {"input_ids": tokens()}, out_dims={"mems": 1})
