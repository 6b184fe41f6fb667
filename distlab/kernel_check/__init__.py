"""Anyone's kernel against the operation that it claims to be.

    from distlab.kernel_check import check_kernel

    def test_my_kernel():
        report = check_kernel(my_rms_norm, "rms_norm")
        assert report.is_right, report

The function runs on inputs that its own test does not have: sizes around tiles, large means, masked
rows, strided inputs and gradients, other dtypes. Results are compared with float64, and errors with
those of torch's own operation. `distlab kernel my_kernels:rms_norm --as rms_norm` does the same in
a process of its own, with a time limit. Read `operations.py` for what a name means.
"""

from distlab.kernel_check.operations import OPERATIONS
from distlab.kernel_check.report import Report, check_kernel

__all__ = ["OPERATIONS", "Report", "check_kernel"]
