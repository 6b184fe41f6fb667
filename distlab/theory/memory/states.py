"""States of each strategy on one rank: parameters, gradients, buckets and copies, in bytes.

`distlab.theory.memory.peak` adds these numbers up moment by moment. Each states the rule of the
strategy's file in `distlab/parallel` a second time, and uses none of its code. This is on purpose:
`tests/theory/test_axes.py` compares them with the memory of a simulated step, which runs that code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from distlab.theory.forms import Form
from distlab.theory.memory.activations import FP32, Activations, Precision
from distlab.theory.memory.recompute import Segments
from distlab.theory.model_shape import ModelShape
from distlab.theory.volume import bucket_payloads, dealt_out, sharded_buffers

# cuBLAS reserves 32 MiB per stream and thread on Hopper, from the same allocator: forward's thread
# and autograd's. Source: getChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp.
CUBLAS_WORKSPACES = 2 * 32 * 2**20


@dataclass(frozen=True)
class OptimizerNumbers:
    """fp32 numbers that an optimizer has per stepped parameter.

    Args:
        of_matrices: numbers kept per parameter of the blocks' matrices.
        of_others: numbers kept per parameter of the rest.
        in_step: numbers needed per parameter during the step.
    """

    of_matrices: float
    of_others: float
    in_step: float


OPTIMIZERS = {
    "adamw-fused": OptimizerNumbers(of_matrices=2, of_others=2, in_step=0),
    # The foreach form makes temporaries of whole size: the square root of the second moment, of all
    # parameters at once.
    "adamw-foreach": OptimizerNumbers(of_matrices=2, of_others=2, in_step=1),
    "sgd": OptimizerNumbers(of_matrices=0, of_others=0, in_step=0),
    "sgd-momentum": OptimizerNumbers(of_matrices=1, of_others=1, in_step=0),
    # Muon has updates of all matrices that it sends, in fp32 and in bf16.
    "muon": OptimizerNumbers(of_matrices=1, of_others=2, in_step=1.5),
}


@dataclass(frozen=True)
class Breakdown:
    """Bytes on one rank at one moment, by category.

    Args:
        parameters: bytes of the masters. On a sharding strategy, of this rank's slices.
        gradients: bytes of gradients outside of buckets.
        optimizer_state: bytes of the optimizer's state, for example AdamW's two moments.
        buckets: bytes of flat buffers of gradients.
        gathered: bytes of full parameters that a sharding strategy gathered.
        weight_copies: bytes of low-precision copies that autocast made.
        activations: bytes kept for backward.
        temporary: bytes needed at this moment only, workspaces included.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    buckets: int = 0
    gathered: int = 0
    weight_copies: int = 0
    activations: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer_state
            + self.buckets
            + self.gathered
            + self.weight_copies
            + self.activations
            + self.temporary
        )

    @property
    def states(self) -> int:
        """Bytes that ZeRO divides: parameters, gradients (in buckets or not), optimizer state."""
        return self.parameters + self.gradients + self.optimizer_state + self.buckets


@dataclass(frozen=True)
class Setting:
    """Everything that the walk through a step needs, as numbers.

    Args:
        shape: shape of this rank's part of the model.
        kept: bytes of activations.
        precision: bytes per element.
        strategy: entry of the strategy.
        world_size: number of ranks that the strategy divides by.
        segments: blocks that are recomputed together.
        state_numbers: fp32 numbers of the optimizer's state per parameter, on average.
        step_numbers: fp32 numbers per parameter that the optimizer needs during its step.
        levels: what is kept of each block of a stage, a name in `Activations.kept`. Empty with
            groups.
        loss_chunk: bytes of logits at a time, if the loss is computed in the head.
        layers: number of blocks of a stage: all, unless ranks share the blocks.
        accumulates: True for several micro-batches without synchronisation.
        bucket_size_mb: MiB of a bucket, for strategies whose buckets are freed. None: unbounded.
    """

    shape: ModelShape
    kept: Activations
    precision: Precision
    strategy: Form
    world_size: int
    segments: Segments
    state_numbers: float
    step_numbers: float
    levels: tuple[str, ...]
    loss_chunk: int | None
    layers: int
    accumulates: bool
    bucket_size_mb: float | None

    @property
    def shards_parameters(self) -> bool:
        """Return whether parameters are sharded, and gathered unit by unit."""
        return self.strategy.sends == "units"

    @property
    def sums_are_sharded(self) -> bool:
        """Return whether earlier micro-batches are summed in this rank's shards, as in HSDP."""
        return self.accumulates and self.shards_parameters and self.strategy.takes_mesh

    @property
    def pads(self) -> bool:
        """Return whether matrices' buffers have whole rows on every rank, as in this lab's FSDP."""
        return self.shards_parameters and not self.strategy.is_peer

    @cached_property
    def block_buffer(self) -> int:
        """Elements of the buffers that gather one block's matrices, with FSDP's padding."""
        return self._padded(self.shape.matrix_shapes_per_block)

    @cached_property
    def embedding_buffer(self) -> int:
        """Elements of the buffer that gathers the embedding, or the head, with FSDP's padding."""
        return self._padded([(self.shape.words, self.shape.d_model)])

    @cached_property
    def buckets(self) -> list[tuple[int, int]]:
        """(first element, elements) of each bucket, in the order in which backward fills them."""
        numels = self.shape.parameter_numels()
        payloads = bucket_payloads(numels, [FP32] * len(numels), self.bucket_size_mb, None)
        found = []
        first = 0
        for numel, _ in payloads:
            found.append((first, numel))
            first += numel
        return found

    @property
    def is_stage(self) -> bool:
        """Return whether this rank has a part of the blocks only, in a pipeline."""
        return not (self.shape.has_embedding and self.shape.has_head)

    def sharded(self, numel: int) -> int:
        """Return the fp32 bytes that this rank keeps of `numel` of the model's elements.

        FSDP keeps an N-th of the padded matrices and all norms. Of a part of the model it keeps the
        proportional part.
        """
        if self.pads:
            # Multiplied before divided, and in integers: a float holds neither the product exactly
            # nor a ratio that gives whole elements back.
            share = numel * self._kept_elements
            return FP32 * -(-share // self.shape.num_parameters)
        if self.shards_parameters:
            return FP32 * -(-numel // self.world_size)
        return FP32 * numel

    @cached_property
    def _kept_elements(self) -> int:
        """Elements that this rank keeps under FSDP: all norms, and its part of the matrices."""
        norms = self.shape.norms * self.shape.d_model
        padded_matrices = self.shape.num_layers * self.block_buffer
        padded_matrices += self.shape.vocabularies * self.embedding_buffer
        return norms + padded_matrices // self.world_size

    def _padded(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return the elements of matrices in the buffers of their unit."""
        if self.pads:
            return sum(sharded_buffers(shapes, self.world_size))
        return sum(math.prod(shape) for shape in shapes)


def resident(setting: Setting) -> Breakdown:
    """Return the parameters and buffers that exist from construction on."""
    buckets = 0
    if setting.strategy.sends in ("all", "buckets") and not setting.strategy.frees_gradients:
        buckets = FP32 * setting.shape.num_parameters
    return Breakdown(parameters=setting.sharded(setting.shape.num_parameters), buckets=buckets)


def optimizer_state(setting: Setting) -> int:
    """Return the bytes of the optimizer's state on the rank that has most.

    Owners get whole parameters, largest first. Slices divide evenly.
    """
    parameters = setting.shape.num_parameters
    if setting.shards_parameters:
        # `sharded` counts bytes of fp32 numbers already, the other branches count elements.
        return int(setting.state_numbers * setting.sharded(parameters))
    if setting.strategy.updates == "slices":
        owned = -(-parameters // setting.world_size)
    elif setting.strategy.updates == "owned":
        # Whole parameters do not divide evenly. The fullest rank decides what fits.
        numels = setting.shape.parameter_numels()
        owned = 0
        for positions in dealt_out(numels, setting.world_size):
            owned = max(owned, sum(numels[position] for position in positions))
    else:
        owned = parameters
    return int(FP32 * setting.state_numbers * owned)


def gradients_after(setting: Setting, done: int) -> int:
    """Return the bytes of gradients outside of buckets once backward finished some parameters.

    Args:
        done: number of elements of head and blocks that backward finished.
    """
    if setting.strategy.frees_gradients:
        if not setting.accumulates:
            return FP32 * -(-done // setting.world_size)
        # A pipeline accumulates whole gradients before it sends. Without one, each micro-batch adds
        # to this rank's slices.
        ranks = 1 if setting.is_stage else setting.world_size
        return FP32 * -(-setting.shape.num_parameters // ranks)
    if setting.sums_are_sharded:
        return setting.sharded(setting.shape.num_parameters)
    keeps_earlier_sums = not (setting.shards_parameters or in_place(setting))
    if setting.accumulates and keeps_earlier_sums:
        # The sums of earlier micro-batches are there from the start of the backward.
        return FP32 * setting.shape.num_parameters
    # Where `.grad` becomes a view of a bucket at once, no gradients gather outside. torch's DDP
    # with its defaults copies instead.
    in_buckets = setting.strategy.sends == "buckets" and setting.strategy.has_buckets
    if in_buckets or in_place(setting):
        return 0
    return setting.sharded(done)


def all_gradients(setting: Setting) -> int:
    """Return the bytes of gradients outside of buckets after backward.

    A flat buffer takes over gradients one by one.
    """
    if setting.strategy.frees_gradients:
        return FP32 * -(-setting.shape.num_parameters // setting.world_size)
    if not in_place(setting):
        return gradients_after(setting, setting.shape.num_parameters)
    # Backward of a look-up is not a matmul, so it cannot write into the buffer. With buckets
    # `.grad` is a view of one all the same.
    if setting.strategy.sends == "buckets" or not setting.shape.has_embedding:
        return 0
    return FP32 * setting.shape.embedding_parameters


def buckets_in_backward(setting: Setting, done: int, numel: int) -> int:
    """Return the bytes of buckets that are freed later: one is filled, the one before is sent.

    0 for strategies whose buckets are always there.

    Args:
        done: number of elements of which backward has the gradients.
        numel: number of elements of which it makes them now.
    """
    if not setting.strategy.frees_gradients:
        return 0
    if setting.accumulates and setting.is_stage:
        # Only the last micro-batch fills buckets, when the activations of the others are gone.
        return 0
    most = 0
    before = 0  # elements of the bucket before
    for first, elements in setting.buckets:
        if first < done + numel and first + elements > done:
            most = max(most, before + elements)
        before = elements
    return FP32 * most


def in_place(setting: Setting) -> bool:
    """Return whether linear layers write weights' gradients directly into the sent buffers.

    See `model.ops.gradient_target`.
    """
    strategy = setting.strategy
    return (
        setting.precision.copies_weights
        and strategy.sends in ("all", "buckets")
        and not strategy.is_peer
    )


def weight_copies(setting: Setting) -> int:
    """Return the bytes of autocast's copies of a stage's matrices.

    The embedding has none, because it is looked up and not multiplied.
    """
    if not setting.precision.copies_weights:
        return 0
    shape = setting.shape
    matrices = setting.layers * shape.block_matrices
    if shape.has_head:
        matrices += shape.embedding_parameters
    return setting.precision.compute * matrices


def gathered(setting: Setting, numel: int) -> int:
    """Return the bytes of gathered units, in the dtype of the messages.

    Args:
        numel: elements of the units.
    """
    if not setting.shards_parameters:
        return 0
    # Under autocast the masters are sent, in fp32.
    itemsize = FP32 if setting.precision.copies_weights else setting.precision.compute
    return itemsize * numel


def full_gradients(setting: Setting, numel: int, buffer: int) -> int:
    """Return the bytes of a unit's full gradients and of the fp32 buffer that is being sent.

    0 unless the strategy shards parameters.

    Args:
        numel: elements of the unit.
        buffer: elements of the buffer that is being sent.
    """
    return gathered(setting, numel) + (FP32 * buffer if setting.shards_parameters else 0)


def weight_gradient(setting: Setting, numel: int) -> int:
    """Return the bytes of a matrix's gradient as the matmul leaves it.

    It is then accumulated, packed or cast.

    Args:
        numel: elements of the matrix.
    """
    if in_place(setting):
        return 0
    if setting.shards_parameters and not setting.precision.copies_weights:
        return setting.precision.compute * numel
    return FP32 * numel


def step_temporary(setting: Setting) -> int:
    """Return the temporary bytes of the optimizer, or of messages in which owners send parameters.

    The larger of the two counts.
    """
    # Bytes of the parameters that this rank steps. Plain SGD has no state to derive them from, and
    # needs no temporaries either.
    stepped_bytes = int(optimizer_state(setting) / max(1, setting.state_numbers))
    of_optimizer = int(setting.step_numbers * stepped_bytes)
    of_messages = 0
    if setting.strategy.updates == "owned" and not setting.strategy.is_peer:
        of_messages = FP32 * setting.shape.num_parameters
    return max(of_optimizer, of_messages)
