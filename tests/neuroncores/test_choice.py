"""The choice of the runtime: by name, by installed package, and with broken or placeholder packages."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from parawrap import neuron
from parawrap.cli._machine import machine_checks
from parawrap.errors import DeviceUnavailableError
from parawrap.neuroncores import NeuronRuntime, _choose_runtime, runtime, using
from parawrap.testing import NeuronHost

_INDEX = "https://pip.repos.neuron.amazonaws.com"
_VENDORS = ["torch_neuronx", "torch_neuron"]

# The code of the placeholder packages that have these names on PyPI.
_PLACEHOLDER = """
raise ImportError(
    "WRONG PACKAGE. Please install the package from Neuron Repository - https://pip.repos.neuron.amazonaws.com"
)
"""


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch):
    """Start without a chosen runtime, without a named one, and without an installed vendor package."""
    monkeypatch.setattr(_choose_runtime, "_chosen", None)
    monkeypatch.delenv("PARAWRAP_NEURON_RUNTIME", raising=False)
    for name in _VENDORS:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that puts a package of a given name and content on sys.path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def package(name, content=""):
        (site / f"{name}.py").write_text(content)
        monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()

    return package


def test_without_any_runtime_the_cores_are_emulated_with_a_warning():
    """The warning appears once, points at the user's line, and names the variable that silences it."""
    with pytest.warns(UserWarning, match="no NeuronCore runtime is installed, .*PARAWRAP_NEURON_RUNTIME=host") as warned:
        neuron.core_count()
    chosen = runtime()
    assert isinstance(chosen, NeuronHost)
    assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime() is chosen


def test_naming_the_emulated_runtime_silences_the_warning(monkeypatch):
    """PARAWRAP_NEURON_RUNTIME=host selects the emulated runtime without a warning."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    assert isinstance(runtime(), NeuronHost)


@pytest.mark.parametrize("name", _VENDORS)
def test_an_installed_vendor_runtime_is_chosen(install, name):
    """It takes precedence over the emulated runtime, without a name and without a warning."""
    install(name)
    assert runtime().name == name
    assert runtime() is runtime()


def test_torch_neuronx_takes_precedence_over_torch_neuron(install, monkeypatch):
    """If both are installed, torch_neuronx is chosen, unless the variable names torch_neuron."""
    for name in _VENDORS:
        install(name)
    assert runtime().name == "torch_neuronx"
    monkeypatch.setattr(_choose_runtime, "_chosen", None)
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "torch_neuron")
    assert runtime().name == "torch_neuron"


@pytest.mark.parametrize("name", ["nonsense", "torch-neuronx", "HOST"])
def test_an_unknown_runtime_name_is_refused(monkeypatch, name):
    """The error shows the value and lists the known names."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", name)
    with pytest.raises(
        DeviceUnavailableError, match=f"PARAWRAP_NEURON_RUNTIME='{name}'.*host, torch_neuronx, torch_neuron"
    ):
        runtime()


def test_a_blank_runtime_name_counts_as_unset(monkeypatch):
    """A variable that holds only spaces is treated like an unset variable."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "  ")
    with pytest.warns(UserWarning, match="no NeuronCore runtime is installed"):
        assert isinstance(runtime(), NeuronHost)


@pytest.mark.parametrize("name", _VENDORS)
def test_a_named_runtime_that_is_not_installed_is_an_error(monkeypatch, name):
    """The error says where to install the package from, and how to continue without it."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", name)
    with pytest.raises(DeviceUnavailableError) as refused:
        runtime()
    package = {"torch_neuronx": "'torch-neuronx==2.9.*'", "torch_neuron": "torch-neuron "}[name]
    for said in (f"{name} is not installed", _INDEX, package, "PARAWRAP_NEURON_RUNTIME=host"):
        assert said in str(refused.value)


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
@pytest.mark.parametrize("name", _VENDORS)
def test_the_placeholder_from_pypi_is_recognised(install, monkeypatch, name, named):
    """The error says that it is a placeholder and where the real package is, even if no runtime is named."""
    install(name, _PLACEHOLDER)
    if named:
        monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", name)
    with pytest.raises(DeviceUnavailableError) as refused:
        runtime()
    for said in (f"{name} is installed from PyPI", "placeholder", f"pip install --extra-index-url {_INDEX}"):
        assert said in str(refused.value)
    assert isinstance(refused.value.__cause__, ImportError)


def test_an_error_is_not_cached(install, monkeypatch):
    """A runtime that is installed after the error is used at the next attempt."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "torch_neuronx")
    with pytest.raises(DeviceUnavailableError):
        runtime()
    install("torch_neuronx")
    assert runtime().name == "torch_neuronx"


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("raise ImportError('libnrt.so.1: cannot open')", r"ImportError: libnrt\.so\.1: cannot open"),
        ("raise OSError('libnrt.so.1: cannot open')", r"OSError: libnrt\.so\.1: cannot open"),
        ("import module_that_is_not_there", "ModuleNotFoundError: No module named 'module_that_is_not_there'"),
    ],
    ids=["import-error", "library", "dependency"],
)
def test_a_broken_runtime_is_replaced_by_no_other(install, monkeypatch, named, content, reason):
    """The error gives the reason, and what to do. Emulated cores would hide that the machine's own are idle."""
    install("torch_neuronx", content)
    install("torch_neuron")
    if named:
        monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "torch_neuronx")
    with pytest.raises(DeviceUnavailableError, match=rf"torch_neuronx is installed, but cannot be imported \({reason}"):
        runtime()
    (check,) = [check for check in machine_checks() if check.name == "NeuronCores"]
    assert check.state == "problem"


def test_doctor_names_the_runtime(install, monkeypatch):
    """It says if the cores are emulated, also where a vendor's package is installed."""
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "3")
    install("torch_neuron")
    details = []
    for named in "", "host":
        monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", named)
        monkeypatch.setattr(_choose_runtime, "_chosen", None)
        (check,) = [check for check in machine_checks() if check.name == "NeuronCores"]
        details.append((check.state, check.detail))
    emulated = "3 emulated cores (PARAWRAP_NEURON_RUNTIME=host)"
    assert details == [("ok", "3 cores with torch_neuron"), ("ok", emulated)]


def test_concurrent_first_calls_get_one_runtime(monkeypatch):
    """Threads that call `runtime` at the same time all get the same runtime."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    threads = 8
    together = threading.Barrier(threads)

    def ask(_: int) -> NeuronRuntime:
        together.wait()
        return runtime()

    with ThreadPoolExecutor(threads) as pool:
        assert len({id(chosen) for chosen in pool.map(ask, range(threads))}) == 1


def test_using_selects_another_runtime_inside_the_block(monkeypatch):
    """Blocks nest. After a block the previous runtime is in use again, also after an exception."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    before, outer, inner = runtime(), NeuronHost(1), NeuronHost(1)
    with using(outer) as given:
        assert runtime() is given is outer
        with pytest.raises(LookupError, match="True"), using(inner):
            raise LookupError(runtime() is inner)
        assert runtime() is outer
    assert runtime() is before


def test_using_does_not_choose_the_default_runtime():
    """A block before the first call of `runtime` imports no vendor package and issues no warning."""
    with using(NeuronHost(1)):
        pass
    assert _choose_runtime._chosen is None


def test_importing_the_package_imports_no_vendor_package():
    """Names of cores are parsed without importing any runtime."""
    script = (
        "import sys; from parawrap.neuroncores import resolve_cores; resolve_cores('nc:0', 1); "
        "print([name for name in ('torch_neuronx', 'torch_neuron', 'parawrap.testing') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
