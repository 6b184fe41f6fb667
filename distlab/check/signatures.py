"""Names of the mistakes that a check knows.

P stands for the ranks, M for the micro-batches of a rank and step. `judge.py` computes the values
that each mistake would give.
"""

NOT_BROADCAST = "ranks start from different values: not broadcast"
SUMMED = "× P: summed over ranks, not averaged"
DIVIDED = "× 1/P: divided twice, or a sum is missing"
OWN = "each rank's own: never reduced"
OWN_DIVIDED = "each rank's own / P: divided, never summed"
ONE_RANK = "one rank's own gradient on every rank"
MISSING = "the gradient of one rank is missing in the mean"
MICRO_SUMMED = "× M: not divided by the micro-batches"
MICRO_DIVIDED = "× 1/M: divided by the micro-batches twice"
FIRST, LAST = "only the first micro-batch", "only the last micro-batch"
SCALED = "scaled by a factor that is not the ranks, the micro-batches or their inverse"
PREVIOUS = "the previous step's gradient"
ADDED = "the previous step's gradient was added: not set to zero between steps"
MIXED = "a weighted mean with the previous step's gradient"
TIED = "a tied weight counted twice"
PART = "ranks differ and add up to the right one: a sum is missing"
SHARE = "ranks differ and their mean is right: not averaged"
SEQUENCE = ", in vectors only, as where a rank has a part of the sequence"
MEANS = "mean of means: micro-batches (or ranks) weigh alike, tokens do not"
ROUNDED = "within the rounding of bf16: computed or reduced in half precision"
LIKE_BF16 = "near the right one, as if computed in bf16: by autocast?"
LIKE_FP16 = "near the right one, as if computed in fp16: by autocast?"
WEIGHED = "ranks weigh"  # before their weights
BY_TOKENS = ": by their shares of the tokens"  # after their weights
OTHER_TENSOR = "mixed with another tensor's: sent in another order"
ABSENT = "zero, or none, on some rank"
APART = "ranks differ from one another"
NOT_A_NUMBER = "not a number, and a number in one process"
UNKNOWN = "the same on all ranks, and no known mistake"
STALE = "right in step 1, not in step 2: weights of before the step"
NOT_SENT = "gradients are right, and ranks differ after the step: update not sent"
STEPPED_TWICE = "gradients are right, and the update was made twice"
# With two ranks, the two mistakes give the same values.
STEPPED_TWICE_OR_LR = STEPPED_TWICE + ", or the learning rate is × P"
STEPPED_P_TIMES = (
    "gradients are right, and the update was made P times, or the learning rate is × P"
)
NOT_STEPPED = "gradients are right, and no update was made"
DECAYED = "gradients are right, and the value also shrinks: a decay that was not asked for"
STEPPED_WRONG = "gradients are right, the value after the step is not"
FROZEN = "a parameter that does not train was changed"
BUFFER = "differs from the buffer in one process"
NORM_TIMES_RANKS = "norm: gradients that every rank has are counted P times"
NORM_LOCAL = "norm: of each rank's own shard or gradient only"
NORM_PART = "norm: a part of the shards is missing"
NORM_ROOTS = "norm: the square root is taken per rank, and the roots are added"
NORM_APART = "norm: ranks differ from one another"
NORM_UNKNOWN = "norm: the same on all ranks, and no known mistake"
STATE_OWN = "state: moments are not averaged, they are those of each rank's own gradient"
STATE_RESET = "state reset: after the second step it is that of one step"
STATE_COUNT = "state: step count differs (it corrects the bias of moments)"
STATE_UNKNOWN = "state is not that of one process, and no known mistake"
UNTIED = "is no longer tied to"  # between two names
# They say what is visible in the whole tensor. A part of it may have a mistake with a name.
VAGUE = (SHARE, APART, UNKNOWN, STEPPED_WRONG)
WITH_PARTS = (*VAGUE, NOT_A_NUMBER, NOT_SENT)
# They were seen in some elements, and not computed for each of them.
SEEN = (NOT_BROADCAST, NOT_A_NUMBER, NOT_SENT, ABSENT)
UNNAMED = (ROUNDED, LIKE_BF16, LIKE_FP16, APART, UNKNOWN)  # may be a consequence of another mistake
