"""Two different parameters on the same memory would be averaged, stepped and moved as two."""

from itertools import combinations

from torch import nn


def refuse_shared_memory(module: nn.Module) -> None:
    """Check that no trainable parameter overlaps another one.

    Slices of one flat tensor that do not overlap are two parameters and allowed; interleaved
    columns are refused.

    Raises:
        ValueError: names two that overlap.
    """
    on_storage: dict[int, list[tuple]] = {}
    for name, parameter in module.named_parameters():  # a tied parameter is listed once
        if parameter.numel() > 0:
            first, width = parameter.storage_offset(), parameter.element_size()
            reach = sum(
                (size - 1) * stride
                for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
            )
            # the first byte, one past the last
            touched = (first * width, (first + reach + 1) * width, name, parameter)
            on_storage.setdefault(parameter.untyped_storage()._cdata, []).append(touched)
    for together in on_storage.values():
        for (start, stop, name, one), (first, last, other_name, other) in combinations(together, 2):
            if start < last and first < stop and (one.requires_grad or other.requires_grad):
                raise ValueError(
                    f"'{name}' and '{other_name}' are two parameters on the same memory: to tie them, assign "
                    "one Parameter object to both names; to keep them apart, clone one"
                )
