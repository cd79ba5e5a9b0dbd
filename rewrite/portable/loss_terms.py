"""Counts the terms that a loss is a mean over, and the share of a rank in the loss of all ranks."""

from __future__ import annotations

import torch

from planner.rewrite.portable.batch_slicing import count_samples, map_tensors

# ---- below: the text that runs here is the text that is emitted -------------------------------------------------


def samples_only(batch, samples):
    """Return the number of terms of a loss that is a mean over samples: the number of samples.

    For a loss that is a mean over other terms, pass your own function that counts them as `loss_terms`. For a loss that
    is a sum, that function must return 1.
    """
    return samples


def counted_labels(batch, samples, *, shifted, ignored, divides=False):
    """Return the number of terms of a loss that is a mean over `batch["labels"]`, as a tensor on their device.

    Without integer labels the loss is a mean over samples, and the result is their number.

    shifted: if True, the first label of each sample does not count. ignored: labels of this value do not count.
    divides: if True and the batch has `num_items_in_batch`, the loss is a sum divided by that number. The losses of
    micro-batches then add up without weights, so the result is 1.
    """
    if divides and batch.get("num_items_in_batch") is not None:
        return 1.0
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() < 1 or labels.is_floating_point():
        return samples
    return (labels[..., 1:] if shifted and labels.dim() > 1 else labels).ne(ignored).sum(dtype=torch.float64)


def labels_of_experts(batch, samples, *, shifted, ignored):
    """Return the same as `counted_labels` for a model whose loss also balances its experts.

    Raises ValueError if the batch has `num_items_in_batch`: the model divides only one of the two terms by it, so that
    no factor for the loss is right for both.
    """
    if batch.get("num_items_in_batch") is not None:
        raise ValueError(
            "the loss of this model balances its experts (output_router_logits), and this term is not divided by "
            "num_items_in_batch: leave num_items_in_batch out of the batch"
        )
    return counted_labels(batch, samples, shifted=shifted, ignored=ignored)


def share_of_rank(batch, *, batch_size, loss_terms, not_by_sample=(), alike=1):
    """Return the factor for the loss of this rank with which the mean over all ranks is the loss of the whole batch.

    FSDP2 and DistributedDataParallel average the gradients of the ranks. If the ranks have different numbers of terms,
    such as labels that are not ignored, that mean alone would weigh the terms of different ranks differently. If the
    loss is a sum (`loss_terms` returns 1 for any number of samples), the result is the number of parts of the batch.

    alike: number of ranks that have the same samples, as in tensor parallelism.
    """
    samples = count_samples(batch, batch_size, not_by_sample)
    terms = loss_terms(batch, samples)
    if isinstance(terms, float) and terms == 1:  # a sum, or a mean over one term
        twice = map_tensors(lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor, batch)
        if loss_terms(twice, 2 * samples) == 1:
            return torch.distributed.get_world_size() / alike
    total = as_tensor(terms, batch).clone()
    torch.distributed.all_reduce(total)
    return terms * torch.distributed.get_world_size() / total


def as_tensor(terms, batch):
    """Return a number of terms as a tensor on the device of the batch. A tensor is returned unchanged."""
    if isinstance(terms, torch.Tensor):
        return terms
    devices = []
    map_tensors(lambda tensor: devices.append(tensor.device), batch)
    return torch.full((), float(terms), dtype=torch.float64, device=devices[0])


def share_of_part(share, weight):
    """Return the factor for the loss of a micro-batch: the share of the rank times the micro-batch's weight.

    If no term of the rank's batch counts (all labels are ignored), the weights of its micro-batches are 0/0. Return 0
    then, not NaN, because other ranks may have terms.

    weight: None if the batch of the rank is not split.
    """
    if weight is None or not isinstance(share, torch.Tensor):
        return share if weight is None else share * weight
    return torch.where(share == 0, 0.0, share * weight)
