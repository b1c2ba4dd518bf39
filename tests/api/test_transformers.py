"""Models of transformers with random weights in a block, compared with the plain calls."""

from __future__ import annotations

import copy

import pytest
import torch

from parawrap import parallel
from tests.helpers.tiers import require_packages

# Of transformers and of torch, on the CPU and with few weights.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
TWO = ["cpu"] * 2
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


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "t5", "vit", "yolos"])
def test_models_have_plain_outputs(name):
    """All outputs, with caches and padded masks, and the output class equal those of the plain call."""
    model, inputs = build(name), inputs_of(name)
    with torch.no_grad():
        plain = model(**copy.deepcopy(inputs))
        with parallel(model, ["cpu"] * 3) as p:
            for _ in range(2):
                assert_same(model(**copy.deepcopy(inputs)), plain)
            assert len(p.stats().shards) == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_training_with_checkpoints(reentrant):
    """Loss and gradients are the plain ones, also with tied weights."""
    model, inputs = build("llama").train(), inputs_of("llama") | {"labels": tokens(), "use_cache": False}
    model.lm_head.weight = model.model.embed_tokens.weight
    parameters = list(model.parameters())
    plain = model(**inputs).loss
    expected = torch.autograd.grad(plain, parameters, allow_unused=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with parallel(model, TWO, reduce="mean"):
        loss = model(**inputs).loss
        loss.backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close([parameter.grad for parameter in parameters], list(expected), atol=1e-5, rtol=1e-4)
