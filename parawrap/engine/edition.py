"""Facts about a model that hold until its structure or a training flag changes.

Forward of a listed layer of torch.nn writes nothing, or its statistics alone, so calls of models of
these layers leave out looks at what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parawrap._private_names import BUFFERS, HOOK_TABLES, NOT_CALLED
from parawrap.engine.places import ALWAYS_NEW
from parawrap.engine.survey import Survey

# Layers of torch.nn with a forward that writes no attribute and no buffer. Listed, because others
# do: LazyLinear, spectral norms
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
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # the buffers of these


class Edition:
    """Facts about a model that hold until its structure or a training flag changes.

    Attributes:
        survey: The walk over the target.
        trains: True if a module is in training mode.
        is_quiet: True if forward is code of listed classes of torch.nn alone, which write nothing.
        writes_statistics: True if forward is code of such classes, and of batch norms in training
            mode, which write their statistics in place and nothing else.
        writes_unseen: True if forward may write tensors that lanes have copies of without a new
            version.
        renews_always: True if no look at versions shows all writes of such tensors, so that each
            call must renew them.
        probed: Plans of cut calls that have run. The first call of each is watched more closely.
        is_checked: True once a whole call is watched for writes through ``.data``.
    """

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.probed: set[Any] = set()
        self.is_checked = False
        self.trains = any(module.training for module in survey.modules)
        self.is_quiet = _has_only(survey, _is_quiet_module)
        self.writes_statistics = self.trains and _writes_statistics_alone(survey)
        buffers = filter(survey.is_buffer, survey.tensors)
        has_statistics = self.trains and any(map(is_written_unseen, buffers))
        has_data = survey.writes_data and bool(survey.tensors)
        self.writes_unseen = has_statistics or has_data
        has_inference = len(survey.versioned) < len(survey.tensors)
        self.renews_always = self.writes_unseen or has_inference


def is_written_unseen(tensor: torch.Tensor) -> bool:
    """True for a tensor that forward may write in training mode without a new version.

    Batch norm writes its statistics so, in C++.
    """
    return tensor.ndim > 0 and tensor.is_floating_point()


def _writes_statistics_alone(survey: Survey) -> bool:
    """True if forward is code of listed classes, and of batch norms of torch.nn.

    In training mode, these write their statistics in place, and nothing else. All tensors besides
    parameters are such statistics then.
    """
    statistics: set[int] = set()
    for module in survey.modules:
        if type(module) in _QUIET_IN_EVAL:
            buffers = vars(module)[BUFFERS]
            statistics.update(id(buffers.get(name)) for name in _STATISTICS)
    are_statistics = statistics.issuperset(map(id, survey.tensors))
    return are_statistics and _has_only(survey, _is_listed_module)


def _has_only(survey: Survey, is_known: Callable[[torch.nn.Module], bool]) -> bool:
    """True if the target is such modules, without other code and other objects."""
    if survey.functions or survey.scripts or not all(map(is_known, survey.modules)):
        return False
    return all(_is_module_or_empty(place.owner) for place in survey.places)


def _is_module_or_empty(owner: Any) -> bool:
    """True for a module, and for a container of Python without items, which has no code."""
    if isinstance(owner, torch.nn.Module):
        return True
    # The class first: an object of the user's has code, and may say that it is empty or false
    return type(owner) in ALWAYS_NEW and not owner


def _is_quiet_module(module: torch.nn.Module) -> bool:
    """True for a listed layer that writes nothing: a batch norm writes in training mode."""
    writes = module.training and type(module) in _QUIET_IN_EVAL
    return not writes and _is_listed_module(module)


def _is_listed_module(module: torch.nn.Module) -> bool:
    """True for a layer of a listed class with no other code: no hook, and no function set on it."""
    cls = type(module)
    if cls not in _QUIET_CLASSES and cls not in _QUIET_IN_EVAL:
        return False
    own = [*vars(module).items()]  # one step: other threads may write
    has_hooks = any(name in HOOK_TABLES and part for name, part in own if name not in NOT_CALLED)
    has_code = any(callable(part) and hasattr(cls, name) for name, part in own)
    is_own_forward = cls.forward.__module__.startswith("torch.")
    return (
        not has_hooks
        and not has_code
        and is_own_forward
        and getattr(module, "max_norm", None) is None
    )
