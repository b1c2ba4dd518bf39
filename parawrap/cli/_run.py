"""``parawrap run``: launch a function, and print the result of each rank."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parawrap.cli._usage_error import UsageError
from parawrap.displays import refusal_of_path, safe_repr
from parawrap.errors import PlatformError

if TYPE_CHECKING:
    from parawrap.api.wrapper import Launchable
    from parawrap.launch import Preview

__all__ = ["EXAMPLES", "HELP", "add_options", "run"]

HELP = "Launch a function, and print the result of each rank"
EXAMPLES = """arguments after -- are Python values: 0.1 is a number, [1, 2] a list, and other text a string. NAME=VALUE is a
keyword argument. If the function is decorated with @wrapper, the options change the fields of its platform.

examples:
  parawrap run train:main --device cpu --n 2 -- 0.1 epochs=3
  parawrap run jobs/train.py:main --device slurm --nodes 2 --n 4 --set partition=long
  parawrap run train:main --device gpu --dry-run
"""
_OPTIONS = {
    "device": "cpu, gpu, mps, neuron, slurm, or ray",
    "launcher": "local, slurm, ray, or env",
    "name": "the name of the job on a cluster",
    "trace": "a .html or .json file for the timeline of the ranks",
}
_NOT_INLINE = {"n_cpus", "n_gpus", "n_nodes", "launcher", "timeout_min", "trace"}
_CLUSTERS = {"slurm", "ray"}  # their ranks are on CPUs, unless n_gpus is set


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="a module or a .py file, and a function in it")
    for name, text in _OPTIONS.items():
        parser.add_argument(f"--{name}", help=text)
    parser.add_argument("--n", type=int, help="ranks per node: n_cpus of a CPU platform, n_gpus of others")
    parser.add_argument("--nodes", type=int, dest="n_nodes", help="the number of machines")
    parser.add_argument("--timeout-min", type=float, dest="timeout_min", help="minutes until the launch is ended")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="any other field of Platform; may be repeated"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="describe the launch, and start nothing")
    instead.add_argument("--inline", action="store_true", help="run in this process as rank 0 of 1, for a debugger")


def run(given: argparse.Namespace) -> int:
    """Launch the function. An exception of a rank is printed with its traceback, and gives exit code 1."""
    try:
        function = _found(given)
        args, kwargs = _arguments(given.rest)
        _check_call(given, function, args, kwargs)
        launchable = _launchable(function, given)
        outcome = _outcome(launchable, given, args, kwargs)
    except UsageError:
        raise
    except SystemExit as error:
        print(f"parawrap run: rank 0 called sys.exit({error.code!r}) and returned nothing", file=sys.stderr)
        return 1
    except Exception:  # noqa: BLE001 (the module and the function may raise anything)
        traceback.print_exc()
        return 1
    print(outcome)
    return 0


def _outcome(launchable: Launchable[..., Any], given: argparse.Namespace, args: Any, kwargs: Any) -> str:
    """Launch the function, or describe the launch. Return what to print."""
    if given.dry_run:
        return str(_preview(launchable, args, kwargs))
    results = (launchable.inline if given.inline else launchable)(*args, **kwargs)
    return "\n".join(f"rank {rank}: {safe_repr(result)}" for rank, result in enumerate(results))


def _preview(launchable: Launchable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Preview:
    try:
        return launchable.dry_run(*args, **kwargs)
    except PlatformError as error:
        raise UsageError(str(error)) from error


def _check_call(given: argparse.Namespace, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from parawrap.api.wrapper import check_signature

    try:
        check_signature(function, args, kwargs)
    except TypeError as error:
        msg = f"{given.target}: {error}"
        raise UsageError(msg) from error


def _found(given: argparse.Namespace) -> Callable[..., Any]:
    """Import a module or a file, and return its function.

    Raises:
        UsageError: If the module, the file, or the function does not exist, or the module exits.
    """
    place, _, name = given.target.rpartition(":")
    is_file = place.endswith(".py")
    if not (name and place and (is_file or all(place.split(".")))):
        msg = f"{given.target!r} does not name a function. Give MODULE:FUNCTION, such as train:main or jobs/train.py:main"
        raise UsageError(msg)
    sys.argv = [place, *given.rest]  # as a script would see; ranks see it too
    try:
        module = _imported_file(Path(place)) if is_file else _imported(place, Path.cwd())
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
    return function  # type: ignore[no-any-return]


def _imported_file(path: Path) -> Any:
    if not path.is_file():
        msg = f"the file {str(path)!r} does not exist"
        raise UsageError(msg)
    path = path.resolve()  # as Python does with the file of a script
    if path.suffix != ".py" or "." in path.stem:
        msg = f"{str(path)!r} cannot be imported. Rename the file: its name ends with .py, and has no other dot"
        raise UsageError(msg)
    module = _imported(path.stem, path.parent)
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path:
        msg = f"{path.stem!r} is the name of another module, {found or 'which is built in'}. Rename {str(path)!r}"
        raise UsageError(msg)
    return module


def _imported(name: str, folder: Path) -> Any:
    sys.path.insert(0, str(folder))  # ranks get it too
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        msg = f"module {name!r} was not found in {folder} or on sys.path"
        raise UsageError(msg) from error


def _arguments(texts: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments."""
    args, kwargs = [], {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name.isidentifier():
            kwargs[name] = _value(value)
        else:
            args.append(_value(text))
    return tuple(args), kwargs


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # as its documentation lists
        return text


def _launchable(function: Any, given: argparse.Namespace) -> Launchable[..., Any]:
    """Return the decorated function. Options change the platform that it has, or make one.

    Raises:
        UsageError: If the options contradict each other, or `Platform` refuses a value.
    """
    from parawrap.api.wrapper import is_launchable, wrapper
    from parawrap.launch import Platform

    own = function.platform if is_launchable(function) else None
    changes = _changes(given, {} if own is None else {"device": own.device, "launcher": own.launcher, "n_gpus": own.n_gpus})
    try:
        if own is None:
            return wrapper(Platform(**changes))(function)
        return wrapper(replace(own, **changes))(function.__wrapped__) if changes else function
    except (PlatformError, TypeError) as error:  # TypeError: a coroutine function, for example
        raise UsageError(str(error)) from error


def _changes(given: argparse.Namespace, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Platform that the options name. `own` are fields of the function's platform."""
    named = {name: getattr(given, name) for name in (*_OPTIONS, "n_nodes", "timeout_min")}
    changes = {name: value for name, value in named.items() if value is not None}
    for text in given.set:
        name, equals, value = text.partition("=")
        if not equals:
            msg = f"--set {text}: give FIELD=VALUE, such as --set seed=1"
            raise UsageError(msg)
        _add(changes, name, _value(value))
    if given.n is not None:
        _add(changes, _rank_count({**own, **changes}), given.n)
    if given.inline and (without_effect := _NOT_INLINE & changes.keys()):
        msg = f"--inline runs one rank in this process, so {min(without_effect)} has no effect. Leave one of them out"
        raise UsageError(msg)
    refusal = None if changes.get("trace") is None else refusal_of_path(changes["trace"])
    if refusal is not None:
        msg = f"trace: {refusal}"
        raise UsageError(msg)
    return changes


def _add(changes: dict[str, Any], name: str, value: object) -> None:
    if name in changes:
        msg = f"{name} is given twice, as {changes[name]!r} and {value!r}. Leave one of them out"
        raise UsageError(msg)
    changes[name] = value


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
