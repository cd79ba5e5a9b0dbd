"""Options of the allocator are read as PyTorch reads them: PyTorch's own parser is asked about the same texts."""

import itertools
import json
import subprocess
import sys

import pytest
import torch

from planner.allocator.options import given_options, settings_of
from planner.errors import WorkloadError
from planner.plan_types.decision_base import allocator_conf, allocator_variable_in, changed_options, options_in
from planner.plan_types.decisions import Allocator
from planner.plan_types.sizes import MIB

ACCEPTED = [
    "",
    "expandable_segments:True",
    "expandable_segments:False,",
    "max_split_size_mb:20",
    " max_split_size_mb : 6 4 ",
    "max_split_size_mb:64MB",
    "max_split_size_mb:-1",
    "max_split_size_mb:64,max_split_size_mb:128",
    "max_non_split_rounding_mb:30",
    "large_segment_size_mb:40,max_split_size_mb:40",
    "garbage_collection_threshold:0.8",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[1:8,64:0]",
    "roundup_power2_divisions:[]",
    "pinned_use_background_threads:True",
]
REFUSED = [
    "expandable_segments:true",
    "expandable_segments",
    "expandable_segments=True",
    "max_split_size_mb:19",
    "max_split_size_mb:much",
    "max_split_size_mb:",
    "max_split_size_mb:30,large_segment_size_mb:40",
    "max_non_split_rounding_mb:10",
    "large_segment_size_mb:10",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[256:1,512:3]",
    "roundup_power2_divisions:[100:4]",
    "roundup_power2_divisions:[64:8",
]
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
VALUES = ((None, "", "max_split_size_mb:64"), (None, "max_split_size_mb:32"), (None, "max_split_size_mb:128"))
ENVIRONMENTS = [dict(zip(VARIABLES, values, strict=True)) for values in itertools.product(*VALUES)]


def in_torch(code):
    """Runs code in a new process, and returns what it prints as JSON."""
    command = [sys.executable, "-c", f"import json, os, torch\n{code}"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_pytorch_accepts_and_refuses_the_same_texts():
    code = f"""
found = []
for text in {ACCEPTED + REFUSED!r}:
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        found.append(text)
    except (ValueError, RuntimeError):
        pass
print(json.dumps(found))
"""
    assert in_torch(code) == ACCEPTED


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_pytorch_accepts_is_read(text):
    conf, _ = given_options(text, {}, torch.__version__)
    assert settings_of(conf) == settings_of(text)


@pytest.mark.parametrize("text", REFUSED)
def test_what_pytorch_refuses_is_refused_with_the_name_of_the_option(text):
    with pytest.raises(WorkloadError, match=text.partition(":")[0].partition("=")[0]):
        given_options(text, {}, torch.__version__)


@pytest.mark.slow
@pytest.mark.thorough
def test_pytorch_reads_the_same_variable():
    """PyTorch reads the variables when it is first asked: each child of one process asks with other variables."""
    present = [
        {name: value for name, value in environment.items() if value is not None} for environment in ENVIRONMENTS
    ]
    code = f"""
found = []
for environment in {present!r}:
    reader, writer = os.pipe()
    if not os.fork():
        for name in {VARIABLES!r}:
            os.environ.pop(name, None)
        os.environ.update(environment)
        os.write(writer, torch._C._accelerator_getAllocatorSettings().encode())
        os._exit(0)
    os.wait()
    os.close(writer)
    found.append(os.read(reader, 10_000).decode())
print(json.dumps(found))
"""
    assert in_torch(code) == [allocator_variable_in(environment)[1] for environment in present]


def test_the_variable_with_the_former_name_counts_even_if_it_is_empty():
    both = {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    conf, notes = given_options(None, both, "2.13.0")
    assert conf == "" and "ignores PYTORCH_ALLOC_CONF=expandable_segments:True" in notes[0]
    assert given_options(None, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "2.13.0") == (
        "expandable_segments:True",
        ("allocator options of this process (PYTORCH_ALLOC_CONF): expandable_segments:True",),
    )
    assert given_options("", both, "2.13.0") == ("", ())


def test_settings_have_the_values_of_the_text():
    found = settings_of(
        "max_split_size_mb:128,max_non_split_rounding_mb:30,large_segment_size_mb:40,expandable_segments:True,"
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.25,roundup_power2_divisions:[2:4,8:2,>:8]",
        card_bytes=1000 * MIB,
    )
    assert found.max_split_size_bytes == 128 * MIB and found.max_non_split_rounding_bytes == 30 * MIB
    assert found.large_segment_bytes == 40 * MIB and found.expandable_segments
    assert found.garbage_collection_threshold == 0.5 and found.allowed_bytes == 250 * MIB
    assert found.roundup_power2_divisions == (4, 4, 0, *(8,) * 13)


@pytest.mark.parametrize(
    ("text", "version", "message"),
    [
        ("unknown:1", "2.13.0", "the option 'unknown', which PyTorch does not know"),
        ("throw_on_cudamalloc_oom:True", "2.11.0", "torch 2.11.0 does not know.*2.12 or newer"),
        ("pinned_max_cached_size_mb:1", "2.12.0+cpu", "2.13 or newer"),
        ("backend:cudaMallocAsync", "2.13.0", "whose memory is not simulated.*--gpu bare"),
        ("backend:other", "2.13.0", "backend:other, which PyTorch refuses"),
        ("pinned_free_catch_all:yes", "2.13.0", "pinned_free_catch_all:yes"),
        ("pinned_num_register_threads:many", "2.13.0", "pinned_num_register_threads:many"),
        ("per_process_memory_fraction:2", "2.13.0", "per_process_memory_fraction:2"),
    ],
)
def test_unknown_options_and_those_of_other_versions_are_refused(text, version, message):
    with pytest.raises(WorkloadError, match=message):
        given_options(text, {}, version)


def test_options_of_a_plan_come_to_those_of_the_user():
    expandable, split = Allocator(expandable_segments=True), Allocator(max_split_size_mb=512)
    given = "roundup_power2_divisions:[256:1,512:2],max_split_size_mb:64"
    assert allocator_conf([expandable], given) == f"{given},expandable_segments:True"
    assert allocator_conf([split], given) == "roundup_power2_divisions:[256:1,512:2],max_split_size_mb:512"
    assert changed_options([split], given) == {"max_split_size_mb": "512"} and not changed_options([expandable], given)
    assert options_in(" a:1, b:[2:3,4:5] ,a:6") == {"b": "[2:3,4:5]", "a": "6"}
