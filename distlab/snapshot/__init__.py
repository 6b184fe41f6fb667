"""Explanation of a memory snapshot of torch's CUDA allocator, of any program.

    # In your program, before the steps:
    torch.cuda.memory._record_memory_history(stacks="python")
    ...
    torch.cuda.memory._dump_snapshot("snapshot.pickle")

    from distlab.snapshot import explain, read_snapshot

    print(explain(read_snapshot("snapshot.pickle")))

Reading order: `reader.py` (a file that may be hostile), `history.py` (blocks of memory over time),
`purposes.py` (what a block is for), `fragmentation.py` (reserved but not allocated), `growth.py`
(leaks), and `report.py`.
"""

from distlab.snapshot.reader import read_snapshot
from distlab.snapshot.report import Explanation, explain

__all__ = ["Explanation", "explain", "read_snapshot"]
