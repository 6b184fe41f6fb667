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

__all__ = ["tl", "triton"]
