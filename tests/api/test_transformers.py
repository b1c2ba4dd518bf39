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
LANES = [["cpu"] * lanes for lanes in (2, 3)]
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

    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    pair = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, **heads}
    starts = {"vocab_size": 12, "decoder_start_token_id": 1, **ENDS}
    wide = {"initializer_range": 1.0}  # texts of different lengths
    makers = {
        "bert": lambda: t.BertForSequenceClassification(t.BertConfig(attn_implementation="eager", **TEXT)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=12, n_embd=16, n_head=2, n_layer=2, **wide, **ENDS)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(num_key_value_heads=1, **TEXT, **ENDS)),
        "mistral": lambda: t.MistralForCausalLM(
            t.MistralConfig(num_key_value_heads=1, sliding_window=4, **TEXT, **wide, **ENDS)
        ),
        "gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(num_key_value_heads=1, head_dim=8, sliding_window=4, **TEXT, **ENDS)
        ),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **{**starts, "decoder_start_token_id": 0})
        ),
        "bart": lambda: t.BartForConditionalGeneration(t.BartConfig(**pair, **starts)),
        "whisper": lambda: t.WhisperForConditionalGeneration(
            t.WhisperConfig(max_source_positions=10, max_target_positions=12, num_mel_bins=8, **pair, **starts)
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
        "bert": lambda: {"input_ids": tokens(), "attention_mask": padded_left().flip(1)},
        "t5": lambda: {"input_ids": tokens(), "attention_mask": padded_left(), "decoder_input_ids": tokens(3)},
        "bart": lambda: {"input_ids": tokens(), "attention_mask": padded_left(), "decoder_input_ids": tokens(3)},
        "whisper": lambda: {"input_features": torch.randn(ROWS, 8, 20), "decoder_input_ids": tokens(3)},
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
    """Compare three calls in a block with the plain call."""
    with torch.no_grad():
        plain = model(**copy.deepcopy(inputs))
        with parallel(model, lanes, **options) as p:
            for _ in range(3):
                assert_same(model(**copy.deepcopy(inputs)), plain)
            assert len(p.stats().shards) == len(lanes)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral", "gemma2", "t5", "bart", "whisper", "vit", "yolos"])
def test_a_model_has_its_plain_outputs(name, lanes):
    """All outputs, with caches and padded masks, and the output class equal those of the plain call."""
    assert_as_plain(build(name), lanes, inputs_of(name))


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(
    "options",
    [{"output_hidden_states": True, "output_attentions": True}, {"return_dict": False, "output_hidden_states": True}],
)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_options_of_outputs(name, options, lanes):
    """Hidden states, attentions, and tuples instead of output objects are joined."""
    model = build(name)
    model.set_attn_implementation("eager")
    assert_as_plain(model, lanes, inputs_of(name) | options)


@pytest.mark.parametrize("mask", [(ROWS, 1, 6, 6), (1, 1, 6, 6)])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_masks_with_four_dims_and_position_ids_of_one_row(name, mask):
    """A mask per row is cut. A mask or position ids with one row serve all rows."""
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones(mask).tril().bool()}
    assert_as_plain(build(name), LANES[0], inputs | {"position_ids": torch.arange(6)[None]})


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", ["bert", "llama", "t5", "vit"])
def test_a_training_step_has_the_plain_loss_and_gradients(name, lanes):
    """With reduce="mean", a mean over rows, or over rows with equal token counts, has the plain value and gradients."""
    model, inputs = build(name), inputs_of(name)
    inputs.pop("decoder_input_ids", None)
    inputs["labels"] = torch.randint(0, 2, (ROWS,)) if name in ("bert", "vit") else tokens()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = model(**inputs).loss
    expected = torch.autograd.grad(plain, parameters, allow_unused=True)
    with parallel(model, lanes, reduce="mean"):
        for _ in range(2):
            model.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            torch.testing.assert_close(loss, plain)
            torch.testing.assert_close([parameter.grad for parameter in parameters], list(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant):
    """Gradients with activation checkpointing and tied weights are those of the plain call."""
    model, inputs = build("llama").train(), {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    model.lm_head.weight = model.model.embed_tokens.weight
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(**inputs).loss, parameters)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with parallel(model, LANES[0], reduce="mean"):
        model(**inputs).loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in parameters], list(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_seq2seq_model_takes_the_output_of_its_encoder(name, lanes):
    """`encoder_outputs` is cut with the other arguments, as an output object and as a tuple."""
    model = build(name)
    with torch.no_grad():
        encoded = model.get_encoder()(tokens())
    for outputs in (encoded, (encoded[0],)):
        inputs = {"encoder_outputs": outputs, "attention_mask": padded_left(), "decoder_input_ids": tokens(3)}
        assert_as_plain(model, lanes, inputs)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_generate_in_lanes_is_padded_like_plain_generate(name, lanes):
    """Lanes that end at different lengths have the plain tokens with join="pad"."""
    model, inputs = build(name), {"input_ids": tokens(), "attention_mask": padded_left(), "max_new_tokens": 12}
    inputs["eos_token_id"] = [2, 4, 5, 6]
    plain = model.generate(**inputs, do_sample=False)
    ends = [part.ne(0).any(0).sum().item() for part in plain.tensor_split(len(lanes))]
    assert len(set(ends)) > 1
    with parallel(model, lanes, methods=("generate",), join="pad", pad_value=model.config.pad_token_id) as p:
        for _ in range(3):
            assert torch.equal(model.generate(**inputs, do_sample=False), plain)
        assert len(p.stats().shards) == len(lanes)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_generate_of_encoder_decoder_models(name):
    """Each lane encodes its own rows, and the tokens are those of the plain call."""
    model, inputs = build(name), {"input_ids": tokens(), "attention_mask": padded_left(), "max_new_tokens": 6}
    plain = model.generate(**inputs, do_sample=False)
    with parallel(model, LANES[0], methods=("generate",), join="pad", pad_value=0) as p:
        assert torch.equal(model.generate(**inputs, do_sample=False), plain)
        assert p.stats().shards == (5, 4)


@pytest.mark.parametrize("lanes", LANES)
def test_several_sequences_per_prompt_are_declared_ragged(lanes):
    """`num_return_sequences` is refused until out_dims="ragged" declares it, and has the plain order."""
    model = build("gpt2")
    inputs = {"input_ids": tokens(), "max_new_tokens": 5, "min_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2}
    plain = model.generate(**inputs, do_sample=False)
    with parallel(model, lanes, methods=("generate",), out_dims="ragged"):
        assert torch.equal(model.generate(**inputs, do_sample=False), plain)
    with parallel(model, lanes, methods=("generate",)), pytest.raises(GatherError, match='"ragged" for rows in order'):
        model.generate(**inputs, do_sample=False)


@pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_generate_around_a_block_draws_the_plain_tokens(options):
    """Without `methods`, sampling with a seed, beam search, and static caches give the tokens of the plain call."""
    model, inputs = build("gpt2"), {"input_ids": tokens(), "attention_mask": padded_left(), "max_new_tokens": 6}
    inputs |= {"do_sample": False, "disable_compile": True} | options
    torch.manual_seed(1)
    plain = model.generate(**inputs)
    with parallel(model, LANES[0]):
        torch.manual_seed(1)
        assert torch.equal(model.generate(**inputs), plain)


def test_a_seed_repeats_the_samples_of_the_lanes():
    """Sampling in lanes gives the same tokens for the same seed, in every call."""
    model, samples = build("gpt2"), []
    with parallel(model, LANES[0], methods=("generate",), join="pad"):
        for _ in range(3):
            torch.manual_seed(1)
            samples.append(model.generate(tokens(), max_new_tokens=5, do_sample=True))
    assert torch.equal(samples[0], samples[1])
    assert torch.equal(samples[0], samples[2])


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma2"])
def test_decoding_with_one_cache_object(name, kind, lanes):
    """Sliding windows, static, and mixed layers have the plain logits at each step, and the state of the plain cache."""
    import transformers as t

    model, text = build(name), tokens(8)

    def new_cache():
        layout = {"config": model.config}
        return t.DynamicCache(**layout) if kind == "dynamic" else t.StaticCache(max_cache_len=12, **layout)

    cache, whole, plain = new_cache(), new_cache(), copy.deepcopy(model)
    with torch.no_grad(), parallel(model, lanes):
        for step in range(8):
            token = text[:, step : step + 1]
            output = model(token, past_key_values=cache, use_cache=True)
            assert output.past_key_values is cache
            expected = plain(token, past_key_values=whole, use_cache=True).logits
            torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)
    assert_same(cache, whole)


def test_lanes_with_caches_of_different_lengths():
    """The error names the place of the cache and what to do."""
    import transformers

    def cache_of(x):
        keys = torch.zeros(len(x), 1, len(x), 4)  # as many tokens as rows: lanes differ
        return {"past_key_values": transformers.DynamicCache([(keys, keys)])}

    place_and_remedy = r'output\["past_key_values"\].*shapes of keys.*join="list"'
    with parallel(cache_of, LANES[0]) as p, pytest.raises(GatherError, match=place_and_remedy):
        p(torch.zeros(ROWS, 2))


def test_lanes_that_fill_a_given_cache_differently():
    """The error names the argument."""
    import transformers

    def fills(x, cache):
        keys = torch.zeros(len(x), 1, len(x), 4)  # as many tokens as rows: lanes differ
        cache.update(keys, keys, 0)
        return x

    cache = transformers.DynamicCache([(torch.zeros(7, 1, 2, 4), torch.zeros(7, 1, 2, 4))])
    with parallel(fills, LANES[0]) as p, pytest.raises(GatherError, match=r"args\[1\] was changed differently"):
        p(torch.zeros(7, 2), cache)


def test_labels_of_detection_models():
    """A list with one dict of boxes per image is cut, and each lane computes the loss of its images."""
    model, pixels = build("yolos"), torch.randn(8, 3, 16, 16)
    labels = [{"class_labels": torch.tensor([row % 2]), "boxes": torch.rand(1, 4) * 0.4 + 0.3} for row in range(8)]
    with torch.no_grad():
        plain = model(pixel_values=pixels, labels=labels)
        with parallel(model, LANES[0], in_dims={"labels": "items"}, reduce="mean"):
            for _ in range(2):
                output = model(pixel_values=pixels, labels=labels)
                torch.testing.assert_close(output.logits, plain.logits)
                # Box losses are divided by the number of boxes, which is one per image here.
                torch.testing.assert_close(output.loss_dict["loss_bbox"], plain.loss_dict["loss_bbox"])


def test_rows_on_another_dim_are_declared_by_name():
    """The memories of XLNet have their rows on dim 1."""
    model = build("xlnet")
    with torch.no_grad(), pytest.raises(GatherError, match=r'output\["mems"\]\[0\]'), parallel(model, LANES[0]):
        model(tokens())
    assert_as_plain(model, LANES[0], {"input_ids": tokens()}, out_dims={"mems": 1})


def test_attributes_are_those_of_the_model():
    """Inside the block, the configuration and methods that call the model are reached through the same object."""
    model = build("gpt2")
    with parallel(model, LANES[0]) as p:
        assert model.config.pad_token_id == 0
        assert model.get_input_embeddings() is model.transformer.wte
        model.generate(tokens(), max_new_tokens=2, do_sample=False)
        assert p.stats().shards == (5, 4)
