"""Device profiles: complete files, honest refusals, and the rules that follow from a compute capability."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from planner import profiles
from planner.profiles import device
from planner.profiles.generic import modelled_context_bytes

pytestmark = pytest.mark.no_torch

ROOT = Path(profiles.__file__).resolve().parents[1]
DEVICES = ROOT / "profiles" / "devices"

SMALL_WORKSPACE_BYTES = 8_519_680
LARGE_WORKSPACE_BYTES = 33_554_432

CARDS = {
    "rtx-3060-ti",
    "rtx-4060-ti-16gb",
    "l40s",
    "b200",
    "a100-40gb",
    "a100-80gb",
    "a10g",
    "gtx-1080-ti",
    "h100",
    "h200",
    "l4",
    "p100",
    "rtx-2060",
    "rtx-3060-12gb",
    "rtx-3070",
    "rtx-3090",
    "rtx-4060-8gb",
    "rtx-4090",
    "rtx-5090",
    "t4",
    "v100-16gb",
}


def broken(tmp_path: Path, pattern: str, replacement: str) -> Path:
    """A copy of a good profile with the one line that matches `pattern` replaced."""
    text, count = re.subn(f"(?m)^{pattern}.*$", replacement, (DEVICES / "rtx-2060.toml").read_text())
    assert count == 1
    path = tmp_path / "broken-card.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "written, meant",
    [
        ("RTX 3060", "rtx-3060-12gb"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060-12gb"),
        ("4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("3060ti", "rtx-3060-ti"),
        ("rtx 4060 laptop gpu", "rtx-4060-laptop"),
        ("A100 80GB", "a100-80gb"),
        ("v100 32 GiB", "v100-32gb"),
        ("Tesla T4", "t4"),
        ("A6000", "rtx-a6000"),
        ("T4 16GB", "t4"),
        ("rtx 4090 24 GB", "rtx-4090"),
        ("4070TiSuper", "rtx-4070-ti-super"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
    ],
)
def test_a_card_is_found_by_the_name_that_people_write(written, meant) -> None:
    assert profiles.load(written).name == meant


def test_known_lists_a_file_for_each_card() -> None:
    assert set(profiles.known()) >= CARDS
    assert list(profiles.known()) == sorted(profiles.known())
    assert set(profiles.known()) == {path.stem for path in DEVICES.iterdir()}


@pytest.mark.parametrize("name", profiles.known())
def test_every_card_loads_and_is_plausible(name: str) -> None:
    card = profiles.load(name)
    assert card.name == name
    assert card.allocator
    assert card.cuda_names
    assert set(card.flops_per_s) == set(device.DTYPES)
    assert 5e12 < card.flops_per_s["fp32"] <= card.flops_per_s["tf32"] <= card.flops_per_s["fp16"]
    assert 1e11 < card.memory_bandwidth_bytes_per_s < 1e13
    assert 4 << 30 < card.vram_bytes < 200 << 30
    assert 0.6 < card.context_bytes / modelled_context_bytes(card.sm_count) < 1.4
    assert card.context_source.startswith(("measured", "modelled"))


@pytest.mark.parametrize("name", profiles.known())
def test_every_number_in_a_profile_names_its_source_beside_it(name: str) -> None:
    for line in (DEVICES / f"{name}.toml").read_text().splitlines():
        value = line.partition("=")[2].strip()
        if value and value[0] in "[0123456789" and not line.startswith("cuda_names"):
            assert re.search(r"# \S{2,}", line), line


@pytest.mark.parametrize("name", profiles.known())
def test_bf16_is_native_only_from_compute_capability_8(name: str) -> None:
    card = profiles.load(name)
    assert ("bf16" in card.native_dtypes) == (card.compute_capability >= (8, 0))
    assert set(card.native_dtypes) <= set(device.AUTOCAST_DTYPES)


@pytest.mark.parametrize("name", profiles.known())
def test_a_dtype_that_is_not_native_is_not_faster_than_fp32(name: str) -> None:
    card = profiles.load(name)
    for dtype in set(device.AUTOCAST_DTYPES) - set(card.native_dtypes):
        assert card.flops_per_s[dtype] <= card.flops_per_s["fp32"]


def test_a_gtx_10_card_has_no_native_autocast_dtype_and_older_data_centre_cards_have_fp16() -> None:
    assert profiles.load("gtx-1080-ti").native_dtypes == ()
    assert [profiles.load(name).native_dtypes for name in ("p100", "v100-16gb", "t4", "rtx-2060")] == [("fp16",)] * 4


def test_a_profile_that_claims_bf16_before_8_is_refused() -> None:
    with pytest.raises(profiles.ProfileError, match=r"t4: native_dtypes names 'bf16' at compute capability 7\.5"):
        dataclasses.replace(profiles.load("t4"), native_dtypes=("bf16",))


def test_a_profile_with_an_order_of_addresses_that_does_not_exist_is_refused() -> None:
    with pytest.raises(profiles.ProfileError, match="is 'sideways': choose from ascending, descending"):
        dataclasses.replace(profiles.load("h100"), segment_addresses="sideways")


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("rtx2061", "rtx-2060"),
        ("4090 laptop", "rtx-4060-laptop"),
        ("2060ti", "rtx-2060"),
        ("a100", "a100-40gb or a100-80gb"),
        ("H-100", "h100"),
    ],
)
def test_an_unknown_card_is_refused_with_near_matches_and_a_way_out(given: str, near: str) -> None:
    with pytest.raises(profiles.ProfileError) as refusal:
        profiles.load(given)
    message = str(refusal.value)
    assert f"'{given}'" in message
    assert near in message.partition("?")[0]
    assert ".toml" in message


def test_a_card_like_no_other_is_refused_with_the_whole_list() -> None:
    with pytest.raises(profiles.ProfileError) as refusal:
        profiles.load("§§§")
    assert "did you mean" not in str(refusal.value)
    assert all(name in str(refusal.value) for name in (*profiles.known(), "bare"))


@pytest.mark.parametrize(
    ("cuda_name", "card"),
    [
        ("NVIDIA GeForce RTX 2060", "rtx-2060"),
        ("GeForce RTX 2060", "rtx-2060"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("Tesla T4", "t4"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("nvidia geforce rtx 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060-12gb"),
    ],
)
def test_a_live_card_finds_its_profile_by_name(cuda_name: str, card: str) -> None:
    found = profiles.matching(cuda_name)
    assert found is not None
    assert found.name == card


@pytest.mark.parametrize(
    "cuda_name",
    [
        "NVIDIA GeForce RTX 2060 SUPER",
        "NVIDIA GeForce RTX 3070 Laptop GPU",
        "NVIDIA GeForce RTX 4070 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA L40",
        "Radeon RX 7900 XTX",
        "",
    ],
)
def test_a_card_with_a_similar_name_finds_no_profile(cuda_name: str) -> None:
    assert profiles.matching(cuda_name) is None


def test_no_cuda_name_is_claimed_twice() -> None:
    claims = [pattern.casefold() for name in profiles.known() for pattern in profiles.load(name).cuda_names]
    assert len(claims) == len(set(claims))


@pytest.mark.parametrize(
    ("capability", "torch_version", "workspace_bytes"),
    [
        ((6, 0), "2.13.0", SMALL_WORKSPACE_BYTES),
        ((7, 5), "2.15.0", SMALL_WORKSPACE_BYTES),
        ((8, 9), "2.13.0+cpu", SMALL_WORKSPACE_BYTES),
        ((9, 0), "2.3.1", LARGE_WORKSPACE_BYTES),
        ((9, 0), "2.4.1+cu121", LARGE_WORKSPACE_BYTES),
        ((9, 0), "2.15.0", LARGE_WORKSPACE_BYTES),
        ((10, 0), "2.11.0", SMALL_WORKSPACE_BYTES),
        ((10, 0), "2.12.1", LARGE_WORKSPACE_BYTES),
        ((11, 0), "2.13.0", SMALL_WORKSPACE_BYTES),
        ((11, 0), "2.14.0a0+git1234", LARGE_WORKSPACE_BYTES),
        ((12, 0), "2.9.1", SMALL_WORKSPACE_BYTES),
        ((12, 0), "2.13.0", LARGE_WORKSPACE_BYTES),
        ((12, 0), "3.0.0", LARGE_WORKSPACE_BYTES),
    ],
)
def test_the_cublas_workspace_follows_capability_and_torch_version(
    capability: tuple[int, int], torch_version: str, workspace_bytes: int
) -> None:
    card = dataclasses.replace(profiles.generic(8 << 30), compute_capability=capability, native_dtypes=())
    assert card.cublas_workspace_bytes(torch_version) == workspace_bytes


def test_a_torch_version_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(profiles.ProfileError, match="torch version 'nightly' cannot be read"):
        profiles.load("t4").cublas_workspace_bytes("nightly")


def test_a_generic_card_never_shrinks_when_its_memory_grows() -> None:
    cards = [profiles.generic(mib << 20) for mib in range(64, 96 << 10, 509)]
    for smaller, larger in itertools.pairwise(cards):
        assert smaller.vram_bytes < larger.vram_bytes
        for field in ("sm_count", "memory_bandwidth_bytes_per_s", "context_bytes"):
            assert getattr(smaller, field) <= getattr(larger, field)
        assert all(smaller.flops_per_s[dtype] <= larger.flops_per_s[dtype] for dtype in device.DTYPES)


def test_a_generic_card_is_ampere_of_the_size_asked_for() -> None:
    card = profiles.generic(6 << 30)
    assert (card.name, card.compute_capability, card.vram_bytes) == ("generic", (8, 6), 6 << 30)
    assert card.native_dtypes == ("bf16", "fp16")
    assert card.context_bytes == 13 * (1 << 20) + 30 * 341 * (1 << 20) // 100
    assert card == profiles.generic(6 << 30)


@pytest.mark.parametrize("vram_bytes", [0, -1])
def test_a_generic_card_without_memory_is_refused(vram_bytes: int) -> None:
    with pytest.raises(profiles.ProfileError, match=f"{vram_bytes} bytes"):
        profiles.generic(vram_bytes)


def test_the_bare_card_has_rates_but_no_fixed_costs() -> None:
    card = profiles.load("bare")
    assert card == profiles.bare()
    assert (card.context_bytes, card.cublas_workspace_bytes("2.13.0"), card.allocator) == (0, 0, False)
    assert card.flops_per_s == profiles.generic(24 << 30).flops_per_s


def test_a_profile_can_be_hashed_and_sent_to_another_process() -> None:
    card = profiles.load("h100")
    assert pickle.loads(pickle.dumps(card)) == card
    assert hash(card) == hash(profiles.load("h100"))


def test_a_profile_file_of_ones_own_is_loaded_by_its_path(tmp_path: Path) -> None:
    path = broken(tmp_path, "title", 'title = "A card of my own"')
    assert profiles.load(str(path)) == profiles.read(path)
    assert (profiles.read(path).name, profiles.read(path).title) == ("broken-card", "A card of my own")


@pytest.mark.parametrize(
    ("pattern", "replacement", "key"),
    [
        ("sm_count", "", "sm_count"),
        ("sm_count", 'sm_count = "30"', "sm_count"),
        ("sm_count", "sm_count = 0", "sm_count"),
        ("sm_count", "sm_count = true", "sm_count"),
        ("vram_bytes", "vram_bytes = 6.2e9", "vram_bytes"),
        ("title", "title = 2060\ncolour = 'green'", "colour"),
        ("title", "title = ''", "title"),
        ("cuda_names", "cuda_names = 'GeForce RTX 2060'", "cuda_names"),
        ("compute_capability", "compute_capability = [7]", "compute_capability"),
        ("native_dtypes", "native_dtypes = ['fp8']", "native_dtypes"),
        ("native_dtypes", "native_dtypes = ['bf16']", "native_dtypes"),
        ("fp64", "", "fp64"),
        ("fp64", "fp64 = 1.5e12", "flops_per_s"),
        ("fp64", "fp64 = 1\nfp8 = 1", "fp8"),
        ("source", "source = datasheet", "line 2"),
    ],
)
def test_a_profile_file_that_is_not_well_formed_is_refused_by_file_and_key(
    tmp_path: Path, pattern: str, replacement: str, key: str
) -> None:
    path = broken(tmp_path, f"{pattern} =", replacement)
    with pytest.raises(profiles.ProfileError) as refusal:
        profiles.read(path)
    assert str(path) in str(refusal.value)
    assert key in str(refusal.value)


def test_a_profile_file_that_is_not_there_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(profiles.ProfileError, match=r"my-card\.toml cannot be read"):
        profiles.load(str(tmp_path / "my-card.toml"))


def test_a_calibrated_profile_of_ones_own_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_DEVICES", str(tmp_path))
    assert profiles.matching("NVIDIA GeForce RTX 3090").name == "rtx-3090"
    text = (ROOT / "profiles" / "devices" / "rtx-3090.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('source = "datasheet"', 'source = "calibrated today"'))
    mine = profiles.matching("NVIDIA GeForce RTX 3090")
    assert mine.source == "calibrated today"
    assert profiles.load(mine.name).source == "calibrated today"
    assert profiles.load("rtx-3090").source == "datasheet"


@pytest.mark.parametrize(("given", "folder"), [("PLANNER_DEVICES", "."), ("XDG_CONFIG_HOME", "torch-planner/devices")])
def test_ones_own_profiles_are_where_the_environment_says(given, folder, tmp_path, monkeypatch) -> None:
    for name in ("PLANNER_DEVICES", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert profiles.own_folder() == Path.home() / ".config" / "torch-planner" / "devices"
    monkeypatch.setenv(given, str(tmp_path))
    assert profiles.own_folder() == tmp_path / folder


@pytest.mark.parametrize(
    ("capability", "sm_count", "vram_gib", "similar"),
    [((8, 9), 26, 12, "4060"), ((8, 9), 120, 16, "4090"), ((8, 6), 85, 48, "3090"), ((7, 2), 8, 16, "V100")],
)
def test_a_card_that_no_file_claims_is_scaled_from_one_like_it(capability, sm_count, vram_gib, similar) -> None:
    facts = {"sm_count": sm_count, "max_threads_per_sm": 1536, "vram_bytes": vram_gib << 30}
    card = profiles.like(profiles.CardFacts(cuda_name="GeForce RTX 4070", compute_capability=capability, **facts))
    assert similar in card.source and "scaled" in card.source
    assert (card.title, card.sm_count, card.vram_bytes) == ("GeForce RTX 4070", sm_count, vram_gib << 30)
    assert card.context_bytes == modelled_context_bytes(sm_count)
    assert ("bf16" in card.native_dtypes) is (capability >= (8, 0))
    known = [profiles.load(name) for name in profiles.known() if similar.casefold() in name]
    scaled = [pytest.approx(profile.flops_per_s["fp32"] * sm_count / profile.sm_count) for profile in known]
    assert card.flops_per_s["fp32"] in scaled


def test_profiles_import_neither_torch_nor_the_other_rooms() -> None:
    code = (
        "import sys; from planner import profiles; profiles.matching('x');"
        "print(sorted({'torch', 'numpy', 'planner.rewrite', 'planner.pipeline'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
