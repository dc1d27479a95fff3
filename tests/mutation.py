"""Faults that the tests find: lines of src are changed, one at a time, and tests run against each.

    python tests/mutation.py draw --also OTHER_CHECKOUT     40 changes, in tests/mutation.json
    python tests/mutation.py run [--checkout DIR] --out FILE

A change is of an operator, a comparison, a constant, or a statement that is left out. It is found
by the name of its function and the text of its line, so that checkouts with other files run the
same changes. A change runs the test files that import its module, for 60 s of processor time at
most; files that import it themselves precede those that import it through another module. Results
are appended to FILE, and a later run continues after them.
"""

import argparse
import ast
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHANGES = ROOT / "tests" / "mutation.json"
LIMIT_S = 60  # of processor time: a busy machine finds the same
MAX_WALL_S = 600  # a test that waits forever
MAX_FILES = 12
FAILED, NOT_COLLECTED = 1, 2  # statuses of pytest; a change can stop an import
OPERATORS = {ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or}
for _one, _other in (
    *((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)),
    *((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
):
    OPERATORS |= {_one: _other, _other: _one}


@dataclass(frozen=True)
class Change:
    """A changed line; texts are without indentation."""

    function: str  # qualified name of its function, such as "Arena.take"
    old: str
    new: str


# ---- drawing -------------------------------------------------------------------------------------


def draw(count: int, seed: int, also: Path | None) -> list[Change]:
    """Changes of lines that occur once in their functions, in this checkout and the other."""
    rng = random.Random(seed)
    files = [
        path for path in sorted((ROOT / "src/quire").rglob("*.py")) if "triton" not in str(path)
    ]
    others = _functions(also) if also else None
    own = _functions(ROOT)
    found: dict[Change, None] = {}
    weights = [path.stat().st_size for path in files]
    while len(found) < count:
        path = rng.choices(files, weights)[0]
        changes = list(_changes_of(path))
        if changes:
            change = rng.choice(changes)
            if _is_unique(own, change) and (others is None or _is_unique(others, change)):
                found[change] = None
    return list(found)


def _changes_of(path: Path) -> Iterator[Change]:
    """All changes of single-line statements in functions of a file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for name, function in _defined(ast.parse(text)):
        for statement in ast.walk(function):
            if not isinstance(statement, ast.stmt) or statement.lineno != statement.end_lineno:
                continue
            old = lines[statement.lineno - 1].strip()
            for new in _new_lines(statement, old):
                yield Change(name, old, new)


def _new_lines(statement: ast.stmt, old: str) -> Iterator[str]:
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    if isinstance(statement, ast.AugAssign) or is_call:
        yield "pass"
    for node in ast.walk(statement):
        new = _changed(node)
        part = ast.get_source_segment(old, _moved(statement, node)) if new else None
        if part and old.count(part) == 1:
            yield old.replace(part, new)


def _moved(statement: ast.stmt, node: ast.AST) -> ast.AST:
    """The node with positions in its own line."""
    shift = statement.col_offset
    moved = ast.copy_location(ast.Constant(0), node)
    moved.lineno = moved.end_lineno = 1
    moved.col_offset = getattr(node, "col_offset", 0) - shift
    moved.end_col_offset = getattr(node, "end_col_offset", 0) - shift
    return moved


def _changed(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return str(node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return str(not node.value)
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
        return ast.unparse(_with(node, op=OPERATORS[type(node.op)]()))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
        return ast.unparse(_with(node, ops=[OPERATORS[type(node.ops[0])]()]))
    return None


def _with(node: ast.AST, **fields: object) -> ast.AST:
    return type(node)(**{name: getattr(node, name) for name in node._fields} | fields)


def _defined(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}", inner


Functions = dict[str, list[tuple[Path, int, int]]]


def _functions(checkout: Path) -> Functions:
    """File, first and last line of the functions of a checkout, by qualified name."""
    found: Functions = {}
    for path in (checkout / "src/quire").rglob("*.py"):
        for name, node in _defined(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(name, []).append((path, node.lineno, node.end_lineno))
    return found


def _places(functions: Functions, change: Change) -> list[tuple[Path, int]]:
    found = []
    for path, first, last in functions.get(change.function, []):
        lines = path.read_text(encoding="utf-8").splitlines()[first - 1 : last]
        found += [(path, first + i) for i, one in enumerate(lines) if one.strip() == change.old]
    return found


def _is_unique(functions: Functions, change: Change) -> bool:
    return len(_places(functions, change)) == 1


# ---- running -------------------------------------------------------------------------------------


def run(checkout: Path, out: Path) -> None:
    changes = [Change(**values) for values in json.loads(CHANGES.read_text(encoding="utf-8"))]
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    functions = _functions(checkout)
    for change in changes[len(done) :]:
        places = _places(functions, change)
        if not places:  # the code has changed since: no fault to find
            result, file = "gone", ""
        else:
            [(path, number)] = places
            result, file = _result(checkout, path, number, change), str(path.relative_to(checkout))
        done.append(asdict(change) | {"file": file, "result": result})
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[-1]) + "\n")
        print(f"{len(done):3d} {result:9s} {change.function}: {change.old} -> {change.new}")
    print(dict(Counter(one["result"] for one in done)))


def _result(checkout: Path, path: Path, number: int, change: Change) -> str:
    tests = _tests_of(checkout, path)
    if not tests:
        return "no test"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(checkout / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        changed = source / path.relative_to(checkout / "src")
        lines = changed.read_text(encoding="utf-8").splitlines(keepends=True)
        lines[number - 1] = lines[number - 1].replace(change.old, change.new)
        changed.write_text("".join(lines), encoding="utf-8")
        paths = os.pathsep.join([str(source), str(checkout)])
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            ended = subprocess.run(
                [*command, "-m", "not slow", *tests],
                cwd=checkout,
                env=os.environ | {"PYTHONPATH": paths},
                capture_output=True,
                timeout=MAX_WALL_S,
                preexec_fn=_limit_processor_time,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "survived"
    if ended.returncode in (FAILED, NOT_COLLECTED):
        return "found"
    if ended.returncode in (0, -signal.SIGXCPU, -signal.SIGKILL):
        return "survived"
    raise SystemExit(f"pytest ended with status {ended.returncode}: {ended.stdout[-400:]!r}")


def _limit_processor_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))


def _tests_of(checkout: Path, path: Path) -> list[str]:
    """Test files that import a module, directly or through one other module."""
    module = ".".join(path.relative_to(checkout / "src").with_suffix("").parts)
    sources = {p: p.read_text(encoding="utf-8") for p in (checkout / "src/quire").rglob("*.py")}
    through = [
        ".".join(p.relative_to(checkout / "src").with_suffix("").parts)
        for p, text in sources.items()
        if _imports(text, module)
    ]
    tests = {
        p: p.read_text(encoding="utf-8") for p in sorted((checkout / "tests").rglob("test_*.py"))
    }
    direct = [p for p, text in tests.items() if _imports(text, module)]
    others = [p for p, text in tests.items() if any(_imports(text, name) for name in through)]
    return [str(p.relative_to(checkout)) for p in dict.fromkeys(direct + others)][:MAX_FILES]


def _imports(text: str, module: str) -> bool:
    package, _, name = module.rpartition(".")
    return f"from {module} import" in text or f"from {package} import {name}\n" in text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--count", type=int, default=40)
    drawing.add_argument("--seed", type=int, default=19)
    drawing.add_argument("--also", type=Path)
    running = commands.add_parser("run")
    running.add_argument("--checkout", type=Path, default=ROOT)
    running.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.command == "draw":
        changes = [asdict(change) for change in draw(given.count, given.seed, given.also)]
        CHANGES.write_text(json.dumps(changes, indent=1) + "\n", encoding="utf-8")
    else:
        run(given.checkout.resolve(), given.out.resolve())


if __name__ == "__main__":
    main()
