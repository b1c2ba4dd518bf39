"""The programs in examples/ run unchanged.

``make demo`` runs examples/digits.py, stay.py, and one_block.py.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# For a tiny model, several threads on busy cores are slower
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
EXAMPLES = Path(__file__).parents[1] / "examples"


def ran(*arguments):
    """Run Python without warnings in the folder of the examples, and return what it printed."""
    command = [sys.executable, "-W", "error", *arguments]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=EXAMPLES, env=ONE_THREAD
    )
    assert found.returncode == 0, found.stderr
    assert "ignored" not in found.stderr, found.stderr  # "Exception ignored in ..."
    return found.stdout


@pytest.mark.long
def test_wrapper_example_trains():
    """The documented example of ddpw, moved to digits, trains in two ranks and evaluates every
    image once.
    """
    printed = ran("digits_wrapper.py")
    assert "[rank 1] global rank 1; local rank 1" in printed
    last = printed.splitlines()[-1]
    assert float(last.split()[1].rstrip("%,")) > 95, last
    assert "the same on every rank: True" in last


@pytest.mark.long
def test_preempted_training_goes_on():
    """A preempted training restarts from its checkpoint, and has the weights of an uninterrupted
    training.
    """
    printed = ran("preemption.py")
    assert ", restarted 1 time(s)" in printed
    assert printed.splitlines()[-1] == "the same weights as without preemption: True"


@pytest.mark.long
def test_one_block_on_both_pools():
    assert ran("one_block.py", "threads", "processes").count("are those of the plain loop") == 2


@pytest.mark.long
def test_ranks_that_stay_train_on():
    """Each call trains the model that the calls before it have left."""
    losses = [float(line.split()[-1]) for line in ran("stay.py").splitlines()]
    assert losses[0] > losses[1] > losses[2] > 0


def test_guide_shows_the_programs():
    """docs/train.md shows the plain loop and every line that differs between the two programs."""
    page = (EXAMPLES.parent / "docs" / "train.md").read_text()
    texts = [(EXAMPLES / f"train_digits_{name}.py").read_text() for name in ("plain", "ranks")]
    plain, ranks = (text[text.index("from __future__") :].splitlines() for text in texts)
    loop, diff = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "diff"))
    assert loop in "\n".join(plain) + "\n"
    # Without the header with file names
    found = list(difflib.unified_diff(plain, ranks, n=0, lineterm=""))[2:]
    assert [line for line in found if line[0] != "@" and line[1:]] == [
        line for line in diff.splitlines() if line[1:]
    ]


def test_code_of_pages_is_not_cut_off():
    """The site shows 84 columns of a code block."""
    root, wide = EXAMPLES.parent, []
    for page in [root / "README.md", *root.glob("docs/**/*.md")]:
        for block in re.findall(r"^```.*?^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            wide += [(page.name, line) for line in block.splitlines() if len(line) > 84]
    assert not wide


@pytest.mark.long
def test_ranks_train_like_the_loop():
    """Two ranks have the losses and accuracy of one rank.

    The plain loop has another row order and a similar accuracy.
    """
    script = (
        "import json, torch, train_digits_plain, train_digits_ranks\ntorch.manual_seed(0)\nplain, "
        "(one,), two = train_digits_plain.train(), train_digits_ranks.train.inline(), "
        "train_digits_ranks.train()\nprint(json.dumps([plain, one, *two]))"
    )
    (plain_losses, plain), (losses, accuracy), *ranks = json.loads(
        ran("-c", script).splitlines()[-1]
    )
    assert ranks[0] == ranks[1]
    # Rounding depends on the alignment of memory. In late epochs, with losses near 0, it shows.
    assert ranks[0][0] == pytest.approx(losses, rel=1e-3, abs=1e-3)
    assert ranks[0][1] == pytest.approx(accuracy, abs=1 / 389)  # one image of 389
    assert plain_losses[0] == pytest.approx(losses[0], rel=0.05)
    assert abs(plain - accuracy) < 0.015
    assert min(plain, accuracy) > 0.95
