"""``parawrap run``: launch a function, and print the result of each rank."""

from __future__ import annotations

import argparse
import inspect
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parawrap.cli._find_function import find_function
from parawrap.cli._read_arguments import python_value, read_arguments
from parawrap.cli._usage_error import UsageError
from parawrap.displays import safe_repr
from parawrap.errors import PlatformError

if TYPE_CHECKING:
    from parawrap.api.wrapper import Launchable

__all__ = ["EXAMPLES", "HELP", "add_options", "run"]

HELP = "Launch a function, and print the result of each rank"
EXAMPLES = """Arguments after -- are converted by the annotations of the function. A parameter without an annotation gets a
Python value: 0.1 is a number, [1, 2] a list, and other text a string. NAME=VALUE is the same as --NAME VALUE. A
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
    asks_function_for_help = False
    try:
        function = find_function(given.target)
        arguments: tuple[tuple[Any, ...], dict[str, Any]] | str = (), {}
        if _has_no_parameters(function):  # then it reads sys.argv, or nothing
            asks_function_for_help = not {"-h", "--help"}.isdisjoint(given.rest)
        elif given.rest:
            arguments = read_arguments(given.target, function, given.rest)
        inline = given.inline or asks_function_for_help
        outcome = arguments if isinstance(arguments, str) else _launch(given, function, *arguments, inline=inline)
    except UsageError:
        raise
    except SystemExit as error:
        if asks_function_for_help and not error.code:
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
    from parawrap.api.wrapper import check_signature

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


def _has_no_parameters(function: Any) -> bool:
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False


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
        _add(changes, field, python_value(value))
    if given.local:
        _add(changes, "launcher", "local")
    if given.inline and (without_effect := _NOT_INLINE & changes.keys()):
        msg = f"--inline runs one rank in this process, so {min(without_effect)} has no effect. Leave one of them out"
        raise UsageError(msg)
    return changes


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
