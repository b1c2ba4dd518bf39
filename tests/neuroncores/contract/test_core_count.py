"""The number of cores that the vendor's adapters report, from the environment or from `neuron-ls`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from parawrap.errors import DeviceListError, DeviceUnavailableError
from parawrap.neuroncores import _neuron_cores

# Two devices, as in the Neuron LS User Guide, with some fields that parawrap does not read.
_DEVICES = [
    {"neuron_device": 0, "connected_to": [1], "nc_count": 2, "memory_size": 34359738368, "neuron_processes": []},
    {"neuron_device": 1, "connected_to": [0], "nc_count": 2, "memory_size": 34359738368, "neuron_processes": []},
]


class Tool:
    """A fake `neuron-ls`, which counts its runs."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "neuron-ls"
        self._runs = folder / "runs"

    def says(self, stdout: str, *, stderr: str = "", code: int = 0) -> None:
        self.file.write_text(
            f"#!{sys.executable}\nimport sys\nopen({str(self._runs)!r}, 'a').write(repr(sys.argv[1:]) + '\\n')\n"
            f"sys.stdout.write({stdout!r})\nsys.stderr.write({stderr!r})\nsys.exit({code})\n"
        )
        self.file.chmod(0o755)

    @property
    def runs(self) -> list[str]:
        return self._runs.read_text().splitlines() if self._runs.exists() else []


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Set PATH to one folder, and make the vendor's folder point to a missing one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(_neuron_cores, "_LS_FOLDER", str(tmp_path / "opt"))
    return Tool(folder)


@pytest.fixture
def runtime(recorded, tool, monkeypatch):
    """An adapter without a number of cores in the environment."""
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    return recorded.runtime


def test_the_cores_of_all_devices_are_summed_and_cached(runtime, tool):
    """Two devices of two cores are four. The tool runs only once."""
    tool.says(json.dumps(_DEVICES))
    assert [runtime.core_count() for _ in range(3)] == [4, 4, 4]
    assert tool.runs == ["['--json-output']"]


def test_the_environment_takes_precedence_over_the_tool(runtime, tool, monkeypatch):
    """If a variable sets the number, the tool does not run, also after it has reported another number."""
    tool.says(json.dumps(_DEVICES))
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "3")
    assert runtime.core_count() == 3
    assert tool.runs == []
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    assert runtime.core_count() == 4
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    assert runtime.core_count() == 2


def test_a_malformed_environment_does_not_fall_back_to_the_tool(runtime, tool, monkeypatch):
    """The error names the variable."""
    tool.says(json.dumps(_DEVICES))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3-1")
    with pytest.raises(DeviceListError, match=r"NEURON_RT_VISIBLE_CORES='3-1'"):
        runtime.core_count()
    assert tool.runs == []


def test_the_vendors_folder_is_searched(runtime, tool, tmp_path, monkeypatch):
    """If neuron-ls is not on PATH, the install folder of the vendor's tools is searched."""
    elsewhere = tmp_path / "opt"
    elsewhere.mkdir()
    Tool(elsewhere).says(json.dumps(_DEVICES[:1]))
    assert runtime.core_count() == 2


def test_a_machine_without_devices_has_no_cores(runtime, tool):
    """An empty list means zero cores."""
    tool.says("[]")
    assert runtime.core_count() == 0


@pytest.mark.parametrize(
    ("stdout", "stderr", "code", "said"),
    [
        ("not json", "", 0, "did not print a list of devices with an nc_count each: 'not json'"),
        ("", "", 0, "did not print a list"),
        ('{"neuron_devices": []}', "", 0, "did not print a list"),
        ('[{"neuron_device": 0}]', "", 0, "did not print a list"),
        ('[{"nc_count": null}]', "", 0, "did not print a list"),
        ("[2, 2]", "", 0, "did not print a list"),
        ("2", "", 0, "did not print a list"),
        ("", "unknown flag: --json-output\n", 1, "exited with status 1: 'unknown flag: --json-output'"),
    ],
)
def test_unusable_output_of_the_tool_is_an_error(runtime, tool, stdout, stderr, code, said):
    """The error shows the tool, its output, and the variable to set. The tool runs again at the next attempt."""
    tool.says(stdout, stderr=stderr, code=code)
    with pytest.raises(DeviceUnavailableError) as refused:
        runtime.core_count()
    assert said in str(refused.value)
    assert str(tool.file) in str(refused.value)
    assert "NEURON_RT_NUM_CORES" in str(refused.value)
    tool.says(json.dumps(_DEVICES))
    assert runtime.core_count() == 4


def test_a_tool_that_cannot_be_run_is_an_error(runtime, tool):
    """The error shows the file and the variable to set."""
    tool.file.write_bytes(b"\x7fnot a program")
    tool.file.chmod(0o755)
    with pytest.raises(DeviceUnavailableError, match=r"neuron-ls cannot be run .*NEURON_RT_NUM_CORES"):
        runtime.core_count()


def test_without_the_tool_the_error_says_what_to_install(runtime):
    """It names the searched places, the variable to set, and the package with the tool."""
    with pytest.raises(
        DeviceUnavailableError, match=r"neuron-ls is neither on PATH nor in .*NEURON_RT_NUM_CORES.*aws-neuronx-tools"
    ):
        runtime.core_count()
