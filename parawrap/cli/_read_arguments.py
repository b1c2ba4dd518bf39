"""Turn the words after ``--`` into the arguments of a function, with the package cyclopts."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import TYPE_CHECKING, Annotated, Any

from parawrap.cli._usage_error import UsageError

if TYPE_CHECKING:
    from cyclopts import App

__all__ = ["python_value", "read_arguments"]

_KEYWORD = re.compile(r"[^\W\d]\w*=")  # NAME=VALUE


def read_arguments(
    target: str, function: Callable[..., Any], words: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]] | str:
    """Return the positional and keyword arguments, converted by the annotations of the function.

    If the words ask for help, return the help of the function.

    Raises:
        UsageError: If the words do not match the parameters, or cyclopts is not installed.
    """
    try:
        from cyclopts import CycloptsError
    except ImportError as error:
        msg = "arguments after -- need the package cyclopts. Run pip install 'parawrap-torch[cli]'"
        raise UsageError(msg) from error
    app = _make_app(f"parawrap run {target} --", _find_parameters(function), function.__doc__)
    tokens = [f"--{word}" if _KEYWORD.match(word) else word for word in words]
    try:
        command, bound, _ = app.parse_args(tokens, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        msg = f"{target}: {error}"
        raise UsageError(msg) from error
    if command is not app.default_command:
        with redirect_stdout(StringIO()) as shown:
            command(*bound.args, **bound.kwargs)
        return shown.getvalue().rstrip()
    return bound.args, {name.replace("-", "_"): value for name, value in bound.kwargs.items()}


def _make_app(name: str, parameters: Sequence[inspect.Parameter], doc: str | None = None) -> App:
    from cyclopts import App, Parameter

    def command(*_: Any, **__: Any) -> None: ...

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}  # the parameters have theirs
    command.__doc__ = doc
    lists = Parameter(consume_multiple=True, json_list=True, negative_iterable=())  # --sizes 1 2, or --sizes '[1, 2]'
    app = App(name, version_flags=(), help_formatter="plain", default_parameter=lists)
    app["--help"].show = False
    app.default(command)
    return app


def _find_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function. Those without an annotation that cyclopts supports take Python values."""
    from cyclopts import Parameter

    literal = Parameter(converter=lambda _, tokens: python_value(tokens[0].value), json_list=False, consume_multiple=False)
    unannotated = Annotated[str, literal]  # str: one word per parameter, also if the default is a list
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError, NameError):  # some builtins have none; Python 3.14 evaluates annotations here
        signature = inspect.signature(lambda *_, **__: None)
    module = sys.modules.get(getattr(function, "__module__", None) or "builtins", builtins)
    found = []
    for parameter in signature.parameters.values():
        annotation = parameter.annotation
        if isinstance(annotation, str):
            with suppress(Exception):  # the name of a type that is imported for type checkers only, for example
                annotation = eval(annotation, vars(module))
        has_none = isinstance(annotation, str) or annotation in (parameter.empty, Any, object)
        evaluated = parameter.replace(annotation=annotation)
        if has_none or not _is_supported(evaluated):
            evaluated = parameter.replace(annotation=bool if isinstance(parameter.default, bool) else unannotated)
        elif annotation is int:  # cyclopts rounds 2.5
            whole = Parameter(converter=lambda _, tokens: int(tokens[0].value))
            evaluated = parameter.replace(annotation=Annotated[int, whole])
        found.append(evaluated)
    return found


def _is_supported(parameter: inspect.Parameter) -> bool:
    """True if cyclopts supports the annotation. Otherwise it raises any error, as for classes that contain themselves."""
    try:
        _make_app("", [parameter]).assemble_argument_collection()
    except Exception:  # noqa: BLE001
        return False
    return True


def python_value(text: str) -> Any:
    """Return the value of a Python literal, and other text unchanged."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # as its documentation lists
        return text
