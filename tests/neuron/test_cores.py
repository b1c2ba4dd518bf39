"""The names of NeuronCores: lists of devices, and what the environment gives to a process."""

from __future__ import annotations

import pytest
import torch

from parawrap.backends import names_cores
from parawrap.backends.neuron import NeuronCore, cores_given, resolve_cores
from parawrap.errors import DeviceListError, DeviceUnavailableError


def indices(cores):
    return [core.index for core in cores]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("nc", [0, 1, 2, 3]),
        ("neuron", [0, 1, 2, 3]),
        ("nc:2", [2]),
        ("neuron:2", [2]),
        (3, [3]),
        (0, [0]),
        (NeuronCore(1), [1]),
        ([2], [2]),
        (["nc:3", 0, "neuron:1", NeuronCore(2)], [3, 0, 1, 2]),
        (("nc:0", "nc:1"), [0, 1]),
        (range(1, 3), [1, 2]),
    ],
    ids=str,
)
def test_a_list_of_devices_names_cores_in_its_order(devices, expected):
    """Indices and "nc:#" mean the same, one entry stands for a list of one, and none for all cores of the process."""
    assert indices(resolve_cores(devices, 4)) == expected


def test_a_core_is_written_as_it_is_named():
    """``str`` of a core is what a list of devices takes; cores compare by their index."""
    core = NeuronCore(3)
    assert str(core) == "nc:3"
    assert resolve_cores(str(core), 4) == (core,)
    assert sorted([NeuronCore(2), NeuronCore(0)]) == [NeuronCore(0), NeuronCore(2)]


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ("gpu:0", "'gpu:0'"),
        ("cuda:0", "'cuda:0'"),
        ("cpu", "'cpu'"),
        ("", "''"),
        ("nc:", "'nc:'"),
        ("nc:x", "'nc:x'"),
        ("nc:-1", "'nc:-1'"),
        ("nc:1.0", "'nc:1.0'"),
        ("nc: 1", "'nc: 1'"),
        ("nc:²", "'nc:²'"),
        ("nc:٣", "'nc:٣'"),
        ("NC:0", "'NC:0'"),
        ("nc0", "'nc0'"),
        ("0", "'0'"),
        (-1, "-1"),
        (True, "True"),
        (1.0, "1.0"),
        (None, "None"),
        (torch.device("cuda", 0), "cuda:0"),
        (torch.device("cpu"), "cpu"),
        (b"nc:0", "b'nc:0'"),
    ],
    ids=repr,
)
def test_an_entry_that_is_no_core_is_named(entry, shown):
    """The error shows the entry as it was written, and the two spellings that would do."""
    with pytest.raises(DeviceListError) as refused:
        resolve_cores(["nc:0", entry], 4)
    assert str(refused.value).startswith(f"{shown} is no NeuronCore")
    assert "an index or 'nc:#'" in str(refused.value)


@pytest.mark.parametrize("devices", ["gpu:0", -1, True, "nc:-1"], ids=repr)
def test_a_single_entry_that_is_no_core_is_named(devices):
    """An entry outside of a list is read as one inside."""
    with pytest.raises(DeviceListError, match=rf"{devices}'? is no NeuronCore"):
        resolve_cores(devices, 4)


@pytest.mark.parametrize("kind", ["nc", "neuron"])
def test_all_cores_are_no_entry_of_a_list(kind):
    """Among others "nc" names no core."""
    with pytest.raises(DeviceListError, match=f"'{kind}' is no NeuronCore"):
        resolve_cores([kind, "nc:1"], 4)


@pytest.mark.parametrize("devices", [[], (), range(0)], ids=repr)
def test_a_list_without_entries_is_refused(devices):
    """The error says that leaving the list out takes all cores."""
    with pytest.raises(DeviceListError, match=r"no NeuronCore is named.*leave the list out"):
        resolve_cores(devices, 4)


@pytest.mark.parametrize("devices", [[1, 0, 1], ["nc:1", 1], ["nc:01", "neuron:1"], [NeuronCore(1), 1]], ids=str)
def test_a_core_that_is_named_twice_is_refused(devices):
    """However it is written, the error names the core, and what to set for more workers on it."""
    with pytest.raises(DeviceListError, match=r"nc:1 is named twice in \[.*'nc:1'.*num_workers"):
        resolve_cores(devices, 4)


@pytest.mark.parametrize(
    ("devices", "visible", "there"),
    [
        ("nc:14", 9, "nc:0 to nc:8"),
        ([0, 14], 9, "nc:0 to nc:8"),
        (9, 9, "nc:0 to nc:8"),
        ("nc:1", 1, "nc:0 alone"),
        ("nc:0", 0, "no NeuronCore"),
    ],
)
def test_a_core_that_the_process_does_not_have_is_refused(devices, visible, there):
    """The error names it, those that there are, and the variables that allocate more."""
    with pytest.raises(DeviceUnavailableError) as refused:
        resolve_cores(devices, visible)
    wanted = resolve_cores(devices, 99)[-1]
    assert str(refused.value).startswith(f"'{wanted}' is not there: this process sees {there}")
    assert "NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES" in str(refused.value)


@pytest.mark.parametrize("devices", [None, "nc", "neuron"])
def test_all_cores_of_a_process_without_any_is_refused(devices):
    """The error says that none is allocated, and which variables allocate."""
    with pytest.raises(DeviceUnavailableError, match=r"no NeuronCore is allocated.*NEURON_RT_VISIBLE_CORES"):
        resolve_cores(devices, 0)


@pytest.mark.parametrize("devices", ["nc", "neuron", "nc:0", "nc:x", NeuronCore(0), ["nc:0"], [0, "nc:1"], [NeuronCore(0)]])
def test_what_names_cores_is_told_from_other_devices(devices):
    """Also where the name turns out to be malformed, or indices stand beside it."""
    assert names_cores(devices)


@pytest.mark.parametrize(
    "devices",
    [
        None,
        0,
        2,
        "cpu",
        "cuda:0",
        "auto",
        "ncx",
        "",
        [0, 1],
        [],
        ["cpu", "cuda:0"],
        torch.device("cpu"),
        [torch.device("cpu")],
    ],
    ids=str,
)
def test_other_devices_name_no_cores(devices):
    """Indices alone are no NeuronCores: they may be any device's."""
    assert not names_cores(devices)


@pytest.mark.parametrize(
    ("visible", "number", "cores"),
    [
        ("0-6", None, 7),
        ("7-15", None, 9),
        ("3", None, 1),
        ("0,2-4", None, 4),
        (" 0 , 2 - 4 ".replace(" - ", "-"), None, 4),
        ("5-5", None, 1),
        ("0-3", "99", 4),
        ("0-3", "nonsense", 4),
        (None, "8", 8),
        (None, " 8 ", 8),
        ("", "8", 8),
        ("  ", "8", 8),
        (None, None, None),
        (None, "", None),
    ],
)
def test_the_environment_gives_a_number_of_cores(monkeypatch, visible, number, cores):
    """The list goes before the number, as in the Neuron runtime; an empty variable is as one that is not set."""
    for name, value in (("NEURON_RT_VISIBLE_CORES", visible), ("NEURON_RT_NUM_CORES", number)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert cores_given() == cores


@pytest.mark.parametrize(
    ("listed", "part", "why"),
    [
        ("a", "a", "is no core and no range"),
        ("-1", "-1", "is no core and no range"),
        ("1-", "1-", "is no core and no range"),
        ("0-3-5", "0-3-5", "is no core and no range"),
        ("0,,2", "", "is no core and no range"),
        ("0,", "", "is no core and no range"),
        ("0;2", "0;2", "is no core and no range"),
        ("0 2", "0 2", "is no core and no range"),
        ("1.5", "1.5", "is no core and no range"),
        ("0x1", "0x1", "is no core and no range"),
        ("nc:0", "nc:0", "is no core and no range"),
        ("4-2", "4-2", "runs backwards"),
        ("0-3,5-4", "5-4", "runs backwards"),
        ("0,0", "0", "names a core again"),
        ("0-3,2", "2", "names a core again"),
        ("0-3,2-5", "2-5", "names a core again"),
    ],
)
def test_a_malformed_list_of_visible_cores_is_named(listed, part, why):
    """The error shows the variable with its value, the part that is wrong, why it is, and spellings that would do."""
    with pytest.raises(DeviceListError) as refused:
        cores_given({"NEURON_RT_VISIBLE_CORES": listed})
    assert str(refused.value).startswith(f"NEURON_RT_VISIBLE_CORES={listed!r}: {part!r} {why}")
    assert "'0-6', '3' or '0,2-4'" in str(refused.value)


@pytest.mark.parametrize("number", ["-1", "two", "1.5", "2 3", "0-3", "²", "1e3"])
def test_a_malformed_number_of_cores_is_named(number):
    """The error shows the variable with its value, and one that would do."""
    with pytest.raises(DeviceListError, match=rf"NEURON_RT_NUM_CORES='{number}' .*NEURON_RT_NUM_CORES=2"):
        cores_given({"NEURON_RT_NUM_CORES": number})


def test_no_cores_is_the_vendors_word_for_all():
    """NEURON_RT_NUM_CORES=0 limits nothing."""
    assert cores_given({"NEURON_RT_NUM_CORES": "0"}) is None
