"""The part of a tensor that is wrong, where the rest of it is right.

`Judge` compares whole tensors first. This file finds the ranges of elements that differ, and
`Judge` then asks for the mistake in these elements alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.check.signatures import SEEN, VAGUE
from distlab.check.tensors import per_element

MOST_RANGES = 64  # of a tensor that are examined; what differs in more places has no shape
SHOWN = 3  # ranges that are written out
# Right elements outside of a part whose mistake is not known. Fewer may be right by chance.
LEAST_RIGHT = 8
LEAST_NAMED = 4  # elements of a part with a known mistake, in half precision
# Share of wrong elements in a part whose mistake was not computed element by element.
DENSE = 0.9

Range = tuple[int, int]  # first and last element in flattened order, from 0 on


@dataclass(frozen=True)
class Part:
    """Elements of a tensor that are wrong. The other elements are right.

    Attributes:
        ranges: first and last element of each range, in flattened order, from 0 on.
        elements: number of elements of the tensor.
        row: number of elements in one row, which is one index of the first dimension.
    """

    ranges: tuple[Range, ...]
    elements: int
    row: int

    def __str__(self) -> str:
        are_rows = self.row > 1 and all(
            first % self.row == 0 and (last + 1) % self.row == 0 for first, last in self.ranges
        )
        unit = self.row if are_rows else 1
        words = []
        for first, last in self.ranges[:SHOWN]:
            begin, end = first // unit, last // unit
            words.append(str(begin) if begin == end else f"{begin} to {end}")
        if len(self.ranges) > SHOWN:
            words.append(f"{len(self.ranges) - SHOWN} more ranges")
        listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
        wrong = sum(last + 1 - first for first, last in self.ranges)
        noun = "row" if are_rows else "element"
        plural = "" if wrong == unit else "s"
        share = f"{100 * wrong / self.elements:.3g}%"
        return f"{noun}{plural} {listed} of {self.elements // unit} ({share})"


def narrowed(
    signature: str,
    wrong: Tensor,
    undecided: Tensor,
    parameter: Tensor,
    mistake_in: Callable[[Tensor], str | None],
) -> tuple[str, Part | None]:
    """Return the mistake in the wrong part of a tensor, and this part.

    The part is None, and the mistake that of the whole tensor, if the whole tensor is wrong.

    Args:
        signature: mistake of the whole tensor.
        wrong: mask of the elements that are wrong.
        undecided: mask of the elements that most mistakes leave right, such as a gradient of zero.
            If they are not wrong, they may belong to the part.
        parameter: tensor with the shape and the dtype of the parameter.
        mistake_in: function that takes indices of elements, in flattened order, and returns the
            mistake in them alone. None: they are right.
    """
    shape = parameter.shape
    # A complex element is wrong if one of its two numbers is.
    wrong = per_element(wrong, shape).any(1)
    undecided = per_element(undecided, shape).all(1) & ~wrong
    runs = _runs(wrong, undecided, shape[1:].numel())
    # A tensor may also differ without one element that differs by more than is allowed.
    if not runs:
        return signature, None
    # In half precision, rounding hides small mistakes, so that some wrong elements look right.
    is_half = parameter.dtype in (torch.bfloat16, torch.float16)
    first, last = runs[0][0], runs[-1][1]
    between = int((~undecided)[first : last + 1].sum())
    is_dense = int(wrong.sum()) >= DENSE * between
    # One range is tried first: in it, an element may be near to the right value by chance.
    tries = [[(first, last)]]
    if len(runs) > 1 and not is_dense and not is_half:
        tries.append(runs)
    for ranges in tries:
        inside = torch.zeros_like(wrong)
        for begin, end in ranges:
            inside[begin : end + 1] = True
        right = int((~inside & ~undecided).sum())
        # Where all of the rest is undecided, the mistake may be in the whole tensor.
        if not right or mistake_in((~inside).nonzero().flatten()) is not None:
            continue
        mistake = mistake_in(inside.nonzero().flatten())
        if mistake is None:
            is_sure = False  # right, if these elements alone are compared
        elif mistake in VAGUE:
            # What is right in the rest could be so by chance.
            is_sure = is_dense and not is_half and right >= LEAST_RIGHT
        elif mistake in SEEN:
            is_sure = is_dense or len(ranges) > 1
        else:
            # A few elements in half precision agree with one of the many mistakes by chance.
            is_sure = not is_half or int(inside.sum()) >= LEAST_NAMED
        if is_sure:
            return mistake, Part(tuple(ranges), len(wrong), shape[1:].numel())
    return signature, None


def _runs(wrong: Tensor, undecided: Tensor, row: int) -> list[Range]:
    """Return the ranges of wrong elements. Only right elements separate two of them."""
    places = wrong.nonzero().flatten()
    if not len(places):
        return []
    # The number of right elements before a wrong one is the same in all of one range.
    before = (~wrong & ~undecided).cumsum(0)[places]
    _, counts = before.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    firsts, lasts = places[ends - counts].tolist(), places[ends - 1].tolist()
    if len(firsts) > MOST_RANGES:
        firsts, lasts = firsts[:1], lasts[-1:]
    found = []
    for first, last in zip(firsts, lasts, strict=True):
        # Undecided elements complete a row, and then the tensor.
        start, stop = first, last + 1
        for edge in (start - start % row, 0):
            if undecided[edge:start].all():
                start = edge
        for edge in (stop + -stop % row, len(wrong)):
            if undecided[stop:edge].all():
                stop = edge
        found.append((start, stop - 1))
    return found


class _Piece(NamedTuple):
    """A wrong range of one tensor, and its place in a flat buffer of all tensors.

    Attributes:
        start, stop: first element, and the one after the last, in the flat buffer.
        tensor: name.
        first, last: first and last element in the tensor.
    """

    start: int
    stop: int
    tensor: str
    first: int
    last: int


def together(parts: Mapping[str, Part | None], sizes: Mapping[str, int]) -> list[str]:
    """Return a sentence for each range of a flat buffer that spans several wrong tensors.

    Args:
        parts: tensor with one mistake → its wrong part, None if the whole tensor is wrong.
        sizes: tensor → number of its elements, for all tensors in the order of registration.
    """
    orders = {
        "order of registration": _spans(parts, sizes, list(sizes)),
        "reverse order of registration": _spans(parts, sizes, list(sizes)[::-1]),
    }
    # The parts touch each other in the order in which the buffer holds the tensors.
    order = max(orders, key=lambda order: sum(map(len, orders[order])))
    sentences = []
    for pieces in orders[order]:
        begin, end = pieces[0], pieces[-1]
        sentences.append(
            f"One range of all parameters in {order}: from element {begin.first} of "
            f"'{begin.tensor}' to element {end.last} of '{end.tensor}', which are {begin.start} to "
            f"{end.stop - 1} of {sum(sizes.values())}."
        )
    return sentences


def _spans(
    parts: Mapping[str, Part | None], sizes: Mapping[str, int], order: Sequence[str]
) -> list[list[_Piece]]:
    """Return the wrong ranges that touch each other in a flat buffer with this order of tensors.

    Ranges of whole tensors only are left out: their names say the same.
    """
    spans: list[list[_Piece]] = []
    offset = 0
    for name in order:
        ranges: Sequence[Range] = ()
        if name in parts:
            part = parts[name]
            ranges = ((0, sizes[name] - 1),) if part is None else part.ranges
        for first, last in ranges:
            piece = _Piece(offset + first, offset + last + 1, name, first, last)
            if spans and spans[-1][-1].stop == piece.start:
                spans[-1].append(piece)
            else:
                spans.append([piece])
        offset += sizes[name]
    found = []
    for span in spans:
        has_part = any(parts[piece.tensor] is not None for piece in span)
        if has_part and span[0].tensor != span[-1].tensor:
            found.append(span)
    return found
