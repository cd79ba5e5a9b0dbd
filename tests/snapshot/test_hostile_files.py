"""A small snapshot that asks for endless time or memory is refused at once."""

from __future__ import annotations

import gzip
import json
import pickle
import time

import pytest

from planner.errors import SnapshotError
from planner.snapshot import load

pytestmark = pytest.mark.no_torch

ENDLESS: tuple = ()
for _ in range(34):
    ENDLESS = (ENDLESS, ENDLESS)  # 2 ** 34 leaves, in a pickle of some hundred bytes
EVENT = {"action": "alloc", "addr": 1 << 30, "size": 512, "stream": 0, "frames": []}
SEGMENT = {
    "device": 0, "address": 1 << 30, "total_size": 1 << 21, "stream": 0, "segment_type": "small",
    "blocks": [{"size": 1 << 21, "requested_size": 512, "state": "active_allocated"}],
}  # fmt: skip


def snapshot(event: dict | None = None, segment: dict | None = None, **more) -> dict:
    trace = [{**EVENT, **(event or {})}]
    return {"segments": [{**SEGMENT, **(segment or {})}], "device_traces": [trace], **more}


HOSTILE = {
    **{f"event {name}": snapshot({name: ENDLESS}) for name in ("action", "addr", "size", "stream", "device_free")},
    **{f"segment {name}": snapshot(segment={name: ENDLESS}) for name in ("device", "address", "stream", "total_size")},
    "metadata": snapshot({"user_metadata": ENDLESS}),
    "frame": snapshot({"frames": [{"name": ENDLESS, "filename": ENDLESS, "line": ENDLESS}]}),
    "settings": snapshot(allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": ENDLESS}),
    "devices": {"segments": [], "device_traces": [[]] * 100_000},
    "a number of too many digits": snapshot({"addr": 1 << 200_000}),
    "an address above 64 bits": snapshot({"addr": 1 << 65}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_value_that_stands_for_an_endless_text_is_not_made_one(case, tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(HOSTILE[case]))
    began = time.perf_counter()
    try:
        load(path)
    except SnapshotError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
    else:
        assert case in ("metadata", "frame", "segment device")
    assert time.perf_counter() - began < 5


def test_a_file_that_unpacks_to_much_more_than_a_snapshot_is_refused(tmp_path):
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"{")
        for _ in range(200):
            file.write(b" " * (1 << 20))
    assert path.stat().st_size < 2 << 20
    began = time.perf_counter()
    with pytest.raises(SnapshotError, match=r"unpacks to more than [\d,]+ bytes"):
        load(path)
    assert time.perf_counter() - began < 10


def test_a_pickle_in_gzip_is_still_read(tmp_path):
    plain, packed = tmp_path / "a.pickle", tmp_path / "b.pickle.gz"
    plain.write_bytes(pickle.dumps(snapshot()))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load(plain) == load(packed)


def test_json_that_is_nested_deeply_is_refused(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text('{"segments": ' + "[" * 100_000 + "]" * 100_000 + ', "device_traces": []}')
    with pytest.raises(SnapshotError, match="cannot be read"):
        load(path)
    path.write_text(json.dumps(snapshot(segment={"blocks": 5})))
    with pytest.raises(SnapshotError, match="cannot be interpreted"):
        load(path)
