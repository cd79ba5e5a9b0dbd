"""Planted faults: recordings that are kept between calls."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_TEST = "tests/kept/test_kept_recordings.py"
_DEPENDS = f"{_TEST}::test_everything_on_which_a_recording_depends_is_part_of_its_identity"

FAULTS = (
    Fault(
        name="kept-in-another-environment",
        path="planner/kept/identity.py",
        old='        "environment": sorted(item for item in os.environ.items() if _VARIABLES.fullmatch(item[0])),\n',
        new="",
        tests=(_DEPENDS,),
        why="a recording is used under variables of the environment that change the kernels",
    ),
    Fault(
        name="kept-for-another-card",
        path="planner/kept/identity.py",
        old='        "card": repr(card),\n',
        new="",
        tests=(_DEPENDS,),
        why="a recording for one card is used for another",
    ),
    Fault(
        name="kept-for-other-frozen-parameters",
        path="planner/kept/identity.py",
        old=" {parameter.dtype} {parameter.requires_grad}",
        new=" {parameter.dtype}",
        tests=(_DEPENDS,),
        why="a recording is used for a model of which other parameters are trained",
    ),
    Fault(
        name="kept-after-a-source-file-has-changed",
        path="planner/kept/identity.py",
        old='        "files": list(_files(workload.model)),\n',
        new="",
        tests=(f"{_TEST}::test_a_changed_source_file_is_another_identity",),
        why="after an update of the model's code, plans are based on recordings of the old code",
    ),
    Fault(
        name="kept-with-code-of-the-user",
        path="planner/workload/own_step.py",
        old="    return workload.made_from is None or has_code or not",
        new="    return workload.made_from is None or not",
        tests=(f"{_TEST}::test_what_code_of_the_user_takes_part_in_is_not_kept",),
        why="a recording is used although the user's code may have changed",
    ),
    Fault(
        name="kept-in-a-copied-file",
        path="planner/kept/recordings.py",
        old="        if content.name != path.name:\n            return None\n",
        new="",
        tests=(f"{_TEST}::test_a_damaged_or_hostile_file_is_ignored",),
        why="the recording of another question is used if somebody renames its file",
    ),
    Fault(
        name="kept-for-other-attributes-of-modules",
        path="planner/kept/identity.py",
        old=" {attributes}",
        new="",
        tests=(_DEPENDS,),
        why="a recording is used for a config or an adapter that runs other ops with the same parameters",
    ),
    Fault(
        name="kept-although-other-code-has-run",
        path="planner/kept/identity.py",
        old='        "other code": list(_other_code()),\n',
        new="",
        tests=(f"{_TEST}::test_other_code_that_has_run_is_part_of_the_identity",),
        why="a recording is used although a sitecustomize.py has replaced the forward of a module since",
    ),
    Fault(
        name="kept-in-place-of-other-files",
        path="planner/files/cache.py",
        old=" if entry.suffix == suffix and entry.is_file()]",
        new="]",
        tests=(f"{_TEST}::test_other_files_and_linked_folders_are_left_alone",),
        why="files of the user's in the cache folder are removed",
    ),
    Fault(
        name="kept-for-other-questions",
        path="planner/kept/recordings.py",
        old="repr((self._identity, question))",
        new="repr((self._identity, question[:2]))",
        tests=(f"{_TEST}::test_questions_have_files_of_their_own_and_the_oldest_are_removed",),
        why="the recording of one split of the batch is used for another",
    ),
)
