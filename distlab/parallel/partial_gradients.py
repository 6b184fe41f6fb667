"""Gradients of which only this rank's part is the mean: who edits them, or adds to them, must know.

After a reduce-scatter a parameter's `.grad` holds the mean in the part that this rank owns, and leftovers elsewhere.
What works element by element does no harm to that; what looks at the whole (`torch.nn.utils.clip_grad_norm_`) gets
another answer on each rank, and a backward that adds to it mixes means with leftovers. Both are noticed at no cost in
memory traffic: torch counts a tensor's in-place changes in its `_version`, and each gradient here has a counter of
its own.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class PartialGradients:
    """Watches the gradients of one wrapper.

    Args:
        names, parameters: of what is trained.
        views: where each parameter's gradient lies, with a version counter of its own (`tensor.data`); `.grad` is
            this very object once it has been averaged.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], views: Sequence[Tensor]):
        self.names = names
        self.parameters = parameters
        self.views = views
        self._stepped_by: weakref.ref[Optimizer] | None = None
        self._noted = [-2] * len(views)  # versions as they should be; none is as low at first

    def note(self) -> None:
        """The gradients are as they should be now."""
        self._noted = [view._version for view in self.views]

    def belong_to(self, optimizer: Optimizer) -> None:
        """Only `optimizer` knows which part of them to use."""
        self._stepped_by = weakref.ref(optimizer)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if another one is about to use them."""
        if self._stepped_by is not None and self._stepped_by() is not optimizer:
            raise RuntimeError(
                "these gradients are reduce-scattered, and each rank has the mean of a part only: step with the "
                f"ZeroOptimizer that was made last for this wrapper, not with {type(optimizer).__name__}; for "
                "another optimizer close() the wrapper and wrap the module again"
            )

    def check_added(self, index: int) -> None:
        """Called when a backward has added to the gradient of parameter `index`.

        Raises:
            RuntimeError: to one that was averaged before and not zeroed since: the addition is the only change.
        """
        view = self.views[index]
        if self.parameters[index].grad is view and view._version == self._noted[index] + 1:
            self._raise_not_zeroed(index)

    def check_sent_again(self, index: int) -> None:
        """Called when the gradient of parameter `index` is sent though backward did not reach it.

        Raises:
            RuntimeError: it is one that was averaged before and not zeroed since.
        """
        view = self.views[index]
        if self.parameters[index].grad is view and view._version == self._noted[index]:
            self._raise_not_zeroed(index)

    def _raise_not_zeroed(self, index: int) -> None:
        raise RuntimeError(
            f"the gradient of '{self.names[index]}' was not zeroed since the last finish_gradient_synchronization(), "
            "and the mean that it holds is that of this rank's part only, which cannot be added to: call zero_grad() "
            "before every step's first backward, and use no_sync() for all but the last backward of a step to "
            "accumulate"
        )

    def check_unedited(self) -> None:
        """Called before a step. What `GradScaler.unscale_` does, a multiplication, torch does not count as a change.

        Raises:
            RuntimeError: a gradient was edited or replaced since it was averaged.
        """
        for name, parameter, view, noted in zip(
            self.names, self.parameters, self.views, self._noted, strict=True
        ):
            gradient = parameter.grad
            if gradient is not None and (gradient is not view or view._version != noted):
                raise RuntimeError(
                    f"the gradient of '{name}' is not as finish_gradient_synchronization() left it; only this "
                    "rank's part of it is the mean, so that torch.nn.utils.clip_grad_norm_ and the like see a part "
                    "of the whole: clip by ZeroOptimizer.clip_grad_norm_(max_norm), and make edits that are right "
                    "element by element inside `with optimizer.elementwise_gradient_edits():`"
                )

    @contextmanager
    def elementwise_edits(self) -> Iterator[None]:
        """Changes inside are right element by element. A gradient that was replaced is copied to its place.

        Raises:
            RuntimeError: a gradient was edited before.
        """
        self.check_unedited()
        yield
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self.views, strict=True):
                if parameter.grad is not None and parameter.grad is not view:
                    parameter.grad = view.copy_(parameter.grad)
        self.note()
