"""Names of NeuronCores: lists of devices, and the cores that the environment allocates to a process."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from parawrap.backends import names_cores, resolve_device
from parawrap.errors import DeviceListError, DeviceUnavailableError
from parawrap.neuroncores import NeuronCore, read_core_numbers, resolve_cores


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
def test_cores_keep_the_order_of_the_list(devices, expected):
    """Indices and "nc:#" mean the same. A single entry is a list of one, and None means all cores of the process."""
    assert indices(resolve_cores(devices, 4)) == expected


def test_str_of_a_core_names_it_again():
    """A list of devices accepts ``str`` of a core. Cores compare by their index."""
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
def test_the_error_shows_an_entry_that_is_not_a_core(entry, shown):
    """The error shows the entry as the user wrote it, and the two valid spellings."""
    with pytest.raises(DeviceListError) as refused:
        resolve_cores(["nc:0", entry], 4)
    assert str(refused.value).startswith(f"{shown} is not a NeuronCore")
    assert "an index or 'nc:#'" in str(refused.value)


@pytest.mark.parametrize("devices", ["gpu:0", -1, True, "nc:-1"], ids=repr)
def test_the_error_shows_a_single_value_that_is_not_a_core(devices):
    """A single value is parsed like an entry of a list."""
    with pytest.raises(DeviceListError, match=rf"{devices}'? is not a NeuronCore"):
        resolve_cores(devices, 4)


@pytest.mark.parametrize("kind", ["nc", "neuron"])
def test_a_kind_is_not_a_valid_entry_of_a_list(kind):
    """In a list, "nc" alone is refused."""
    with pytest.raises(DeviceListError, match=f"'{kind}' is not a NeuronCore"):
        resolve_cores([kind, "nc:1"], 4)


@pytest.mark.parametrize("devices", [[], (), range(0)], ids=repr)
def test_a_list_without_entries_is_refused(devices):
    """The error says that omitting the list selects all cores."""
    with pytest.raises(DeviceListError, match=r"list of NeuronCores is empty.*omit the list"):
        resolve_cores(devices, 4)


@pytest.mark.parametrize("devices", [[1, 0, 1], ["nc:1", 1], ["nc:01", "neuron:1"], [NeuronCore(1), 1]], ids=str)
def test_a_core_that_is_named_twice_is_refused(devices):
    """In every spelling, the error names the core, and the option for more threads per core."""
    with pytest.raises(DeviceListError, match=r"nc:1 is named twice in \[.*'nc:1'.*num_workers"):
        resolve_cores(devices, 4)


@pytest.mark.parametrize(
    ("devices", "visible", "there"),
    [
        ("nc:14", 9, "nc:0 to nc:8"),
        ([0, 14], 9, "nc:0 to nc:8"),
        (9, 9, "nc:0 to nc:8"),
        ("nc:1", 1, "only nc:0"),
        ("nc:0", 0, "no NeuronCore"),
    ],
)
def test_a_core_that_the_process_does_not_have_is_refused(devices, visible, there):
    """The error names the core, the cores of the process, and the variables that allocate more."""
    with pytest.raises(DeviceUnavailableError) as refused:
        resolve_cores(devices, visible)
    missing = resolve_cores(devices, 99)[-1]
    assert str(refused.value).startswith(f"'{missing}' is not available: this process sees {there}")
    assert "NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES" in str(refused.value)


@pytest.mark.parametrize("devices", [None, "nc", "neuron"])
def test_all_cores_of_a_process_without_cores_is_an_error(devices):
    """The error says that no core is allocated, and names the variables that allocate cores."""
    with pytest.raises(DeviceUnavailableError, match=r"no NeuronCore is allocated.*NEURON_RT_VISIBLE_CORES"):
        resolve_cores(devices, 0)


@pytest.mark.parametrize("devices", ["nc", "neuron", "nc:0", "nc:x", NeuronCore(0), ["nc:0"], [0, "nc:1"], [NeuronCore(0)]])
def test_names_of_cores_are_recognised(devices):
    """This includes malformed names of cores, and lists that also hold indices."""
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
    """Indices alone do not name NeuronCores, because any kind of device has indices."""
    assert not names_cores(devices)


def test_a_module_torch_neuron_alone_is_no_kind_of_device(monkeypatch):
    """torch_neuron for Inf1 adds the module torch.neuron, but registers no torch device: "neuron:0" is still a core."""
    module = ModuleType("torch.neuron")
    module.device_count = lambda: 4
    monkeypatch.setattr(torch, "neuron", module, raising=False)
    assert names_cores("neuron:0")
    with pytest.raises(DeviceUnavailableError, match=r"'neuron' names NeuronCores, which are not torch devices in this"):
        resolve_device("neuron:0")


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
def test_the_environment_sets_the_number_of_cores(monkeypatch, visible, number, cores):
    """The list takes precedence over the number, as in the Neuron runtime. An empty variable counts as unset."""
    for name, value in (("NEURON_RT_VISIBLE_CORES", visible), ("NEURON_RT_NUM_CORES", number)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    numbers = read_core_numbers()
    assert (None if numbers is None else len(numbers)) == cores


@pytest.mark.parametrize(
    ("listed", "part", "why"),
    [
        ("a", "a", "is neither a core nor a range"),
        ("-1", "-1", "is neither a core nor a range"),
        ("1-", "1-", "is neither a core nor a range"),
        ("0-3-5", "0-3-5", "is neither a core nor a range"),
        ("0,,2", "", "is neither a core nor a range"),
        ("0,", "", "is neither a core nor a range"),
        ("0;2", "0;2", "is neither a core nor a range"),
        ("0 2", "0 2", "is neither a core nor a range"),
        ("1.5", "1.5", "is neither a core nor a range"),
        ("0x1", "0x1", "is neither a core nor a range"),
        ("nc:0", "nc:0", "is neither a core nor a range"),
        ("4-2", "4-2", "runs backwards"),
        ("0-3,5-4", "5-4", "runs backwards"),
        ("0,0", "0", "repeats a core"),
        ("0-3,2", "2", "repeats a core"),
        ("0-3,2-5", "2-5", "repeats a core"),
    ],
)
def test_a_malformed_list_of_visible_cores_is_an_error(listed, part, why):
    """The error shows the variable with its value, the malformed part, the reason, and valid spellings."""
    with pytest.raises(DeviceListError) as refused:
        read_core_numbers({"NEURON_RT_VISIBLE_CORES": listed})
    assert str(refused.value).startswith(f"NEURON_RT_VISIBLE_CORES={listed!r}: {part!r} {why}")
    assert "'0-6', '3' or '0,2-4'" in str(refused.value)


@pytest.mark.parametrize("number", ["-1", "two", "1.5", "2 3", "0-3", "²", "1e3"])
def test_a_malformed_number_of_cores_is_an_error(number):
    """The error shows the variable with its value, and a valid value."""
    with pytest.raises(DeviceListError, match=rf"NEURON_RT_NUM_CORES='{number}' .*NEURON_RT_NUM_CORES=2"):
        read_core_numbers({"NEURON_RT_NUM_CORES": number})


def test_zero_cores_means_all_cores():
    """NEURON_RT_NUM_CORES=0 sets no limit, as in the Neuron runtime."""
    assert read_core_numbers({"NEURON_RT_NUM_CORES": "0"}) is None
