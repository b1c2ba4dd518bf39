"""Check that the tests notice wrong code: change one place of the package at random, and run the tests.

``python -m tests.mutants --count 200 --seed 0`` draws the same mutants each time. They lie in a temporary copy of the
repository.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = ("shards", "replicas", "lanes", "engine")
STAGES = (*PACKAGES, "tree", "api")
"""The folders of tests. Those of the mutant's own package run first, and tests/api last."""
MOST_TIMES = 10
"""The time limit of a folder, in times of the run without a mutant."""

SWAPPED = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
]
OPERATORS = {**dict(SWAPPED), **{other: one for one, other in SWAPPED}, ast.Div: ast.Mult, ast.Mod: ast.Mult}


NOTHING = ("None", "False")
"""Values whose callers would read None in the same way."""


class Mutant(NamedTuple):
    """The changed place of a file, its number among the places of that file, and its code before and after."""

    file: str
    number: int
    line: int
    before: str
    after: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line} ({self.number}): {self.before!r} -> {self.after!r}"


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may take the place of a node."""
    match node:
        case ast.Compare():
            for index, old in enumerate(node.ops):
                changed = copy.copy(node)
                changed.ops = [*node.ops[:index], OPERATORS[type(old)](), *node.ops[index + 1 :]]
                yield changed
        case ast.BoolOp() | ast.BinOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            changed = copy.copy(node)
            changed.op = OPERATORS[type(node.op)]()
            yield changed
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
        case ast.Return(value=ast.expr()) if ast.unparse(node.value) not in NOTHING:
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def is_left_out(node: ast.AST) -> bool:
    """True for docstrings, messages, annotations, names of types, and logging."""
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.Assert() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name(id="msg" | "cure" | "__all__")]) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="_LOG"))) | ast.Expr(value=ast.Call(func=ast.Name(id="refuse"))):
            return True
    return False


def places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yield every node below one that may be changed, with its parent, and its place there."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not is_left_out(child):
                yield node, name, index, child
                yield from places(child)


def changes_of(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, ast.AST]]:
    """Yield the parent, the place, the node, and the new node of each change."""
    for parent, name, index, node in places(tree):
        for new in replacements(node):
            yield parent, name, index, node, new


def mutants_of(path: Path) -> Iterator[Mutant]:
    for number, (*_, node, new) in enumerate(changes_of(ast.parse(path.read_text()))):
        yield Mutant(str(path.relative_to(ROOT)), number, node.lineno, ast.unparse(node)[:99], ast.unparse(new)[:99])


def source_of(mutant: Mutant) -> str:
    """Return the source of the whole file with the change."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    parent, name, index, _, new = next(itertools.islice(changes_of(tree), mutant.number, None))
    put(parent, name, index, new)
    return ast.unparse(ast.fix_missing_locations(tree))


def put(parent: ast.AST, name: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def copy_repository(folder: Path) -> Path:
    """Copy the files of the work tree, without compiled code, which Python might take for that of a mutant."""
    listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def outcome_of(folder: Path, stage: str, limit_s: float | None) -> str:
    """Run one folder of tests; return "passed", "failed", or "timed out", and end what the tests have started."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not (contract or slurm or ray or long)", f"tests/{stage}"]
    environ = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    with (folder / "mutant.log").open("wb") as log:
        tests = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        return "failed" if tests.wait(limit_s) else "passed"
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()


def check(mutant: Mutant, folder: Path, limits_s: dict[str, float]) -> str:
    """Return what became of a mutant: killed, timed out, or survived, and the folder of tests that ended it."""
    own, file = Path(mutant.file).parts[1], folder / mutant.file
    before = file.read_text()
    file.write_text(source_of(mutant))
    try:
        for stage in sorted(STAGES, key=lambda stage: (stage != own, STAGES.index(stage))):
            outcome = outcome_of(folder, stage, limits_s[stage])
            if outcome != "passed":
                return f"{'killed' if outcome == 'failed' else outcome} by tests/{stage}"
    finally:
        file.write_text(before)
    return "survived"


def clean_seconds(folder: Path) -> dict[str, float]:
    """Return how long each folder of tests takes without a mutant."""
    seconds = {}
    for stage in STAGES:
        began = time.monotonic()
        if (outcome := outcome_of(folder, stage, None)) != "passed":
            sys.exit(f"tests/{stage} {outcome} without a mutant:\n{(folder / 'mutant.log').read_text()[-3000:]}")
        seconds[stage] = time.monotonic() - began
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    files = [path for package in PACKAGES for path in sorted((ROOT / "parawrap" / package).glob("*.py"))]
    every = [mutant for path in files for mutant in mutants_of(path)]
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = copy_repository(Path(temporary))
        limits_s = {stage: MOST_TIMES * seconds for stage, seconds in clean_seconds(folder).items()}
        for mutant in random.Random(options.seed).sample(every, min(options.count, len(every))):
            result = check(mutant, folder, limits_s)
            found[result] += 1
            print(f"{result}: {mutant.key}", flush=True)
    print(dict(found))


if __name__ == "__main__":
    main()
