"""What the repository promises about itself: its commands, its layers, and that nothing of a workplace is in it."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src/isobit").rglob("*.py"))
KERNELS = sorted(path for folder in ("src", "bench") for path in (ROOT / folder).rglob("*.cu*"))
LAYERS = ("ops", "checkpoint", "model", "engine", "serve")
MAY_IMPORT = {
    "ops": {"checkpoint", "ops"},
    "checkpoint": {"checkpoint", "ops"},
    "model": {"checkpoint", "ops", "model"},
    "engine": {"checkpoint", "ops", "model", "engine"},
    "serve": {"checkpoint", "ops", "model", "engine", "serve"},
}
OPTIONAL = ("torch.", "transformers.", "cuda.", "isobit.cuda.")
ARITHMETIC = {"dot", "matmul", "einsum", "exp", "log", "sqrt", "mean", "tanh", "power", "multiply", "add", "inner"}


def commands(text: str) -> list[str]:
    """The shell lines of a Markdown text's code blocks."""
    return [line for block in re.findall(r"```(?:sh|bash)?\n(.*?)```", text, re.S) for line in block.splitlines()]


def imported(path: Path) -> set[str]:
    """The packages of isobit that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("isobit.")}


def test_ci_runs_the_second_command_of_the_readme():
    first, second = commands((ROOT / "README.md").read_text(encoding="utf-8"))[:2]
    assert first == "pip install . && isobit demo"
    assert second.startswith("pip install ")
    assert second.endswith("&& pytest")
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert ci[-1] == second.replace("pip install", "pip install -q")


@pytest.mark.parametrize("layer", LAYERS)
def test_data_flows_one_way(layer):
    for path in (ROOT / "src/isobit" / layer).rglob("*.py"):
        upwards = (imported(path) & set(LAYERS)) - MAY_IMPORT[layer]
        assert not upwards, f"{path.name} imports {upwards}"


@pytest.mark.parametrize("layer", ["model", "engine"])
def test_model_and_engine_do_no_arithmetic_on_arrays(layer):
    for path in (ROOT / "src/isobit" / layer).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)), f"{path.name}: @"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "np":
                assert node.attr not in ARITHMETIC, f"{path.name}:{node.lineno}: np.{node.attr}"


def test_nothing_of_a_workplace_is_in_the_project():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    spoilers = re.compile(
        r"/(?:work|root|home)/\w|\.library|shared/(?:design|facts|lab)|https?://[^\s)\"']*(?:pypi|proxy|mirror)"
    )
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".cu", ""} and path.is_file() and path != Path(__file__):
            found = spoilers.search(path.read_text(encoding="utf-8", errors="ignore"))
            assert not found, f"{name}: {found.group()}"


def test_comments_are_one_line_and_lines_are_short():
    assert KERNELS
    for path in (*SOURCES, *KERNELS):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 120, f"{path.name}:{number}"


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: path.stem)
def test_what_is_optional_is_imported_after_a_check(path):
    """The README's test command installs none of it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if "importorskip" in ast.dump(node):
            return
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not any(f"{name}.".startswith(OPTIONAL) for name in names), f"{path}: {names} before importorskip"
