"""What all lanes share."""

from __future__ import annotations

import collections
import os
import pathlib
import zlib
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a model hub
os.environ["PLANNER_DEVICES"] = os.devnull  # nor calibrated profiles of the machine that they run on
os.environ["PLANNER_CUDNN"] = "none"  # nor the cuDNN that is installed there: plans have the planner's own tables
os.environ["PLANNER_RECORDINGS"] = "none"  # nor recordings of earlier calls
os.environ["PLANNER_START_METHOD"] = "fork"  # workers of parallel tests have threads, which hold no locks of interest
for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # plans are made for PyTorch's defaults
    os.environ.pop(variable, None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small here: more threads only wait for each other

_THOROUGH_SECONDS = 1200
"""Time limit of a thorough test. That of other tests is in pyproject.toml."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-fixtures", action="store_true", help="write tests/fixtures/emitted anew")
    parser.addoption("--part", metavar="K/N", help="run one of N parts of the selected tests, such as 0/4")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Do not even import files that a lane leaves out as a whole: importing torch and transformers takes seconds."""
    if not collection_path.match("test_*.py"):
        return None
    marks = next((line for line in collection_path.read_text().splitlines() if line.startswith("pytestmark")), "")
    lane = config.getoption("markexpr")
    left_out = {"not slow": "mark.slow" in marks, "no_torch": "mark.no_torch" not in marks}
    return True if left_out.get(lane) else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need other people's recordings or take long, and leave out those of other parts (`--part`)."""
    cases: collections.Counter[str] = collections.Counter()
    for item in items:
        if (after := item.get_closest_marker("thorough_after")) is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] >= after.args[0]:
                item.add_marker(pytest.mark.thorough)
            cases[test] += 1
        if item.get_closest_marker("thorough") is not None:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(_THOROUGH_SECONDS))
        if "shared_data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.recordings)
    if part := config.getoption("part"):
        number, parts = map(int, part.split("/"))
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts != number % parts]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture(autouse=True)
def _environment_of_each_test() -> Iterator[None]:
    """Restore the environment after each test: an emitted file sets the allocator's options, which a plan reads."""
    before = dict(os.environ)
    yield
    left = {"PYTEST_CURRENT_TEST": os.environ["PYTEST_CURRENT_TEST"]} if "PYTEST_CURRENT_TEST" in os.environ else {}
    os.environ.clear()
    os.environ.update(before | left)


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """Other people's measurements, read where they lie: the folder that PLANNER_SHARED_DATA names."""
    named = os.environ.get("PLANNER_SHARED_DATA")
    if not named or not pathlib.Path(named).is_dir():
        pytest.skip("set PLANNER_SHARED_DATA to the folder with allocator_traces/ and gpumemnet_mlp2.csv")
    return pathlib.Path(named)
