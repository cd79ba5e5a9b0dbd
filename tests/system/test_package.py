"""The source distribution and the wheel hold all that the command needs, also where a file system has no links."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools is not installed"),
]

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ("planner", "rewrite", "profiles", "docs", "pyproject.toml", "setup.py", "README.md", "LICENSE")
MODEL = """
import torch

def build():
    return torch.nn.Linear(8, 1), (torch.zeros(4, 8),), lambda output, batch: output.mean()
"""


def checkout(folder: pathlib.Path, *, links: bool) -> pathlib.Path:
    """Copies the sources. Without `links`, symbolic links become text files, as on a file system that has none."""
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skipped)
        else:
            shutil.copy(ROOT / name, folder / name)
    for path in [] if links else [path for path in (folder / "planner").rglob("*") if path.is_symlink()]:
        target = os.readlink(path)
        path.unlink()
        path.write_text(target)
    return folder


def built(kind: str, source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Builds 'wheel' or 'sdist' from a folder, without the network."""
    code = f"import setuptools.build_meta as b; b.build_{kind}({str(target)!r})"
    run = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (found,) = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


def names_in(wheel: pathlib.Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("planner/")}


@pytest.mark.slow
def test_a_wheel_of_the_source_distribution_runs_from_another_folder(tmp_path):
    sdist = built("sdist", checkout(tmp_path / "checkout", links=True), tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    wheel = built("wheel", source, tmp_path)
    files = {path.relative_to(ROOT) for path in (ROOT / "rewrite").rglob("*.py")}
    assert {f"planner/{path.as_posix()}" for path in files} <= names_in(wheel)

    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere.mkdir()
    (elsewhere / "net.py").write_text(MODEL)
    for words in (
        [
            "net.py:build",
            "--vram",
            "1GiB",
            "--gpu",
            "rtx-2060",
            "--save",
            "p.json",
            "--emit",
            "s.py",
            "--report",
            "r.html",
        ],
        ["--explain", "slack"],
        ["--list-gpus"],
    ):
        run = subprocess.run(
            [sys.executable, "-m", "planner.cli", *words], cwd=elsewhere, env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
    where = subprocess.run(
        [sys.executable, "-c", "import planner.rewrite; print(planner.rewrite.__file__)"], cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(site))


def test_a_wheel_that_is_built_without_links_has_the_same_files(tmp_path):
    wheels = []
    for links in (True, False):
        (tmp_path / str(links)).mkdir()
        source = checkout(tmp_path / f"checkout {links}", links=links)
        wheels.append(built("wheel", source, tmp_path / str(links)))
    assert names_in(wheels[0]) == names_in(wheels[1])
    for name in ("planner/cli/glossary.md", "planner/rewrite/__init__.py", "planner/profiles/devices/t4.toml"):
        first, second = (zipfile.ZipFile(wheel).read(name) for wheel in wheels)
        assert first == second and len(first) > 100
