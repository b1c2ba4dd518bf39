"""How many cores the vendor's adapters find: by the environment, else by `neuron-ls`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from parawrap.backends.neuron import _neuron_ls
from parawrap.errors import DeviceListError, DeviceUnavailableError

# As in the Neuron LS User Guide: one device of two, with what is read of it and some of what is not.
_DEVICES = [
    {"neuron_device": 0, "connected_to": [1], "nc_count": 2, "memory_size": 34359738368, "neuron_processes": []},
    {"neuron_device": 1, "connected_to": [0], "nc_count": 2, "memory_size": 34359738368, "neuron_processes": []},
]


class Tool:
    """A `neuron-ls` in a folder of its own, which counts its runs."""

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
    """PATH has one folder, and the vendor's own is not there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(_neuron_ls, "_FOLDER", str(tmp_path / "opt"))
    return Tool(folder)


@pytest.fixture
def runtime(recorded, tool, monkeypatch):
    """An adapter that is not told by the environment."""
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    return recorded.runtime


def test_the_cores_of_all_devices_are_counted_once(runtime, tool):
    """Two devices of two cores are four; what was told is not asked for again."""
    tool.says(json.dumps(_DEVICES))
    assert [runtime.core_count() for _ in range(3)] == [4, 4, 4]
    assert tool.runs == ["['--json-output']"]


def test_the_environment_goes_before_the_tool(runtime, tool, monkeypatch):
    """Where the environment says it, nothing is run, also after the tool has told another number."""
    tool.says(json.dumps(_DEVICES))
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "3")
    assert runtime.core_count() == 3
    assert tool.runs == []
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    assert runtime.core_count() == 4
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    assert runtime.core_count() == 2


def test_a_malformed_environment_is_no_reason_to_ask_the_tool(runtime, tool, monkeypatch):
    """The variable is named instead."""
    tool.says(json.dumps(_DEVICES))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3-1")
    with pytest.raises(DeviceListError, match=r"NEURON_RT_VISIBLE_CORES='3-1'"):
        runtime.core_count()
    assert tool.runs == []


def test_the_vendors_folder_is_looked_into(runtime, tool, tmp_path, monkeypatch):
    """Where PATH has no neuron-ls, the folder that the vendor's tools are installed in may have it."""
    elsewhere = tmp_path / "opt"
    elsewhere.mkdir()
    Tool(elsewhere).says(json.dumps(_DEVICES[:1]))
    assert runtime.core_count() == 2


def test_a_machine_without_devices_has_no_cores(runtime, tool):
    """An empty list is an answer."""
    tool.says("[]")
    assert runtime.core_count() == 0


@pytest.mark.parametrize(
    ("stdout", "stderr", "code", "said"),
    [
        ("not json", "", 0, "printed no list of devices with an nc_count each: 'not json'"),
        ("", "", 0, "printed no list"),
        ('{"neuron_devices": []}', "", 0, "printed no list"),
        ('[{"neuron_device": 0}]', "", 0, "printed no list"),
        ('[{"nc_count": null}]', "", 0, "printed no list"),
        ("[2, 2]", "", 0, "printed no list"),
        ("2", "", 0, "printed no list"),
        ("", "unknown flag: --json-output\n", 1, "ended with 1: 'unknown flag: --json-output'"),
    ],
)
def test_a_tool_that_does_not_tell_is_an_error_with_a_cure(runtime, tool, stdout, stderr, code, said):
    """The error says which tool said what, and names the variable to set; the tool is asked again the next time."""
    tool.says(stdout, stderr=stderr, code=code)
    with pytest.raises(DeviceUnavailableError) as refused:
        runtime.core_count()
    assert said in str(refused.value)
    assert str(tool.file) in str(refused.value)
    assert "NEURON_RT_NUM_CORES" in str(refused.value)
    tool.says(json.dumps(_DEVICES))
    assert runtime.core_count() == 4


def test_a_tool_that_cannot_be_run_is_an_error_with_a_cure(runtime, tool):
    """A file that is no program is named."""
    tool.file.write_bytes(b"\x7fnot a program")
    tool.file.chmod(0o755)
    with pytest.raises(DeviceUnavailableError, match=r"neuron-ls cannot be run .*NEURON_RT_NUM_CORES"):
        runtime.core_count()


def test_without_the_tool_the_error_says_what_to_install(runtime):
    """It names the places that were looked into, the variable to set and the package that has the tool."""
    with pytest.raises(
        DeviceUnavailableError, match=r"no neuron-ls on PATH or in .*NEURON_RT_NUM_CORES.*aws-neuronx-tools"
    ):
        runtime.core_count()
