"""Facts about a model that hold until its structure or a training flag changes."""

from __future__ import annotations

from typing import Any

import torch

from parawrap.engine.survey import Survey


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
        self.is_quiet = survey.is_quiet()
        self.writes_statistics = self.trains and survey.writes_statistics_alone()
        buffers = filter(survey.is_buffer, survey.tensors)
        through_data = survey.writes_data and bool(survey.tensors)
        self.writes_unseen = through_data or (self.trains and any(map(is_written_unseen, buffers)))
        has_inference = len(survey.versioned) < len(survey.tensors)
        self.renews_always = self.writes_unseen or has_inference


def is_written_unseen(tensor: torch.Tensor) -> bool:
    """True for a tensor that forward may write in training mode without a new version.

    Batch norm writes its statistics so, in C++.
    """
    return tensor.ndim > 0 and tensor.is_floating_point()
