"""``parawrap run``: launch a function, and print the result of each rank."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parawrap.displays import safe_repr
from parawrap.errors import PlatformError

if TYPE_CHECKING:
    from parawrap.api.wrapper import Launchable

EXAMPLES = """The annotations and defaults of the function convert the arguments after --; other
arguments are strings. A function without parameters finds the arguments in sys.argv. If the
function is decorated with @wrapper, the options change the fields of its platform.

examples:
  parawrap run train:main --device cpu --n 2 -- --lr 0.1 --epochs 3
  parawrap run train:main -- --help        # the parameters of the function
  parawrap run jobs.train:main --device slurm --nodes 2 --n 4 --set partition=long
  parawrap run jobs.train:main --device slurm --nodes 2 --n 4 --local    # the 8 ranks run here
  parawrap run train:main --device gpu --dry-run
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="a module, and a function in it")
    parser.add_argument("--device", help="cpu, gpu, mps, neuron, slurm, or ray")
    parser.add_argument("--n", type=int, help="ranks per node")
    parser.add_argument("--nodes", type=int, help="the number of machines: n_nodes")
    parser.add_argument(
        "--local", action="store_true", help="start the ranks of a cluster function on this machine"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field of Platform; may be repeated",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run", action="store_true", help="describe the launch, and start nothing"
    )
    instead.add_argument(
        "--inline", action="store_true", help="run in this process as rank 0 of 1, for a debugger"
    )


def run(given: argparse.Namespace) -> int:
    """Launch the function, and return the exit code.

    An exception of a rank is printed with its traceback, and gives exit code 1.
    """
    # As the script of the module would see it. Ranks get this list too
    sys.argv = [given.target.rpartition(":")[0], *given.rest]
    try:
        function = _find_function(given.target)
        call = _read_arguments(given.target, function, given.rest)
        if call is not None:
            args, kwargs = call
            print(_launch(given, function, args, kwargs))
    except argparse.ArgumentError:  # `main` prints it: wrong usage is not a failure
        raise
    except SystemExit as error:
        print(
            f"parawrap run: sys.exit({error.code!r}) was called, so there are no results. Put the "
            "script of a module under if __name__ == '__main__':",
            file=sys.stderr,
        )
        return 1
    except Exception:  # noqa: BLE001 (the module and the function may raise anything)
        traceback.print_exc()
        return 1
    return 0


def _launch(
    given: argparse.Namespace, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Launch the function, or describe the launch. Return the text to print.

    Raises:
        ArgumentError: If the arguments or the options of the platform are refused.
    """
    from parawrap.launch import check_signature

    try:
        launchable = _decorate(function, given)
        check_signature(launchable.__wrapped__, args, kwargs)
        if given.dry_run:
            return launchable.dry_run(*args, **kwargs)
    # TypeError: if the arguments do not match, or the function is a coroutine function
    except (PlatformError, TypeError) as error:
        msg = f"{given.target}: {error}"
        raise argparse.ArgumentError(None, msg) from error
    call = launchable.inline if given.inline else launchable
    results = call(*args, **kwargs)
    return "\n".join(f"rank {rank}: {safe_repr(result)}" for rank, result in enumerate(results))


# --- the function and its arguments ---


def _find_function(target: str) -> Any:
    """Import ``MODULE:FUNCTION``, and return the function.

    Raises:
        ArgumentError: If the module or the function does not exist.
    """
    module_name, _, name = target.rpartition(":")
    if not (name and module_name) or module_name.endswith(".py"):
        msg = (
            f"{target!r} does not name a function. Give MODULE:FUNCTION, such as jobs.train:main "
            "for jobs/train.py"
        )
        raise argparse.ArgumentError(None, msg)
    sys.path.insert(0, str(Path.cwd()))  # ranks get the same list
    try:
        function: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing module that the target imports is shown with its traceback. The dots keep `job`
        # from being taken for a parent of `jobs.train`
        is_target_or_parent = f"{module_name}.".startswith(f"{error.name}.")
        if not is_target_or_parent:
            raise
        msg = f"module {module_name!r} was not found in {Path.cwd()} or on sys.path"
        raise argparse.ArgumentError(None, msg) from error
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        msg = f"{module_name!r} has no function {name!r}"
        raise argparse.ArgumentError(None, msg)
    return function


def _read_arguments(
    target: str, function: Any, words: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return positional and keyword arguments, as cyclopts converts them.

    If the words are ``--help``, print the parameters and return None.

    Raises:
        ArgumentError: If the words do not match the parameters.
    """
    if not words:
        return (), {}
    # A function without parameters reads the words in sys.argv
    with contextlib.suppress(TypeError, ValueError):  # some builtins have no signature
        if not inspect.signature(function).parameters:
            return (), {}
    try:
        from cyclopts import App, Parameter
    except ImportError as error:
        msg = "arguments after -- need the package cyclopts. Run pip install 'parawrap-torch[cli]'"
        raise argparse.ArgumentError(None, msg) from error
    # A list is given as --sizes 1 2, or --sizes '[1, 2]'
    lists = Parameter(consume_multiple=True, json_list=True, negative_iterable=())
    app = App(
        f"parawrap run {target} --",
        version_flags=(),
        help_formatter="plain",
        default_parameter=lists,
    )
    undecorated = getattr(function, "__wrapped__", function)
    try:
        app.default(undecorated)
        command, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False)
    # cyclopts raises errors of several kinds for annotations that it does not support
    except Exception as error:
        msg = f"{target}: {error}"
        raise argparse.ArgumentError(None, msg) from error
    if command is undecorated:
        return bound.args, bound.kwargs
    # cyclopts found --help, and returned its own command, which prints the parameters
    command(*bound.args, **bound.kwargs)
    return None


# --- the platform ---


def _decorate(function: Any, given: argparse.Namespace) -> Launchable[..., Any]:
    """Decorate the function for the options of the command line.

    The options change the fields of the platform of a decorated function. For another function,
    they make a platform.

    Raises:
        ArgumentError: If --n and --set name the ranks per node twice.
        PlatformError: If a field has a value that is not allowed.
    """
    from parawrap.api.wrapper import Launchable, wrapper
    from parawrap.launch import Device, Platform, rank_count_field, resolve_device

    # The fields that options set
    changes: dict[str, Any] = {}
    if given.device is not None:
        changes["device"] = given.device
    if given.nodes is not None:
        changes["n_nodes"] = given.nodes
    if given.local:
        changes["launcher"] = "local"
    fields_set = _read_fields(given.set)
    changes |= fields_set

    # The platform to change. Without one, the class stands for it: its attributes are the defaults
    old: Platform | type[Platform] = Platform
    make_platform: Callable[..., Platform] = Platform
    if isinstance(function, Launchable):
        old = function.platform
        make_platform = partial(replace, old)
        function = function.__wrapped__

    # The field that --n sets. Found without making a platform, which might be refused for a number
    # that --n replaces
    device = changes.get("device", old.device)
    launcher = changes.get("launcher", old.launcher)
    n_gpus = changes.get("n_gpus", old.n_gpus)
    count_field = rank_count_field(resolve_device(device, launcher, n_gpus))

    # Fields of the decorator that mean something else on the new device get their defaults
    if isinstance(old, Platform):
        if rank_count_field(Device(old.device)) != count_field:
            # n_cpus is the number of ranks on CPUs, but of threads per rank on accelerators
            changes.setdefault("n_gpus", Platform.n_gpus)
            changes.setdefault("n_cpus", Platform.n_cpus)
        if "device" in changes:
            # The numbers name devices of the old kind on this machine
            changes.setdefault("device_ids", None)

    if given.n is not None:
        if count_field in fields_set:
            msg = (
                f"--n {given.n} and --set {count_field}={fields_set[count_field]!r} both give the "
                "ranks per node: leave one of them out"
            )
            raise argparse.ArgumentError(None, msg)
        changes[count_field] = given.n
    return wrapper(make_platform(**changes))(function)


def _read_fields(texts: list[str]) -> dict[str, Any]:
    """Return the fields that FIELD=VALUE texts set. A value that is not a literal stays a text.

    Raises:
        ArgumentError: If a text has no equals sign.
    """
    found: dict[str, Any] = {}
    for text in texts:
        field, equals, value = text.partition("=")
        if not equals:
            msg = f"--set {text}: give FIELD=VALUE, such as --set seed=1"
            raise argparse.ArgumentError(None, msg)
        found[field] = value
        with contextlib.suppress(ValueError, SyntaxError):
            found[field] = ast.literal_eval(value)
    return found
