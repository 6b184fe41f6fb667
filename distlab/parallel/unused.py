"""What a parameter gets that only some ranks used in a step."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn


class UsedFlags:
    """Which parameters some rank used: one flag for each, averaged beside the gradients.

    A parameter that this rank did not use is sent as zeros. After the mean, its flag says whether another rank used it:
    then it has a gradient here too; one that no rank used keeps `.grad = None`, and optimizers leave it alone.

    Args:
        parameters: P of them.
        flags: `(P,)`, of any floating-point dtype.

    Attributes:
        unused: positions of the parameters that this rank did not use in this step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], flags: Tensor):
        self.flags = flags
        self._parameters = parameters
        self.unused: list[int] = []

    def write(self) -> Tensor:
        """Write 1 for every parameter that has a gradient here, else 0; returns the flags, to be averaged."""
        self.unused = [index for index, parameter in enumerate(self._parameters) if parameter.grad is None]
        self.flags.fill_(1.0)
        for index in self.unused:
            self.flags[index] = 0
        return self.flags

    def adopt(self, mean_of: Callable[[int], Tensor]) -> None:
        """After the mean: give parameters unused here the mean of the others' gradients, if any rank used them.

        Only a rank with an unused parameter reads a flag on the host; the usual step does not block.
        """
        for index in self.unused:
            if self.flags[index].item() > 0:
                self._parameters[index].grad = mean_of(index)
