"""What forward finds of a parameter while its unit is sharded."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class NotGathered(Tensor):
    """What a module's attribute finds in forward while its unit is sharded: the gathered parameter's shape, strides,
    dtype and device, and an error.

    A rank's shard has the dimensions of its parameter, so that an operator might well compute with
    it: a head that reads `embedding.weight` would give logits of a part of the vocabulary, without
    a word.

    Args:
        like: any tensor of that shape and these strides.
        dtype, device: of the gathered parameter.
        message: what any operator on it, or asking for its address, raises as RuntimeError.
    """

    _message: str

    @staticmethod
    def __new__(
        cls, like: Tensor, dtype: torch.dtype, device: torch.device, message: str
    ) -> NotGathered:
        stand_in = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_size=0,
            dtype=dtype,
            device=device,
            requires_grad=like.requires_grad,
        )
        stand_in._message = message
        return stand_in

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        found = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RuntimeError(found._message)

    def data_ptr(self) -> NoReturn:
        """Raises RuntimeError: a kernel that is given addresses would read where nothing is."""
        raise RuntimeError(self._message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"
