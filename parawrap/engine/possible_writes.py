"""The possible writes of forward, by the modules of a model and their training flags.

Forward of a listed layer of torch.nn writes nothing, and that of a batch norm its statistics alone.
Calls of models that have only such layers need no look at what forward wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parawrap._private_names import BUFFERS, HOOK_TABLES
from parawrap.engine.places import ALWAYS_NEW
from parawrap.engine.survey import Survey

# Layers of torch.nn with a forward that writes no attribute and no buffer. Other layers of torch.nn
# may write them, such as LazyLinear and spectral norms
_QUIET = """
    Sequential ModuleList ModuleDict ParameterList ParameterDict Identity Linear Bilinear
    Flatten Unflatten Fold Unfold Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d
    ConvTranspose3d LayerNorm GroupNorm RMSNorm LocalResponseNorm Threshold ReLU RReLU Hardtanh
    ReLU6 Sigmoid Hardsigmoid Tanh SiLU Mish Hardswish ELU CELU SELU GLU GELU Hardshrink
    LeakyReLU LogSigmoid Softplus Softshrink PReLU Softsign Tanhshrink Softmin Softmax Softmax2d
    LogSoftmax MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d LPPool1d LPPool2d
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d
    AdaptiveMaxPool3d ZeroPad2d ConstantPad1d ConstantPad2d ReflectionPad1d ReflectionPad2d
    ReplicationPad1d ReplicationPad2d Dropout Dropout1d Dropout2d Dropout3d AlphaDropout
    FeatureAlphaDropout Embedding EmbeddingBag RNN LSTM GRU RNNCell LSTMCell GRUCell
    MultiheadAttention Transformer TransformerEncoder TransformerDecoder TransformerEncoderLayer
    TransformerDecoderLayer PixelShuffle PixelUnshuffle Upsample ChannelShuffle CosineSimilarity
    PairwiseDistance L1Loss MSELoss CrossEntropyLoss NLLLoss BCELoss BCEWithLogitsLoss KLDivLoss
    SmoothL1Loss
"""
_QUIET_CLASSES = frozenset(
    getattr(torch.nn, name) for name in _QUIET.split() if hasattr(torch.nn, name)
)
_QUIET_IN_EVAL = frozenset({torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d})
# The buffers of these batch norms
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class PossibleWrites:
    """The possible writes of forward, until the structure of the model or a training flag changes.

    Attributes:
        survey: What the model leads to.
        trains: True if a module is in training mode.
        is_quiet: True if the model has no code but listed layers of torch.nn, which write nothing.
        writes_statistics: True if the model has no code but such layers, and batch norms in
            training mode. These write their statistics in place, and nothing else.
        writes_unseen: True if forward may write a tensor that lanes have copies of, and leave its
            version alone.
        renews_always: True if versions do not show all writes to such tensors, so that each call
            must renew the copies.
        watched_plans: The plans of cut calls that have run. The first call of each plan is watched
            for writes through ``.data``, and for draws of random numbers.
        watched_whole_call: True once a whole call has been chosen to be watched for writes
            through ``.data``.
    """

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        # Calls write these two. No other attribute changes after `__init__`
        self.watched_plans: set[Any] = set()
        self.watched_whole_call = False
        self.trains = any(module.training for module in survey.modules)
        self.is_quiet = _has_only(survey, _is_quiet_module)
        self.writes_statistics = self.trains and _writes_statistics_alone(survey)
        buffers = filter(survey.is_buffer, survey.tensors)
        has_statistics = self.trains and any(map(is_written_unseen, buffers))
        may_write_data = survey.writes_data and bool(survey.tensors)
        self.writes_unseen = has_statistics or may_write_data
        has_inference_tensors = len(survey.versioned) < len(survey.tensors)
        self.renews_always = self.writes_unseen or has_inference_tensors


def is_written_unseen(tensor: torch.Tensor) -> bool:
    """True for a buffer that forward may write in training mode, and leave its version alone.

    Batch norms write their statistics so, in C++.
    """
    return tensor.ndim > 0 and tensor.is_floating_point()


def _writes_statistics_alone(survey: Survey) -> bool:
    """True for a model of listed layers and batch norms, without tensors but their statistics."""
    statistics: set[int] = set()  # ids
    for module in survey.modules:
        if type(module) in _QUIET_IN_EVAL:
            buffers = vars(module)[BUFFERS]
            statistics.update(id(buffers.get(name)) for name in _STATISTICS)
    are_statistics = statistics.issuperset(map(id, survey.tensors))
    return are_statistics and _has_only(survey, _is_listed_module)


def _has_only(survey: Survey, is_known: Callable[[torch.nn.Module], bool]) -> bool:
    """True if all modules of the target are known, and it leads to no other code."""
    if survey.functions or survey.scripts:
        return False
    has_known_modules = all(map(is_known, survey.modules))
    return has_known_modules and all(_is_module_or_empty(place.owner) for place in survey.places)


def _is_module_or_empty(owner: Any) -> bool:
    """True for a module, and for an empty container of Python, which can lead to no code."""
    if isinstance(owner, torch.nn.Module):
        return True
    # The class first: an object of the user's class has code, also if it says that it is empty
    return type(owner) in ALWAYS_NEW and not owner


def _is_quiet_module(module: torch.nn.Module) -> bool:
    """True for a listed layer that writes nothing. A batch norm writes in training mode."""
    writes = module.training and type(module) in _QUIET_IN_EVAL
    return not writes and _is_listed_module(module)


def _is_listed_module(module: torch.nn.Module) -> bool:
    """True for a layer of a listed class without other code, such as a hook."""
    cls = type(module)
    if cls not in _QUIET_CLASSES and cls not in _QUIET_IN_EVAL:
        return False
    if not cls.forward.__module__.startswith("torch."):  # ``torch.nn.Linear.forward = ...``
        return False
    if getattr(module, "max_norm", None) is not None:  # an embedding that writes its weight
        return False
    # The list is made in one step: other threads may set attributes
    for name, part in [*vars(module).items()]:
        is_hooked = name in HOOK_TABLES and part
        replaces_method = callable(part) and hasattr(cls, name)  # ``layer.forward = ...``
        if is_hooked or replaces_method:
            return False
    return True
