"""What is refused, and the bookkeeping that it takes: one file for each thing that is watched.

A strategy asks once per event, and its own file holds no check.

    module.py         before wrapping: no parameter, several devices, ranks that disagree; after it: layers that changed
    shared_memory.py  before wrapping: two parameters on one memory
    gradients.py      in every step: gradients that came twice, were edited, or were not finished before the step
    shards.py         FSDP's units and shards: before wrapping, in forward and backward, and before a step
    optimizers.py     optimizers that couple what lies on several ranks
    assignments.py    `p.data = …` of a parameter that lies in a flat buffer
    hooks.py          torch's hooks that reach all of this, there only while something is watched
"""
