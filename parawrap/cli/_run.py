"""``parawrap run``: launch a function, and print the result of each rank."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from parawrap.cli._usage_error import UsageError
from parawrap.displays import safe_repr
from parawrap.errors import PlatformError

if TYPE_CHECKING:
    from parawrap.api.wrapper import Launchable

HELP = "Launch a function, and print the result of each rank"
EXAMPLES = """The annotations and defaults of the function convert the arguments after --; other arguments are strings. A
function without parameters finds the arguments in sys.argv. If the function is decorated with @wrapper, the options
change the fields of its platform.

examples:
  parawrap run train:main --device cpu --n 2 -- --lr 0.1 --epochs 3
  parawrap run train:main -- --help        # the parameters of the function
  parawrap run jobs/train.py:main --device slurm --nodes 2 --n 4 --set partition=long
  parawrap run jobs/train.py:main --device slurm --nodes 2 --n 4 --local    # the 8 ranks run here
  parawrap run train:main --device gpu --dry-run
"""
_OPTIONS: dict[str, tuple[str, type, str]] = {
    "device": ("device", str, "cpu, gpu, mps, neuron, slurm, or ray"),
    "launcher": ("launcher", str, "local, slurm, ray, or env"),
    "name": ("name", str, "the name of the job on a cluster"),
    "gpus": ("n_gpus", int, "accelerators per node, one rank each"),
    "cpus": ("n_cpus", int, "ranks per node of a CPU platform; threads per rank of others"),
    "n": ("n", int, "ranks per node: n_cpus of a CPU platform, n_gpus of others"),
    "nodes": ("n_nodes", int, "the number of machines"),
    "timeout-min": ("timeout_min", float, "minutes until the launch is ended"),
}
_NOT_INLINE = {"n", "n_cpus", "n_gpus", "n_nodes", "launcher", "timeout_min"}
_CLUSTERS = {"slurm", "ray"}  # their ranks are on CPUs, unless n_gpus is set


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="a module or a .py file, and a function in it")
    for option, (field, kind, text) in _OPTIONS.items():
        parser.add_argument(f"--{option}", dest=field, type=kind, metavar=option.partition("-")[0].upper(), help=text)
    parser.add_argument(
        "--local", action="store_true", help="start the ranks of a cluster function on this machine: --launcher local"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="any other field of Platform; may be repeated"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="describe the launch, and start nothing")
    instead.add_argument("--inline", action="store_true", help="run in this process as rank 0 of 1, for a debugger")


def run(given: argparse.Namespace) -> int:
    """Launch the function. An exception of a rank is printed with its traceback, and gives exit code 1."""
    sys.argv = [given.target.rpartition(":")[0], *given.rest]  # as a script would see; ranks see it too
    wants_help = not {"-h", "--help"}.isdisjoint(given.rest)
    try:
        function = _find_function(given.target)
        reads_argv = _has_no_parameters(function)
        if wants_help and not reads_argv:
            outcome = _describe_arguments(given.target, function)
        else:
            arguments = _read_arguments(given.target, function, given.rest) if given.rest and not reads_argv else ((), {})
            outcome = _launch(given, function, *arguments, inline=given.inline or wants_help)
    except UsageError:
        raise
    except SystemExit as error:
        if wants_help and not error.code:
            return 0
        print(f"parawrap run: rank 0 called sys.exit({error.code!r}) and returned nothing", file=sys.stderr)
        return 1
    except Exception:  # noqa: BLE001 (the module and the function may raise anything)
        traceback.print_exc()
        return 1
    print(outcome)
    return 0


def _launch(
    given: argparse.Namespace, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, inline: bool
) -> str:
    """Launch the function, or describe the launch. Return the text to print."""
    from parawrap.launch import check_signature

    try:
        check_signature(function, args, kwargs)
        launchable = _decorate(function, given)
        if given.dry_run:
            return str(launchable.dry_run(*args, **kwargs))
    except (PlatformError, TypeError) as error:  # TypeError: wrong arguments, or a coroutine function, for example
        msg = f"{given.target}: {error}"
        raise UsageError(msg) from error
    results = (launchable.inline if inline else launchable)(*args, **kwargs)
    return "\n".join(f"rank {rank}: {safe_repr(result)}" for rank, result in enumerate(results))


# --- the function and its arguments ---


def _find_function(target: str) -> Any:
    """Import ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``, and return the function.

    Raises:
        UsageError: If the module, the file, or the function does not exist, or the module exits.
    """
    place, _, name = target.rpartition(":")
    if not (name and place):
        msg = f"{target!r} does not name a function. Give MODULE:FUNCTION, such as train:main or jobs/train.py:main"
        raise UsageError(msg)
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import(place, Path.cwd())
    except SystemExit as error:
        msg = f"{place} exits while it is imported, with {error.code!r}. Put its script under if __name__ == '__main__':"
        raise UsageError(msg) from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        known = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        msg = f"{place!r} has no function {name!r}. It has {', '.join(known) or 'no functions'}"
        raise UsageError(msg)
    return function


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        msg = f"the file {str(path)!r} does not exist"
        raise UsageError(msg)
    path = path.resolve()  # as Python does with the file of a script
    module = _import(path.stem, path.parent)
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path:
        msg = f"{path.stem!r} is the name of another module, {found or 'which is built in'}. Rename {str(path)!r}"
        raise UsageError(msg)
    return module


def _import(name: str, folder: Path) -> ModuleType:
    sys.path.insert(0, str(folder))  # ranks get it too
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        msg = f"module {name!r} was not found in {folder} or on sys.path"
        raise UsageError(msg) from error


def _has_no_parameters(function: Any) -> bool:
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False


def _read_arguments(target: str, function: Any, words: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments, as cyclopts converts them.

    Raises:
        UsageError: If the words do not match the parameters.
    """
    try:
        _, bound, _ = _make_app(target, function).parse_args(words, print_error=False, exit_on_error=False)
    except Exception as error:  # cyclopts raises errors of several kinds for annotations that it does not support
        msg = f"{target}: {error}"
        raise UsageError(msg) from error
    return bound.args, bound.kwargs


def _describe_arguments(target: str, function: Any) -> str:
    """Return the help of a function: its parameters and its docstring."""
    with redirect_stdout(StringIO()) as shown:
        _make_app(target, function).help_print([])
    return shown.getvalue().rstrip()


def _make_app(target: str, function: Any) -> Any:
    try:
        from cyclopts import App, Parameter
    except ImportError as error:
        msg = "arguments after -- need the package cyclopts. Run pip install 'parawrap-torch[cli]'"
        raise UsageError(msg) from error
    lists = Parameter(consume_multiple=True, json_list=True, negative_iterable=())  # --sizes 1 2, or --sizes '[1, 2]'
    app = App(f"parawrap run {target} --", version_flags=(), help_formatter="plain", default_parameter=lists)
    app.default(getattr(function, "__wrapped__", function))
    return app


# --- the platform ---


def _decorate(function: Any, given: argparse.Namespace) -> Launchable[..., Any]:
    """Return the decorated function. Options change the platform that it has, or make one."""
    from parawrap.api.wrapper import is_launchable, wrapper
    from parawrap.launch import Platform

    own = function.platform if is_launchable(function) else None
    changes = _read_options(given)
    if own is not None and "device" in changes:
        if own.launcher in _CLUSTERS:  # Platform(device="slurm") has set it
            changes.setdefault("launcher", None if changes["device"] in _CLUSTERS else "local")
        if changes["device"] == "cpu":
            changes.setdefault("n_gpus", None)
    if "n" in changes:
        fields = {} if own is None else {"device": own.device, "launcher": own.launcher, "n_gpus": own.n_gpus}
        rank_count = _rank_count({**fields, **changes})
        _add(changes, rank_count, changes.pop("n"))
    if own is None:
        return wrapper(Platform(**changes))(function)
    return wrapper(replace(own, **changes))(function.__wrapped__) if changes else function


def _read_options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of Platform that the options name, and ``n`` of ``--n``."""
    named = {field: getattr(given, field) for field, _, _ in _OPTIONS.values()}
    changes = {field: value for field, value in named.items() if value is not None}
    for text in given.set:
        field, equals, value = text.partition("=")
        if not equals:
            msg = f"--set {text}: give FIELD=VALUE, such as --set seed=1"
            raise UsageError(msg)
        _add(changes, field, _python_value(value))
    if given.local:
        _add(changes, "launcher", "local")
    if given.inline and (without_effect := _NOT_INLINE & changes.keys()):
        msg = f"--inline runs one rank in this process, so {min(without_effect)} has no effect. Leave one of them out"
        raise UsageError(msg)
    return changes


def _python_value(text: str) -> Any:
    """Return the value of a Python literal, and other text unchanged."""
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # as its documentation lists
        return ast.literal_eval(text)
    return text


def _add(changes: dict[str, Any], field: str, value: object) -> None:
    if field in changes:
        msg = f"{field} is given twice, as {changes[field]!r} and {value!r}. Leave one of them out"
        raise UsageError(msg)
    changes[field] = value


def _rank_count(platform: Mapping[str, Any]) -> str:
    """Return the field of a platform that counts the ranks of a node."""
    from parawrap.launch import Platform

    device = platform.get("device", "auto")
    if device != "cpu" and platform.get("n_gpus") is not None:
        return "n_gpus"
    if device in _CLUSTERS or (device == "auto" and platform.get("launcher") in _CLUSTERS):
        return "n_cpus"
    kind = Platform().device if device == "auto" else device
    return "n_cpus" if kind == "cpu" else "n_gpus"
