"""Which bucket size is best here, and could one have known? Step time against bucket size, measured and predicted.

Before anything is timed with buckets, the parts are: when backward has made each gradient, what all-reduces cost
(a fit, from records of allreduce_sweep or taken here), how backward and an all-reduce slow each other down, and what
packing costs. From these the step with every bucket size is predicted, then it is measured, and torch DDP's beside.

What to sweep is in `config`, measuring the parts in `parts`, the step they predict in `prediction`, the sweep in
`measuring`, the size to use on a machine that was swept in `choice`, table, findings and picture in `view`.
"""

from .config import NAME, BucketSweepConfig
from .measuring import run
from .view import VIEW

__all__ = ["NAME", "VIEW", "BucketSweepConfig", "run"]
