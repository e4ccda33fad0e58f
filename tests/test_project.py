"""The shape of the project: direction of imports, sizes, what loads without what, and the frozen command line.

`.venv/bin/python tests/test_project.py > tests/cli_surface.txt` records a wanted change of the command line.
"""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastgrpo
from fastgrpo import cli

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fastgrpo"
SURFACE = ROOT / "tests" / "cli_surface.txt"

# Rooms, and within a room the modules whose order is fixed; a module imports only from what stands above it.
ORDER = [
    ("models", ["loading", "attention", "cache", "lean", "target", "draft_config", "draft", "draft_formats"]),
    (
        "speculation",
        [
            "noise",
            "requests",
            "sampling",
            "coupling",
            "memory",
            "tree",
            "policy",
            "proposers",
            "recorder",
            "siblings",
            "mixed",
            "verification",
            "costs",
            "batch",
            "engine",
            "generate",
        ],
    ),
    ("drafting", ["data", "losses", "pretrain", "online"]),
    ("config", []),  # below what runs without TRL, which it imports
    ("grpo", ["data", "rewards", "batching", "shared_prompts", "update", "trainer"]),
    ("evidence", []),
    ("cli", []),
]
ROOMS = [room for room, _ in ORDER]
WITHOUT_TRL = ("models", "speculation", "drafting")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """`grpo.data` for src/fastgrpo/grpo/data.py; `grpo` for a room's __init__; empty for the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imports_of(name: str, source: str, known: set[str], *, is_package: bool = False) -> Iterator[tuple[str, int]]:
    """Every module of ours that a source text imports, at whatever depth, with the line: ("grpo.data", 12)."""
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (
                (a.name.removeprefix("fastgrpo").removeprefix("."), node.lineno)
                for a in node.names
                if a.name.split(".")[0] == "fastgrpo"
            )
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # a dot is this package, each further one its parent
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
                base = ".".join(["fastgrpo", *above, *([base] if base else [])])
            if base.split(".")[0] != "fastgrpo":
                continue
            base = base.removeprefix("fastgrpo").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                yield (inner if inner in known else base), node.lineno


def may_import(name: str, other: str) -> bool:
    """Whether the order lets module `name` import module `other`; two modules of a room without an order may."""
    room, _, rest = name.partition(".")
    other_room, _, other_rest = other.partition(".")
    if room == "__main__":
        return True
    if not other:  # the package itself only hands names out; inside, a module names its source
        return room == "cli"
    if room != other_room:
        return ROOMS.index(other_room) < ROOMS.index(room)
    order = dict(ORDER)[room]
    if rest in order and other_rest in order:
        return order.index(other_rest) < order.index(rest)
    return True


def import_graph() -> dict[str, dict[str, int]]:
    return {
        name: dict(imports_of(name, path.read_text(), set(MODULES), is_package=path.name == "__init__.py"))
        for name, path in MODULES.items()
        if name
    }


def test_imports_go_one_way() -> None:
    wrong = [
        f"{MODULES[name].relative_to(ROOT)}:{line} imports {other or 'the package itself'}"
        for name, imported in import_graph().items()
        for other, line in imported.items()
        if not may_import(name, other)
    ]
    assert not wrong, "against the order of tests/test_project.py:\n" + "\n".join(wrong)


def test_imports_have_no_cycle() -> None:
    graph = {name: set(imported) & set(MODULES) - {name} for name, imported in import_graph().items()}
    while leaves := {name for name, imported in graph.items() if not imported & graph.keys()}:
        graph = {name: imported for name, imported in graph.items() if name not in leaves}
    assert not graph, f"modules that import each other in a circle: {sorted(graph)}"


def test_every_module_stands_in_a_room() -> None:
    assert {name.split(".")[0] for name in MODULES if name} <= {*ROOMS, "__main__"}


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("models.cache", "from fastgrpo.speculation import engine", True),
        ("models.cache", "def f():\n    import fastgrpo.speculation.engine", True),
        ("models.cache", "from ..speculation.engine import Engine", True),
        ("models.cache", "from .target import forward", True),
        ("models.target", "from .cache import Cache", False),
        ("speculation.engine", "from fastgrpo.config import FastGRPOConfig", True),
        ("speculation.engine", "from fastgrpo import config", True),
        ("speculation.engine", "from fastgrpo import SamplingParams", True),
        ("grpo.trainer", "from fastgrpo.config import FastGRPOConfig", False),
        ("grpo.trainer", "from fastgrpo.speculation import engine, sampling", False),
        ("cli.generate", "from fastgrpo import Engine", False),
    ],
)
def test_the_import_check_sees_what_it_should(name: str, source: str, wrong: bool) -> None:
    known = {"config", "models.cache", "models.target", "speculation.engine", "speculation.sampling"}
    found = list(imports_of(name, source, known))
    assert found
    assert any(not may_import(name, other) for other, _ in found) is wrong


def test_files_and_functions_are_small() -> None:
    too_long = []
    for path in sources("src", "tests", "examples", "tools"):
        text = path.read_text()
        if len(text.splitlines()) > MAX_FILE_LINES:
            too_long.append(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = (ast.get_docstring(node, clean=False) or "").count("\n")  # explaining more is no fault
                lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring
                if lines > MAX_FUNCTION_LINES:
                    where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                    too_long.append(f"{where}: {lines} lines, at most {MAX_FUNCTION_LINES}")
    assert not too_long, "divide these:\n" + "\n".join(too_long)


def test_source_starts_with_what_it_is() -> None:
    bare = [str(p.relative_to(ROOT)) for p in sources("src") if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not bare, f"modules without a docstring: {bare}"


def test_nothing_names_a_machine() -> None:
    machine_path = re.compile(r"(?<![\w.])/(?:work|root|home)/[a-z]|(?<![\w.])/tmp/[a-z]|shared/data")
    texts = [
        *(p for p in (ROOT / "src").rglob("*") if p.suffix in {".py", ".yaml", ".json", ".txt"}),
        *sources("examples", "tools"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*.md"),
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
    ]
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if machine_path.search(line)
    ]
    assert not named, "paths of one machine:\n" + "\n".join(named)


def run_python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120)


def test_models_and_speculation_import_without_trl() -> None:
    names = [f"fastgrpo.{name}" for name in sorted(MODULES) if name.split(".")[0] in WITHOUT_TRL]
    assert names
    done = run_python(
        f"import sys; sys.modules['trl'] = None\nimport importlib\nfor n in {names}: importlib.import_module(n)"
    )
    assert done.returncode == 0, done.stderr


def test_the_package_and_its_help_load_no_torch() -> None:
    done = run_python(
        "import sys, fastgrpo\n"
        "from fastgrpo.cli import main\n"
        "code = main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'trl', 'numpy', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy or code else 0)"
    )
    assert done.returncode == 0, done.stderr


def test_help_takes_less_than_half_a_second() -> None:
    command = [sys.executable, "-m", "fastgrpo", "--help"]

    def seconds() -> float:  # of its own: what a machine with other work makes it wait for is not its doing
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.5


def test_public_names_are_there_and_unknown_ones_refused() -> None:
    promised = {"Engine", "SamplingParams", "FastGRPOTrainer", "FastGRPOConfig", "load_model"}
    promised |= {"DraftModel", "DraftConfig", "SpeculativeModel", "speculative_generate"}
    assert promised <= set(fastgrpo.__all__) <= set(dir(fastgrpo))
    for name in promised:
        assert callable(getattr(fastgrpo, name))
    with pytest.raises(AttributeError, match=r"no attribute 'Trainer'.*FastGRPOTrainer"):
        fastgrpo.Trainer  # noqa: B018


def test_constraints_satisfy_the_ranges() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = dict(line.split("==") for line in lines)
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    for text in [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), text


def test_what_is_imported_is_asked_for() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    known = {canonicalize_name(Requirement(text).name) for text in asked}
    known |= {"fastgrpo", *sys.stdlib_module_names}
    other_names = {"yaml": "pyyaml"}
    missing = set()
    for path in sources("src", "examples", "tools"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in (full.partition(".")[0] for full in names):
                if not {name, canonicalize_name(other_names.get(name, name))} & known:
                    missing.add(f"{path.relative_to(ROOT)} imports {name}")
    assert not missing, "add to the dependencies in pyproject.toml:\n" + "\n".join(sorted(missing))


def cli_surface() -> str:
    """Every subcommand with what may follow it, one a line: positional arguments, with their choices, then flags."""
    lines = []
    for name in cli.COMMANDS:
        parser = cli.command_parser(name)
        positional = [action for action in parser._actions if not action.option_strings]
        lines += [name, *(f"  {a.dest} {' | '.join(a.choices or ())}".rstrip() for a in positional)]
        lines += [f"  {flag}" for flag in parser.flags()]
    return "\n".join(lines) + "\n"


def test_the_command_line_is_as_recorded() -> None:
    assert cli_surface() == SURFACE.read_text(), (
        "the command line changed. A removed or renamed flag breaks scripts of users: keep it. If the change is meant, "
        "say so in CHANGELOG.md and record it: .venv/bin/python tests/test_project.py > tests/cli_surface.txt"
    )


if __name__ == "__main__":
    sys.stdout.write(cli_surface())
