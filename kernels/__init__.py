"""Triton kernels, one operation per file. Imports nothing: take what you need from the submodules."""
