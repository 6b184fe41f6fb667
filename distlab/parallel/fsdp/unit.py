"""A unit: parameters that are gathered and freed together, because one module's forward needs them."""

from enum import Enum

import torch

from distlab.comm.subgroups import MeshGroups
from distlab.parallel.fsdp.entry import Entry
from distlab.parallel.fsdp.flat_param import FlatParam
from distlab.parallel.fsdp.layout import plan_buffers
from distlab.parallel.fsdp.units import UnitPlan
from distlab.parallel.guards.shards import NotGathered


class State(Enum):
    """Where a unit's full parameters are."""

    SHARDED = "sharded"  # nowhere
    UNSHARDING = "unsharding"  # being gathered
    UNSHARDED = "unsharded"  # in the buffers, and what the module's attributes find


class Unit:
    """Parameters that are gathered and freed together, because one module's forward needs them.

    Args:
        plan: which module and parameters.
        device, groups: see `FlatParam`.

    Attributes:
        state: of the full parameters.
        uses: forwards whose backward has not run yet.
        trained: full parameters that get gradients.
        touched: backward has reached it since its gradients were last accumulated.
    """

    def __init__(self, index: int, plan: UnitPlan, device: torch.device, groups: MeshGroups):
        self.index, self.name, self.module = index, plan.name, plan.module
        kinds: dict[tuple, list[Entry]] = {}
        for entry in plan.entries:
            key = (entry.compute_dtype, entry.master_dtype, entry.parameter.requires_grad)
            kinds.setdefault(key, []).append(entry)
        self.params = [
            FlatParam([entries[index] for index in indices], device, groups)
            for entries in kinds.values()
            for indices in plan_buffers([entry.sizes for entry in entries], groups.shard.size())
        ]
        self.trainable = [param for param in self.params if param.trainable]
        self.trained = [full for param in self.trainable for full in param.full]
        self.storages = {param.buffer.untyped_storage()._cdata for param in self.params}
        self._places = [  # of the parameters, what is found there when they are gathered, and when they are not
            (owner, attribute, full, not_gathered)
            for param in self.params
            for entry, full in zip(param.entries, param.full, strict=True)
            for not_gathered in [
                NotGathered(entry.parameter, entry.compute_dtype, device, self._read_outside(entry))
            ]
            for owner, attribute in entry.owners
        ]
        self._watching = False  # forward is running: attributes must not find shards
        self.state = State.SHARDED
        self.uses = 0
        self.touched = False
        for param in self.params:  # lets go of full parameters before the next unit takes memory
            for number, entry in enumerate(param.entries):
                if not entry.parameter.is_meta:
                    param.load(number, entry.parameter.detach())
                entry.forget_values()
        self.register()

    def register(self) -> None:
        """Let `parameters()` yield the shards."""
        for param in self.params:
            for entry, shard in zip(param.entries, param.shards, strict=True):
                entry.register(shard)

    def unshard(self) -> None:
        """Start to gather the full parameters, unless they are there or on their way."""
        if self.state is State.SHARDED:
            self.state = State.UNSHARDING
            for param in self.params:
                param.unshard()

    def wait_for_unshard(self) -> None:
        """Make the full parameters usable, and what the module's attributes find."""
        if self.state is State.UNSHARDED:
            return
        try:
            for param in self.params:
                param.wait_for_unshard()
        except RuntimeError as error:
            raise RuntimeError(f"FSDP: gathering unit '{self.name}' failed: {error}") from error
        for owner, attribute, full, _ in self._places:
            owner.__dict__[attribute] = full
        self.state = State.UNSHARDED

    def reshard(self) -> None:
        """Give the full parameters' memory back, after which the module's attributes do not find them."""
        if self.state is not State.SHARDED:
            self.state = State.SHARDED
            self.watch(self._watching)  # first: reading a freed buffer would end the process, not raise
            for param in self.params:
                param.reshard()

    def watch(self, watching: bool) -> None:
        """From now on let the module's attributes find, while nothing is gathered, an error (or shards again)."""
        self._watching = watching
        if self.state is State.SHARDED:
            for owner, attribute, _, not_gathered in self._places:
                if watching:
                    owner.__dict__[attribute] = not_gathered
                else:
                    owner.__dict__.pop(attribute, None)

    def _read_outside(self, entry: Entry) -> str:
        return (
            f"FSDP: forward reads '{entry.name}' while its unit '{self.name}' is not gathered: read it in the forward "
            "of the module that owns it, or let the module that reads it own it too (reader.weight = owner.weight, "
            "before wrapping), and it is gathered for the whole pass"
        )
