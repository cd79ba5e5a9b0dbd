"""Planted faults: protections that were missing once, each with the lane of `tests/fuzz` that should miss them.

PLANNER_FUZZ_CASES=2000 python -m benchmarks.faults fuzz-
"""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_LANE = "tests/fuzz/test_fuzz.py::test_no_input_ends_in_a_traceback_a_hang_or_a_wrong_exit_code"


def _fault(name: str, kind: str, path: str, old: str, new: str, why: str) -> Fault:
    return Fault(name=f"fuzz-{name}", path=path, old=old, new=new, tests=(f"{_LANE}[{kind}]",), why=why)


FAULTS = (
    _fault(
        name="plan-fields",
        kind="plan",
        path="planner/plan_types/plan.py",
        old="    check_field_types(plan)\n",
        new="",
        why="fields of plan files have any type",
    ),
    _fault(
        name="plan-numbers",
        kind="value",
        path="planner/files/fields.py",
        old="    elif isinstance(value, float) and not math.isfinite(value):",
        new="    elif False:",
        why="numbers of plan files are infinite, or are no numbers",
    ),
    _fault(
        name="plan-names",
        kind="value",
        path="rewrite/emitter/quoted.py",
        old="    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):",
        new="    if False:",
        why="a plan file adds code to emitted files by the name of a model",
    ),
    _fault(
        name="plan-texts",
        kind="value",
        path="rewrite/emitted_code.py",
        old='            return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()',
        new="            return f'\"{value}\"'",
        why="a plan file adds code to emitted files by a text",
    ),
    _fault(
        name="snapshot-errors",
        kind="snapshot",
        path="planner/snapshot/file.py",
        old="    except _BROKEN_FILE as error:",
        new="    except EOFError as error:",
        why="damaged snapshots end in a traceback",
    ),
    _fault(
        name="state-is-lost",
        kind="state",
        path="rewrite/step_state/__init__.py",
        old="    refuse_mismatch(state, module, optimizer, scaler, scheduler, decisions)\n    with restored",
        new="    optimizer.state.clear()\n"
        "    refuse_mismatch(state, module, optimizer, scaler, scheduler, decisions)\n    with restored",
        why="the state of the optimizer is lost if the new one is refused",
    ),
    _fault(
        name="state-entries",
        kind="state",
        path="rewrite/step_state/optimizer_check.py",
        old="        _refuse_entry(entry, parameter, wanted or dict(optimizer.state.get(parameter, {})), where)\n",
        new="",
        why="moments of other shapes or dtypes are loaded",
    ),
    _fault(
        name="config-values",
        kind="config",
        path="planner/workload/transformers_models.py",
        old="    except Exception as error:  # configs are data from elsewhere, and their classes",
        new="    except ValueError as error:  #",
        why="wrong types in a config count as a bug of the planner",
    ),
    _fault(
        name="command-exit",
        kind="option",
        path="planner/cli/command.py",
        old="    except BaseException as error:\n        return _refuse(_refusal(error, watch)",
        new="    except Exception as error:\n        return _refuse(_refusal(error, watch)",
        why="code of the user's that exits decides the exit code",
    ),
    _fault(
        name="command-escapes",
        kind="option",
        path="planner/errors.py",
        old='letter if letter.isprintable() else " "',
        new="letter",
        why="names control the terminal",
    ),
)
