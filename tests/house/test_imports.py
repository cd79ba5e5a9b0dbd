"""House rules of imports: rooms stand on floors, and a room imports only rooms below it."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = {"planner": "planner", "rewrite": "planner.rewrite", "profiles": "planner.profiles"}
"""Folder at the top of the repository, and the name under which it is installed."""
FLOORS = (
    # what everything may use
    ("planner.errors",),
    ("planner.files",),
    ("planner.profiles",),
    ("planner.plan_types",),
    ("planner.progress", "planner.spawned"),
    ("planner.workspaces", "planner.search"),
    ("planner.virtual_gpu",),
    ("planner.allocator", "planner.safe_process"),
    ("planner.workload", "planner.snapshot"),
    # planning: from a running step to a certified configuration
    ("planner.recording",),
    ("planner.derive", "planner.kept"),
    ("planner.estimate",),
    ("planner.run_memory",),
    ("planner.recompute", "planner.space"),
    ("planner.choose",),
    # rewriting: from decisions to a module and a training step
    (
        "planner.rewrite.portable",
        "planner.rewrite.emitted_code",
        "planner.rewrite.optimizers",
        "planner.rewrite.step_observer",
    ),
    ("planner.rewrite.rewriting", "planner.rewrite.step_state", "planner.rewrite.accumulation_check"),
    (
        "planner.rewrite.loss_terms",
        "planner.rewrite.step",
        "planner.rewrite.own_step",
        "planner.rewrite.recomputed_modules",
        "planner.rewrite.recompute_observer",
        "planner.rewrite.first_step_check",
        "planner.rewrite.nondeterminism",
    ),
    ("planner.rewrite.rules",),
    ("planner.rewrite.application",),
    ("planner.rewrite.rehearse", "planner.rewrite.emitter", "planner.rewrite.parity"),
    ("planner.rewrite.certificate", "planner.rewrite.on_gpu"),
    ("planner.rewrite.memory_promise",),
    ("planner.rewrite.trainer",),
    ("planner.rewrite.on_cpu",),
    ("planner.rewrite",),
    # where planner and rewriter meet, and what people call
    ("planner.assemble",),
    ("planner.pipeline",),
    ("planner.questions", "planner.checkpointed_ways"),
    ("planner.adapted", "planner.default_batch", "planner.sharded"),
    ("planner.fewest_cards",),
    ("planner.whole_run",),
    ("planner.replan",),
    ("planner.ask", "planner.arguments"),
    ("planner",),
    ("planner.cli",),
)
"""Rooms (folders or single files) from the lowest floor up. A room imports only rooms on lower floors."""
TYPES_AND_WORKLOADS = {
    "planner.errors",
    "planner.files",
    "planner.plan_types",
    "planner.progress",
    "planner.workload",
    "planner.profiles",
}
REWRITER_NEEDS = {
    "planner.rewrite.accumulation_check": {"planner.recording"},  # which attributes a forward changes
    "planner.rewrite.rules": {"planner.recompute"},  # the ops whose outputs selective checkpointing keeps
    "planner.rewrite.nondeterminism": {"planner.recording"},  # which arguments an op writes to
    "planner.rewrite.rehearse": {"planner.estimate", "planner.recording", "planner.virtual_gpu"},
    "planner.rewrite.certificate": {"planner.estimate", "planner.safe_process"},
    "planner.rewrite.on_cpu": {"planner.estimate", "planner.recording"},  # the bytes of a rehearsed step, op by op
}
"""Rooms of the planner that the rewriter may import, in addition to types and workloads, by room of the rewriter."""
EXTRAS = ("accelerate", "bitsandbytes", "transformers")
"""Packages that an install without extras lacks."""
NEEDS_EXTRAS = "planner.rewrite.trainer.callback"
"""The only module that needs transformers when it is imported; it is imported inside a function."""
WITHOUT_TORCH = (
    "planner",
    "planner.allocator.caching_allocator",
    "planner.allocator.replay",
    "planner.cli",
    "planner.plan_types.decisions",
    "planner.plan_types.plan",
    "planner.plan_types.sizes",
    "planner.profiles",
    "planner.search.milp",
    "planner.snapshot",
)
MOST_LINES = 400
MOST_FILES = 16


def name_of(path: pathlib.Path) -> str:
    """The dotted name under which a file is imported."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[folder], *rest]).removesuffix(".__init__")


SOURCES = {name_of(path): path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))}
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """The room that a module is in: the longest of its prefixes that stands in `FLOORS`."""
    parts = module.split(".")
    return next(room for length in range(len(parts), 0, -1) for room in [".".join(parts[:length])] if room in FLOOR_OF)


def imports(path: pathlib.Path) -> set[str]:
    """Names of all modules of ours and others that a file imports, wherever it does so."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name for name in submodules if name in SOURCES} or {node.module}
    return names


def rooms_imported(module: str) -> set[str]:
    return {room_of(name) for name in imports(SOURCES[module]) if name.split(".")[0] == "planner"} - {room_of(module)}


@pytest.mark.parametrize("module", SOURCES)
def test_a_room_imports_only_rooms_below_it(module):
    above = {room for room in rooms_imported(module) if FLOOR_OF[room] >= FLOOR_OF[room_of(module)]}
    assert not above


@pytest.mark.parametrize("module", [name for name in SOURCES if name.startswith("planner.rewrite")])
def test_the_rewriter_needs_little_of_the_planner(module):
    planning = {room for room in rooms_imported(module) if not room.startswith("planner.rewrite")}
    assert planning <= TYPES_AND_WORKLOADS | REWRITER_NEEDS.get(room_of(module), set())


def test_only_the_pipeline_and_the_command_know_the_rewriter():
    planning = [name for name in SOURCES if not name.startswith(("planner.rewrite", "planner.cli"))]
    knows = {name: room for name in planning for room in rooms_imported(name) if room.startswith("planner.rewrite")}
    assert knows == {"planner.pipeline": "planner.rewrite.rehearse"}


@pytest.mark.parametrize("module", [name for name in SOURCES if name.startswith("planner.rewrite.portable")])
def test_portable_code_imports_torch_and_the_standard_library_only(module):
    allowed = {*sys.stdlib_module_names, "torch"}
    foreign = {name for name in imports(SOURCES[module]) if name.split(".")[0] not in allowed}
    assert all(name.startswith("planner.rewrite.portable") for name in foreign)


@pytest.mark.parametrize("module", [name for name in SOURCES if name.startswith("planner.search")])
def test_the_search_works_on_numbers_alone(module):
    assert not {name for name in imports(SOURCES[module]) if name.split(".")[0] == "torch"}
    assert rooms_imported(module) <= {"planner.errors"}


@pytest.mark.parametrize("module", SOURCES)
def test_a_bare_install_can_import_everything(module):
    """Except one module, which no other imports while it is itself imported."""
    statements = [n for n in ast.parse(SOURCES[module].read_text()).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in statements if isinstance(node, ast.ImportFrom)}
    assert NEEDS_EXTRAS not in names
    assert module == NEEDS_EXTRAS or not {name.split(".")[0] for name in names} & set(EXTRAS)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_plan_files_search_and_profiles_load_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["rewrite", "profiles"])
@pytest.mark.thorough_after(1)
def test_a_folder_of_the_users_with_the_name_of_one_of_ours_does_no_harm(folder, tmp_path):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "__init__.py").write_text("raise RuntimeError('the user has a package of this name')")
    code = "import planner.rewrite, planner.profiles, planner.pipeline"
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=False).returncode == 0


@pytest.mark.parametrize("folder", ["rewrite", "profiles"])
def test_the_old_name_of_a_folder_says_what_to_write_instead(folder):
    run = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1 and f"write `from planner import {folder}`" in run.stderr


@pytest.mark.parametrize("module", SOURCES)
def test_files_and_public_classes_say_what_they_are_for(module):
    tree = ast.parse(SOURCES[module].read_text())
    assert ast.get_docstring(tree), "the file has no docstring"
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert not [node.name for node in classes if not ast.get_docstring(node)]


@pytest.mark.parametrize("module", SOURCES)
def test_no_error_is_swallowed(module):
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"
            assert not (len(node.body) == 1 and isinstance(node.body[0], ast.Pass)), f"line {node.lineno}: except: pass"


def test_files_stay_readable_in_one_sitting():
    long = {module: len(path.read_text().splitlines()) for module, path in SOURCES.items()}
    assert {module: lines for module, lines in long.items() if lines > MOST_LINES} == {}


def test_folders_stay_listable_at_a_glance():
    folders: dict[pathlib.Path, int] = {}
    for path in SOURCES.values():
        if path.stem not in ("__init__", "__main__"):
            folders[path.parent] = folders.get(path.parent, 0) + 1
    assert {str(folder.relative_to(ROOT)): n for folder, n in folders.items() if n > MOST_FILES} == {}
