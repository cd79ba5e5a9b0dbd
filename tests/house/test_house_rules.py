"""House rules that a machine can check: who imports whom, documented public names."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
OURS = ("planner", "rewrite", "profiles")
COMPOSITION_ROOT = {"planner/__init__.py", "planner/pipeline.py", "planner/cli/command.py"}
"""The only files of the planner that know the rewriter."""
EXTRAS = ("accelerate", "bitsandbytes", "transformers")
"""What a bare install lacks."""
NEEDS_EXTRAS = "planner.rewrite.trainer.callback"
"""The only module that is imported where it is used, and not before."""
WITHOUT_TORCH = (
    "planner",
    "planner.allocator.caching_allocator",
    "planner.allocator.replay",
    "planner.plan_types.decisions",
    "planner.plan_types.plan",
    "planner.plan_types.sizes",
    "planner.snapshot",
    "profiles",
)


def sources(*folders: str) -> list[pathlib.Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: pathlib.Path) -> set[str]:
    """Top-level names of all modules that a file imports, wherever it does so."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
    return found


def uses(path: pathlib.Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imports(path))


@pytest.mark.parametrize("path", sources("planner"), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_composition_root_of_the_planner_knows_the_rewriter(path):
    if str(path.relative_to(ROOT)) not in COMPOSITION_ROOT:
        assert not uses(path, "rewrite")


@pytest.mark.parametrize("path", sources("profiles"), ids=lambda path: str(path.relative_to(ROOT)))
def test_profiles_know_nothing_of_ours(path):
    assert not uses(path, "planner")
    assert not uses(path, "rewrite")


@pytest.mark.parametrize("path", sources("planner/search"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_search_works_on_numbers_alone(path):
    assert not uses(path, "torch")
    ours = {name for name in imports(path) if name.split(".")[0] in OURS}
    assert all(name.startswith("planner.search") or name == "planner.errors" for name in ours)


@pytest.mark.parametrize("path", sources(*OURS), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_bare_install_can_import_everything(path):
    """But one module, which none imports when it is itself imported."""
    named = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    statements = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    found = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in statements if isinstance(node, ast.ImportFrom)}
    assert NEEDS_EXTRAS not in found
    assert named == NEEDS_EXTRAS or not {name.split(".")[0] for name in found} & set(EXTRAS)


@pytest.mark.parametrize("module", [*WITHOUT_TORCH, "planner.search.milp"])
def test_plan_files_search_and_profiles_load_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("path", sources(*OURS), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_public_functions_say_what_they_are_for(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the file has no docstring"
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    undocumented = [node.name for node in classes if not ast.get_docstring(node)]
    assert not undocumented


@pytest.mark.parametrize("path", sources(*OURS), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_error_is_swallowed(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"
            assert not (len(node.body) == 1 and isinstance(node.body[0], ast.Pass)), f"line {node.lineno}: except: pass"


def test_files_stay_readable_in_one_sitting():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(*OURS)}
    assert {name: lines for name, lines in long.items() if lines > 450} == {}
