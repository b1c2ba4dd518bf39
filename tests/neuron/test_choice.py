"""Which runtime serves the process: what is named, what is installed, and what is not what it seems."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from parawrap import neuron
from parawrap.backends.neuron import NeuronRuntime, _choice, runtime, using
from parawrap.errors import DeviceUnavailableError
from parawrap.testing import NeuronHost

_INDEX = "https://pip.repos.neuron.amazonaws.com"
_VENDORS = ["torch_neuronx", "torch_neuron"]

# What the packages of these names on PyPI do when they are imported.
_PLACEHOLDER = """
raise ImportError(
    "WRONG PACKAGE. Please install the package from Neuron Repository - https://pip.repos.neuron.amazonaws.com"
)
"""


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch):
    """No runtime was chosen yet, none is named and none of a vendor's is installed."""
    monkeypatch.setattr(_choice, "_chosen", None)
    monkeypatch.delenv("PARAWRAP_NEURON_RUNTIME", raising=False)
    for name in _VENDORS:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package of that name and content on sys.path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def package(name, content=""):
        (site / f"{name}.py").write_text(content)
        monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()

    return package


def test_without_any_runtime_the_cores_are_emulated_with_a_warning():
    """The warning comes once, at the line that asked, and names the variable that silences it."""
    with pytest.warns(UserWarning, match="no NeuronCore runtime is installed: .*PARAWRAP_NEURON_RUNTIME=host") as warned:
        neuron.core_count()
    chosen = runtime()
    assert isinstance(chosen, NeuronHost)
    assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime() is chosen


def test_the_emulation_that_is_named_comes_without_a_warning(monkeypatch):
    """PARAWRAP_NEURON_RUNTIME=host says that it is wanted."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    assert isinstance(runtime(), NeuronHost)


@pytest.mark.parametrize("name", _VENDORS)
def test_a_vendors_runtime_that_is_installed_serves(install, name):
    """It goes before the emulated one, without being named and without a warning."""
    install(name)
    assert runtime().name == name
    assert runtime() is runtime()


def test_torch_neuronx_goes_before_torch_neuron(install, monkeypatch):
    """Where both are installed the newer one serves, unless the other is named."""
    for name in _VENDORS:
        install(name)
    assert runtime().name == "torch_neuronx"
    monkeypatch.setattr(_choice, "_chosen", None)
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "torch_neuron")
    assert runtime().name == "torch_neuron"


@pytest.mark.parametrize("name", ["nonsense", "torch-neuronx", "HOST"])
def test_a_name_of_no_runtime_is_refused(monkeypatch, name):
    """The error shows the value and lists the names that there are."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", name)
    with pytest.raises(
        DeviceUnavailableError, match=f"PARAWRAP_NEURON_RUNTIME='{name}'.*host, torch_neuronx, torch_neuron"
    ):
        runtime()


def test_a_name_of_blanks_is_no_name(monkeypatch):
    """An empty variable is as one that is not set."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "  ")
    with pytest.warns(UserWarning, match="no NeuronCore runtime is installed"):
        assert isinstance(runtime(), NeuronHost)


@pytest.mark.parametrize("name", _VENDORS)
def test_a_runtime_that_is_named_and_missing_is_an_error(monkeypatch, name):
    """The error says what to install from where, and how to go on without it."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", name)
    with pytest.raises(DeviceUnavailableError) as refused:
        runtime()
    for said in (f"{name} is not installed", _INDEX, name.replace("_", "-"), "PARAWRAP_NEURON_RUNTIME=host"):
        assert said in str(refused.value)


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
@pytest.mark.parametrize("name", _VENDORS)
def test_the_placeholder_from_pypi_is_recognised(install, monkeypatch, name, named):
    """The error says so, and where the real package is; also where none is named: whoever has it wants NeuronCores."""
    install(name, _PLACEHOLDER)
    if named:
        monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", name)
    with pytest.raises(DeviceUnavailableError) as refused:
        runtime()
    for said in (f"{name} is installed from PyPI", "not the real package", f"pip install --extra-index-url {_INDEX}"):
        assert said in str(refused.value)
    assert isinstance(refused.value.__cause__, ImportError)


def test_an_error_is_not_kept(install, monkeypatch):
    """What was missing may be installed, and then serves."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "torch_neuronx")
    with pytest.raises(DeviceUnavailableError):
        runtime()
    install("torch_neuronx")
    assert runtime().name == "torch_neuronx"


def test_a_broken_runtime_is_named_in_the_warning(install):
    """A package that cannot be imported is passed over, and the warning says why it was."""
    install("torch_neuronx", "raise ImportError('libnrt.so.1: cannot open shared object file')")
    with pytest.warns(UserWarning, match=r"torch_neuronx is installed and cannot be imported: libnrt\.so\.1"):
        assert isinstance(runtime(), NeuronHost)


def test_a_broken_runtime_that_is_named_shows_its_own_error(install, monkeypatch):
    """Nothing is put in its place."""
    install("torch_neuronx", "raise ImportError('libnrt.so.1: cannot open shared object file')")
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "torch_neuronx")
    with pytest.raises(ImportError, match=r"libnrt\.so\.1"):
        runtime()


def test_what_a_runtime_needs_and_misses_is_named_itself(install, monkeypatch):
    """torch_neuronx without torch_xla is not "not installed": the missing module is the one that is named."""
    install("torch_neuronx", "import module_that_is_not_there")
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "torch_neuronx")
    with pytest.raises(ModuleNotFoundError, match="module_that_is_not_there"):
        runtime()


def test_threads_that_ask_first_get_one_runtime(monkeypatch):
    """However many threads ask at once, one runtime is made."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    threads = 8
    together = threading.Barrier(threads)

    def ask(_: int) -> NeuronRuntime:
        together.wait()
        return runtime()

    with ThreadPoolExecutor(threads) as pool:
        assert len({id(chosen) for chosen in pool.map(ask, range(threads))}) == 1


def test_using_has_another_runtime_serve_inside_the_block(monkeypatch):
    """Blocks nest, and what served before serves after, also after an exception."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    before, outer, inner = runtime(), NeuronHost(1), NeuronHost(1)
    with using(outer) as given:
        assert runtime() is given is outer
        with pytest.raises(LookupError, match="True"), using(inner):
            raise LookupError(runtime() is inner)
        assert runtime() is outer
    assert runtime() is before


def test_using_chooses_nothing_by_itself():
    """A block before the first question leaves that open: no vendor's package is imported, no warning given."""
    with using(NeuronHost(1)):
        pass
    assert _choice._chosen is None


def test_the_room_imports_no_vendor():
    """Names of cores are read, and the contract is there, without any runtime."""
    script = (
        "import sys; from parawrap.backends.neuron import resolve_cores; resolve_cores('nc:0', 1); "
        "print([name for name in ('torch_neuronx', 'torch_neuron', 'parawrap.testing') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
