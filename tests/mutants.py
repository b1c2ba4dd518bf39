"""Check that the tests notice wrong code: change one place of the package at random, and run the
tests that reach it.

``python -m tests.mutants --count 200 --seed 0`` draws the same mutants each time. They lie in
temporary copies of the repository. First all tests run without a mutant, and coverage notes which
lines each test runs. Then each mutant runs the tests of its lines, those of its own package first,
or the whole package where no test runs its lines in its own process.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from coverage import CoverageData

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine",)
GROUPS = (
    tuple(f"tests/{name}" for name in (*PACKAGES, "test_tree.py", "workers", "api")),
    ("tests/devices",),
)
"""The folders of tests, in the order in which they run. Each group has its own process."""
MOST_TIMES = 10
"""The time limit of a run, in times of the run of all tests without a mutant."""
TEST_LIMIT_S = 100
PYTEST = (
    "-m",
    "pytest",
    "-q",
    "-m",
    "not (contract or slurm or ray or long)",
    f"--timeout={TEST_LIMIT_S}",
)

SWAPPED = [
    *(
        (ast.Lt, ast.LtE),
        (ast.Gt, ast.GtE),
        (ast.Eq, ast.NotEq),
        (ast.Is, ast.IsNot),
        (ast.In, ast.NotIn),
    ),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
]
OPERATORS = {
    **dict(SWAPPED),
    **{other: one for one, other in SWAPPED},
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}


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
        # Callers read None alike
        case ast.Return(value=ast.expr()) if ast.unparse(node.value) not in ("None", "False"):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


class Mutator(ast.NodeTransformer):
    """Change one place of a module, by its number.

    Docstrings, messages, assertions, and logging have no number.
    """

    def __init__(self, number: int) -> None:
        self.number, self.count, self.change = number, 0, ""
        self.lines = range(0)

    def visit(self, node: ast.AST) -> ast.AST:
        match node:
            case (
                ast.JoinedStr()
                | ast.Raise()
                | ast.Assert()
                | ast.Expr(value=ast.Constant())
                | ast.arguments()
            ):
                return node
            case ast.keyword(arg="strict"):  # of zip, which asserts that lengths are equal
                return node
            case (
                ast.Assign(targets=[ast.Name(id="msg" | "cure" | "__all__")])
                | ast.If(test=ast.Name(id="TYPE_CHECKING"))
            ):
                return node
            case ast.Expr(
                value=ast.Call(
                    func=ast.Name(id="refuse") | ast.Attribute(value=ast.Name(id="_LOG"))
                )
            ):
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
                self.lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                self.change = (
                    f"line {node.lineno}: {ast.unparse(node)[:99]!r} -> {ast.unparse(new)[:99]!r}"
                )
                return new
        return self.generic_visit(node)


def mutated(file: Path, number: int) -> tuple[Mutator, str]:
    """Return a mutator that has changed one place, and the source of the whole file with the
    change.
    """
    mutator = Mutator(number)
    return mutator, ast.unparse(
        ast.fix_missing_locations(mutator.visit(ast.parse(file.read_text())))
    )


def copy_repository(folder: Path) -> None:
    """Copy the files of the work tree, without compiled code, which Python might take for that of a
    mutant.
    """
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__"))


def run(folder: Path, arguments: Sequence[str], limit_s: float | None = None) -> str:
    """Run tests in a copy; return "passed", "failed", or "timed out", and end what the tests have
    started.
    """
    environ = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    with (folder / "mutant.log").open("wb") as log:
        command = [sys.executable, *PYTEST, *arguments]
        tests = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True
        )
    try:
        return "failed" if tests.wait(limit_s) else "passed"
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()


def tests_by_line(folder: Path) -> dict[Path, dict[int, set[str]]]:
    """Run all tests without a mutant. Return the tests that run each line of each file."""
    covered = ("--cov=parawrap", "--cov-append", "--cov-context=test", "--cov-report=")
    for group in GROUPS:
        if run(folder, [*group, *covered, "--numprocesses=2", "--dist=loadfile"]) != "passed":
            sys.exit(
                f"the tests fail without a mutant:\n{(folder / 'mutant.log').read_text()[-3000:]}"
            )
    data = CoverageData(str(folder / ".coverage"))
    data.read()
    return {
        Path(name).relative_to(folder): {
            # "tests/test_a.py::test_b|run"
            line: {context.rpartition("|")[0] for context in contexts if context}
            for line, contexts in data.contexts_by_lineno(name).items()
        }
        for name in data.measured_files()
    }


class Mutant(NamedTuple):
    file: Path
    """In the repository, such as parawrap/engine/cut.py."""
    number: int
    """Of the change in the file."""

    def result(self, folder: Path, tests: dict[int, set[str]], limit_s: float) -> str:
        """Return what became of this mutant, in one line."""
        mutator, source = mutated(ROOT / self.file, self.number)
        own = f"tests/{self.file.parent.name}"
        reached = {test for line in mutator.lines for test in tests.get(line, ())} or {own}
        (folder / self.file).write_text(source)
        outcome = "passed"
        for group in GROUPS:
            chosen = [
                test
                for name in sorted(group, key=own.__ne__)
                for test in sorted(reached)
                if test.startswith(name)
            ]
            if chosen and outcome == "passed":
                (folder / "tests_of_mutant").write_text("\n".join(chosen))
                outcome = run(folder, ["-x", "@tests_of_mutant"], limit_s)
        shutil.copy2(ROOT / self.file, folder / self.file)
        became = {"passed": "survived", "failed": "killed"}.get(outcome, outcome)
        return f"{became}: {self.file}, {mutator.change}, {len(reached)} tests"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants that run at the same time")
    options = parser.parse_args()
    files = [
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in sorted((ROOT / "parawrap" / package).glob("*.py"))
    ]
    every = [
        Mutant(path, number)
        for path in files
        for number in range(mutated(ROOT / path, -1)[0].count)
    ]
    drawn = random.Random(options.seed).sample(every, min(options.count, len(every)))
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as temporary,
        ThreadPoolExecutor(options.jobs) as jobs,
    ):
        for job in range(options.jobs):
            folder = Path(temporary, str(job))
            copy_repository(folder)
            folders.put(folder)
        began = time.monotonic()
        tests = tests_by_line(folder)
        limit_s = MOST_TIMES * (time.monotonic() - began)

        def result_of(mutant: Mutant) -> str:
            folder = folders.get()
            try:
                return mutant.result(folder, tests.get(mutant.file, {}), limit_s)
            finally:
                folders.put(folder)

        found: Counter[str] = Counter()
        for result in jobs.map(result_of, drawn):
            print(result, flush=True)
            found[result.partition(":")[0]] += 1
    print(dict(found))


if __name__ == "__main__":
    main()
