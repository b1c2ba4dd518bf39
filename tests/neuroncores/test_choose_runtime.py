"""The choice of the runtime: by name, by installed package, and with broken or placeholder
packages.
"""

from __future__ import annotations

import importlib
import sys

import pytest

from parawrap import DeviceUnavailableError, neuron
from parawrap.neuroncores import _choose_runtime, runtime
from parawrap.testing import NeuronHost

INDEX = "https://pip.repos.neuron.amazonaws.com"
VENDORS = ["torch_neuronx", "torch_neuron"]
# On PyPI
PLACEHOLDER = (
    'raise ImportError("WRONG PACKAGE. Please install the package from Neuron Repository - '
    f'{INDEX}")'
)


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch):
    """Start without a chosen runtime, without a named one, and without an
    installed vendor package.
    """
    monkeypatch.setattr(_choose_runtime, "_chosen", None)
    monkeypatch.delenv("PARAWRAP_NEURON_RUNTIME", raising=False)
    for name in VENDORS:
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


@pytest.fixture
def named(monkeypatch):
    """Return a function that names a runtime, and forgets the one that was chosen."""

    def name(value):
        monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", value)
        monkeypatch.setattr(_choose_runtime, "_chosen", None)

    return name


def test_emulation_warns(named):
    """The warning points at the user's line, and names the variable that silences it.

    Another name is refused.
    """
    for blank in "", "  ":
        named(blank)
        with pytest.warns(
            UserWarning, match="no NeuronCore runtime is installed, .*=host"
        ) as warned:
            neuron.core_count()
        assert isinstance(runtime(), NeuronHost)
        assert warned[0].filename == __file__
    named("host")
    assert isinstance(runtime(), NeuronHost)
    named("HOST")
    with pytest.raises(
        DeviceUnavailableError, match=r"RUNTIME='HOST'.*host, torch_neuronx, torch_neuron"
    ):
        runtime()


def test_installed_package_is_chosen(install, named):
    """torch_neuronx takes precedence over torch_neuron, unless the variable names the latter."""
    install("torch_neuron")
    assert runtime().name == "torch_neuron"
    assert runtime() is runtime()
    install("torch_neuronx")
    named("")
    assert runtime().name == "torch_neuronx"
    named("torch_neuron")
    assert runtime().name == "torch_neuron"


@pytest.mark.parametrize(
    ("name", "package"),
    [("torch_neuronx", "'torch-neuronx==2.9.*'"), ("torch_neuron", "torch-neuron ")],
)
def test_named_package_that_is_missing(install, named, name, package):
    """The error says what to install, and how to continue without it. It is not cached."""
    named(name)
    with pytest.raises(DeviceUnavailableError) as refused:
        runtime()
    for said in (
        f"{name} cannot be imported (ModuleNotFoundError",
        INDEX,
        package,
        "PARAWRAP_NEURON_RUNTIME=host",
    ):
        assert said in str(refused.value)
    install(name)
    assert runtime().name == name


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            PLACEHOLDER,
            r"cannot be imported \(ImportError: WRONG PACKAGE.*placeholders.*pip install --extra",
        ),
        (
            "import missing_module",
            r"cannot be imported \(ModuleNotFoundError: No module named 'missing_module'",
        ),
    ],
    ids=["placeholder", "dependency"],
)
def test_broken_package_is_an_error(install, named, content, said):
    """The error gives the reason. Emulated cores would hide that the machine's own are idle."""
    install("torch_neuronx", content)
    install("torch_neuron")
    for name in "", "torch_neuronx":
        named(name)
        with pytest.raises(DeviceUnavailableError, match=rf"(?s)torch_neuronx .*{said}"):
            runtime()
