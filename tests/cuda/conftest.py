"""The tests in this folder run on the GPUs that torch sees.

Most need one GPU, and a few need several.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cuda.gpus import ONE, TWICE, every, missing, settle
from tests.helpers.tiers import require

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Run these tests last, because tests of launches fork, and a process that
    uses CUDA must not.
    """
    items.sort(key=lambda item: _HERE in item.path.parents)


@pytest.fixture(autouse=True)
def _gpu():
    """Skip or fail where there is no GPU, and leave no work behind."""
    require("cuda", missing())
    yield
    settle()


@pytest.fixture
def several():
    """All GPUs. Skip the test if there are fewer than two."""
    if len(every()) < 2:
        pytest.skip("there is one GPU, and this is about several")
    return every()


@pytest.fixture(params=["one lane", "two lanes on a GPU", "a lane on every GPU"])
def devices(request):
    lists = {"one lane": ONE, "two lanes on a GPU": TWICE}
    return lists.get(request.param) or request.getfixturevalue("several")


@pytest.fixture
def every_warning():
    """Have torch repeat warnings that it gives once per process. Warnings are errors."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)
