"""Loads MODEL and calls the planner function that the options of the `plan` command select."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
import shlex
from collections.abc import Callable
from typing import Any

from planner import pipeline
from planner.advice import advised, refuse_hopeless
from planner.cli.option_checks import CARDS_LOOPS, names, option
from planner.cli.training_lines import LOOPS
from planner.default_batch import with_default_batch
from planner.errors import DecisionError, PlanFileError, WorkloadError
from planner.fewest_cards import plan_on_cards
from planner.files import reading
from planner.for_program import UNSUPPORTED, plan_for_program, terms_for
from planner.plan_types.adapter import Adapter
from planner.plan_types.answers import Answers, parse_answer
from planner.plan_types.constraints import Constraints, known_kinds, parse_constraints
from planner.plan_types.plan import Plan, TrainingProgram, names_code
from planner.plan_types.tradeoff import Tradeoff
from planner.profiles.device import DeviceProfile
from planner.progress import Watch
from planner.questions.largest_batch import largest_batch
from planner.questions.smallest_card import smallest_card
from planner.recompute.units import CHECKPOINT
from planner.replan import replan
from planner.rewrite.trainer.on_cards import LIBRARY
from planner.run_memory.lengths import read_lengths
from planner.space.sharding import Cards, several_cards
from planner.whole_run.request import RunRequest, plan_step_or_run
from planner.workload.batch_source import read_shapes
from planner.workload.budget import Budget, card_and_budget
from planner.workload.cards import resolve_card, with_allocator_options
from planner.workload.loading import load_callable, load_workload
from planner.workload.programs import PROGRAMS
from planner.workload.workload import Workload

_FIXED_BY_A_PLAN = (
    "batch_size seq_len dtype lora qlora dora optimizer fidelity force forbid only max_slowdown gradients_alive "
    "by_sample arguments input_shapes value batch_values tradeoff largest_batch smallest_card lengths "
    "pad_to_multiple_of eval_batch_size eval_samples between cards sharding mesh parallelize "
    "cards_per_node link offload_shards".split()
)
"""Options that cannot be combined with a saved plan, because the plan already fixes their values."""
_TRAINER_OPTIMIZERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "adamw_torch": ("adamw", ()),
    "adamw_torch_fused": ("adamw", ("optimizer-kernel",)),
    "adamw_8bit": ("adamw", ("8bit-optimizer",)),
    "adamw_bnb_8bit": ("adamw", ("8bit-optimizer",)),
}
"""For each name of an optimizer in the Trainer (`optim`): the planner's name, and the techniques that are forced."""


def answer(options: argparse.Namespace, watch: Watch) -> Plan | Tradeoff:
    """Return the plan or the trade-off that the options ask for.

    If MODEL is a saved plan, it is rehearsed again. Otherwise the answer is the fastest plan inside the budget, or that
    of --tradeoff, --largest-batch or --smallest-card.

    Raises:
        PlannerError: an option, the model or the file cannot be used; the message says what to change.
    """
    saved = _saved_plan(options.model)
    if saved is not None:
        _refuse_untrusted_code(saved, options)
        return _replan(saved, options, watch)
    watch.stage("loading the model")
    if options.margin is not None and options.vram is None and not options.smallest_card:
        raise WorkloadError("--margin needs a budget: give --vram, such as --vram 6GiB, or leave --margin out")
    _refuse_without_effect(options)
    options, checkpoints = _with_checkpointing_of_library(options)
    optimizer, kinds = _TRAINER_OPTIMIZERS.get(options.optimizer, (options.optimizer or "adamw", ()))
    asked_by = dict.fromkeys(kinds, f"--optimizer {options.optimizer}")
    _refuse_forced(options, optimizer)
    load = functools.partial(
        _load_noted,
        _allocator_notes(options),
        options.model,
        dtype=options.dtype,
        adapter=_adapter(options),
        optimizer=optimizer,
        gradients_alive=options.gradients_alive,
        arguments=options.arguments,
        by_sample=names([options.by_sample]) if options.by_sample else None,
        answers=Answers(values=dict(map(parse_answer, options.value)), worst_case=not options.batch_values),
        input_shapes=None if options.input_shapes is None else read_shapes(options.input_shapes),
        keep=not (options.no_cache or options.between or options.parallelize),
    )
    if options.loop in PROGRAMS:
        return _for_program(options, load, optimizer, asked_by, watch)
    constraints = _constraints(options, asked_by=asked_by, forbid=_unsupported(options, optimizer))
    if options.smallest_card:
        conf = with_allocator_options(resolve_card("generic", None), options.alloc_conf)[0].alloc_conf
        workload = load(batch_size=options.batch_size, seq_len=options.seq_len)
        settings = {"alloc_conf": conf, "cudnn_benchmark": options.cudnn_benchmark or None}
        return smallest_card(workload, constraints, watch, settings=settings)
    card, vram_bytes = _card_and_budget(options)
    load = functools.partial(load, choose=lambda workloads: pipeline.largest_step(workloads, card, watch))
    budget = None if vram_bytes is None else Budget.on(card, vram_bytes, margin=options.margin)

    def load_hopeful(samples: int | None, **settings: Any) -> Workload:
        """Loads the workload, and refuses a budget that cannot hold the model whatever the plan."""
        workload = load(batch_size=samples, **settings)
        if budget is not None and not options.tradeoff:
            refuse_hopeless(workload, card, budget, constraints)
        return workload

    if (cards := _cards(options, checkpoints)) is not None:
        workload = load(batch_size=options.batch_size, seq_len=options.seq_len)
        if options.batch_size is None and workload.batch_size == 1:  # the default of a transformers model
            if cards.fewest:
                raise WorkloadError("--cards fewest divides one batch among the cards: give its size with --batch-size")
            workload = load(batch_size=cards.parts, seq_len=options.seq_len)
        if options.parallelize is not None:
            workload = dataclasses.replace(workload, parallelize=load_callable(options.parallelize, again=False))
        return plan_on_cards(workload, card, cards, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    if options.largest_batch:
        assert vram_bytes is not None, "checked with the options"
        build = functools.partial(load_hopeful, seq_len=options.seq_len)
        return largest_batch(build, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    request = _run_request(options)
    seq_len = request.longest(options.seq_len) or options.seq_len

    def load_longest(samples: int | None) -> Workload:
        return load_hopeful(samples, seq_len=seq_len, masking=request.masking(samples, options.seq_len))

    workload = load_longest(options.batch_size)
    if budget is not None:
        workload = with_default_batch(workload, load_longest, card, budget, watch)
    masking = request.masking(workload.batch_size, options.seq_len)
    if options.tradeoff:
        return pipeline.tradeoff_workload(workload, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch)
    plan = plan_step_or_run(
        workload,
        card,
        vram_bytes=vram_bytes,
        constraints=constraints,
        request=request,
        at=lambda shape: load(batch_size=shape.samples, seq_len=shape.length, masking=masking),
        watch=watch,
    )
    if plan.run is not None:
        return plan  # what would help the run is part of the plan
    load = functools.partial(load, masking=masking)
    return advised(plan, workload, card, constraints=constraints, load=load, watch=watch)


def _cards(options: argparse.Namespace, checkpoints: bool | None) -> Cards | None:
    """Returns the cards that train together; None for one card.

    Args:
        checkpoints: as in `Cards`.
    """
    return several_cards(
        options.cards,
        mesh=options.mesh,
        parallelize=options.parallelize,
        way=options.sharding,
        offload=options.offload_shards,
        per_node=options.cards_per_node,
        link=options.link,
        prepared_by=LIBRARY if options.loop in CARDS_LOOPS else "",
        checkpoints=checkpoints,
    )


def _card_and_budget(options: argparse.Namespace) -> tuple[DeviceProfile, int | None]:
    """Returns the card with the options of the allocator that the user has set, and the budget in bytes."""
    card, vram_bytes = card_and_budget(options.gpu, options.vram)
    card = dataclasses.replace(card, cudnn_benchmark=options.cudnn_benchmark or None)
    return with_allocator_options(card, options.alloc_conf)[0], vram_bytes


def _allocator_notes(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns notes about the options of the allocator that the user has set."""
    return with_allocator_options(resolve_card(options.gpu or "generic", None), options.alloc_conf)[1]


def _load_noted(notes: tuple[str, ...], reference: str, **settings: Any) -> Workload:
    """Returns the workload that `load_workload` returns, with further notes."""
    workload = load_workload(reference, **settings)
    return dataclasses.replace(workload, notes=(*workload.notes, *notes))


def _run_request(options: argparse.Namespace) -> RunRequest:
    """Returns what the options say about the whole run."""
    return RunRequest(
        samples=() if options.lengths is None else tuple(read_lengths(options.lengths)),
        multiple=options.pad_to_multiple_of or 1,
        eval_batch_size=options.eval_batch_size,
        eval_samples=options.eval_samples or 0,
        between=names(options.between),
    )


def _is_by_library(options: argparse.Namespace) -> bool:
    """True if a library prepares the model for several cards."""
    return options.loop in CARDS_LOOPS and options.cards not in (None, 1)


def _with_checkpointing_of_library(options: argparse.Namespace) -> tuple[argparse.Namespace, bool | None]:
    """Returns the options of the search, and whether a library checkpoints all blocks, as in `Cards.checkpoints`.

    The technique is then not a part of the search, which would choose blocks one by one.
    """
    if not _is_by_library(options):
        return options, None
    force, forbid = known_kinds(names(options.force)), known_kinds(names(options.forbid))
    only = known_kinds(names(options.only)) if options.only else None
    if CHECKPOINT not in force:
        checkpoints = False if CHECKPOINT in forbid or (only is not None and CHECKPOINT not in only) else None
    elif CHECKPOINT in forbid:
        raise DecisionError(f"technique '{CHECKPOINT}' is forced and forbidden: leave it out of one of the options")
    else:
        checkpoints = True
    without = {"force": [kind for kind in force if kind != CHECKPOINT]}
    if only is not None:
        without["only"] = ["shard", *(kind for kind in only if kind != CHECKPOINT)]
    return argparse.Namespace(**{**vars(options), **without}), checkpoints


def _unsupported(options: argparse.Namespace, optimizer: str) -> tuple[str, ...]:
    """Returns the techniques that the loop of --for does not support.

    On several cards the Trainer and accelerate follow settings alone, as programs with a config do.
    """
    if options.loop is None:
        return ()
    if _is_by_library(options):
        kernels = () if optimizer == "adamw" else ("optimizer-kernel",)  # a name sets a kernel only for AdamW
        return (*UNSUPPORTED, *kernels)
    return LOOPS[options.loop]


def _refuse_forced(options: argparse.Namespace, optimizer: str) -> None:
    """Refuses --force with a technique that the loop of --for does not support."""
    unsupported = _unsupported(options, optimizer)
    if both := sorted(set(unsupported) & set(known_kinds(names(options.force)))):
        raise DecisionError(
            f"--force {both[0]} cannot be combined with --for {options.loop}, because this kind of training loop does "
            "not support the technique: leave one of them out, or use another loop, such as --for loop"
        )


def _for_program(
    options: argparse.Namespace,
    load: Callable[..., Workload],
    optimizer: str,
    asked_by: dict[str, str],
    watch: Watch,
) -> Plan:
    """Returns the plan for the config of axolotl or LLaMA-Factory."""
    card, vram_bytes = _card_and_budget(options)
    terms = terms_for(
        options.loop, options.model, card, adapter=_adapter(options), optimizer=optimizer, dtype=options.dtype
    )
    forbidden = (*LOOPS[options.loop], *terms.forbidden)
    asked_by = {**dict.fromkeys(terms.forced, f"--for {options.loop}"), **asked_by}
    constraints = _constraints(options, asked_by=asked_by, forbid=forbidden)
    budget = None if vram_bytes is None else Budget.on(card, vram_bytes, margin=options.margin)
    load = functools.partial(load, dtype=terms.dtype)

    def load_hopeful(program: TrainingProgram, batch_size: int | None) -> Workload:
        workload = load(batch_size=batch_size, seq_len=options.seq_len, program=program)
        if budget is not None:
            refuse_hopeless(workload, card, budget, constraints)
        return workload

    plain = TrainingProgram(name=options.loop, gradient_checkpointing=False)
    first = load_hopeful(plain, options.batch_size)
    if budget is not None:
        first = with_default_batch(first, functools.partial(load_hopeful, plain), card, budget, watch)

    def load_batch(program: TrainingProgram) -> Workload:
        """Loads the workload with the batch of the first one, and with its notes."""
        workload = load_hopeful(program, first.batch_size)
        return dataclasses.replace(workload, notes=tuple(dict.fromkeys((*workload.notes, *first.notes))))

    plan, workload = plan_for_program(
        options.loop, load_batch, card, vram_bytes=vram_bytes, constraints=constraints, watch=watch
    )
    load = functools.partial(load, program=workload.program)
    return advised(plan, workload, card, constraints=constraints, load=load, watch=watch)


def _constraints(options: argparse.Namespace, *, asked_by: dict[str, str], forbid: tuple[str, ...]) -> Constraints:
    """Returns what the options allow, with further techniques that are forbidden, or forced by the named options."""
    return parse_constraints(
        fidelity=options.fidelity or "rounded",
        force=names(options.force),
        forbid=(*names(options.forbid), *forbid),
        only=names(options.only) if options.only else None,
        max_slowdown=options.max_slowdown,
        margin=options.margin,
        asked_by=asked_by,
    )


def _adapter(options: argparse.Namespace) -> Adapter | None:
    """Returns the adapters that --lora or --qlora asks for."""
    text = options.qlora or options.lora
    if options.dora and text is None:
        raise WorkloadError("--dora works only with --lora or --qlora: add one of them, or leave --dora out")
    return None if text is None else Adapter.parsed(text, is_quantized=bool(options.qlora), is_dora=options.dora)


def _replan(saved: Plan, options: argparse.Namespace, watch: Watch) -> Plan:
    """Rehearse the saved plan again. --vram and --gpu replace the budget and the card of the saved plan."""
    for name in _FIXED_BY_A_PLAN:
        if getattr(options, name):
            raise WorkloadError(
                f"{option(name)} cannot be combined with a saved plan, which fixes the training step and its "
                f"decisions: leave {option(name)} out, or give the model instead of the plan"
            )
    _refuse_another_loop(saved, options)
    return replan(
        saved,
        vram=options.vram,
        gpu=options.gpu,
        margin=options.margin,
        alloc_conf=options.alloc_conf,
        cudnn_benchmark=options.cudnn_benchmark,
        watch=watch,
    )


def _refuse_another_loop(saved: Plan, options: argparse.Namespace) -> None:
    """Refuses a saved plan for another loop than the config that it was made for, and the other way round.

    Raises:
        PlanFileError: the message says for what the plan was made.
    """
    program = None if saved.model.program is None else saved.model.program.name
    wanted = options.loop if options.loop in PROGRAMS else None
    is_other = program != wanted and (wanted is not None or options.loop is not None or options.emit is not None)
    if is_other:
        made_for = f"for {program}" if program else "for a training loop in Python"
        remedy = f"give --for {program}, or plan" if program else "plan"
        raise PlanFileError(
            f"the plan was made {made_for}, and no other loop runs the same training step: {remedy} the model again "
            "with the --for that you want"
        )


def _refuse_without_effect(options: argparse.Namespace) -> None:
    """Refuses limits on a plan where there is none, since without a budget only the baseline is rehearsed.

    Raises:
        WorkloadError: the message names the option.
    """
    if options.vram is not None or options.smallest_card or options.tradeoff or options.cards:
        return
    for name in ("force", "max_slowdown"):
        if getattr(options, name):
            raise WorkloadError(
                f"{option(name)} has no effect without a budget: give --vram, such as --vram 6GiB, or leave it out"
            )


def _refuse_untrusted_code(saved: Plan, options: argparse.Namespace) -> None:
    """Refuses a saved plan whose model or own function is Python code, unless the user says that it may be run.

    Raises:
        PlanFileError: the message names the code, and says how to plan it again.
    """
    reference = saved.model.reference or ""
    divided_by = next((decision.dividing_function for decision in saved.decisions if decision.dividing_function), "")
    code = reference if names_code(reference) else divided_by
    if code and not options.trust_reference:
        raise PlanFileError(
            f"the plan '{options.model}' names the Python code '{code}', which runs when the plan is rehearsed "
            "again: give --trust-reference if you trust this file, or plan the model itself, as in plan "
            f"{shlex.quote(reference)}"
        )


def _saved_plan(reference: str) -> Plan | None:
    """Returns the saved plan if MODEL is the path of one, else None."""
    path = pathlib.Path(reference)
    if path.suffix.lower() != ".json" or not os.path.isfile(path):
        return None
    try:
        data = reading.json_data(path)
    except OSError as error:
        raise PlanFileError(f"'{path}' cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise PlanFileError(
            f"'{path}' is not JSON ({error}): give a transformers config.json or a saved plan"
        ) from error
    return Plan.from_json(data) if isinstance(data, dict) and "schema_version" in data else None
