"""The steps of the vendor's two tutorials for inference, with small models, under the vendor's name.

Sources: "Compiling and Deploying HuggingFace Pretrained BERT on Trn1 or Inf2" and "Compiling and Deploying ResNet50 on Trn1
or Inf2" (https://awsdocs-neuron.readthedocs-hosted.com).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap import neuron as torch_neuronx


class Classifier(nn.Module):
    """The interface of BertForSequenceClassification with ``torchscript=True``: three inputs by position, and a tuple."""

    def __init__(self):
        super().__init__()
        self.words, self.types = nn.Embedding(50, 16), nn.Embedding(2, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask, token_type_ids):
        hidden = self.words(input_ids) + self.types(token_type_ids)
        hidden = self.encoder(hidden, src_key_padding_mask=attention_mask == 0)
        return (self.head(hidden[:, 0]),)


def encode(batch_size, length=12):
    """Return tokens for one or more sentences, each followed by padding."""
    ids = torch.randint(1, 50, (batch_size, length))
    mask = (torch.arange(length) < torch.randint(4, length + 1, (batch_size, 1))).long()
    return ids * mask, mask, (torch.arange(length) > 5).long().expand(batch_size, length)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the branches in torch's encoder
def test_bert(host, tmp_path):
    """Trace with example tensors, save, load, run, and compare with the model on the CPU; then several cores at once."""
    model = Classifier().eval()
    paraphrase, not_paraphrase = encode(1), encode(1)
    reference = [model(*tokens)[0].detach() for tokens in (paraphrase, not_paraphrase)]

    model_neuron = torch_neuronx.trace(model, paraphrase)
    filename = tmp_path / "model.pt"
    torch.jit.save(model_neuron, filename)
    model_neuron = torch.jit.load(filename)
    for tokens, expected in zip((paraphrase, not_paraphrase), reference, strict=True):
        torch.testing.assert_close(model_neuron(*tokens)[0], expected)

    model_parallel = torch_neuronx.DataParallel(model_neuron)
    batch = encode(8)
    torch.testing.assert_close(model_parallel(*batch)[0], model(*batch)[0].detach())
    model_parallel.close()


def test_resnet50(host, tmp_path):
    """Trace with an image, save, load, run; then a batch on every core, and a batch of any size with dynamic batching."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    ).eval()
    image = torch.rand(1, 3, 32, 32)

    model_neuron = torch_neuronx.trace(model, image)
    filename = tmp_path / "model.pt"
    torch.jit.save(model_neuron, filename)
    model_neuron = torch.jit.load(filename)
    torch.testing.assert_close(model_neuron(image), model(image).detach())

    batch = torch.rand(8, 3, 32, 32)
    model_parallel = torch_neuronx.DataParallel(model_neuron)
    model_parallel.num_workers = 4
    torch.testing.assert_close(model_parallel(batch), model(batch).detach())
    model_parallel.close()
    dynamic = torch_neuronx.dynamic_batch(model_neuron)
    torch.testing.assert_close(dynamic(batch[:3]), model(batch[:3]).detach())
