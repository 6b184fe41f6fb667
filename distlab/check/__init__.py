"""Compare a training step on several ranks with the same step in one process.

The tensors that differ are named, with the mistake that explains them.

    verdict = check(context, task, strategy)        # on every rank
    verdict.right, print(verdict)

Ranks draw different weights and different batches, and train two steps, by plain SGD unless another
optimizer is asked for, whose state is then compared as well. The module's
gradients are read after each step's synchronisation, its parameters there and after the last step.
Each rank then repeats its micro-batches in a copy of the model that no wrapper has touched, from
the parameters that the ranks had in that step. Rank 0 adds the gradients of all ranks in fp64, and
asks of each tensor that differs which known mistake would give these values. A name is given only
where the values that the mistake would give were computed, and agree.

How far two right gradients may be apart is measured for each tensor, see `Expected.combination`:
the rounding of sums in the dtype of the parameter, and the noise of forward and backward. The noise
is what changes where the copy repeats the micro-batches with every parameter moved by its last bit.
It is all that remains of a gradient that is exactly zero, as of a bias in front of BatchNorm, so
such a tensor is right while it differs by noise, and wrong when it differs by more.

Read `compare.py` first. `training.py` trains on the ranks, `reference.py` repeats that in one
process, `weights.py` weighs the micro-batches, `expected.py` says how far right values may be
apart, and `judge.py` finds the mistake, in a norm `norm.py`. `parts.py` finds the part of a tensor
that is wrong. `optimizer.py` reads an optimizer's state and steps it in one process. `where.py`
finds the first module that differs.
"""

from distlab.bench.wrappers import UserWrapper, whole_tensor, wrapped_by
from distlab.check.compare import check, on_rank
from distlab.check.verdict import Finding, Verdict

__all__ = ["Finding", "UserWrapper", "Verdict", "check", "on_rank", "whole_tensor", "wrapped_by"]
