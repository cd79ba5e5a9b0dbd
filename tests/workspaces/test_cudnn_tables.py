"""The tables of cuDNN's workspaces, and the estimates for what they do not have."""

from __future__ import annotations

import dataclasses

import pytest

from planner import profiles
from planner.workspaces.cudnn import tables
from planner.workspaces.cudnn.convolution import Convolution, Kind, Shape
from planner.workspaces.cudnn.fallback import CLOSE, estimated_bytes, scaled_workspaces
from planner.workspaces.cudnn.sources import Source, workspaces
from planner.workspaces.cudnn.versions import PINNED, expected

pytestmark = pytest.mark.no_torch

NEWEST = max(PINNED.values())
RECORDED = {
    "forward": {"1,30,256,256/16,30": 82_880, "1,16,128,128/32,16": 51_328, "1,32,64,64/64,32": 205_056},
    "grad_input": {"1,30,256,256/16,30": 50_168, "1,16,128,128/32,16": 84_032, "1,32,64,64/64,32": 204_928},
}
"""Bytes of the blocks of `run_conv_plan` in a public recording of the allocator, by image and weight (3 x 3).

JasperSolt/EoR_NN, snapshot.pickle of February 2025, fp32, padding 1. The sizes follow from the blocks before and the
model's config (30 channels of 256 x 256 pixels; 16, 32 and 64 output channels). Card and versions are not stated.
"""


@pytest.mark.parametrize("operation", RECORDED)
def test_workspaces_are_those_of_a_public_recording(operation):
    """With the nearest version to that of early 2025, on a card of a common capability."""
    wanted = {
        Convolution.of(f"{operation}:float32:tf32 {sizes},3,3/1,1/1,1/1,1"): size
        for sizes, size in RECORDED[operation].items()
    }
    found = workspaces(wanted, (8, 6), "2.6.0")
    assert {each: answer.size_bytes for each, answer in found.items()} == wanted
    assert {(each.source, each.is_exact) for each in found.values()} == {(Source.TABLE, False)}


def test_each_version_that_pytorch_requires_has_a_table_and_each_card_an_answer():
    assert set(tables.versions()) == set(PINNED.values())
    wanted = Convolution.of("forward:float16 32,64,56,56/64,64,3,3/1,1/1,1/1,1")
    for name in profiles.known():
        capability = profiles.load(name).compute_capability
        assert expected("2.13.0", capability).version in (NEWEST, (9, 10, 2))
        (answer,) = workspaces([wanted], capability, "2.13.0").values()
        assert answer.source is Source.TABLE and answer.is_exact, (name, capability)


def test_a_table_says_how_it_was_made_and_its_lines_have_all_columns():
    table = tables.load(NEWEST)
    assert len(table.lines) > 1000 and len(table.kinds) == 21
    for text in list(table.lines)[::50]:
        assert Shape.of(text).text == text
        columns = table.lines[text].split(" ")
        assert len(columns) == len(table.capabilities)
        assert {len(column.split(",")) for column in columns} == {len(table.kinds)}


def test_a_card_without_a_column_has_that_of_the_capability_below_it():
    table = tables.load(NEWEST)
    assert table.nearest((8, 7)) == (8, 6) and table.nearest((10, 3)) == (10, 0) and table.nearest((7, 2)) == (7, 5)
    wanted = Convolution.of("forward:float32:tf32 32,64,56,56/64,64,3,3/1,1/1,1/1,1")
    (answer,) = workspaces([wanted], (8, 7), "2.13.0").values()
    assert answer.source is Source.TABLE and not answer.is_exact


def test_a_table_keeps_the_sizes_that_differ_and_that_the_last_is_nothing():
    """PyTorch tries them one after another where there is too little memory."""
    many = [(1000, 990, 500, 0), (0,), (), (4096, 2048), (7, 0)]
    assert tables.written(many) == "1000>500,,-,4096>2048!,7"
    read = [tables.read_item(item) for item in tables.written(many).split(",")]
    assert read == [(1000, 500, 0), (0,), (), (4096, 2048), (7, 0)]


def test_a_table_of_all_algorithms_keeps_the_largest_of_the_first_ones_and_what_is_larger():
    """PyTorch compares the times of the first ten; the others only decide how much memory the search takes."""
    many = [(90, 100, 0, *[50] * 8, 400, 390, 99), (0,) * 12, (), (8, 8)]
    assert tables.written(many, benchmark=True) == "100>50|400,|,-,8!|"
    read = [tables.read_item(item) for item in "100>50|400,|,-,8!|".split(",")]
    assert read == [(100, 50, *[0] * 8, 400), (0,) * 10, (), (8,) * 10]


def test_the_algorithm_that_the_heuristics_take_is_among_those_that_are_compared():
    usual, searched = tables.load(NEWEST), tables.load(NEWEST, benchmark=True)
    for capability in searched.capabilities:
        for shape in list(searched.lines)[::40]:
            for kind in map(Kind.of, usual.kinds):
                taken = usual.workspaces(Convolution(kind, Shape.of(shape)), capability)
                question = Convolution(dataclasses.replace(kind, benchmark=True), Shape.of(shape))
                compared = searched.workspaces(question, capability)[:10]
                assert bool(compared) is bool(taken) and max(compared, default=0) >= max(taken, default=0)


def test_deterministic_convolutions_without_a_library_are_estimated_from_those_of_all_algorithms():
    wanted = Convolution.of("grad_weight:float16:deterministic 32,64,56,56/64,64,3,3/1,1/1,1/1,1")
    usual = Convolution.of("grad_weight:float16 32,64,56,56/64,64,3,3/1,1/1,1/1,1")
    found = workspaces([wanted, usual], (8, 0), "2.13.0")
    assert found[wanted].sizes == found[usual].sizes
    assert (found[wanted].source, found[wanted].is_exact, found[usual].is_exact) == (Source.TABLE, False, True)


def test_another_batch_size_is_scaled_by_the_bytes_of_the_tensors():
    table = tables.load(NEWEST)
    known, wanted = (
        Convolution.of(f"forward:float16 {samples},64,56,56/64,64,3,3/1,1/1,1/1,1") for samples in (32, 31)
    )
    sizes = table.workspaces(known, (8, 0))
    assert sizes[0] and table.with_other_batches(wanted)[0] == known and not table.workspaces(wanted, (8, 0))
    assert scaled_workspaces(wanted, table, (8, 0)) == pytest.approx([size * 31 / 32 for size in sizes], rel=0.01)
    (answer,) = workspaces([wanted], (8, 0), "2.13.0").values()
    assert (answer.source, answer.sizes) == (Source.SCALED, scaled_workspaces(wanted, table, (8, 0)))
    assert scaled_workspaces(Convolution.of("forward:float16 1,2,9,9/3,2,2,2/1,1/0,0/1,1"), table, (8, 0)) == ()


SIZES = "8,3,32,32/16,3,3,3/1,1/1,1/1,1"
X, W, Y = 8 * 3 * 32 * 32, 16 * 3 * 3 * 3, 8 * 16 * 32 * 32


@pytest.mark.parametrize(
    ("kind", "capability", "elements"),
    [
        ("forward:float16", (8, 0), X + W + Y),
        ("grad_weight:bfloat16", (7, 5), X + W + Y),
        ("forward:bfloat16:channels_last", (8, 0), 0),
        ("forward:float32", (8, 0), 0),
        ("forward:float32:tf32", (7, 5), 0),  # the card has no TF32
        ("forward:float32:tf32", (8, 0), X + W),
        ("grad_input:float32:tf32", (8, 6), X + W + Y),
        ("forward:float32:tf32:channels_last", (8, 9), X + W),
        ("grad_input:float32:tf32:channels_last", (12, 0), Y + W),
        ("grad_weight:float32:tf32:channels_last", (8, 0), X + Y),
        ("forward:float32:tf32", (9, 0), X + W + Y),
        ("grad_weight:float32:tf32:channels_last", (9, 0), 0),
        ("forward:float64", (9, 0), 0),
        ("forward:float16", (6, 1), 0),  # nor tensor cores
        ("grad_input:float32:tf32:channels_last", (7, 5), X + W + Y),
    ],
)
def test_the_formula_counts_the_copies_that_tensor_cores_need(kind, capability, elements):
    convolution = Convolution.of(f"{kind} {SIZES}")
    assert estimated_bytes(convolution, capability) == convolution.nbytes((elements,))


@pytest.mark.parametrize("version", sorted(set(PINNED.values())))
def test_half_of_the_estimates_are_as_close_as_the_notes_say(version):
    table = tables.load(version)
    errors = []
    for text in list(table.lines)[::17]:
        shape = Shape.of(text)
        for kind in map(Kind.of, table.kinds):
            convolution = Convolution(kind, shape)
            whole = sum(convolution.nbytes(sizes) for sizes in (shape.x, shape.y, shape.w))
            for capability in table.capabilities:
                if sizes := table.workspaces(convolution, capability):
                    errors.append(abs(estimated_bytes(convolution, capability) - sizes[0]) / whole)
    assert sum(error <= CLOSE for error in errors) > len(errors) / 2
