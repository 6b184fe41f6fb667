"""States of each strategy on one rank: parameters, gradients, buckets and copies, in bytes.

The numbers that `distlab.theory.memory` adds up moment by moment; each is read off the strategy's
file in `distlab/parallel`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from distlab.theory.forms import Form
from distlab.theory.memory.activations import FP32, Activations, Precision
from distlab.theory.model_shape import ModelShape
from distlab.theory.volume import padded_parameters, sharded_buffers

# cuBLAS reserves 32 MiB per stream and thread on Hopper, from the same allocator: forward's thread
# and autograd's. Source: getChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp.
CUBLAS_WORKSPACES = 2 * 32 * 2**20

# fp32 numbers per stepped parameter: kept, of the matrices of blocks and of the rest, and needed
# during the step. The foreach form makes temporaries of whole size: the square root of the second
# moment, of all parameters at once. Muon has updates of all matrices that it sends, in fp32 and in
# bf16.
OPTIMIZERS = {
    "adamw-fused": (2, 2, 0),
    "adamw-foreach": (2, 2, 1),
    "sgd": (0, 0, 0),
    "sgd-momentum": (1, 1, 0),
    "muon": (1, 2, 1.5),
}


@dataclass(frozen=True)
class Breakdown:
    """Bytes on one rank at one moment, by category.

    Args:
        parameters: masters; on a sharding strategy this rank's slices.
        gradients: held outside of buckets.
        optimizer_state: AdamW's two moments, say.
        buckets: flat buffers of gradients.
        gathered: full parameters that a sharding strategy gathered.
        weight_copies: low-precision copies that autocast made.
        activations: kept for backward.
        temporary: needed at this moment only, workspaces included.
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
        """Parameters, gradients (in buckets or not) and optimizer state: what ZeRO divides."""
        return self.parameters + self.gradients + self.optimizer_state + self.buckets


@dataclass(frozen=True)
class Setting:
    """Everything that the walk through a step needs, as numbers."""

    shape: ModelShape
    kept: Activations
    precision: Precision
    strategy: Form
    world_size: int
    group: int
    state_numbers: float
    step_numbers: float
    # what is kept of each block of a stage, an entry of `Activations.kept`; empty with groups
    levels: tuple[str, ...]
    loss_chunk: int | None  # bytes of logits at a time, where the loss is computed in the head
    layers: int  # of a stage: all, unless ranks share the blocks
    accumulates: bool

    @property
    def shards_parameters(self) -> bool:
        """Return whether parameters are sharded, and gathered unit by unit."""
        return self.strategy.sends == "units"

    @property
    def pads(self) -> bool:
        """Return whether matrices' buffers have whole rows on every rank, as in this lab's FSDP."""
        return self.shards_parameters and not self.strategy.is_peer

    @cached_property
    def block_buffer(self) -> int:
        """Elements of one block's matrices where they are gathered, with FSDP's padding."""
        return self._padded(self.shape.matrix_shapes_per_block)

    @cached_property
    def embedding_buffer(self) -> int:
        """The same of the embedding, or of the head."""
        return self._padded([(self.shape.words, self.shape.d_model)])

    def sharded(self, numel: int) -> int:
        """Bytes of what this rank keeps, in fp32, of `numel` of the model's elements.

        FSDP keeps an N-th of the padded matrices and all norms; of a part of the model, the
        proportional part.
        """
        if not self.pads:
            return FP32 * -(-numel // (self.world_size if self.shards_parameters else 1))
        return FP32 * -(-numel * self._kept_elements // self.shape.num_parameters)

    @cached_property
    def _kept_elements(self) -> int:
        """Elements that this rank keeps under FSDP: all norms, and its part of the padded matrices."""
        norms = self.shape.norms * self.shape.d_model
        padded = padded_parameters(self.shape, self.world_size)
        return norms + (padded - norms) // self.world_size

    def _padded(self, shapes: Sequence[Sequence[int]]) -> int:
        if self.pads:
            return sum(sharded_buffers(shapes, self.world_size))
        return sum(map(math.prod, shapes))


def resident(setting: Setting) -> Breakdown:
    """Parameters and buffers that exist from construction on."""
    whole = FP32 * setting.shape.num_parameters
    buckets = whole if setting.strategy.sends in ("all", "buckets") else 0
    return Breakdown(parameters=setting.sharded(setting.shape.num_parameters), buckets=buckets)


def optimizer_state(setting: Setting) -> int:
    """Return the bytes on the rank that has most.

    Owners get whole parameters, largest first. Slices divide evenly.
    """
    parameters = setting.shape.num_parameters
    if setting.shards_parameters:
        return int(setting.state_numbers * setting.sharded(parameters))
    if setting.strategy.updates == "slices":
        owned = -(-parameters // setting.world_size)
    elif setting.strategy.updates == "owned":
        owned = max(dealt_out(setting.shape.parameter_numels(), setting.world_size))
    else:
        owned = parameters
    return int(FP32 * setting.state_numbers * owned)


def dealt_out(numels: list[int], ranks: int) -> list[int]:
    """Elements per rank where whole parameters go, largest first, to the rank that has least."""
    loads = [0] * ranks
    for numel in sorted(numels, reverse=True):
        loads[loads.index(min(loads))] += numel
    return loads


def gradients_after(setting: Setting, done: int) -> int:
    """Return the bytes of gradients outside of buckets once backward finished `done` parameters.

    `done` counts those of head and blocks.
    """
    # Where `.grad` becomes a view of a bucket at once, nothing gathers outside; torch DDP as it
    # comes copies instead. of earlier micro-batches
    if setting.accumulates and not (setting.shards_parameters or in_place(setting)):
        return FP32 * setting.shape.num_parameters
    in_buckets = setting.strategy.sends == "buckets" and setting.strategy.has_buckets
    return 0 if in_buckets or in_place(setting) else setting.sharded(done)


def all_gradients(setting: Setting) -> int:
    """Return the bytes after backward. The flat buffer takes over gradients one by one."""
    if in_place(setting):
        embedding = setting.shape.has_embedding * setting.shape.embedding_parameters
        return 0 if setting.strategy.sends == "buckets" else FP32 * embedding
    return gradients_after(setting, setting.shape.num_parameters)


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
    shape = setting.shape
    matrices = setting.layers * shape.block_matrices + shape.has_head * shape.embedding_parameters
    return setting.precision.compute * matrices if setting.precision.copies_weights else 0


def gathered(setting: Setting, numel: int) -> int:
    """Return the bytes of gathered units with `numel` elements, in the dtype of the messages."""
    if not setting.shards_parameters:
        return 0
    return (FP32 if setting.precision.copies_weights else setting.precision.compute) * numel


def full_gradients(setting: Setting, numel: int, buffer: int) -> int:
    """Return the bytes of a unit's full gradients and of the fp32 buffer that is being sent.

    `numel` counts the elements of the unit, `buffer` those of the unit before. Both are 0 except
    under FSDP.
    """
    return gathered(setting, numel) + (FP32 * buffer if setting.shards_parameters else 0)


def weight_gradient(setting: Setting, numel: int) -> int:
    """One matrix's gradient as the matmul leaves it, before it is accumulated, packed or cast."""
    if in_place(setting):
        return 0
    if setting.shards_parameters and not setting.precision.copies_weights:
        return setting.precision.compute * numel
    return FP32 * numel


def step_temporary(setting: Setting) -> int:
    """Return the temporary bytes of the optimizer, or of messages in which owners send parameters.

    The larger of the two counts.
    """
    stepped = int(optimizer_state(setting) / max(1, setting.state_numbers))
    ours = setting.strategy.updates == "owned" and not setting.strategy.is_peer
    sent = FP32 * setting.shape.num_parameters if ours else 0
    return max(int(setting.step_numbers * stepped), sent)
