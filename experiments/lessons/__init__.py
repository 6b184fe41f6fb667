"""Lessons about GPUs, compilers and kernels. Their own kernels are in `_lesson_*.py`."""
