"""`triton` and `tl` for the files that hold their kernels themselves, also where Triton does not exist.

There `@triton.jit` leaves a function as it is and nothing is ever launched: `_triton.runs_triton` is false, and the
public functions compute their reference. Whether kernels are compiled or interpreted is decided when such a file is
imported, see `_triton`: import it where it is first needed if TRITON_INTERPRET may still be set.
"""

from ._triton import installed

if installed():
    import triton
    import triton.language as tl
else:

    class _Absent:
        """Stands for a module or a type; any attribute is again one."""

        def __getattr__(self, name: str):
            return lambda function=None, **options: function if function is not None else (lambda f: f)

    triton = _Absent()
    tl = _Absent()

# Hints for the L2. STREAMED: nobody reads this again, so the line may leave first. It pays where a kernel only reads,
# since lines that other kernels wrote are then not pushed out to memory while it runs; kernels that write as much as
# they read were 1 to 3 % slower with it. KEPT: this program will read the line once more.
STREAMED = tl.constexpr("evict_first")
KEPT = tl.constexpr("evict_last")

__all__ = ["KEPT", "STREAMED", "tl", "triton"]
