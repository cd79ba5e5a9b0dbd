"""Names the packages to install. Everything else is in pyproject.toml.

In a checkout, planner/rewrite, planner/profiles and planner/cli/glossary.md are symbolic links. A file system without
links has small text files there instead; then the folders that they name are installed under the names of the links.
"""

import pathlib
import shutil

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

LINKS = ("rewrite", "profiles")
FOLDERS = {} if pathlib.Path("planner/rewrite").is_dir() else {f"planner.{name}": name for name in LINKS}
GLOSSARY = pathlib.Path("docs/glossary.md")  # a source distribution has it in planner/cli only


class BuildWithGlossary(build_py):
    """Copies the glossary, which may be a link that is not one."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode and GLOSSARY.exists():
            shutil.copyfile(GLOSSARY, pathlib.Path(self.build_lib, "planner", "cli", "glossary.md"))


setup(
    cmdclass={"build_py": BuildWithGlossary},
    packages=[
        *find_packages(include=["planner*"]),
        *(f"planner.{name}" for link in FOLDERS.values() for name in find_packages(include=[link, f"{link}.*"])),
    ],
    package_dir={"": ".", **FOLDERS},  # editable installs are then a plain path, which type checkers follow
)
