"""Plans in a file: what was chosen is saved, merged with what others saved, and used from the first call on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from parawrap import Plan, parallel
from parawrap.engine.plan import _book, _file, _memory
from parawrap.errors import PlanError

DEVICES = ["cpu", "cpu"]


class Counted(nn.Sequential):
    """A model that counts its calls."""

    def __init__(self, width=8):
        super().__init__(nn.Linear(width, width), nn.ReLU())
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(x)


def used(plan, model=None, rows=8, calls=150):
    """The plan after calls of a model."""
    model = model or nn.Linear(8, 8).eval()
    x = torch.randn(rows, 8)
    with torch.no_grad(), parallel(model, DEVICES, plan=plan) as p:
        for _ in range(calls):
            model(x)
        return p.plan


def records(path):
    return json.loads(path.read_text())["plans"]


def changed(path, change):
    """Have the first record of a file be another's."""
    document = json.loads(path.read_text())
    change(document["plans"][0])
    path.write_text(json.dumps(document))


@pytest.fixture
def saved(tmp_path):
    """The path of a file with the plan of a linear layer."""
    return used(Plan("auto", keep_memory=False)).save(tmp_path / "plans.json")


def test_a_plan_comes_back_as_it_was_saved(saved, tmp_path):
    """What is loaded and saved again is the same."""
    again = Plan.load(saved)
    used(again, calls=1)
    assert records(again.save(tmp_path / "again.json")) == records(saved)


def test_a_loaded_plan_is_used_from_the_first_call(saved):
    """After one call the table has the stored choice and the stored times, and says nothing of being measured."""
    (case,) = records(saved)[0]["cases"]
    table = str(used(Plan.load(saved, keep_memory=False), calls=1))
    assert "being measured" not in table
    (line,) = [line for line in table.splitlines() if line.startswith("  * ")]
    times = next(one["times_ns"] for one in case["measured"] if one["way"] == case["choice"])
    assert f"{times['median'] / 1e3:,.1f} us" in line
    assert f"), {times['calls']} call" in line


def test_a_stored_choice_is_obeyed(saved):
    """A file that says lanes has calls cut over lanes though none was measured."""

    def cut(record):
        record["cases"][0]["choice"] = {**record["cases"][0]["choice"], "lanes": 2, "threads": 1}

    changed(saved, cut)
    model = nn.Linear(8, 8).eval()
    x = torch.randn(8, 8)
    expected = model(x)
    with torch.no_grad(), parallel(model, DEVICES, plan=Plan.load(saved, keep_memory=False)) as p:
        for _ in range(3):
            torch.testing.assert_close(model(x), expected)
        assert p.stats().shards == (4, 4)
    assert "* 2 lanes of 1 thread" in str(p.plan)


def test_a_plan_that_is_loaded_runs_the_model_no_more_often_than_it_is_called(saved):
    """A loaded plan makes no extra calls."""
    model = Counted().eval()
    plan = used(Plan("auto", keep_memory=False), model)
    plan.save(saved)
    runs = model.runs
    with torch.no_grad(), parallel(model, [DEVICES[0]], plan=Plan.load(saved, keep_memory=False)):
        model(torch.randn(8, 8))
    assert model.runs == runs + 1


@pytest.mark.parametrize("part", ["machine", "torch", "devices", "target"])
def test_the_plan_of_something_else_is_left_alone(saved, part):
    """Records of another machine, release, device set or structure are not used, and stay beside the new one."""
    changed(saved, lambda record: record.update({part: "another"}))
    (foreign,) = records(saved)
    plan = Plan.load(saved, keep_memory=False)
    used(plan, calls=1)
    assert "being measured" in str(plan)
    used(plan)
    plan.save(saved)
    assert len(records(saved)) == 2
    assert foreign in records(saved)


def test_another_structure_is_measured_for_itself(saved):
    """A model of other layers, or of the same with other shapes, has a record of its own."""
    for other in (nn.Sequential(nn.Linear(8, 8)).eval(), nn.Linear(8, 9).eval(), nn.Linear(8, 8, bias=False).eval()):
        plan = Plan.load(saved, keep_memory=False)
        used(plan, other, calls=1)
        assert "being measured" in str(plan)


def test_the_cases_of_a_file_that_are_not_met_stay_in_it(saved):
    """Saving after calls of another size keeps what is known of the earlier size."""
    plan = Plan.load(saved, keep_memory=False)
    used(plan, rows=64)
    plan.save(saved)
    (record,) = records(saved)
    assert sorted(case["case"]["rows"] for case in record["cases"]) == [8, 64]


def test_what_was_measured_anew_takes_the_place_of_what_was_there(saved):
    """Two plans of the same thing leave one record: the later one's."""
    later = used(Plan("auto", keep_memory=False))
    later.save(saved)
    assert len(records(saved)) == 1
    assert records(saved) == json.loads(json.dumps([book.record() for book in later._books.values()]))


FORBIDDEN = pytest.mark.parametrize("what", ["traced", "memory_kept"])


def found(path, rows):
    """What a file has of calls of so many rows."""
    ((case,),) = [[case for case in record["cases"] if case["case"]["rows"] == rows] for record in records(path)]
    return case


@pytest.fixture
def with_times_of(saved):
    """A function that has a file know the times of calls that are of this sort too."""

    def add(what):
        def more(record):
            for case in record["cases"]:
                one = case["measured"][0]
                case["measured"].append({"way": {**one["way"], what: True}, "times_ns": one["times_ns"]})

        changed(saved, more)

    return add


@FORBIDDEN
def test_what_was_measured_and_is_not_allowed_stays_in_the_file(saved, with_times_of, what):
    """A plan that may not trace, or keep memory, neither shows nor uses what the file has of that, and takes none away."""
    with_times_of(what)
    before = records(saved)
    plan = Plan.load(saved, keep_memory=False)
    used(plan, calls=3)
    assert "being measured" not in str(plan)
    assert what.replace("_", " ").removesuffix(" kept") not in str(plan)
    plan.save(saved)
    assert records(saved) == before


@FORBIDDEN
def test_a_choice_that_is_not_allowed_is_made_anew(saved, with_times_of, monkeypatch, what):
    """Such calls are measured as if there were no file; other cases stay as they are, and so do the times of this one."""
    said = []
    monkeypatch.setattr(_memory, "_set", lambda *values: said.append(values))
    plan = Plan.load(saved, keep_memory=False)
    used(plan, rows=64).save(saved)
    with_times_of(what)
    changed(saved, lambda record: [case["choice"].update({what: True}) for case in record["cases"]])
    before = {rows: found(saved, rows) for rows in (8, 64)}
    plan = Plan.load(saved, keep_memory=False)
    used(plan, calls=2)
    assert "being measured" in str(plan)
    plan.save(saved)
    assert found(saved, 8) == before[8]
    used(plan)
    plan.save(saved)
    assert plan.extra_calls == 0
    assert said == []
    assert not found(saved, 8)["choice"][what]
    assert before[8]["measured"][-1] in found(saved, 8)["measured"]
    assert found(saved, 64) == before[64]


def test_two_plans_of_one_target_are_merged_by_their_cases(tmp_path):
    """What either has measured is there in the end, and of a case that both have, what was saved last."""
    one, other = (used(used(Plan("auto", keep_memory=False), rows=rows), rows=16) for rows in (8, 64))
    path = tmp_path / "plans.json"
    one.save(path)
    other.save(path)
    assert [found(path, rows) for rows in (8, 64)] == [
        found(one.save(tmp_path / "one.json"), 8),
        found(other.save(tmp_path / "other.json"), 64),
    ]
    assert found(path, 16) == found(tmp_path / "other.json", 16)


def test_what_the_default_rule_chose_is_not_taken_over(tmp_path):
    """It compares two ways only: a plan of rule "auto" measures for itself, and both stay in the file."""
    path = used(Plan("default")).save(tmp_path / "plans.json")
    (quick,) = records(path)
    plan = Plan.load(path, keep_memory=False)
    used(plan, calls=1)
    assert "being measured" in str(plan)
    used(plan).save(path)
    assert [record["rule"] for record in records(path)] == ["default", "auto"]
    assert records(path)[0] == quick
    again = Plan.load(path, keep_memory=False)
    used(again, calls=1)
    assert "being measured" not in str(again)


def test_there_is_a_bound_to_the_cases_of_a_plan(tmp_path, monkeypatch):
    """Calls of more kinds than a plan keeps are answered right, measured or not; the table and the file have the first."""
    monkeypatch.setattr(_book, "_MOST_CASES", 3)
    model = Counted().eval()
    batches = [torch.randn(rows, 8) for rows in (2, 4, 8, 16, 32, 64)]
    plan = Plan("auto", keep_memory=False)
    with torch.no_grad():
        expected = [model(x) for x in batches]
        runs = model.runs
        with parallel(model, DEVICES, plan=plan) as p:
            for _ in range(150):
                for x, output in zip(batches, expected, strict=True):
                    torch.testing.assert_close(model(x), output)
            assert p.stats().calls == 900
    assert model.runs - runs <= 2 * 900  # cut calls run it in both lanes
    assert [rows in str(plan) for rows in ("2 to 2 rows", "3 to 4 rows", "5 to 8 rows")] == [True] * 3
    assert str(plan).count(" rows;") == 3
    (record,) = records(plan.save(tmp_path / "plans.json"))
    assert [case["case"]["rows"] for case in record["cases"]] == [2, 4, 8]


BROKEN = {
    "no json": "{",
    "empty": "",
    "a list": "[]",
    "another's": '{"format": "something"}',
    "bytes": b"\xff\xfe\x00",
    "no records": '{"format": "parawrap plans", "version": 1}',
    "a record that is none": '{"format": "parawrap plans", "version": 1, "plans": [1]}',
    "a record without its parts": '{"format": "parawrap plans", "version": 1, "plans": [{"torch": "2"}]}',
    "a version to come": '{"format": "parawrap plans", "version": 2, "plans": []}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_file_of_something_else_is_told_and_left_as_it_is(tmp_path, text):
    """Load and save name the file and a cure, and save does not write over it."""
    path = tmp_path / "plans.json"
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plans\.json.*save") as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)
    with pytest.raises(PlanError, match=r"plans\.json"):
        used(Plan("auto", keep_memory=False), calls=1).save(path)
    assert path.read_bytes() == content


SPOILED = {
    "no choice": lambda case: case.update(choice=None),
    "a way with other parts": lambda case: case["choice"].update(colour="red"),
    "a case that lacks a part": lambda case: case["case"].pop("rows"),
    "no times": lambda case: case["measured"][0].pop("times_ns"),
    "a case that is a number": lambda case: case.update(case=3),
    "no elements": lambda case: case.pop("elements"),
    "more lanes than devices": lambda case: case["choice"].update(lanes=3),
    "times of more lanes than devices": lambda case: case["measured"][0]["way"].update(lanes=3),
    "no lanes": lambda case: case["choice"].update(lanes=0),
    "lanes that are a flag": lambda case: case["choice"].update(lanes=True),
    "lanes in words": lambda case: case["choice"].update(lanes="2"),
    "half a lane": lambda case: case["choice"].update(lanes=1.5),
    "threads below none": lambda case: case["choice"].update(threads=-1),
    "threads that are a flag": lambda case: case["choice"].update(threads=False),
    "a flag that is a number": lambda case: case["choice"].update(traced=1),
    "a flag in words": lambda case: case["choice"].update(own_backward="no"),
    "threads beyond reason": lambda case: case["choice"].update(threads=10**9),
    "a share too many": lambda case: case["choice"].update(lanes=2, weights=[1, 1, 1]),
    "a share too few": lambda case: case["choice"].update(lanes=2, weights=[1]),
    "a share of none": lambda case: case["choice"].update(lanes=2, weights=[1, 0]),
    "a share below none": lambda case: case["choice"].update(lanes=2, weights=[1, -1]),
    "shares in words": lambda case: case["choice"].update(lanes=2, weights=["1", "1"]),
    "shares that are a word": lambda case: case["choice"].update(lanes=2, weights="11"),
    "shares that are flags": lambda case: case["choice"].update(lanes=2, weights=[True, True]),
    "shares that are a number": lambda case: case["choice"].update(lanes=2, weights=2),
    "shares that are not there": lambda case: case["choice"].update(weights=None),
    "inputs that are a list": lambda case: case["case"].update(inputs=[]),
    "a method that is not there": lambda case: case["case"].update(method=None),
    "rows in words": lambda case: case["case"].update(rows="8"),
    "rows that are a flag": lambda case: case["case"].update(rows=True),
    "elements of the case that are half": lambda case: case["case"].update(elements=0.5),
    "a mode that is a number": lambda case: case["case"].update(grad=0),
    "elements that are a list": lambda case: case.update(elements=[8]),
    "elements that are a flag": lambda case: case.update(elements=True),
    "a time below none": lambda case: case["measured"][0]["times_ns"].update(median=-1.0),
    "a time of none": lambda case: case["measured"][0]["times_ns"].update(low=0),
    "a time that is no number": lambda case: case["measured"][0]["times_ns"].update(high=float("nan")),
    "a time in words": lambda case: case["measured"][0]["times_ns"].update(median="1"),
    "a time that is a flag": lambda case: case["measured"][0]["times_ns"].update(median=True),
    "a time without end": lambda case: case["measured"][0]["times_ns"].update(median=float("inf")),
    "calls below none": lambda case: case["measured"][0]["times_ns"].update(calls=-3),
    "half a call": lambda case: case["measured"][0]["times_ns"].update(calls=1.5),
    "what was measured is a number": lambda case: case.update(measured=3),
    "what was measured is not there": lambda case: case.update(measured=None),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_record_that_lacks_parts_is_told_when_it_is_loaded(saved, spoil):
    """What a call would stumble over later is told by load."""
    changed(saved, lambda record: spoil(record["cases"][0]))
    with pytest.raises(PlanError, match=r"plans\.json.*save it again"):
        Plan.load(saved)


def test_a_file_that_is_not_there_is_told(tmp_path):
    """Load names the path and how to get a file."""
    with pytest.raises(PlanError, match=r"no plan can be read from .*absent\.json.*p\.plan\.save"):
        Plan.load(tmp_path / "absent.json")


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    """A path below a file, and a path that is a folder: PlanError with the place and a cure, and nothing is left."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    plan = Plan("auto")
    with pytest.raises(PlanError, match="PARAWRAP_CACHE_DIR"):
        plan.save(tmp_path / "file" / "plans.json")
    with pytest.raises(PlanError, match="folder"):
        plan.save(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_relative_path_is_meant_from_where_the_process_is(tmp_path, monkeypatch):
    """Save and load take a relative path, as text too, and make the folders on the way."""
    monkeypatch.chdir(tmp_path)
    where = Plan("auto").save("below/plans.json")
    assert (tmp_path / "below" / "plans.json").exists()
    assert where.exists()
    assert Plan.load("below/plans.json").rule == "auto"


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("PARAWRAP_CACHE_DIR", "plans.json"),
        ("XDG_CACHE_HOME", "parawrap/plans.json"),
        ("HOME", ".cache/parawrap/plans.json"),
    ],
)
def test_the_file_is_where_the_user_says_by_default(tmp_path, monkeypatch, variable, below):
    """PARAWRAP_CACHE_DIR comes first, then XDG_CACHE_HOME, then the home folder."""
    for name in ("PARAWRAP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert Plan("auto").save() == tmp_path / below
    assert Plan.load().rule == "auto"


def test_a_named_cache_folder_comes_before_the_users_caches(tmp_path, monkeypatch):
    """With both variables set parawrap's own is taken."""
    monkeypatch.setenv("PARAWRAP_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "theirs"))
    assert Plan("auto").save() == tmp_path / "ours" / "plans.json"


def test_threads_that_save_at_once_leave_one_whole_file(saved):
    """The file can be read at any time, has what was saved last, and no temporary file stays."""
    done = threading.Event()

    def reads():
        read = 0
        while not done.is_set():
            read += len(_file.read(saved)) > 0
        return read

    targets = [nn.Linear(8, width).eval() for width in range(1, 5)]
    plans = [used(Plan("auto", keep_memory=False), target) for target in targets]
    with ThreadPoolExecutor(5) as pool:
        reading = pool.submit(reads)
        try:
            for saving in [pool.submit(plan.save, saved) for plan in plans * 10]:
                saving.result(60)
        finally:
            done.set()
        assert reading.result(60) > 0
    for plan in plans:
        plan.save(saved)
    assert len(records(saved)) == 5
    assert [path.name for path in saved.parent.iterdir()] == ["plans.json"]


def test_a_process_that_is_killed_while_it_writes_leaves_the_file_as_it_was(saved):
    """Nobody ever sees half a file: the new one takes the place of the old one when it is whole."""
    before = saved.read_bytes()
    script = (
        "import json, os, signal, sys\n"
        "from parawrap import Plan\n"
        "from parawrap.engine.plan import _file\n"
        "def half(document, file, **_):\n"
        "    file.write('{'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "_file.json.dump = half\n"
        "Plan('auto').save(sys.argv[1])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(saved)], timeout=120, check=False)
    assert ended.returncode == -9
    assert saved.read_bytes() == before


def test_what_a_killed_process_left_goes_with_a_later_save(saved):
    """A temporary file that is hours old is removed; one that somebody may be writing just now is not."""
    old, new, other = (saved.parent / name for name in (".plans.json.old", ".plans.json.new", ".other.json.old"))
    for path in (old, new, other):
        path.write_text("{")
    for path in (old, other):
        os.utime(path, (0, 0))
    Plan("auto").save(saved)
    assert [path.exists() for path in (old, new, other)] == [False, True, True]


def test_an_error_in_the_middle_of_writing_leaves_no_temporary_file(saved, monkeypatch):
    """Whatever is raised while the file is written, the old file stays and the new one goes."""
    before = saved.read_bytes()

    def breaks(document, file, **_):
        file.write("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(_file.json, "dump", breaks)
    with pytest.raises(KeyboardInterrupt):
        Plan("auto").save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["plans.json"]


def test_the_table_names_ways_times_and_the_choice(saved):
    """print(p.plan) shows for each kind of call the ways, their median and spread, and a star at the choice."""
    text = str(used(Plan("auto", keep_memory=False)))
    assert text.startswith("plan 'auto', 0 extra calls\nLinear on ")
    assert "5 to 8 rows" in text
    assert text.count("  * ") == 1
    assert " us (" in text
