"""A measurement that fails is a row that says so, and not the end of the sweep."""

import warnings
from collections.abc import Callable

from distlab.ending import is_out_of_memory

__all__ = ["attempt", "is_out_of_memory"]


def attempt(measure: Callable[[], dict[str, object]]) -> dict[str, object]:
    """`measure()`'s metrics with `status` "ok"; only a status, "OOM" or the error's first line, if it raises.

    Warnings are silenced: a torch backend that refuses a call warns once for every reason it has.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"status": "ok"} | measure()
    except Exception as error:
        if is_out_of_memory(error):
            return {"status": "OOM"}
        reason = str(error).strip().splitlines()
        return {"status": f"{type(error).__name__}: {reason[0][:100] if reason else ''}"}
