"""Every kernel compiles for Hopper, without spilling registers and within its shared memory: no GPU
needed.

Those that take much of it also for the generations before, whose programs have less. What
`compiled.json` says of an unchanged kernel is believed; `compiled.py` says how.
"""

import ast

import pytest

from . import compiled

# KiB of shared memory that a block can have (CUDA programming guide), by compute capability
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227}
SPILLS = {
    "dkdv_kernel": 64,  # addresses: a window, documents and softcap at once, compiled by Triton 3.6
    # 128 elements of a thread in 128 registers, for two rows per multiprocessor
    "wide_forward_kernel": 16,
}


def test_the_file_is_of_these_kernels():
    if compiled.kept()["triton"] == compiled.version("triton"):
        assert not compiled.changed(), (
            "other sources than compiled.json's; python -m tests.kernels.compiled renews it"
        )


def test_all_kernels_fit_their_generation():
    assert (
        sum(len(kernels) for unit, kernels in compiled.results().items() if unit.endswith(" 90"))
        > 40 + 24
    )
    assert {int(unit.split()[1]) for unit in compiled.UNITS} == set(SHARED_MEMORY)
    for unit, kernels in compiled.results().items():
        # whose registers are the tests' of its own
        for kernel in () if unit.startswith("hopper") else kernels:
            assert kernel["spill_bytes"] <= SPILLS.get(kernel["name"], 0), kernel
            assert kernel["shared_bytes"] <= 1024 * SHARED_MEMORY[int(unit.split()[1])], kernel
            assert kernel["registers"] * kernel["warps"] * 32 <= 65536, kernel


def test_memory_bound_kernels_load_sixteen_bytes_at_a_time():
    """A kernel that loads element by element reaches a fraction of the bandwidth."""
    no_matter = {"persistent_kernel", "total_kernel"}  # loads by TMA; one program
    # of other things
    lessons = {"busy_kernel", "divergent_kernel", "strided_kernel", "transpose_kernel"}
    narrow = set()
    for unit, kernels in compiled.results().items():
        if not unit.startswith("hopper"):
            narrow.update(kernel["name"] for kernel in kernels if not kernel["wide_loads"])
    narrow -= no_matter | lessons
    assert not narrow


def test_compiling_is_refused_where_kernels_are_interpreted(monkeypatch):
    from kernels import _compile

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), _compile.compile_for():
        pass


def test_a_kernels_defaults_are_literals():
    """Inductor copies the source of a function that a kernel calls, and not what its
    defaults name.
    """
    defaults = []
    for path in compiled.FILES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            if "triton.jit" in map(ast.unparse, node.decorator_list):
                defaults += node.args.defaults
    assert defaults and all(isinstance(default, ast.Constant) for default in defaults)
