"""Count the samples of a batch and slice it by samples, whatever containers hold its tensors.

All of this module is emitted: the text that runs here is the text that is emitted.
"""

import copy
import dataclasses
from collections.abc import Mapping

import torch


def samples_between(start, stop, batch, samples, not_by_sample=()):
    """Slice samples [start, stop) out of a batch that has `samples`.

    Tensors without a sample dimension are shared. So are those whose paths `not_by_sample` names: their first
    dimension may be equal to the number of samples by chance.
    """
    return map_tensors(
        lambda t: t[start:stop] if t.dim() and t.shape[0] == samples else t,
        batch,
        lambda mappings: mappings[start:stop] if len(mappings) == samples else None,
        not_by_sample,
    )


def marking_last(parts):
    """Yield each micro-batch and its weight, and True for the last one, False for the others."""
    before = next(parts)
    for following in parts:
        yield *before, False
        before = following
    yield *before, True


def count_samples(batch, batch_size, not_by_sample=()):
    """Return the number of samples: `batch_size`, or in a smaller last batch the first dimension of the tensors."""
    sizes = set()

    def count(tensor):
        sizes.add(tensor.shape[0] if tensor.dim() else 1)
        return tensor

    map_tensors(count, batch, lambda mappings: mappings, not_by_sample)
    if not sizes:  # every tensor is inside a list with one mapping per sample
        map_tensors(count, batch, None, not_by_sample)
    if batch_size in sizes:
        return batch_size
    candidates = sizes - {1} or sizes  # a first dimension of 1 usually broadcasts over the samples
    if len(candidates) != 1:
        raise ValueError(
            f"the tensors of the batch have different first dimensions {sorted(candidates)}, and none is the planned "
            f"batch size {batch_size}: give batches of that size (drop_last=True), with the sample as first dimension"
        )
    return candidates.pop()


def map_tensors(function, batch, of_mappings=None, excluded=(), path=""):
    """Apply a function to every tensor of nested mappings, dataclasses, tuples and lists; share everything else.

    Tensors are shared too if `excluded` has their path, such as 'mask' or '0.mask'.

    A list of mappings inside the batch, such as one mapping per sample, is replaced by the result of
    `of_mappings(list)`. If that is None, the function is applied to every tensor in the list.
    """

    def inside(value, name):
        is_list = of_mappings and isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value)
        replacement = of_mappings(value) if is_list else None
        if replacement is not None:
            return replacement
        return map_tensors(function, value, of_mappings, excluded, f"{path}.{name}" if path else str(name))

    if isinstance(batch, torch.Tensor):
        return batch if path in excluded else function(batch)
    if isinstance(batch, Mapping):
        # Copy the mapping so that its class is kept (BatchEncoding, for example).
        values = dict(batch)
        mapped = copy.copy(batch)
        for key, value in values.items():
            mapped[key] = inside(value, key)
            if batch[key] is not value:  # the copy shares its storage with the batch: undo, and return a plain dict
                batch[key] = value
                return {key: inside(value, key) for key, value in values.items()}
        return mapped
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        mapped = copy.copy(batch)  # does not run __init__, and object.__setattr__ also works on frozen dataclasses
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(mapped, field.name, inside(getattr(batch, field.name), field.name))
        return mapped
    if isinstance(batch, (tuple, list)):
        parts = [inside(value, number) for number, value in enumerate(batch)]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)  # _fields: a named tuple
    if hasattr(batch, "to_dict") and hasattr(batch, "apply"):  # a graph of torch_geometric
        return copy.copy(batch).apply(lambda value: function(value) if isinstance(value, torch.Tensor) else value)
    return batch
