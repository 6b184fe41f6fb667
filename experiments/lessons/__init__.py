"""Lessons about GPUs, compilers and kernels, each an experiment; kernels of their own lie in `_lesson_*.py`."""
