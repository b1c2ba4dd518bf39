"""Check that the tests notice wrong code: change one place of the package at random, and run the tests.

``python -m tests.mutants --count 200 --seed 0`` draws the same mutants each time. They lie in a temporary copy of the
repository.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
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

ROOT = Path(__file__).parent.parent
PACKAGES = ("shards", "replicas", "lanes", "engine")
STAGES = (*PACKAGES, "tree", "devices", "workers", "api")
"""The folders of tests, each in its own process. Those of the mutant's own package run first, and tests/api last."""
MOST_TIMES = 10
"""The time limit of a folder, in times of the run without a mutant."""

SWAPPED = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
]
OPERATORS = {**dict(SWAPPED), **{other: one for one, other in SWAPPED}, ast.Div: ast.Mult, ast.Mod: ast.Mult}


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
        case ast.Return(value=ast.expr()) if ast.unparse(node.value) not in ("None", "False"):  # callers read None alike
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


class Mutator(ast.NodeTransformer):
    """Change one place of a module, by its number. Docstrings, messages, annotations, and logging have no number."""

    def __init__(self, number: int) -> None:
        self.number, self.count, self.change = number, 0, ""

    def visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.JoinedStr() | ast.Raise() | ast.Assert() | ast.Expr(value=ast.Constant()) | ast.arguments():
                return node
            case ast.Assign(targets=[ast.Name(id="msg" | "cure" | "__all__")]) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return node
            case ast.Expr(value=ast.Call(func=ast.Name(id="refuse") | ast.Attribute(value=ast.Name(id="_LOG")))):
                return node
            case ast.FunctionDef():
                node.body = [self.visit(each) for each in node.body]
                return node
            case ast.AnnAssign():
                node.value = node.value and self.visit(node.value)
                return node
        for new in replacements(node):
            self.count += 1
            if self.count - 1 == self.number:
                self.change = f"line {node.lineno}: {ast.unparse(node)[:99]!r} -> {ast.unparse(new)[:99]!r}"
                return new
        return self.generic_visit(node)


def mutated(file: Path, number: int) -> tuple[Mutator, str]:
    """Return a mutator that has changed one place, and the source of the whole file with the change."""
    mutator = Mutator(number)
    return mutator, ast.unparse(ast.fix_missing_locations(mutator.visit(ast.parse(file.read_text()))))


def copy_repository(folder: Path) -> None:
    """Copy the files of the work tree, without compiled code, which Python might take for that of a mutant."""
    listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


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


def result_of(package: str, folder: Path, limits_s: dict[str, float]) -> str:
    """Return what became of a mutant: killed or timed out by a folder of tests, or survived."""
    for stage in sorted(STAGES, key=lambda stage: (stage != package, STAGES.index(stage))):
        outcome = outcome_of(folder, stage, limits_s[stage])
        if outcome != "passed":
            return f"{'killed' if outcome == 'failed' else outcome} by tests/{stage}"
    return "survived"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    files = [path for package in PACKAGES for path in sorted((ROOT / "parawrap" / package).glob("*.py"))]
    every = [(path, number) for path in files for number in range(mutated(path, -1)[0].count)]
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder, limits_s = Path(temporary), {}
        copy_repository(folder)
        for stage in STAGES:
            began = time.monotonic()
            if outcome_of(folder, stage, None) != "passed":
                sys.exit(f"tests/{stage} fail without a mutant:\n{(folder / 'mutant.log').read_text()[-3000:]}")
            limits_s[stage] = MOST_TIMES * (time.monotonic() - began)
        for file, number in random.Random(options.seed).sample(every, min(options.count, len(every))):
            mutator, source = mutated(file, number)
            copied = folder / file.relative_to(ROOT)
            copied.write_text(source)
            result = result_of(file.parent.name, folder, limits_s)
            shutil.copy2(file, copied)
            found[result] += 1
            print(f"{result}: {copied.relative_to(folder)}, {mutator.change}", flush=True)
    print(dict(found))


if __name__ == "__main__":
    main()
