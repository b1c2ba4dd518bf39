"""Names of NeuronCores, and their number: from NEURON_RT_* variables, or from `neuron-ls`."""

from __future__ import annotations

import json
import sys

import pytest

from parawrap import DeviceListError, DeviceUnavailableError
from parawrap.backends import _neuron_devices, read_core_numbers
from parawrap.neuroncores import resolve_cores

# Two devices, as in the Neuron LS User Guide, with some fields that parawrap does not read.
DEVICES = [
    {"neuron_device": number, "nc_count": 2, "memory_size": 34359738368} for number in range(2)
]


@pytest.mark.parametrize(
    "entry", ["gpu:0", "", "nc:", "nc:x", "nc:-1", "nc: 1", "nc:²", "0", -1, True, 1.0, None, "nc"]
)
def test_entry_that_is_not_a_core(entry):
    """The error shows the entry as the user wrote it, and the two valid spellings.

    A kind is not an entry of a list.
    """
    with pytest.raises(DeviceListError) as refused:
        resolve_cores(["nc:0", entry], 4)
    assert str(refused.value).startswith(f"{entry!r} is not a NeuronCore")
    assert "an index or 'nc:#'" in str(refused.value)


@pytest.mark.parametrize(
    ("devices", "visible", "error", "said"),
    [
        ([], 4, DeviceListError, r"list of NeuronCores is empty.*omit the list"),
        ([1, 0, 1], 4, DeviceListError, r"nc:1 is named twice in \[.*'nc:1'.*num_workers"),
        (
            "nc:14",
            9,
            DeviceUnavailableError,
            "'nc:14' is not available: this process sees nc:0 to nc:8",
        ),
        (
            [0, 14],
            9,
            DeviceUnavailableError,
            "'nc:14' is not .* NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES",
        ),
        (None, 0, DeviceUnavailableError, r"no NeuronCore is allocated.*NEURON_RT_VISIBLE_CORES"),
    ],
    ids=str,
)
def test_cores_of_other_processes(devices, visible, error, said):
    """The error names the core, the cores of the process, and the variables that allocate more."""
    with pytest.raises(error, match=said):
        resolve_cores(devices, visible)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        *(
            ("NEURON_RT_VISIBLE_CORES", each, f"'{each}' is neither")
            for each in ("a", "-1", "1-", "0-3-5", "nc:0")
        ),
        ("NEURON_RT_VISIBLE_CORES", "0,", "'' is neither"),
        ("NEURON_RT_VISIBLE_CORES", "0-3,5-4", "'5-4' is neither"),
        ("NEURON_RT_VISIBLE_CORES", "0-3,2-5", "'2-5' is neither"),
        *(
            ("NEURON_RT_NUM_CORES", each, "NEURON_RT_NUM_CORES=2")
            for each in ("-1", "two", "1.5", "\N{SUPERSCRIPT TWO}")
        ),
    ],
)
def test_malformed_variables(variable, value, said):
    """The error shows the variable with its value, the malformed part, and valid spellings."""
    with pytest.raises(DeviceListError) as refused:
        read_core_numbers({variable: value})
    for part in (
        f"{variable}={value!r}",
        said,
        "'0-6', '3' or '0,2-4'" if "VISIBLE" in variable else "0 for all",
    ):
        assert part in str(refused.value)


@pytest.mark.parametrize("recorded", ["torch_neuronx"], indirect=True)
def test_variables_precede_the_tool(recorded, tmp_path, monkeypatch):
    """Variables, also malformed ones, precede the tool.

    The list precedes the number. Without a value, or with 0, the tool counts all cores.

    The tool is searched on PATH, and in the vendor's folder.
    """
    runtime, tool = recorded.runtime, tmp_path / "neuron-ls"
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(_neuron_devices, "_LS_FOLDER", str(tmp_path))
    said = r"No such file .*neuron-ls.*NEURON_RT_NUM_CORES.*aws-neuronx-tools"
    with pytest.raises(DeviceUnavailableError, match=said):
        runtime.core_count()
    tool.write_text(f"#!{sys.executable}\nprint({json.dumps(DEVICES)!r})")
    tool.chmod(0o755)
    assert runtime.core_count() == 4
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "  ")
    for number, cores in (("", 4), ("0", 4), (" 8 ", 8)):
        monkeypatch.setenv("NEURON_RT_NUM_CORES", number)
        assert runtime.core_count() == cores
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "nonsense")
    for listed, cores in (("0-6", 7), ("3", 1), (" 0 , 2-4 ", 4)):
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", listed)
        assert runtime.core_count() == cores
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3-1")
    with pytest.raises(DeviceListError, match=r"NEURON_RT_VISIBLE_CORES='3-1'"):
        runtime.core_count()
