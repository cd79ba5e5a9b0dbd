"""Planted faults: weights of micro-batches, and the chunked loss."""

from __future__ import annotations

from benchmarks.faults.fault import Fault

FAULTS = (
    # ---- accumulation
    Fault(
        name="accumulation-weighs-labels-as-samples",
        path="rewrite/loss_terms.py",
        old="    if own is None:\n",
        new="    if own is not None:\n",
        tests=("tests/rewrite/rules/test_accumulation.py::test_token_means_over_uneven_padding_equal_the_full_batch",),
        why="micro-batches with few labels weigh as much as those with many",
    ),
    Fault(
        name="accumulation-drops-the-uneven-part",
        path="rewrite/rules/accumulation.py",
        old="for start in range(0, samples, micro_batch_size):",
        new="for start in range(0, samples - micro_batch_size + 1, micro_batch_size):",
        tests=("tests/rewrite/rules/test_accumulation.py::test_sample_means_equal_the_full_batch[batch of 10]",),
        why="the samples of a smaller last micro-batch are not trained",
    ),
    Fault(
        name="accumulation-trains-parts-without-terms",
        path="rewrite/rules/accumulation.py",
        old="        if isinstance(share, torch.Tensor) or share != 0:",
        new="        if isinstance(share, torch.Tensor) or share >= 0:",
        tests=(
            "tests/rewrite/accumulation_check/test_reduction_check.py"
            "::test_a_part_over_which_the_mean_is_0_over_0_is_left_out",
        ),
        why="a micro-batch whose loss is a mean over no terms makes all gradients NaN",
    ),
    Fault(
        name="accumulation-counts-the-first-label",
        path="rewrite/portable/loss_terms.py",
        old="(labels[..., 1:] if shifted and labels.dim() > 1 else labels)",
        new="(labels if shifted and labels.dim() > 1 else labels)",
        tests=(
            "tests/rewrite/rules/test_accumulation.py"
            "::test_token_means_over_uneven_padding_equal_the_full_batch[causal_model]",
        ),
        why="next-token losses are weighted by labels that they leave out",
    ),
    Fault(
        name="accumulation-counts-ignored-labels",
        path="rewrite/portable/loss_terms.py",
        old=".ne(ignored).sum(dtype=torch.float64)",
        new=".ne(0).sum(dtype=torch.float64)",
        tests=(
            "tests/rewrite/rules/test_accumulation.py"
            "::test_token_means_over_uneven_padding_equal_the_full_batch[masked_model]",
        ),
        why="padding counts as labels in the weights of micro-batches",
    ),
    Fault(
        name="accumulation-divides-twice",
        path="rewrite/portable/loss_terms.py",
        old='    if divides and batch.get("num_items_in_batch") is not None:\n        return 1.0\n',
        new="",
        tests=(
            "tests/rewrite/accumulation_check/test_reduction_check.py"
            "::test_a_loss_that_a_batch_divides_by_a_number_is_summed_up",
        ),
        why="a loss that is already divided by num_items_in_batch is multiplied by the share of its micro-batch",
    ),
    Fault(
        name="accumulation-multiplies-nan-by-zero",
        path="rewrite/portable/loss_and_clipping.py",
        old="    return torch.where(weight == 0, 0.0, loss * weight.to(loss.dtype))",
        new="    return loss * weight.to(loss.dtype)",
        tests=(
            "tests/rewrite/rules/test_accumulation.py"
            "::test_a_micro_batch_without_a_counted_label_takes_no_part[masked_model]",
        ),
        why="the loss of a micro-batch whose labels are all ignored is 0/0, and so is that of the batch",
    ),
    Fault(
        name="accumulation-slices-what-all-samples-share",
        path="rewrite/portable/batch_slicing.py",
        old="lambda t: t[start:stop] if t.dim() and t.shape[0] == samples else t,",
        new="lambda t: t[start:stop] if t.dim() else t,",
        tests=("tests/rewrite/rules/test_accumulation.py::test_every_nesting_is_split_and_everything_else_is_shared",),
        why="a tensor that all samples share is cut along a dimension that is not the sample",
    ),
    # ---- chunked loss
    Fault(
        name="chunks-mean-of-each-chunk",
        path="rewrite/rules/chunked_loss.py",
        old='total += F.nll_loss(log_probabilities, labels, ignore_index=ignore_index, reduction="sum")',
        new="total += F.nll_loss(log_probabilities, labels, ignore_index=ignore_index) * counted.sum()",
        tests=("tests/rewrite/rules/test_chunked_loss.py::test_loss_and_gradients_are_those_of_the_whole",),
        why="a chunk whose labels are all ignored makes the loss NaN (0/0)",
    ),
    Fault(
        name="chunks-gradient-of-no-terms",
        path="rewrite/rules/chunked_loss.py",
        old="share = torch.where(ctx.terms == 0, 0.0, share / ctx.terms if ctx.mean else share)",
        new="share = share / ctx.terms if ctx.mean else share",
        tests=("tests/rewrite/rules/test_chunked_loss.py::test_a_mean_over_no_labels_has_the_gradient_zero",),
        why="a batch whose labels are all ignored makes all gradients NaN",
    ),
    Fault(
        name="chunks-hidden-gradient-of-ignored-rows",
        path="rewrite/rules/chunked_loss.py",
        old="unscaled((gradient @ weight) * counted, scale)",
        new="unscaled(gradient @ weight, scale)",
        tests=("tests/rewrite/rules/test_chunked_loss.py::test_loss_and_gradients_are_those_of_the_whole",),
        why="rows whose label is ignored are trained as if their label were 0",
    ),
    Fault(
        name="chunks-weight-gradient-of-ignored-rows",
        path="rewrite/rules/chunked_loss.py",
        old="unscaled(gradient.t() @ (rows * counted), scale)",
        new="unscaled(gradient.t() @ rows, scale)",
        tests=("tests/rewrite/rules/test_chunked_loss.py::test_loss_and_gradients_are_those_of_the_whole",),
        why="rows whose label is ignored are trained as if their label were 0",
    ),
    Fault(
        name="chunks-any-ignore-index",
        path="rewrite/rules/chunked_loss.py",
        old="ctx.terms, ctx.mean = (target != ignore_index).sum(), mean",
        new="ctx.terms, ctx.mean = (target != -100).sum(), mean",
        tests=("tests/rewrite/rules/test_chunked_loss.py::test_loss_and_gradients_are_those_of_the_whole",),
        why="a loss with another ignore_index is divided by the number of all labels",
    ),
    Fault(
        name="chunks-take-smoothing-silently",
        path="rewrite/rules/chunked_loss.py",
        old=' or reduction not in ("mean", "sum") or label_smoothing != 0.0:',
        new=' or reduction not in ("mean", "sum"):',
        tests=("tests/rewrite/rules/test_chunked_loss.py::test_what_asks_for_all_logits_or_changes_them_is_refused",),
        why="label smoothing is silently left out",
    ),
    Fault(
        name="chunks-take-class-weights-silently",
        path="rewrite/rules/chunked_loss.py",
        old="    if not (weight is size_average is reduce is None) or reduction",
        new="    if not (size_average is reduce is None) or reduction",
        tests=("tests/rewrite/rules/test_chunked_loss.py::test_what_asks_for_all_logits_or_changes_them_is_refused",),
        why="class weights are silently left out",
    ),
    Fault(
        name="chunks-fp16-unscaled",
        path="rewrite/rules/chunked_loss.py",
        old="scale = half_precision_scale(rows, weight) if dtype == torch.float16 else None",
        new="scale = None",
        tests=("tests/rewrite/rules/test_chunked_loss.py::test_in_half_precision_sums_neither_overflow_nor_vanish",),
        why="small probabilities underflow in the fp16 gradient of the logits",
    ),
    Fault(
        name="chunks-fp16-clamp",
        path="rewrite/rules/chunked_loss.py",
        old="return (16384 / largest).clamp(max=1024)",
        new="return 16384 / largest",
        tests=(
            "tests/rewrite/rules/test_chunked_loss.py::test_in_half_precision_the_scale_suits_small_and_large_operands",
        ),
        why="with small hidden states and weights the scale is huge, and the gradient of the logits overflows in fp16",
    ),
    Fault(
        name="chunks-fp16-scale-ignores-the-weight",
        path="rewrite/rules/chunked_loss.py",
        old="largest = torch.maximum(len(rows) * rows.abs().amax().float(), 2 * weight.abs().amax().float())",
        new="largest = len(rows) * rows.abs().amax().float()",
        tests=(
            "tests/rewrite/rules/test_chunked_loss.py::test_in_half_precision_the_scale_suits_small_and_large_operands",
        ),
        why="the gradient of the hidden states overflows in fp16 if the weights are large",
    ),
    Fault(
        name="chunks-second-backward",
        path="rewrite/rules/chunked_loss.py",
        old="        gradients, ctx.gradients = ctx.gradients, None\n",
        new="        gradients = ctx.gradients\n",
        tests=("tests/rewrite/rules/test_chunked_loss.py::test_a_second_backward_is_refused_and_so_is_another_module",),
        why="a second backward multiplies the gradients by the gradient of the loss again",
    ),
    Fault(
        name="chunks-in-evaluation",
        path="rewrite/rules/chunked_loss.py",
        old="        if not (self.training and torch.is_grad_enabled()):",
        new="        if not torch.is_grad_enabled():",
        tests=("tests/rewrite/rules/test_chunked_loss.py::test_outside_of_training_the_head_returns_what_it_did",),
        why="in evaluation the head returns an object without logits",
    ),
    Fault(
        name="chunks-loss-in-half",
        path="rewrite/rules/chunked_loss.py",
        old="return loss if torch.is_autocast_enabled(target.device.type) else loss.to(logits.dtype)",
        new="return loss.to(logits.dtype)",
        tests=("tests/rewrite/rules/test_chunked_loss.py::test_under_autocast_it_computes_as_the_whole_does",),
        why="inside autocast the loss is rounded to bf16, while cross entropy returns it in fp32",
    ),
    Fault(
        name="chunks-keep-gradient-dtype",
        path="rewrite/rules/chunked_loss.py",
        old="weight_grad = torch.zeros_like(weight, dtype=exact) if wanted[1] else None",
        new="weight_grad = torch.zeros_like(weight, dtype=dtype) if wanted[1] else None",
        tests=("tests/rewrite/rules/test_chunked_loss.py::test_in_half_precision_sums_neither_overflow_nor_vanish",),
        why="the weight's gradient is summed over chunks in bf16 or fp16",
    ),
)
