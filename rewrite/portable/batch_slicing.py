"""The samples of a batch of any nesting: how many there are, and a batch of some of them.

The text that runs here is the text that is emitted.
"""

import copy
import dataclasses
from collections.abc import Mapping

import torch


def samples_between(start, stop, batch, samples):
    """The part of a batch with these samples; what has no sample dimension is shared."""
    return map_tensors(
        lambda t: t[start:stop] if t.dim() and t.shape[0] == samples else t,
        batch,
        lambda mappings: mappings[start:stop] if len(mappings) == samples else None,
    )


def count_samples(batch, batch_size):
    """How many samples the batch has: as planned, or for a smaller last batch what all its tensors agree on."""
    sizes = set()

    def count(tensor):
        sizes.add(tensor.shape[0] if tensor.dim() else 1)
        return tensor

    map_tensors(count, batch, lambda mappings: mappings)
    if not sizes:  # all of them are in lists of mappings
        map_tensors(count, batch)
    if batch_size in sizes:
        return batch_size
    found = sizes - {1} or sizes
    if len(found) != 1:
        raise ValueError(
            f"no tensor of the batch has {batch_size} samples, and their first dimensions {sorted(found)} differ: "
            f"give batches of {batch_size} samples (drop_last=True), with the sample as first dimension"
        )
    return found.pop()


def map_tensors(function, batch, of_mappings=None):
    """Apply a function to every tensor of nested mappings, dataclasses, tuples and lists; share everything else.

    A list of mappings inside of a batch, such as one for each sample, is what `of_mappings` makes of it, unless that is
    None.
    """

    def inside(value):
        is_list = of_mappings and isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value)
        made = of_mappings(value) if is_list else None
        return map_tensors(function, value, of_mappings) if made is None else made

    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        values = dict(batch)
        mapped = copy.copy(batch)
        for key, value in values.items():
            mapped[key] = inside(value)
            if batch[key] is not value:  # a copy that shares what it holds
                batch[key] = value
                return {key: inside(value) for key, value in values.items()}
        return mapped
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        mapped = copy.copy(batch)  # past its __init__
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(mapped, field.name, inside(getattr(batch, field.name)))
        return mapped
    if isinstance(batch, (tuple, list)):
        parts = [inside(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
