"""Check that the tests notice wrong code: change one place of the package at random, and run the tests.

``python -m tests.mutants --count 200 --seed 0`` draws the same mutants each time, and goes on where an earlier run ended.
Each mutant lies in a temporary copy of the repository. Its tests run in a fork of this process, which has torch loaded.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest

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


def run_tests(folder: Path, stage: str) -> None:
    """Run one folder of tests in this process, a fork, and end it with pytest's exit code."""
    os.setsid()
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "parawrap")]:
        del sys.modules[name]
    log = os.open(folder / "mutant.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    phases = [phase for phase in hypothesis.Phase if phase.name not in ("shrink", "explain")]
    hypothesis.settings.register_profile("mutants", phases=phases, derandomize=True, database=None)
    hypothesis.settings.load_profile("mutants")
    options = ["-x", "-q", "-m", "not (contract or slurm or ray or long)", "-W", "ignore:Module already imported"]
    code = 1
    try:
        code = int(pytest.main([f"tests/{stage}", *options]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def outcome_of(folder: Path, stage: str, limit_s: float) -> str:
    """Return "passed", "failed", or "timed out", and end what the tests have started."""
    child = os.fork()
    if child == 0:
        run_tests(folder, stage)
    end, ended = time.monotonic() + limit_s, 0
    try:
        while not ended and time.monotonic() < end:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        return "timed out"
    return "passed" if status == 0 else "failed"


def check(mutant: Mutant, folder: Path, limits_s: dict[str, float]) -> dict[str, Any]:
    """Return the result of one mutant: killed, timed out, or survived, and the folder of tests that ended it."""
    own = Path(mutant.file).parts[1]
    file, began = folder / mutant.file, time.monotonic()
    before, result = file.read_text(), {"mutant": mutant.key, "status": "survived", "by": None}
    file.write_text(source_of(mutant))
    try:
        for stage in sorted(STAGES, key=lambda stage: (stage != own, STAGES.index(stage))):
            outcome = outcome_of(folder, stage, limits_s[stage])
            if outcome != "passed":
                result |= {"status": "killed" if outcome == "failed" else outcome, "by": stage}
                break
    finally:
        file.write_text(before)
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def clean_seconds(folder: Path) -> dict[str, float]:
    """Return how long each folder of tests takes without a mutant."""
    seconds = {}
    for stage in STAGES:
        began = time.monotonic()
        if (outcome := outcome_of(folder, stage, 3600)) != "passed":
            sys.exit(f"tests/{stage} {outcome} without a mutant:\n{(folder / 'mutant.log').read_text()[-3000:]}")
        seconds[stage] = time.monotonic() - began
        print(f"tests/{stage} takes {seconds[stage]:.0f} s")
    return seconds


def run_job(job: int, jobs: int, mutants: list[Mutant], seconds: dict[str, float], results: Path) -> None:
    """Check every `jobs`-th mutant in a copy of the repository of its own, and append the results to the file."""
    limits_s = {stage: MOST_TIMES * jobs * each for stage, each in seconds.items()}
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = copy_repository(Path(temporary))
        for mutant in mutants[job::jobs]:
            line = json.dumps(check(mutant, folder, limits_s))
            with results.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--results", type=Path, help="a file of JSON lines; by default, one per seed in the temporary folder"
    )
    options = parser.parse_args()
    results = options.results or Path(tempfile.gettempdir(), f"parawrap-mutants-{options.seed}.jsonl")
    files = [path for package in PACKAGES for path in sorted((ROOT / "parawrap" / package).glob("*.py"))]
    every = [mutant for path in files for mutant in mutants_of(path)]
    drawn = random.Random(options.seed).sample(every, min(options.count, len(every)))
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    seconds = next((line["clean"] for line in lines if "clean" in line), None)
    if seconds is None:
        with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
            seconds = clean_seconds(copy_repository(Path(temporary)))
        with results.open("a") as file:
            file.write(json.dumps({"clean": seconds}) + "\n")
    known = {line.get("mutant") for line in lines}
    waiting = [mutant for mutant in drawn if mutant.key not in known]
    print(f"{len(every)} mutants, {len(drawn)} drawn, {len(waiting)} to check; results in {results}", flush=True)
    children = []
    for job in range(options.jobs):
        if not (child := os.fork()):
            code = 1
            try:
                run_job(job, options.jobs, waiting, seconds, results)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    keys = {mutant.key for mutant in drawn}
    found = [line for line in map(json.loads, results.read_text().splitlines()) if line.get("mutant") in keys]
    for line in found:
        if line["status"] != "killed":
            print(f"{line['status']}: {line['mutant']}")
    print(dict(Counter(line["status"] for line in found)))


if __name__ == "__main__":
    import torch  # noqa: F401  # forks need not load it

    main()
