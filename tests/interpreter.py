"""Triton's interpreter, a third faster."""

import functools

from triton.runtime import interpreter


def patch_once_per_launch() -> None:
    """The interpreter exchanges the language's functions for its own at each call of a device
    function, though they stay exchanged until the launch ends; looking for them takes longer than
    most of the calls.
    """
    exchange, scope = interpreter._patch_lang, interpreter._LangPatchScope
    restore, done = scope.restore, set()

    @functools.wraps(exchange)
    def exchange_once(fn):
        if id(fn.__globals__) in done:
            return scope()
        done.add(id(fn.__globals__))
        return exchange(fn)

    @functools.wraps(restore)
    def restore_all(self):
        done.clear()
        restore(self)

    interpreter._patch_lang, scope.restore = exchange_once, restore_all
