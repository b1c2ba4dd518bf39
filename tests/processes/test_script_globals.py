"""Functions of a script in ranks that stay: which globals stay in the ranks, which are sent again,
and which are refused.

One script runs all sections, each with new ranks. A section checks itself.
"""

from __future__ import annotations

import json

import pytest

from parawrap import LaunchError
from parawrap.processes.script_globals import ScriptOfRank, SentScript
from tests.helpers.pools import OnlyHere
from tests.helpers.processes import ranks, run_script
from tests.helpers.scripts import SCRIPTS, read_script
from tests.helpers.waiting import eventually

SECTIONS = sorted(path.stem for path in (SCRIPTS / "globals_of_a_script").glob("*.py"))


def guarded(section):
    """Return a section that prints its error, or null."""
    body = section.replace("\n", "\n    ")
    return f"""
raised = None
try:
    {body}
except BaseException:
    raised = traceback.format_exc()
print(json.dumps(raised), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The error of each section, or None."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script_checks.py").write_text(read_script("script_checks"))
    sections = [guarded(read_script(f"globals_of_a_script/{name}")) for name in SECTIONS]
    output = run_script(folder, "import json, traceback\n" + "".join(sections))
    return dict(zip(SECTIONS, map(json.loads, output.splitlines()), strict=True))


@pytest.mark.parametrize("case", SECTIONS)
def test_globals_of_a_script(case, outcomes):
    assert outcomes[case] is None


def test_changes_of_globals_that_did_not_arrive():
    """A global that was deleted here is deleted in the ranks, also if calls before were lost."""
    globals_ = {"__name__": "a_script"}
    exec("def read():\n    return x", globals_)
    script, rank = SentScript(imports=True), ScriptOfRank()

    def pack():
        packed = script.pack_call(globals_["read"], (), {})
        script.note_sent(packed)
        return packed

    def call(packed):
        function, args, kwargs = rank.take(packed.item, packed.block.to_bytes())
        return function(*args, **kwargs)

    globals_["x"] = 1
    assert call(pack()) == 1
    del globals_["x"]
    script.forget(pack())
    with pytest.raises(NameError):
        call(pack())

    globals_["x"] = 2
    arrived_here_alone = pack()
    assert call(arrived_here_alone) == 2
    script.forget(arrived_here_alone)
    del globals_["x"]
    with pytest.raises(NameError):
        call(pack())


def test_globals_that_a_call_before_assigned():
    """A global belongs to the ranks from the end of the call that assigned it, also for calls that
    were packed before.
    """
    globals_ = {"__name__": "a_script", "x": 0}
    exec("def count():\n    global x\n    x += 1\n    return x", globals_)
    script, rank = SentScript(imports=True), ScriptOfRank()

    def call(packed):
        function, args, kwargs = rank.take(packed.item, memoryview(packed.block.to_bytes()))
        value = function(*args, **kwargs)
        rank.changes()
        return value

    packed = []
    for value in (0, 100):
        globals_["x"] = value
        packed.append(script.pack_call(globals_["count"], (), {}))
        script.note_sent(packed[-1])
    del globals_["x"]
    packed.append(script.pack_call(globals_["count"], (), {}))
    assert [call(each) for each in packed] == [1, 2, 3]


def test_global_that_ranks_cannot_unpickle():
    """If only an argument uses it, calls without this argument do not bring it."""
    globals_ = {"__name__": "a_script", "here": OnlyHere()}
    exec(
        "class Part:\n    def use(self):\n        return here\n"
        "def count(*parts):\n    return len(parts)",
        globals_,
    )
    with ranks(1, ipc_groups=None).open() as one:
        with pytest.raises(LookupError):
            one(globals_["count"], globals_["Part"]())
        assert tuple(one(globals_["count"])) == (0,)


class Waiting:
    """A value that is pickled once a launch has ended."""

    def __init__(self, launch):
        self._launch = launch

    def __reduce__(self):
        eventually(self._launch.done, "the end of the call before")
        return int, ()


def test_a_call_that_relies_on_a_lost_call_is_refused():
    """Ranks could not unpickle a call that brought a global, and the next call, which needs it, was
    packed before that was known.
    """
    globals_ = {"__name__": "a_script", "x": 1}
    exec("def read(*_):\n    return x", globals_)
    read = globals_["read"]
    with ranks(2, ipc_groups=None).open() as two:
        launch = two.submit(read, OnlyHere())
        with pytest.raises(LaunchError, match="Call it again"):
            two(read, Waiting(launch))
        assert tuple(two(read)) == (1, 1)
        with pytest.raises(LookupError):
            launch.results()


def test_globals_of_a_call_that_ranks_could_not_unpickle():
    """They do not belong to the ranks: a later call brings them as they are then."""
    globals_ = {"__name__": "a_script", "x": 1}
    exec("def read(*_):\n    return x", globals_)
    with ranks(2, ipc_groups=None).open() as two:
        with pytest.raises(LookupError):
            two(globals_["read"], OnlyHere())
        globals_["x"] = 2
        assert tuple(two(globals_["read"])) == (2, 2)
