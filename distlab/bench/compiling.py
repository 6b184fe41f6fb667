"""Dynamo's limit of recompilations, in a process that runs more models or inputs than a user's."""

from contextlib import AbstractContextManager
from typing import Any

# Times the limit that a user's process has. A run has a few dozen models, or a hundred inputs.
TIMES = 2**7


def with_more_graphs() -> AbstractContextManager[Any]:
    """Let Dynamo compile `TIMES` as many graphs of each function inside a `with` block.

    This holds for this thread. After eight graphs of a function, Dynamo runs it eager, or raises
    with `fullgraph=True`. A user's process has one model and few kinds of inputs. A process here
    has many, and would examine or time other code than the user's.
    """
    import torch._dynamo  # takes a second, and the first optimizer of a process imports it as well

    config = torch._dynamo.config
    names = ("recompile_limit", "accumulated_recompile_limit")
    return config.patch({name: TIMES * getattr(config, name) for name in names})
