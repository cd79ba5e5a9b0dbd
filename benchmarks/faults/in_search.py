"""Planted faults: what may be recomputed, the search, and the choice of plans."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

_REPAIR = "tests/search/test_repair.py"

FAULTS = (
    Fault(
        name="certificates-of-steps-that-cannot-fit",
        path="planner/choose/chooser.py",
        old="candidate.may_fit_with(update, budget_bytes, below_ns=None, recompute=False)\n",
        new="True\n",
        tests=(
            "tests/choose/test_certificates.py"
            "::test_the_certificate_of_a_chunked_loss_is_started_while_its_step_is_recorded",
        ),
        why="a core rehearses a step that exceeds the budget, while the search waits for recordings",
    ),
    Fault(
        name="certificates-of-chunked-losses-come-late",
        path="planner/choose/chooser.py",
        old="counts_logits=not in_chunks",
        new="counts_logits=True",
        tests=(
            "tests/choose/test_certificates.py"
            "::test_the_certificate_of_a_chunked_loss_is_started_while_its_step_is_recorded",
        ),
        why="the certificate of the plan is started when its recording is finished, and a core is idle before",
    ),
    Fault(
        name="certificates-keep-what-was-foreseen",
        path="planner/choose/certificates.py",
        old="            self.forget()\n            self._begun",
        new="            self._begun",
        tests=("tests/choose/test_certificates.py::test_what_was_begun_ends_what_was_foreseen",),
        why="a core rehearses a step whose certificate is not needed, until the plan is known",
    ),
    Fault(
        name="certificates-forget-the-best-plan",
        path="planner/choose/certificates.py",
        old="decisions in (None, self._ahead[0])",
        new="True",
        tests=("tests/choose/test_certificates.py::test_only_the_named_rehearsal_is_forgotten",),
        why="the certificate of the best plan is started again and again",
    ),
    Fault(
        name="certificates-end-the-fallback",
        path="planner/choose/certificates.py",
        old="        foreseen = self._foreseen(decisions)\n        self._end_begun()\n",
        new="        foreseen = self._foreseen(decisions)\n        self.close()\n",
        tests=("tests/choose/test_certificates.py::test_only_close_ends_a_rehearsal_in_the_background",),
        why="no plan is known early, because the next certificate ends the rehearsal of the fallback",
    ),
    Fault(
        name="fallback-takes-a-core",
        path="planner/virtual_gpu/forked_process.py",
        old="            lower_priority(self._pid)\n",
        new="            pass\n",
        tests=("tests/choose/test_fallback.py::test_its_process_has_a_low_priority",),
        why="planning takes longer, because the fallback competes for cores with recordings that the search waits for",
    ),
    Fault(
        name="fallback-although-no-recompute-is-needed",
        path="planner/choose/head_start.py",
        old="if candidate.peak_bytes > guessing.budget.tensor_bytes:",
        new="if True:",
        tests=("tests/choose/test_fallback.py::test_it_is_not_begun_if_it_cannot_help",),
        why="the fallback is rehearsed although the step fits without recompute",
    ),
    Fault(
        name="fallback-that-cannot-fit",
        path="planner/choose/head_start.py",
        old="if config is None or guessing.lower_bound_bytes(config) > guessing.budget.tensor_bytes:",
        new="if config is None:",
        tests=("tests/choose/test_fallback.py::test_it_is_not_begun_if_it_cannot_help",),
        why="the fallback is rehearsed although parameters, gradients and state alone exceed the budget",
    ),
    Fault(
        name="fallback-checkpoints-what-must-not-run-twice",
        path="planner/recompute/units.py",
        old="found = _candidates(graph, windows_of(graph), kinds, excluded)",
        new="found = dict.fromkeys((call.module, call.segment) for call in graph.calls)",
        tests=("tests/recompute/test_pitfalls.py::test_modules_that_may_be_checkpointed_are_known_without_the_units",),
        why="a plan that is returned when the time is up runs a forward twice although that changes the training",
    ),
    Fault(
        name="fallback-is-not-noted",
        path="planner/pipeline.py",
        old="with session.watch.meanwhile(fallback.advance):",
        new="with contextlib.nullcontext():",
        tests=(
            "tests/choose/test_fallback.py::test_it_is_reported_before_the_search_ends_and_changes_no_plan",
            "tests/choose/test_fallback.py::test_it_is_the_plan_if_the_time_is_up",
        ),
        why="planning that ends early returns no plan, although the fallback fits and is certified",
    ),
    Fault(
        name="fallback-hides-errors-of-the-users-function",
        path="planner/choose/head_start.py",
        old="                certified = self._certified(choice)\n",
        new="                self._session.note(self._certified(choice), self._constraints)\n",
        tests=("tests/choose/test_fallback.py::test_an_error_of_the_function_that_receives_progress_ends_planning",),
        why="an error of the user's function that receives progress is lost",
    ),
    Fault(
        name="fallback-checkpoints-inside-of-checkpoints",
        path="planner/recompute/units.py",
        old="if module not in nested)",
        new="if module)",
        tests=(
            "tests/recompute/test_pitfalls.py"
            "::test_modules_that_are_called_by_other_ones_are_not_checkpointed_together_with_them",
        ),
        why="modules inside of recomputed modules are recomputed twice",
    ),
    Fault(
        name="fallback-is-rehearsed-twice",
        path="planner/choose/certificates.py",
        old="decisions in self._cached or decisions in self._begun or decisions in self._in_background",
        new="decisions in self._cached or decisions in self._begun",
        tests=("tests/choose/test_certificates.py::test_only_close_ends_a_rehearsal_in_the_background",),
        why="the search begins the rehearsal of the fallback a second time",
    ),
    Fault(
        name="plans-of-wrong-recordings-are-known",
        path="planner/choose/planning_session.py",
        old="known = [*self._plans[self.recordings.is_dropped], *(",
        new="known = [*self._plans[False], *(",
        tests=("tests/choose/test_fallback.py::test_plans_that_follow_from_wrong_recordings_are_forgotten",),
        why="when the time is up, a plan is returned that may recompute a module which must not run twice",
    ),
    Fault(
        name="fallback-of-wrong-recordings-is-noted",
        path="planner/choose/head_start.py",
        old="            self._possible = self._choice = None\n",
        new="            pass\n",
        tests=("tests/choose/test_fallback.py::test_it_is_not_noted_after_recordings_were_dropped",),
        why="when the time is up, the fallback is returned although it may recompute a module which must not run twice",
    ),
    Fault(
        name="tradeoff-without-small-budgets",
        path="planner/choose/pareto_front.py",
        old="        if least is not None:\n            answers.add(",
        new="        if False:\n            answers.add(",
        tests=("tests/choose/test_pareto_front.py::test_small_plans_are_found_before_the_search_for_the_smallest_one",),
        why="small plans are missing if the smallest one is not found in time",
    ),
    Fault(
        name="tradeoff-searches-slower-plans",
        path="planner/choose/pareto_front.py",
        old="below_ns=known.step_ns / _ALIKE if known else math.inf",
        new="below_ns=math.inf",
        tests=(
            "tests/choose/test_pareto_front.py::test_a_search_looks_only_for_plans_that_are_faster_than_a_smaller_one",
        ),
        why="the search looks for plans that are slower than a known smaller plan, which takes most of the time",
    ),
    Fault(
        name="tradeoff-keeps-plans-of-wrong-recordings",
        path="planner/choose/pareto_front.py",
        old="            points.clear()\n",
        new="            pass\n",
        tests=(
            "tests/choose/test_background_certification.py::test_plans_that_follow_from_wrong_recordings_are_forgotten",
        ),
        why="a trade-off has plans that may recompute a module which must not run twice",
    ),
    Fault(
        name="tradeoff-swallows-errors",
        path="planner/choose/background_certification.py",
        old="            self._error = error\n",
        new="            pass\n",
        tests=(
            "tests/choose/test_background_certification.py::test_an_error_while_a_plan_is_measured_ends_the_search",
        ),
        why="plans are missing without a message if their process is ended",
    ),
    Fault(
        name="tradeoff-loses-failed-plans",
        path="planner/choose/background_certification.py",
        old="            self._failed.append(choice)\n",
        new="            pass\n",
        tests=(
            "tests/choose/test_background_certification.py::test_a_plan_that_cannot_be_rehearsed_leaves_its_technique_out",
        ),
        why="plans are missing without a message if their step cannot be rehearsed",
    ),
    Fault(
        name="tradeoff-states-the-budget-as-memory",
        path="planner/choose/pareto_front.py",
        old="            answers.add(point.choice)\n",
        new="            answers.fastest[point.choice.peak_bytes] = point.choice\n",
        tests=(
            "tests/choose/test_background_certification.py"
            "::test_the_plan_at_the_budget_of_the_user_is_measured_under_the_smallest_budget_too",
        ),
        why="the memory of the plan at the user's budget includes cache that the allocator would release",
    ),
    Fault(
        name="tradeoff-returns-unchecked-plans",
        path="planner/choose/background_certification.py",
        old="(self.points if point.is_as_promised else self._unchecked).append(point)",
        new="self.points.append(point)",
        tests=(
            "tests/choose/test_background_certification.py::test_a_plan_is_not_returned_before_its_recordings_are_checked",
        ),
        why="when the time is up, plans are returned that may recompute a module which must not run twice",
    ),
    Fault(
        name="tradeoff-certifies-what-was-left-out",
        path="planner/choose/background_certification.py",
        old="            if is_new or not searches.leaves_out(choice.decisions):\n",
        new="            if True:\n",
        tests=(
            "tests/choose/test_background_certification.py::test_a_choice_with_what_was_left_out_meanwhile_is_dropped",
        ),
        why="checkpointing is left out for modules with which it works",
    ),
    Fault(
        name="tradeoff-loses-its-smallest-plan",
        path="planner/choose/pareto_front.py",
        old="    points.append(smallest)\n",
        new="",
        tests=(
            "tests/choose/test_background_certification.py::test_the_smallest_plan_so_far_is_returned_if_the_time_is_up_before_it_is_compared",
        ),
        why="the smallest plan is certified and not returned if the time is up then",
    ),
    Fault(
        name="search-notes-unchecked-plans",
        path="planner/choose/fitting.py",
        old="        check_recordings(session, certified)\n        session.note(certified, constraints)\n",
        new="        session.note(certified, constraints)\n        check_recordings(session, certified)\n",
        tests=(
            "tests/choose/test_background_certification.py"
            "::test_a_plan_is_not_returned_before_its_recordings_are_checked",
        ),
        why="when the time is up, a plan is returned that may recompute a module which must not run twice",
    ),
    Fault(
        name="tradeoff-measures-a-plan-twice",
        path="planner/choose/background_certification.py",
        old="if choice is not None and choice.rehearsed_decisions not in self._added:",
        new="if choice is not None and choice.decisions not in self._added:",
        tests=(
            "tests/choose/test_background_certification.py"
            "::test_the_estimate_counts_each_choice_that_is_unfinished_and_one_more",
        ),
        why="a plan that a search has given options of the allocator is measured a second time",
    ),
    Fault(
        name="tradeoff-waits-for-an-ended-rehearsal",
        path="planner/choose/background_certification.py",
        old="                self._session.certificates.begin_in_background(self._in_rehearsal.rehearsed_decisions)\n",
        new="                if self._in_rehearsal.rehearsed_decisions not in vars(self).setdefault('begun', []):\n"
        "                    vars(self)['begun'].append(self._in_rehearsal.rehearsed_decisions)\n"
        "                    self._session.certificates.begin_in_background(self._in_rehearsal.rehearsed_decisions)\n",
        tests=("tests/choose/test_background_certification.py::test_a_rehearsal_that_the_search_ends_is_begun_again",),
        why="a trade-off never ends if the search has ended the rehearsal of one of its plans",
    ),
    Fault(
        name="tradeoff-without-time-for-certificates",
        path="planner/choose/background_certification.py",
        old="return seconds * (self._unfinished + 1) / 2",
        new="return seconds * 0",
        tests=(
            "tests/choose/test_background_certification.py::test_the_estimate_counts_each_choice_that_is_unfinished_and_one_more",
        ),
        why="when the time is up, plans that were found are not certified",
    ),
    Fault(
        name="no-time-is-left-after-a-part",
        path="planner/progress/__init__.py",
        old="return until - self._reserved()",
        new="return until",
        tests=("tests/progress/test_progress.py::test_a_part_may_have_less_time_than_the_whole_but_not_more",),
        why="a search takes the time that its certificates need",
    ),
    Fault(
        name="certificates-rehearsed-twice",
        path="planner/choose/certificates.py",
        old="self._foreseen(decisions) or self._start_in_background(decisions)",
        new="self._start_in_background(decisions)",
        tests=("tests/choose/test_certificates.py::test_a_foreseen_rehearsal_is_kept_by_begin_in_background",),
        why="the same step is rehearsed twice at the same time",
    ),
    Fault(
        name="tradeoff-trusts-recordings",
        path="planner/choose/background_certification.py",
        old="            fitting.check_recordings(self._session, self._unchecked[-1])\n",
        new="",
        tests=(
            "tests/choose/test_background_certification.py::test_plans_that_follow_from_wrong_recordings_are_forgotten",
        ),
        why="lengthened recordings that are wrong are used for a whole trade-off",
    ),
    Fault(
        name="kernel-notes-start-at-the-total-of-slower-algorithms",
        path="planner/estimate/kernel_notes.py",
        old="None if measured.slower else measured.footprint.total_bytes",
        new="measured.footprint.total_bytes",
        tests=(
            "tests/estimate/test_convolution_workspaces.py::test_a_plan_below_the_fastest_algorithms_names_the_convolutions_that_run_slower_ones",
        ),
        why="the note says that the fastest algorithms need no more memory than slower ones",
    ),
    Fault(
        name="sessions-stay-in-cycles",
        path="planner/choose/planning_session.py",
        old="        vars(self).clear()",
        new="        pass",
        tests=("tests/choose/test_fallback.py::test_a_session_that_has_ended_is_in_no_cycle",),
        why="the recordings of a session that has ended take memory until Python's garbage collector runs",
    ),
    Fault(
        name="predicted-slack-of-another-budget",
        path="planner/choose/choice.py",
        old="asked = card, vram_bytes, alternatives, fastest\n        if asked not in self._missing_bytes:\n",
        new="asked = card, vram_bytes, alternatives, fastest\n        if not self._missing_bytes:\n",
        tests=("tests/choose/test_choice.py::test_a_prediction_is_computed_once_for_each_budget_and_allocator",),
        why="what a plan lacks under one budget is answered for all budgets",
    ),
    Fault(
        name="search-for-the-smallest-plan-records-too-little",
        path="planner/choose/chooser.py",
        old="int(smallest_bytes), None, True)",
        new="int(smallest_bytes) // 2, None, True)",
        tests=(
            "tests/choose/test_fitting.py::test_the_smallest_plan_is_searched_without_recordings_that_cannot_change_it",
        ),
        why="the plan that is called the smallest is not the smallest",
    ),
    Fault(
        name="default-batch-is-always-the-largest",
        path="planner/default_batch.py",
        old="measure(predicted, card, vram_bytes=budget.usable_bytes).fits",
        new="measure(predicted, card, vram_bytes=None).fits",
        tests=("tests/workload/test_default_batch.py::test_the_batch_is_the_largest_power_of_two_whose_baseline_fits",),
        why="a batch that nobody stated is larger than the card can take",
    ),
    Fault(
        name="allocator-lets-the-card-wait",
        path="planner/choose/planning_session.py",
        old="            if measured.fits and not measured.retries:\n",
        new="            if measured.fits:\n",
        tests=(
            "tests/choose/test_allocator.py"
            "::test_other_options_come_before_releasing_the_cache_in_the_middle_of_a_step",
        ),
        why="a step that releases the allocator's cache each time is preferred to other options of the allocator",
    ),
    Fault(
        name="allocator-measured-with-the-defaults",
        path="planner/estimate/footprint.py",
        old="        outcome = step.replay(capacity, settings)\n",
        new="        outcome = step.replay(capacity, settings_on(card, ()))\n",
        tests=("tests/choose/test_allocator.py::test_a_step_that_fits_only_with_other_options_gets_them",),
        why="a plan with other options of the allocator is certified without them",
    ),
    Fault(
        name="units-free-inputs-too-early",
        path="planner/recompute/recompute_cost.py",
        old="        holds = [(s, call.start, window.release) for s in call.inputs if",
        new="        holds = [(s, call.start, int(window.back)) for s in call.inputs if",
        tests=(
            "tests/system/test_square.py"
            "::test_the_promised_peak_of_any_selection_is_that_of_the_rehearsed_rewritten_step"
            "[in-place and called twice-fp32]",
        ),
        why="the inputs of a recompute are promised to be free while it runs",
    ),
    Fault(
        name="units-hold-nothing",
        path="planner/recompute/holds.py",
        old='            pieces[storage].append((start, stop, "when", (option.unit,)))',
        new='            pieces[storage].append((start, start, "when", (option.unit,)))',
        tests=(
            "tests/recompute/test_segments.py"
            "::test_the_promise_for_every_division_is_what_its_rehearsal_takes[Skips-2]",
        ),
        why="what a unit keeps alive for its recompute is not promised",
    ),
    Fault(
        name="units-of-nested-modules-together",
        path="planner/recompute/units.py",
        old="    return tuple(longest_paths(paths))",
        new="    return tuple(path for path in longest_paths(paths) if len(path) > 2)",
        tests=(
            "tests/system/test_square.py"
            "::test_the_promised_peak_of_any_selection_is_that_of_the_rehearsed_rewritten_step"
            "[in-place and called twice-fp32]",
        ),
        why="a module and one inside of it are both selected",
    ),
    Fault(
        name="units-with-obstacles",
        path="planner/recompute/units.py",
        old="        if call.segment is None and not (call.module and call.obstacle is None and index in windows):",
        new="        if call.segment is None and not (call.module and index in windows):",
        tests=(
            "tests/recompute/test_pitfalls.py"
            "::test_a_module_that_changes_state_in_its_forward_is_no_unit_but_what_it_holds_is[FunctionalNorm]",
        ),
        why="modules that change state in their forward are recomputed",
    ),
    Fault(
        name="search-allows-a-little-more",
        path="planner/search/cutting_loop.py",
        old="        return self.exact.peak(units) <= self.budget_bytes",
        new="        return self.exact.peak(units) <= self.budget_bytes * (1 + 1e-9) + 1",
        tests=("tests/search/test_search.py::test_the_search_finds_what_trying_everything_finds[0]",),
        why="a selection is returned that exceeds its budget by a byte",
    ),
    Fault(
        name="search-drops-recompute-peaks",
        path="planner/search/presolve.py",
        old="    hot = self._ceiling_bytes + self._extra_bytes > floor_bytes",
        new="    hot = self._ceiling_bytes > floor_bytes",
        tests=("tests/search/test_search.py::test_the_search_finds_what_trying_everything_finds[2]",),
        why="a recompute that exceeds the budget at an event below it is not seen",
    ),
    Fault(
        name="search-absorbs-the-smaller-set",
        path="planner/search/presolve.py",
        old="        if not any(smaller <= members for smaller in kept):",
        new="        if not any(smaller & members for smaller in kept):",
        tests=("tests/search/test_search.py::test_the_search_finds_what_trying_everything_finds[0]",),
        why="a unit dominates others that it does not contain",
    ),
    Fault(
        name="conditions-end-too-early",
        path="planner/recompute/conditions.py",
        old="        return [unit for unit in one if rest <= self._exclusive[unit]]",
        new="        return [unit for unit in one if rest & self._exclusive[unit]]",
        tests=("tests/recompute/test_conditions.py::test_a_storage_is_held_for_any_of_its_reasons",),
        why="a storage is not promised that a selected unit holds, because another unit excludes that unit",
    ),
    Fault(
        name="conditions-come-back-otherwise",
        path="planner/recompute/conditions.py",
        old="(reason for reason in popped if reason not in changes.removed)",
        new="()",
        tests=("tests/recompute/test_conditions.py::test_a_storage_is_held_for_any_of_its_reasons",),
        why="when a reason to hold a storage ends, reasons that began after it end too",
    ),
    Fault(
        name="search-forgets-conditions-in-conditions",
        path="planner/search/curve.py",
        old="np.append(self._containing.largest(of_shared), np.zeros(1, of_shared.dtype))",
        new="np.append(of_shared, np.zeros(1, of_shared.dtype))",
        tests=("tests/search/test_search.py::test_the_compiled_curve_is_the_curve_of_the_definitions",),
        why="a storage that all layers use is held for the last layer only",
    ),
    Fault(
        name="search-frees-nothing-that-layers-share",
        path="planner/search/presolve.py",
        old="*(one.unless for one in shared))",
        new=")",
        tests=("tests/search/test_search.py::test_conditions_that_contain_others_are_solved_like_written_out_ones[0]",),
        why="units that free only a storage of several layers are never selected",
    ),
    Fault(
        name="search-does-not-fold-layers-that-share",
        path="planner/search/linear_rows.py",
        old="                unless, when = normal_form(self.compiled.written_out(number), self.reduced.exclusive)",
        new="                unless, when = normal_form((unless, when), self.reduced.exclusive)",
        tests=("tests/search/test_search.py::test_a_condition_that_contains_others_has_the_rows_of_a_written_out_one",),
        why="the rows of a condition lack the units of the conditions in it",
    ),
    Fault(
        name="search-smallest-recompute",
        path="planner/search/presolve.py",
        old="        largest[key] = max(largest.get(key, 0), recompute.extra_bytes)",
        new="        largest[key] = min(largest.get(key, recompute.extra_bytes), recompute.extra_bytes)",
        tests=("tests/search/test_search.py::test_the_search_finds_what_trying_everything_finds[0]",),
        why="of several recomputes at one event, the smallest counts",
    ),
    Fault(
        name="search-forgets-the-relaxation",
        path="planner/search/cutting_loop.py",
        old="                best = min(best, self._chosen(share), key=self.exact.peak)\n",
        new="",
        tests=("tests/search/test_search.py::test_a_search_that_runs_out_of_time_rounds_the_linear_relaxation",),
        why="a search for the smallest peak that runs out of time returns a peak that is far too large",
    ),
    Fault(
        name="search-any-of-equal-cost",
        path="planner/search/milp.py",
        old="        return units if fewer is None or total(self._cost_ns, fewer) > most else fewer",
        new="        return units",
        tests=("tests/search/test_search.py::test_the_search_finds_what_trying_everything_finds[0]",),
        why="of equally fast plans, one that is not the simplest is returned",
    ),
    Fault(
        name="search-ignores-the-cost",
        path="planner/search/milp.py",
        old="            return self._cheapest(any_cheaper) is not None\n",
        new="            return self._any_below(budget_bytes + 1, deadline)[0] is not None\n",
        tests=("tests/search/test_search.py::test_the_search_finds_what_trying_everything_finds[0]",),
        why="configurations are recorded although it is proven that they cannot be faster",
    ),
    Fault(
        name="threshold-off-by-one",
        path="planner/search/threshold.py",
        old="    while high - low > 1:",
        new="    while high - low > 2:",
        tests=(
            "tests/search/test_threshold.py::test_it_finds_the_threshold_wherever_the_guess_is_and_asks_few_questions",
        ),
        why="a longer prefix than needed is frozen",
    ),
    Fault(
        name="chooser-takes-the-less-faithful",
        path="planner/choose/choice.py",
        old="    return chosen if chosen is fastest else",
        new="    return fastest if True else",
        tests=("tests/choose/test_fitting.py::test_precision_is_not_lowered_for_a_gain_within_a_tie",),
        why="lower precision is chosen although an exact plan is as fast",
    ),
    Fault(
        name="choice-prefers-many-decisions",
        path="planner/choose/choice.py",
        old="return fidelity_of(self.decisions), len(self.decisions), self.step_ns",
        new="return len(self.decisions), fidelity_of(self.decisions), self.step_ns",
        tests=(
            "tests/choose/test_fitting.py"
            "::test_of_equally_fast_plans_the_more_faithful_one_wins_and_then_the_simpler_one",
        ),
        why="one decision that rounds is preferred to two exact ones",
    ),
    Fault(
        name="fitting-settles-for-what-does-not-fit",
        path="planner/choose/budget_search.py",
        old="        does_fit = certify_fits(plan)\n",
        new="        does_fit = certify_fits(plan) or missing_bytes_of(plan) <= 100\n",
        tests=("tests/choose/test_budget_search.py::test_what_is_settled_for_fits_and_is_hardly_slower_than_the_best",),
        why="a plan that lacks a few bytes is returned as fitting",
    ),
    Fault(
        name="fitting-measures-what-the-last-plan-lacks",
        path="planner/choose/budget_search.py",
        old="        elif missing_bytes or certified < limit():\n",
        new="        else:\n",
        tests=(
            "tests/choose/test_budget_search.py"
            "::test_what_a_plan_lacks_is_measured_only_if_smaller_plans_are_asked_for",
        ),
        why="a search that finds nothing takes seconds longer, for a number that nobody reads",
    ),
    Fault(
        name="fitting-searches-the-same-chunks-again",
        path="planner/space/search_space.py",
        old="        if all(present.for_micro_batches(n) == most.for_micro_batches(n) for n in numbers):\n",
        new="        if present == most:\n",
        tests=("tests/choose/test_fitting.py::test_the_most_chunks_are_another_search_only_if_a_plan_could_have_them",),
        why="a search that finds nothing is repeated with the same plans",
    ),
    Fault(
        name="largest-batch-forgets-what-fits",
        path="planner/questions.py",
        old="        if certified is None and known is not None:\n",
        new="        if certified is None and known is None:\n",
        tests=("tests/choose/test_fitting.py::test_a_plan_with_known_decisions_is_returned_if_the_search_finds_none",),
        why="the largest batch is smaller than one that is known to fit",
    ),
    Fault(
        name="fitting-stops-at-the-first-plan",
        path="planner/choose/budget_search.py",
        old="while plan is None and budgets.widen(None if best is None else best.step_ns):",
        new="while plan is None and best is None and budgets.widen(None):",
        tests=(
            "tests/choose/test_budget_search.py::test_a_choice_with_little_slack_is_not_given_up_for_that_of_another",
        ),
        why="the first plan that fits is returned although a faster one fits, too",
    ),
    Fault(
        name="budget-above-the-card",
        path="planner/workload/budget.py",
        old="        usable_bytes = min(asked_bytes, (card_bytes or asked_bytes) - free_bytes)",
        new="        usable_bytes = asked_bytes",
        tests=(
            "tests/workload/test_budget.py"
            "::test_a_budget_above_the_named_card_is_planned_for_the_card_and_a_note_says_so",
        ),
        why="a plan is said to fit a card that has less memory",
    ),
    # ---- the limits of the greedy search
    Fault(
        name="repair-without-a-limit-of-time",
        path="planner/search/repair.py",
        old=" or time.monotonic() > deadline:",
        new=":",
        tests=(f"{_REPAIR}::test_a_search_ends_when_its_time_is_up",),
        why="the greedy search for a model with a thousand layers makes all its moves, although each takes seconds",
    ),
    Fault(
        name="repair-of-all-conditions",
        path="planner/search/repair.py",
        old="[:_MOST_CONDITIONS]",
        new="",
        tests=(f"{_REPAIR}::test_a_move_looks_at_the_largest_of_many_conditions",),
        why="each move looks at all conditions of a deep model, and takes longer than the whole search is allowed to",
    ),
    Fault(
        name="repair-of-the-smallest-tensors",
        path="planner/search/repair.py",
        old="np.argsort(-held_bytes",
        new="np.argsort(held_bytes",
        tests=(f"{_REPAIR}::test_a_move_looks_at_the_largest_of_many_conditions",),
        why="the greedy search of a deep model sees only its smallest tensors, and finds no plan",
    ),
    Fault(
        name="bound-counts-state-of-frozen-parameters",
        path="planner/space/lower_bounds.py",
        old="    still_trained = trained.without(frozen)",
        new="    still_trained = trained",
        tests=(
            "tests/choose/test_fitting.py::test_a_floor_has_neither_gradients_nor_state_of_frozen_parameters[foreach]",
        ),
        why="the lower bound of frozen configurations is too high, so that plans that fit are pruned",
    ),
    Fault(
        name="bound-eight-bit-state",
        path="planner/workload/eight_bit.py",
        old="8 if id(p) in wide or p.numel() < _SMALLEST_IN_8_BITS else 2",
        new="8 if p.numel() < _SMALLEST_IN_8_BITS else 8",
        tests=(
            "tests/choose/test_fitting.py::test_a_floor_has_neither_gradients_nor_state_of_frozen_parameters[8 bits]",
        ),
        why="the lower bound of 8-bit state is that of 32-bit state",
    ),
    # ---- state that one forward leaves for the next
    Fault(
        name="accumulation-over-carried-tensors",
        path="planner/space/carried_state.py",
        old="        if op.phase is Phase.BACKWARD:\n",
        new="        if op.phase is Phase.BACKWARD:\n            continue\n",
        tests=("tests/space/test_carried_state.py::test_state_that_the_next_forward_uses_is_found",),
        why="emitted files train a queue of negatives with every micro-batch",
    ),
    Fault(
        name="accumulation-over-counters",
        path="planner/space/carried_state.py",
        old='    return graph.changed_state or (None if graph.ops_differ else "numbers outside of the model")',
        new="    return None",
        tests=("tests/space/test_carried_state.py::test_a_loss_function_that_counts_is_found",),
        why="emitted files warm the loss up with every micro-batch",
    ),
    Fault(
        name="no-accumulation-over-logged-counters",
        path="planner/space/carried_state.py",
        old="    if not graph.forwards_differ:\n        return None",
        new="    if not graph.forwards_differ:\n        return graph.changed_state",
        tests=("tests/space/test_carried_state.py::test_state_that_the_next_forward_does_not_use_is_not_reported",),
        why="a model that counts its calls for a log is not accumulated",
    ),
    Fault(
        name="no-accumulation-over-caches",
        path="planner/space/carried_state.py",
        old="        and (storage in derived or storage in again or _dies(graph, storage))\n",
        new="",
        tests=("tests/space/test_carried_state.py::test_state_that_the_next_forward_does_not_use_is_not_reported",),
        why="a model that keeps a mask is not accumulated",
    ),
    # ---- the whole run
    Fault(
        name="run-forgets-the-reserved-bytes-before-a-release",
        path="planner/run_memory/simulation.py",
        old="            _replay(allocator, slots, events, lambda: peaks.append(allocator.reserved_bytes))\n",
        new="            _replay(allocator, slots, events)\n",
        tests=(
            "tests/run_memory/test_runs.py"
            "::test_a_run_that_is_put_together_reserves_what_one_recording_of_all_steps_reserves",
        ),
        why="the memory that a step reserves before it calls torch.cuda.empty_cache is not part of its maximum",
    ),
    Fault(
        name="run-never-releases-the-cache",
        path="planner/run_memory/moments.py",
        old="releases = [(RELEASE, 0, tick) for tick in graph.cache_releases]",
        new="releases = [(RELEASE, 0, tick) for tick in graph.cache_releases[:0]]",
        tests=(
            "tests/run_memory/test_runs.py"
            "::test_a_run_that_is_put_together_reserves_what_one_recording_of_all_steps_reserves",
        ),
        why="steps that call torch.cuda.empty_cache are planned as if they kept their cache",
    ),
    Fault(
        name="search-records-all-micro-batches-of-hopeless-budgets",
        path="planner/choose/chooser.py",
        old="            if never_fits and self._is_hopeless(budget_bytes):\n",
        new="            if False:\n",
        tests=(
            "tests/choose/test_fitting.py"
            "::test_a_hopeless_budget_takes_recordings_of_the_fewest_and_the_most_micro_batches_only",
        ),
        why="the answer that nothing fits takes several times as long",
    ),
    Fault(
        name="search-counts-gradients-of-accumulation",
        path="planner/choose/chooser.py",
        old="update = dataclasses.replace(self._bounds.update_memory_bound(config), counts_gradients=False)",
        new="update = dataclasses.replace(self._bounds.update_memory_bound(config), counts_gradients=True)",
        tests=(
            "tests/choose/test_fitting.py"
            "::test_gradients_do_not_make_a_budget_hopeless_that_an_update_in_backward_meets",
        ),
        why="a plan that steps in backward and fits is not found",
    ),
    Fault(
        name="search-keeps-the-fixed-bytes-of-the-presolve",
        path="planner/search/presolve.py",
        old="self._fixed_bytes + change, self._ceiling_bytes + change",
        new="self._fixed_bytes + change, self._ceiling_bytes",
        tests=("tests/search/test_search.py::test_a_search_with_other_fixed_bytes_is_that_of_the_changed_problem",),
        why="a relaxation ignores events that exceed the budget, and plans that cannot fit are searched for",
    ),
    Fault(
        name="allocator-keeps-the-first-alternative",
        path="planner/estimate/smallest_total.py",
        old="            if less_bytes is not None:\n",
        new="            if less_bytes is None:\n",
        tests=(
            "tests/estimate/test_footprint.py::test_the_smallest_total_of_several_alternatives_is_that_of_the_best_one",
        ),
        why="the smallest total ignores the options of the allocator that would lower it",
    ),
    Fault(
        name="search-takes-the-first-smallest-peak",
        path="planner/search/milp.py",
        old="        return found is not None or not proven\n",
        new="        return False\n",
        tests=("tests/search/test_search.py::test_the_search_finds_what_trying_everything_finds",),
        why="candidates with a smaller peak than the first one are not searched",
    ),
    Fault(
        name="search-has-no-proof-without-units",
        path="planner/search/milp.py",
        old="        if self.exact.peak(()) < peak_bytes:\n            return (), True\n",
        new="",
        tests=("tests/search/test_search.py::test_the_search_finds_what_trying_everything_finds",),
        why="the comparison of a problem without units fails",
    ),
    Fault(
        name="predicted-slack-without-the-first-update",
        path="planner/recompute/selected_step.py",
        old="    made_at |= {index: tick * fine + fine - 1 for index, tick in _updates(graph).items()}\n",
        new="",
        tests=(
            "tests/recompute/test_selected_step.py::test_the_predicted_total_is_nearly_that_of_the_certificate[mlp]",
        ),
        why="plans that need a gigabyte more than predicted are certified one after the other",
    ),
    Fault(
        name="predicted-slack-with-gradients-of-an-earlier-step",
        path="planner/recompute/selected_step.py",
        old="span[0] > begin or storage.category is not Category.GRADIENT",
        new="True",
        tests=(
            "tests/recompute/test_selected_step.py"
            "::test_the_first_call_of_an_own_step_is_predicted_without_gradients_of_an_earlier_one",
        ),
        why="plans for steps that zero their gradients first are predicted to fail although they fit",
    ),
    Fault(
        name="predicted-slack-with-a-replay-as-one-block",
        path="planner/recompute/selected_step.py",
        old="_parts([graph.storages[index].size_bytes for _, index in made], peak_bytes)",
        new="[peak_bytes]",
        tests=("tests/recompute/test_selected_step.py::test_the_replay_of_a_segment_is_predicted_with_several_blocks",),
        why="plans with segments are predicted to fail although they fit",
    ),
    Fault(
        name="search-stops-below-plans-with-less-slack",
        path="planner/choose/budget_search.py",
        old="    if best is not None and failed:\n",
        new="    if best is not None and not failed:\n",
        tests=(
            "tests/choose/test_budget_search.py"
            "::test_a_plan_with_less_slack_between_the_failed_one_and_a_much_slower_one_is_found",
        ),
        why="a larger budget gives a slower plan",
    ),
    Fault(
        name="search-believes-predictions",
        path="planner/choose/budget_search.py",
        old="missing_bytes <= plan.peak_bytes // _NEAR",
        new="False",
        tests=(
            "tests/choose/test_budget_search.py"
            "::test_a_near_plan_that_is_wrongly_predicted_to_fail_is_certified_before_a_much_slower_one_is_taken",
        ),
        why="a wrong prediction costs a plan that is much faster",
    ),
    Fault(
        name="radam-recorded-in-its-first-steps",
        path="planner/workload/torch_optimizers.py",
        old='elif weight is None and isinstance(count, torch.Tensor) and count.device.type == "cpu":',
        new="elif False:  # a count",
        tests=("tests/recording/test_later_steps.py::test_a_recording_has_the_memory_of_later_steps[RAdam-loop]",),
        why="a plan with the for-loop of RAdam needs more memory than promised from the sixth step on",
    ),
    Fault(
        name="asgd-recorded-before-it-averages",
        path="planner/workload/torch_optimizers.py",
        old="                    if isinstance(weight, FakeTensor):\n",
        new="                    if weight is None:  # never\n",
        tests=("tests/recording/test_later_steps.py::test_a_recording_has_the_memory_of_later_steps[ASGD-loop-0]",),
        why="a plan with the for-loop of ASGD needs more memory than promised from the step on that averages",
    ),
    Fault(
        name="layers-compared-by-arrays",
        path="planner/derive/shortening.py",
        old="    return torch.Tensor if isinstance(value, torch.Tensor) else id(value)\n",
        new="    return torch.Tensor if isinstance(value, torch.Tensor) else value\n",
        tests=("tests/derive/test_shortening.py::test_layers_are_updated_alike_if_their_options_run_the_same_ops",),
        why="planning fails if an option of an optimizer's group is an array",
    ),
    Fault(
        name="predicted-slack-without-what-units-hold",
        path="planner/recompute/selected_step.py",
        old="in rerun.holds:",
        new="in rerun.holds[:0]:",
        tests=("tests/recompute/test_selected_step.py::test_the_predicted_peak_is_the_promised_one",),
        why="plans that recompute are predicted to need less than they do",
    ),
    Fault(
        name="predictions-decide-that-nothing-fits",
        path="planner/choose/budget_search.py",
        old="        if best is None or (best.step_ns > _MUCH_FASTER",
        new="        if best is not None and (best.step_ns > _MUCH_FASTER",
        tests=("tests/choose/test_budget_search.py::test_wrong_predictions_do_not_hide_that_a_plan_fits",),
        why="a plan that fits is not found because the prediction of its slack is wrong",
    ),
    Fault(
        name="predicted-failures-are-certified",
        path="planner/choose/budget_search.py",
        old="        if missing_bytes > 0:\n            predicted.append(",
        new="        if missing_bytes > 0 and predicted:\n            predicted.append(",
        tests=("tests/choose/test_budget_search.py::test_plans_that_are_rightly_predicted_to_fail_are_not_certified",),
        why="a certificate is made for a plan that is known to fail",
    ),
    Fault(
        name="workspaces-from-the-beginning",
        path="planner/recompute/selected_step.py",
        old="    made_at = {index: tick * fine for index, tick in allocated_in_first_step(graph).items()}\n",
        new="    made_at: dict[int, int] = {}\n",
        tests=(
            "tests/recompute/test_selected_step.py"
            "::test_without_recompute_the_predicted_total_is_that_of_the_certificate[4096-1]",
        ),
        why="the predicted slack is wrong, so that plans that fit are not certified",
    ),
    Fault(
        name="head-start-predicts-less",
        path="planner/choose/fitting.py",
        old="    predictions = _PREDICTIONS * _ATTEMPTS\n",
        new="    predictions = _PREDICTIONS\n",
        tests=(
            "tests/choose/test_budget_search.py"
            "::test_the_head_start_passes_over_as_many_predicted_failures_as_a_search",
        ),
        why="the head start rehearses a plan that the search does not certify",
    ),
    Fault(
        name="predictions-without-end",
        path="planner/choose/budget_search.py",
        old="if len(predicted) < predictions else 0",
        new="if len(predicted) <= predictions else 0",
        tests=("tests/choose/test_budget_search.py::test_after_a_number_of_predicted_failures_plans_are_certified",),
        why="more plans are passed over because of predictions than the limit allows",
    ),
)
