"""Faults in the training on several cards."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_TRUTH = "tests/ranks/test_rank_truth.py::test_each_storage_is_born_and_dies_as_in_real_processes"
_PARITY = "tests/ranks/test_rank_parity.py::test_several_cards_train_as_one_does"

_ONCE = "tests/ranks/test_reduced_once.py"
_KEPT = "tests/ranks/test_kept_units.py"

_NCCL = "tests/ranks/test_nccl_memory.py"
_UNITS, _ACCELERATE = "tests/ranks/test_accelerate_units.py", "tests/ranks/test_accelerate_truth.py"

FAULTS = [
    Fault(
        name="accelerate-gathers-embeddings-with-the-rest",
        path="planner/space/accelerate_units.py",
        old="        units.append(paths[id(given)])\n",
        new="        pass\n",
        tests=(f"{_UNITS}::test_units_are_those_that_accelerate_makes",),
        why="a plan gathers the input embeddings at another time than accelerate",
    ),
    Fault(
        name="accelerate-recomputes-dropout",
        path="planner/checkpointed_ways.py",
        old="if op.draws_random_numbers}",
        new="if op.draws_random_numbers and not op.module}",
        tests=(f"{_UNITS}::test_blocks_with_dropout_are_not_checkpointed_with_fsdp",),
        why="accelerate recomputes dropout with another mask, so that gradients are wrong",
    ),
    Fault(
        name="accelerate-keeps-the-gradients-of-micro-batches",
        path="rewrite/trainer/on_cards.py",
        old='{"sync_each_batch": True}',
        new='{"sync_each_batch": False}',
        tests=(f"{_UNITS}::test_both_libraries_read_what_the_plan_says",),
        why="each card keeps the gradients of the whole model until the last micro-batch, which was not planned",
    ),
    Fault(
        name="gradients-reduced-once-are-reduced-in-each-micro-batch",
        path="rewrite/rules/shard.py",
        old="        rewriting.no_sync = functools.partial(_without_reduction, model)\n",
        new="        pass\n",
        tests=(f"{_TRUTH}[FSDP2, reduced once]", f"{_ONCE}::test_only_the_last_micro_batch_reduces_gradients[fsdp]"),
        why="each micro-batch waits for a reduce-scatter that was not planned",
    ),
    Fault(
        name="micro-batches-with-whole-gradients-are-not-rehearsed",
        path="rewrite/rehearse.py",
        old="(last == size and not reduces_once)",
        new="last == size",
        tests=("tests/rewrite/test_application.py::test_every_size_of_a_micro_batch_is_rehearsed[2-5-rehearsed4]",),
        why="between the first and the last micro-batch all gradients are whole, and that memory is not counted",
    ),
    Fault(
        name="accelerate-with-autocast",
        path="planner/space/search_space.py",
        old="without_autocast=bool(library))",
        new="without_autocast=False)",
        tests=(f"{_UNITS}::test_precision_is_that_of_accelerate",),
        why="FSDP2 is planned under autocast, which accelerate does not use there",
    ),
    Fault(
        name="accelerate-has-gradients-in-buckets",
        path="rewrite/rules/shard.py",
        old="DistributedDataParallel(rewriting.model, gradient_as_bucket_view=not decision.prepared_by)",
        new="DistributedDataParallel(rewriting.model, gradient_as_bucket_view=True)",
        tests=(f"{_ACCELERATE}::test_copies_of_the_model_take_the_planned_memory",),
        why="accelerate's DistributedDataParallel holds gradients twice: next to its buckets and in them",
    ),
    Fault(
        name="accelerate-frees-the-last-norm-and-the-head",
        path="rewrite/rules/shard.py",
        old='units.append((decision.tail, {"reshard_after_forward": False}))',
        new='units.append((decision.tail, {"reshard_after_forward": True}))',
        tests=(f"{_ACCELERATE}::test_accelerate_trains_the_planned_step[FSDP2]",),
        why="the last unit is freed after its forward, where accelerate keeps it until backward",
    ),
    Fault(
        name="nccl-takes-no-memory",
        path="profiles/device.py",
        old="        return self.context_bytes + self.nccl_bytes\n",
        new="        return self.context_bytes\n",
        tests=(f"{_NCCL}::test_the_allocator_gets_the_budget_without_nccl",),
        why="a plan promises that a step fits whose communicators need the memory that it uses",
    ),
    Fault(
        name="nccl-has-one-communicator-for-a-mesh",
        path="planner/plan_types/decisions.py",
        old="return 1 if len(self.mesh) == 1 else 1 + len(self.mesh)",
        new="return 1",
        tests=(f"{_NCCL}::test_each_dimension_of_a_mesh_has_a_communicator_next_to_that_of_all_cards",),
        why="with hybrid sharding two of three communicators take no memory",
    ),
    Fault(
        name="kept-units-take-no-memory",
        path="planner/recompute/holds.py",
        old='            pieces[storage].append((start, stop, "unless", (unit,)))\n',
        new="            pass\n",
        tests=(f"{_KEPT}::test_any_kept_units_have_the_predicted_peak",),
        why="parameters that stay gathered between forward and backward are not counted",
    ),
    Fault(
        name="kept-units-cost-nothing-to-gather",
        path="planner/recompute/repeated_gathers.py",
        old="        for op in unit.ops:\n",
        new="        for op in ():\n",
        tests=(f"{_KEPT}::test_a_step_that_gathers_once_has_the_time_and_the_bytes_of_its_recording",),
        why="no unit seems to save time by staying gathered",
    ),
    Fault(
        name="kept-units-only-of-the-first-micro-batch",
        path="planner/recompute/repeated_gathers.py",
        old="seen.add((op.micro_batch, unit))\n            continue\n",
        new="seen.update((other, unit) for other in range(9))\n            continue\n",
        tests=(f"{_KEPT}::test_each_micro_batch_gathers_anew",),
        why="the first gather of a micro-batch is taken for one that a kept unit does not need",
    ),
    Fault(
        name="rank-keeps-unsharded-parameters",
        path="planner/recording/collectives.py",
        old="                self._table.resized(storage)\n",
        new="                pass\n",
        tests=(f"{_TRUTH}[FSDP2]",),
        why="the gathered parameters of each unit seem to live for ever",
    ),
    Fault(
        name="rank-counts-global-shapes",
        path="planner/recording/collectives.py",
        old='"_propagate_tensor_meta_non_cached", unseen(propagate)',
        new='"_propagate_tensor_meta_non_cached", propagate',
        tests=(f"{_TRUTH}[FSDP2]",),
        why="fakes of whole parameters, by which DTensor finds shapes, count as memory of the optimizer",
    ),
    Fault(
        name="rank-pads-shards-twice",
        path="planner/virtual_gpu/ranks.py",
        old="    _let_shards_stay()\n",
        new="",
        tests=(f"{_TRUTH}[FSDP2, uneven shards]",),
        why="uneven shards are allocated a second time in the first forward",
    ),
    Fault(
        name="rank-on-one-stream",
        path="planner/estimate/allocation_stream.py",
        old="    return {block: stream for block, stream in enumerate(of_lives) if stream}\n",
        new="    return {}\n",
        tests=("tests/ranks/test_rank_plans.py::test_the_allocator_keeps_the_blocks_of_streams_apart",),
        why="a free block of the communication stream serves the computation, so that less memory is reserved",
    ),
    Fault(
        name="rank-weighs-ranks-alike",
        path="rewrite/step.py",
        old="share = None if self._rank_share is None else self._rank_share(batch)",
        new="share = None",
        tests=(f"{_PARITY}[llama, FSDP2]",),
        why="a rank with few labels weighs as much as one with many",
    ),
    Fault(
        name="rank-optimizer-holds-old-parameters",
        path="rewrite/rules/shard.py",
        old="after[name] for name in before})\n    if decision.reduces",
        new="after[name] for name in ()})\n    if decision.reduces",
        tests=("tests/ranks/test_rank_plans.py::test_an_optimizer_that_was_made_before_trains_the_shards",),
        why="the optimizer updates tensors that the model does not use, and nothing is trained",
    ),
    Fault(
        name="rank-divides-parameters-of-copies",
        path="planner/plan_types/decisions.py",
        old='self.mesh[-1] if self.way == "fsdp" else 1\n',
        new="self.mesh[-1]\n",
        tests=("tests/ranks/test_rank_plans.py::test_copies_of_the_model_hold_all_parameters",),
        why="DistributedDataParallel seems to divide the parameters among the cards",
    ),
    Fault(
        name="rank-all-reduce-sends-once",
        path="planner/estimate/lanes.py",
        old='    rounds = 2 if "all_reduce" in collective.kind or "allreduce" in collective.kind else 1\n',
        new="    rounds = 1\n",
        tests=("tests/estimate/test_lanes.py::test_a_collective_takes_its_latency_and_the_bytes_that_it_sends",),
        why="an all-reduce seems to take half of its time, so that copies of the model look faster than they are",
    ),
]
