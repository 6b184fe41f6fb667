"""Small kernels with one effect each: loads in flight, levels of memory, strides, waves, branches.

They are launched by the experiment `gpu_lessons` and shown by `ir`. Lengths are multiples of the
blocks: what ragged ends need is in `kernels/`.
"""

from kernels._dispatch import tl, triton


@triton.jit
def stream_kernel(x_ptr, y_ptr, z_ptr, blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Compute z = x + y by programs that walk over blocks.

    With STAGES above 1 the next loads are in flight meanwhile.
    """
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        at = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(z_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


@triton.jit
def reread_kernel(x_ptr, y_ptr, rounds, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Compute y[i] = Σ over `rounds` r of an element of x, past the L1.

    The length SPAN of x that is read decides the level of memory that the data stay in.
    """
    total = tl.zeros([BLOCK], tl.float32)
    blocks = SPAN // BLOCK
    # Each program goes round and round in blocks of its own. If programs took turns in one window,
    # those that lag would find in the L2 what others have read for them.
    own = tl.maximum(blocks // tl.num_programs(0), 1)
    first = tl.program_id(0) * own
    # loads of four rounds are under way at once
    for r in tl.range(0, rounds, loop_unroll_factor=4):
        block = (first + r % own) % blocks
        total += tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK), cache_modifier=".cg")
    tl.store(y_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


@triton.jit
def strided_kernel(x_ptr, y_ptr, stride, offset, BLOCK: tl.constexpr):
    """Compute y[i] = x[offset + i · stride]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + offset + at * stride))


@triton.jit
def busy_kernel(y_ptr, rounds, BLOCK: tl.constexpr):
    """Compute y[i] = x after `rounds` of x ← x / 2 + 1, beginning at i.

    This is work for one multiprocessor, without memory.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = at.to(tl.float32)
    # Without unrolling, half of the instructions would be the loop's.
    for _ in tl.range(0, rounds, loop_unroll_factor=16):
        x = x * 0.5 + 1.0
    tl.store(y_ptr + at, x)


# Lane by lane: `rounds` of x ← x / 2 + 1 in the one branch of four that the lane takes. Triton
# branches for a whole program, and turns what differs by element into a selection: a branch of a
# thread has to be written in PTX.
_BRANCH = """setp.ne.u32 other, $2, {n}; @other bra DONE{n};
mov.u32 left, $3;
LOOP{n}: fma.rn.f32 value, value, 0f3F000000, 0f3F800000;
sub.u32 left, left, 1; setp.ne.u32 more, left, 0; @more bra LOOP{n};
DONE{n}:
"""
DIVERGENT = tl.constexpr(
    "{ .reg .pred other, more; .reg .u32 left; .reg .f32 value; mov.f32 value, $1;\n"
    + "".join(_BRANCH.format(n=n) for n in range(4))
    + "mov.f32 $0, value; }"
)


@triton.jit
def divergent_kernel(y_ptr, rounds, WIDTH: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute `busy_kernel` in branches: WIDTH neighbouring lanes take the same one of WAYS."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # WIDTH ≥ 32 gives whole warps one branch. With WIDTH = 1, neighbouring lanes differ, and the
    # warp takes all branches one after the other.
    branch = (at // WIDTH) % WAYS
    # `rounds + at * 0` is the number of rounds as a block: inline assembly takes one operand per
    # lane.
    x = tl.inline_asm_elementwise(
        DIVERGENT,
        "=f,f,r,r",
        [at.to(tl.float32), branch, rounds + at * 0],
        tl.float32,
        is_pure=True,
        pack=1,
    )
    tl.store(y_ptr + at, x)
