"""How many buckets? The pipeline of backward and all-reduce with n equal buckets, in closed form.

S bytes of gradients, made at an even rate during T seconds of backward; link bandwidth w (bytes per second of an
all-reduce, its two passes included), o seconds per call. Bucket k is complete at k·T/n; communication of one takes
c = S/(n·w) + o and runs in order. The last is done at the largest, over k, of "bucket k is complete, then all from k
on are sent", k·T/n + (n−k+1)·c, which is linear in k and so largest at k = n or k = 1. Less T this is

    overhead(n) = max( S/(n·w) + o ,  T/n + S/w + n·o − T )

The first form holds where backward is the longer, and only the last bucket is exposed; the second where
communication is. If a bucket's gradients take as long to make as to send (T = S/w), it is S/(n·w) + n·o, smallest
for n = √(S/(w·o)) buckets of √(S·w·o) bytes.
"""

import math
from collections.abc import Sequence


def bucket_overhead(
    total_bytes: float, bandwidth: float, call_s: float, buckets: float, backward_s: float | None = None
) -> float:
    """Seconds that synchronisation adds to backward.

    Args:
        total_bytes: S.
        bandwidth: w.
        call_s: o.
        buckets: n, at least 1.
        backward_s: T; default S/w, as long as communication without its calls.

    Raises:
        ValueError: a bandwidth that is not positive, fewer than one bucket, or something negative.
    """
    backward_s = _check(total_bytes, bandwidth, call_s, backward_s)
    if buckets < 1:
        raise ValueError(f"buckets={buckets}: at least 1")
    sending = total_bytes / bandwidth
    last_only = sending / buckets + call_s
    return max(last_only, backward_s / buckets + sending + buckets * call_s - backward_s)


def best_buckets(
    total_bytes: float, bandwidth: float, call_s: float, backward_s: float | None = None
) -> float:
    """The n (a real number, at least 1) with the least overhead.

    The first form falls with n, the second is smallest at √(T/o), and they meet at n = (T − S/w)/o. So the best is
    the larger of the two: more buckets help until backward no longer covers their calls.

    Returns:
        Infinity where calls cost nothing.
    """
    backward_s = _check(total_bytes, bandwidth, call_s, backward_s)
    if call_s == 0:
        return math.inf
    return max(1.0, math.sqrt(backward_s / call_s), (backward_s - total_bytes / bandwidth) / call_s)


def best_bucket_bytes(
    total_bytes: float, bandwidth: float, call_s: float, backward_s: float | None = None
) -> float:
    """S over the best number of buckets; √(S·w·o) where T = S/w."""
    return total_bytes / best_buckets(total_bytes, bandwidth, call_s, backward_s)


def pipeline(
    ready_s: Sequence[float],
    message_s: Sequence[float],
    backward_s: float,
    *,
    compute_rate: float = 1.0,
    communication_rate: float = 1.0,
) -> float:
    """Seconds from the start of backward until all buckets are sent, without the closed form's assumptions.

    Buckets are complete when they are and cost what they cost; they leave in order, and while one is under way
    backward runs at p = `compute_rate` and the message at q = `communication_rate` of their speed alone.

    Args:
        ready_s: seconds of undisturbed backward after which each bucket is complete; later ones wait for earlier.
        message_s: seconds of each message alone.
        backward_s: T, undisturbed.

    Raises:
        ValueError: unequal lengths, a negative time, a rate outside (0, 1].
    """
    rates = (compute_rate, communication_rate)
    if len(ready_s) != len(message_s) or not all(0 < rate <= 1 for rate in rates):
        raise ValueError(
            f"{len(ready_s)} buckets, {len(message_s)} messages, rates {rates}: see the docstring"
        )
    if min([backward_s, *ready_s, *message_s]) < 0:
        raise ValueError("times must not be negative")
    now = done = 0.0  # seconds, and seconds of backward's own time
    for ready, message in zip(ready_s, message_s, strict=True):
        ready = min(ready, backward_s)
        if ready > done:  # nothing is under way
            now, done = now + ready - done, ready
        beside = min(message / communication_rate, (backward_s - done) / compute_rate)
        now, done = now + beside, min(backward_s, done + compute_rate * beside)
        now += message - communication_rate * beside
    return now + backward_s - done


def _check(total_bytes: float, bandwidth: float, call_s: float, backward_s: float | None) -> float:
    if not bandwidth > 0 or total_bytes < 0 or call_s < 0 or (backward_s or 0) < 0:
        raise ValueError(
            f"total_bytes={total_bytes}, bandwidth={bandwidth}, call_s={call_s}, backward_s={backward_s}: bandwidth "
            "must be positive and nothing negative"
        )
    return total_bytes / bandwidth if backward_s is None else backward_s
