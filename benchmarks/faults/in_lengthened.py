"""Planted faults: recordings of models with many identical layers."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_SEEN = "tests/derive/test_shortening.py::test_what_tells_one_layer_from_the_others_is_seen_in_the_baseline"

FAULTS = (
    Fault(
        name="lengthened-without-comparing-two-layers",
        path="planner/derive/lengthen.py",
        old="                if self._described(items[index], one) != self._described(items[same], other):",
        new="                if self._described(items[index], one) == ():",
        tests=("tests/derive/test_lengthen.py::test_layers_that_are_used_differently_or_together_are_not_lengthened",),
        why="layers that differ are copied as if they were alike",
    ),
    Fault(
        name="lengthened-with-one-backward-for-all-copies",
        path="planner/derive/layer_windows.py",
        old="self._lengths[passed] * (1 if passed.upwards else -1)",
        new="self._lengths[passed] * (1 if passed.upwards else 0)",
        tests=("tests/derive/test_lengthen.py::test_a_model_of_plain_layers_is_lengthened",),
        why="the layers that were left out run their backwards at the same time",
    ),
    Fault(
        name="lengthened-with-the-buckets-of-a-few-layers",
        path="planner/derive/shortening.py",
        old="    if any(way.divides_parameters_by == 1 for way in workload.sharding):",
        new="    if not workload.sharding and workload.batch_size == 0:",
        tests=("tests/derive/test_lengthen.py::test_recordings_with_buckets_of_gradients_have_all_layers",),
        why="the buckets of DistributedDataParallel hold the gradients of six layers only",
    ),
    Fault(
        name="lengthened-under-fsdp2-as-on-one-card",
        path="planner/derive/shortening.py",
        old="layer_runs(workload.model, KEPT_WHEN_GATHERED if is_gathered else KEPT)",
        new="layer_runs(workload.model, KEPT)",
        tests=("tests/derive/test_lengthen.py::test_a_recording_under_fsdp2_is_lengthened[llama-fsdp-micro-batches]",),
        why="six layers do not show what one more layer adds under FSDP2, so that all layers are recorded",
    ),
    Fault(
        name="lengthened-without-the-update-of-all-layers",
        path="planner/choose/recordings.py",
        old="        has_other = has_role(decisions, Role.OPTIMIZER) or self._may_be_lengthened(key)",
        new="        has_other = has_role(decisions, Role.OPTIMIZER)",
        tests=("tests/derive/test_shortening.py::test_the_search_gets_the_update_of_all_layers",),
        why="the search sees the update of six layers only",
    ),
    Fault(
        name="lengthened-whatever-the-baseline-shows",
        path="planner/derive/shortening.py",
        old="            is_same_step(with_all_layers(few, self.runs), whole) for few, whole in steps",
        new="            with_all_layers(few, self.runs) is not None for few, whole in steps",
        tests=(_SEEN,),
        why="layers that differ in the baseline are copied as if they were alike",
    ),
    Fault(
        name="lengthened-whatever-the-first-step-shows",
        path="planner/derive/shortening.py",
        old="        if full.ops_differ or short.ops_differ:",
        new="        if full.ops_differ and short.ops_differ:",
        tests=(f"{_SEEN}[more ops in its first call]",),
        why="a layer with more ops in its first call is copied, or left out, in recordings of a first step",
    ),
    Fault(
        name="lengthened-whatever-one-layer-changes",
        path="planner/derive/same_step.py",
        old="                    call.obstacle,\n",
        new="",
        tests=(f"{_SEEN}[it counts its calls]",),
        why="a layer that changes an attribute in its forward is recomputed by an exact plan",
    ),
    Fault(
        name="lengthened-whatever-hooks-one-layer-has",
        path="planner/derive/same_step.py",
        old="                    call.has_hooks,\n",
        new="",
        tests=(f"{_SEEN}[a forward hook]",),
        why="a recording omits the hook of one layer, or has this hook in every copied layer",
    ),
    Fault(
        name="lengthened-whatever-kernels-run",
        path="planner/derive/same_step.py",
        old="rest = op.shapes, op.kernel, op",
        new="rest = op.shapes, op",
        tests=(f"{_SEEN}[another kernel for equal shapes]",),
        why="layers whose kernels need other workspaces are copied as if they were alike",
    ),
    Fault(
        name="lengthened-whatever-the-layers-read",
        path="planner/derive/same_step.py",
        old="        return storage.size_bytes, storage.category, storage.name, storage.shape, storage.stream, lives",
        new="        return storage.size_bytes, storage.category, storage.shape, storage.stream, lives",
        tests=(f"{_SEEN}[it reads another tensor of the model]",),
        why="layers that read other tensors are copied as if they were alike",
    ),
    Fault(
        name="lengthened-with-other-numbers-of-parameters",
        path="planner/rewrite/rehearse.py",
        old="workload.model, lambda path: any(run.lacks(path) for run in runs))",
        new="workload.model)",
        tests=("tests/derive/test_shortening.py::test_recordings_with_an_optimizer_of_the_user_are_lengthened",),
        why="an optimizer object of the user gets other parameters of a shortened model, or none",
    ),
    Fault(
        name="lengthened-with-the-unscaling-of-a-few-layers",
        path="planner/derive/lengthen.py",
        old="            moved_bytes=op.moved_bytes + self._run.left_out * copied_bytes,",
        new="            moved_bytes=op.moved_bytes,",
        tests=("tests/derive/test_lengthen.py::test_the_lengthened_recording_is_the_recorded_one[gpt2-fp16]",),
        why="under fp16, the time to unscale the gradients of the layers that were left out is not counted",
    ),
    Fault(
        name="lengthened-with-tied-weights",
        path="planner/recording/repeats/layer_runs.py",
        old="    return all(places[parameter] == number for",
        new="    return all(places[parameter] >= number for",
        tests=(
            "tests/derive/test_shortening.py::test_layers_whose_parameters_are_used_elsewhere_or_have_hooks_are_all_recorded",
        ),
        why="a layer whose weight belongs to another module, too, is left out",
    ),
    Fault(
        name="lengthened-with-hooks-of-gradients",
        path="planner/recording/repeats/layer_runs.py",
        old="        parameter._backward_hooks or parameter._post_accumulate_grad_hooks for",
        new="        parameter._backward_hooks is parameter for",
        tests=(
            "tests/derive/test_shortening.py::test_layers_whose_parameters_are_used_elsewhere_or_have_hooks_are_all_recorded",
        ),
        why="a layer whose gradients have a hook is left out",
    ),
    Fault(
        name="lengthened-whatever-all-layers-show",
        path="planner/choose/recordings.py",
        old="                if longer is None or not is_same_step(full, longer):",
        new="                if full is not None and full.steps != 1:",
        tests=(
            "tests/derive/test_shortening.py::test_lengthened_recordings_are_dropped_if_another_precision_shows_a_difference",
        ),
        why="a difference between layers that only bf16 shows stays in the promises of plans",
    ),
    Fault(
        name="lengthened-whatever-the-certificate-says",
        path="planner/choose/fitting.py",
        old="    if not certified.is_as_promised and session.recordings.drop_if_wrong(certified.choice.decisions):",
        new="    if certified.is_as_promised and session.recordings.drop_if_wrong(certified.choice.decisions):",
        tests=(
            "tests/derive/test_shortening.py::test_a_plan_is_as_good_as_with_recordings_of_all_layers_if_another_precision_shows_a_difference",
        ),
        why="a plan is chosen by promises that its certificate has shown to be wrong",
    ),
    Fault(
        name="lengthened-unless-another-recording-cannot-be",
        path="planner/choose/recordings.py",
        old="            self._with_all_layers.add(part)",
        new="            self.shortening.end()",
        tests=(
            "tests/derive/test_shortening.py::test_a_recording_that_cannot_be_lengthened_does_not_keep_others_from_it",
        ),
        why="all recordings have all layers if one of them needs all",
    ),
    Fault(
        name="lengthened-whatever-was-recorded-before-the-baseline",
        path="planner/choose/recordings.py",
        old="            self.shortening.is_dropped = True",
        new="            self.shortening.is_dropped = False",
        tests=("tests/choose/test_head_start.py::test_recordings_of_the_guess_are_dropped_if_the_baseline_differs",),
        why="plans are based on recordings that the baseline has shown to be wrong",
    ),
    Fault(
        name="lengthened-without-a-second-search-for-the-tradeoff",
        path="planner/choose/fitting.py",
        old="        if session.recordings.is_dropped == was_dropped:",
        new="        if result is not None:",
        tests=(
            "tests/choose/test_background_certification.py"
            "::test_a_tradeoff_is_searched_again_if_a_search_within_it_drops_recordings",
        ),
        why="the trade-off keeps plans that are based on recordings which have been dropped",
    ),
    Fault(
        name="lengthened-without-the-update-of-a-gradient-scaler",
        path="planner/choose/recordings.py",
        old="        if not any(decision.needs_gradient_scaler for decision in update):",
        new="        if decisions:",
        tests=("tests/derive/test_shortening.py::test_the_search_gets_the_update_of_all_layers",),
        why="under fp16 the search sees an update without the gradient scaler",
    ),
    Fault(
        name="updates-in-backward-not-compared",
        path="planner/derive/same_step.py",
        old="begin, self._end = graph.step_starts[-1], graph.before_update_end",
        new="begin, self._end = graph.step_starts[-1], graph.update_tick or 0",
        tests=(
            "tests/derive/test_shortening.py::test_recordings_with_updates_inside_of_the_backward_are_compared_op_by_op",
        ),
        why="two recordings with updates inside of the backward are taken for equal, whatever they contain",
    ),
    Fault(
        name="updates-in-backward-recorded-in-all-layers",
        path="planner/choose/recordings.py",
        old="            and not has_role(decisions, Role.FREEZING)\n",
        new="            and not has_role(decisions, Role.FREEZING)\n"
        "            and not any(decision.steps_in_backward for decision in decisions)\n",
        tests=("tests/derive/test_shortening.py::test_recordings_with_updates_inside_of_the_backward_are_lengthened",),
        why="planning waits for a recording of all layers, which takes several times as long",
    ),
    Fault(
        name="lengthened-with-other-updates",
        path="planner/derive/shortening.py",
        old="    return all(other == first for other in others)\n",
        new="    return bool(others)\n",
        tests=(
            "tests/derive/test_shortening.py::test_layers_that_the_optimizer_updates_by_other_ops_are_all_recorded",
        ),
        why="the time of updates inside of the backward is that of other layers",
    ),
    Fault(
        name="extrapolated-but-not-lengthened",
        path="planner/choose/recordings.py",
        old="            return with_all_layers(graph, runs)",
        new="            return with_all_layers(graph, () if size else runs)",
        tests=("tests/derive/test_shortening.py::test_recordings_are_extrapolated_before_they_are_lengthened",),
        why="the search sees only a few layers of a model whose batch is split",
    ),
    Fault(
        name="too-many-recordings-in-memory",
        path="planner/derive/graph_cache.py",
        old="        while len(self._graphs) > 1 and ops > self._most_ops:",
        new="        while len(self._graphs) > 2 and ops > self._most_ops:",
        tests=("tests/derive/test_graph_cache.py::test_the_last_recording_is_kept_whatever_its_size",),
        why="planning a very deep model takes more memory than it has to",
    ),
    Fault(
        name="the-recording-in-use-leaves-memory",
        path="planner/derive/graph_cache.py",
        old="            self._graphs[key] = graph\n        return graph",
        new="            self._graphs = {key: graph, **self._graphs}\n        return graph",
        tests=("tests/derive/test_graph_cache.py::test_the_least_recently_used_recordings_are_dropped",),
        why="recordings that are in use are derived again and again",
    ),
    Fault(
        name="derived-recordings-in-a-cycle",
        path="planner/derive/graph_cache.py",
        old="        self._key = object()",
        new="        self._key = self",
        tests=("tests/derive/test_graph_cache.py::test_a_derived_recording_is_freed_without_garbage_collection",),
        why="the recordings of a session stay in memory until the next garbage collection",
    ),
    Fault(
        name="update-replaced-although-only-the-short-recording-allows-it",
        path="planner/choose/recordings.py",
        old="        step = self._step(parts, size)\n        if updates[0] is None:\n            return step\n",
        new="        if updates[0] is None:\n            return self._step(parts, size)\n"
        "        if all(can_be_grafted(self._result(part)) for part in parts):\n"
        "            step, update = self._step(parts, size), self._result(updates[0])\n"
        "            return lambda: graft_update(step(), update)\n",
        tests=(
            "tests/derive/test_shortening.py"
            "::test_the_update_is_kept_if_it_cannot_be_replaced_in_the_recording_of_all_layers",
        ),
        why="planning ends with an error if layers cannot be copied and their update is part of the backward",
    ),
)
