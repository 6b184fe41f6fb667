"""Faults that tests must notice: each is put into a copy of the tree, and tests that must turn red are run there.

    python -m tests.mutations --workers 4          # all of them, four at a time; 1 if one survives
    python -m tests.mutations --list
    python -m tests.mutations --category buckets resume
    python -m tests.mutations --only "fp16 clipping dropped"
    python -m tests.mutations --only "fp16 clipping dropped" --tests tests/train/test_loop.py

A mutation is a text in a file and what takes its place. The text must stand there exactly once: who changes that
code changes the entry (`tests/test_mutations.py` says so in every run of the suite). The tests of an entry are those
that are about the fault, of those that `make test` runs; others may see it too. Green is a survivor, and so is a
failure that is none: tests that cannot be collected end the command with an error.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: what is wrong then.
        category: what it breaks; `tests/test_mutations.py` says how many of each there must be.
        file: relative to the repository's root.
        find: stands in the file exactly once.
        replacement: what takes its place.
        tests: arguments of pytest; at least one test among them must fail.
    """

    name: str
    category: str
    file: str
    find: str
    replacement: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Change the file below `root`.

        Raises:
            ValueError: the text stands there not at all, or more than once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {count} times, not once: {self.find!r}")
        path.write_text(text.replace(self.find, self.replacement), encoding="utf-8")


RANDOM_MODELS = ("tests/parallel/test_random_models.py", "-k", "2-ranks")
MUTATIONS = (
    # -- strategies ----------------------------------------------------------------------------------------
    Mutation(
        "construction broadcasts no buffers",
        "averaging",
        "distlab/parallel/data_parallel.py",
        "broadcast_all([*module.parameters(), *module.buffers()], self.process_group)",
        "broadcast_all([*module.parameters()], self.process_group)",
        RANDOM_MODELS,
    ),
    Mutation(
        "construction broadcasts no parameters",
        "averaging",
        "distlab/parallel/data_parallel.py",
        "broadcast_all([*module.parameters(), *module.buffers()], self.process_group)",
        "broadcast_all([*module.buffers()], self.process_group)",
        RANDOM_MODELS,
    ),
    Mutation(
        "a reentrant checkpoint ends the backward around it",
        "averaging",
        "distlab/parallel/data_parallel.py",
        "self._in_backward = bool(following)",
        "self._in_backward = False",
        ("tests/parallel/test_faults.py", "-k", "accumulated"),
    ),
    Mutation(
        "the end of a backward around a reentrant checkpoint is not seen",
        "averaging",
        "distlab/parallel/data_parallel.py",
        "            node.register_prehook(self._enter_backward)\n",
        "            pass\n",
        ("tests/parallel/test_faults.py", "-k", "accumulated"),
    ),
    Mutation(
        "a skipped step is not forgotten",
        "guards",
        "distlab/parallel/data_parallel.py",
        "(self._in_backward or self._dropped())",
        "self._in_backward",
        ("tests/parallel/test_faults.py", "-k", "accumulated"),
    ),
    Mutation(
        "memory assigned to a parameter of ZeRO-1 is not refused",
        "guards",
        "distlab/parallel/sharded_buckets.py",
        "            refuse_assigned(self._placed)\n",
        "            pass\n",
        ("tests/parallel/test_idioms.py", "-k", "assigned"),
    ),
    Mutation(
        "memory assigned to a parameter of FSDP is not refused",
        "guards",
        "distlab/parallel/fsdp/fsdp.py",
        "        refuse_assigned(self._placed)  # in backward, values are those of forward\n",
        "",
        ("tests/parallel/test_idioms.py", "-k", "assigned"),
    ),
    Mutation(
        "memory assigned to a parameter of FSDP is gathered",
        "guards",
        "distlab/parallel/fsdp/fsdp.py",
        "        refuse_assigned(self._placed)\n        found = {}\n",
        "        found = {}\n",
        ("tests/parallel/test_idioms.py", "-k", "assigned"),
    ),
    Mutation(
        "gradients that no backward made are not averaged",
        "averaging",
        "distlab/parallel/data_parallel.py",
        "        if not (self._pending or self._ready or self._has_assigned_gradients()):\n",
        "        if not (self._pending or self._ready):\n",
        ("tests/parallel/test_idioms.py", "-k", "assigned"),
    ),
    Mutation(
        "gradients that were averaged count as assigned",
        "averaging",
        "distlab/parallel/data_parallel.py",
        "            self._averaged[:] = [(gradient, gradient._version)",
        "            self._averaged[:] = [(gradient, -1)",
        ("tests/parallel/test_idioms.py", "-k", "assigned"),
    ),
    Mutation(
        "FSDP does not average vectors that alone were reached",
        "sharding",
        "distlab/parallel/fsdp/fsdp.py",
        "        if not (self._runtime.pending or vectors_alone):\n",
        "        if not self._runtime.pending:\n",
        ("tests/parallel/test_idioms.py", "-k", "vectors"),
    ),
    Mutation(
        "a matrix that no rank uses is taken for inputs=",
        "guards",
        "distlab/parallel/fsdp/runtime.py",
        "        if node in ends:\n            return True\n",
        "        return True\n",
        ("tests/parallel/test_idioms.py", "-k", "vectors"),
    ),
    Mutation(
        "other parameters than FSDP's are not refused",
        "guards",
        "distlab/parallel/fsdp/fsdp.py",
        "        checks.refuse_replaced(self._owned)\n",
        "",
        ("tests/parallel/test_idioms.py", "-k", "names"),
    ),
    Mutation(
        "a cached parametrization is not named",
        "guards",
        "distlab/parallel/fsdp/runtime.py",
        '        if ".parametrizations." in before:\n',
        "        if False:\n",
        ("tests/parallel/test_idioms.py", "-k", "names"),
    ),
    Mutation(
        "FSDP does not see what a step's pre-hook edits",
        "guards",
        "distlab/parallel/fsdp/fsdp.py",
        "    if fsdp is not None:\n        fsdp.check_gradients()\n",
        "    if fsdp is not None:\n        pass\n",
        ("tests/parallel/test_idioms.py", "-k", "names"),
    ),
    Mutation(
        "FSDP checks a step before the optimizer's later hooks",
        "guards",
        "distlab/parallel/fsdp/fsdp.py",
        "            self._check_last[optimizer].remove()\n",
        "            return\n",
        ("tests/parallel/test_idioms.py", "-k", "names"),
    ),
    Mutation(
        "wrappers in one backward send when their buckets fill",
        "averaging",
        "distlab/parallel/data_parallel.py",
        "        return not self._ahead or all(wrapper._all_sent() for wrapper in self._ahead)\n",
        "        return True\n",
        ("tests/parallel/test_several_wrappers.py",),
    ),
    Mutation(
        "a wrapper that finishes sends before those that began",
        "averaging",
        "distlab/parallel/data_parallel.py",
        "                step_guard.send_begun(self.process_group, [self])\n",
        "                self._send_rest()\n",
        ("tests/parallel/test_several_wrappers.py",),
    ),
    Mutation(
        "FSDP gathers before wrappers that began have sent",
        "sharding",
        "distlab/parallel/fsdp/fsdp.py",
        "        step_guard.send_begun(self.process_group)\n        with",
        "        with",
        ("tests/parallel/test_several_wrappers.py",),
    ),
    Mutation(
        "FSDP finishes before wrappers that began have sent",
        "sharding",
        "distlab/parallel/fsdp/fsdp.py",
        "        step_guard.send_begun(self.process_group)\n        arrived",
        "        arrived",
        ("tests/parallel/test_several_wrappers.py",),
    ),
    Mutation(
        "FSDP's backward ends before wrappers that began have sent",
        "sharding",
        "distlab/parallel/fsdp/runtime.py",
        "        step_guard.send_begun(self._group)\n        self._backward_order.end()\n",
        "        self._backward_order.end()\n",
        ("tests/parallel/test_several_wrappers.py",),
    ),
    Mutation(
        "FSDP's backward begins before wrappers that began have sent",
        "sharding",
        "distlab/parallel/fsdp/runtime.py",
        "            step_guard.send_begun(self._group)\n            self.unfinished",
        "            self.unfinished",
        ("tests/parallel/test_several_wrappers.py",),
    ),
    Mutation(
        "ZeRO-1 gathers before wrappers that began have sent",
        "sharding",
        "distlab/parallel/sharded_buckets.py",
        "        step_guard.send_begun(self._group)\n",
        "",
        ("tests/parallel/test_several_wrappers.py",),
    ),
    Mutation(
        "ShardedOptimizer broadcasts before wrappers that began have sent",
        "sharding",
        "distlab/parallel/sharded_optimizer.py",
        "        step_guard.send_begun(self._group)\n",
        "",
        ("tests/parallel/test_several_wrappers.py",),
    ),
    Mutation(
        "a gradient behind its message is lost",
        "guards",
        "distlab/parallel/data_parallel.py",
        "        if self._sent_rest:\n",
        "        if False:\n",
        ("tests/parallel/test_several_wrappers.py",),
    ),
    Mutation(
        "ShardedOptimizer takes the default group",
        "sharding",
        "distlab/parallel/sharded_optimizer.py",
        "    group = collectives.resolve_group(given or next(iter(wrapping), None))\n",
        "    group = collectives.resolve_group(given)\n",
        ("tests/parallel/test_several_wrappers.py",),
    ),
    Mutation(
        "ShardedOptimizer takes any group",
        "guards",
        "distlab/parallel/sharded_optimizer.py",
        "        if theirs != ours:\n",
        "        if False:\n",
        ("tests/parallel/test_several_wrappers.py",),
    ),
    Mutation(
        "a copy of the module is taken for the module",
        "guards",
        "distlab/parallel/data_parallel.py",
        "    return Attached(check)\n",
        "    return check\n",
        ("tests/parallel/test_idioms.py", "-k", "copy"),
    ),
    Mutation(
        "hooks that wait for parameters are saved",
        "guards",
        "distlab/parallel/sharded_buckets.py",
        "Attached(partial(self._before_module, needed))",
        "partial(self._before_module, needed)",
        ("tests/parallel/test_idioms.py", "-k", "copy"),
    ),
    Mutation(
        "what FSDP wraps is copied with its hooks",
        "guards",
        "distlab/parallel/fsdp/runtime.py",
        "    def __getstate__(self) -> NoReturn:\n",
        "    def state(self) -> NoReturn:\n",
        ("tests/parallel/test_idioms.py", "-k", "copy"),
    ),
    Mutation(
        "a compiled step of ZeRO-1 is traced",
        "sharding",
        "distlab/parallel/zero1.py",
        "    @torch._disable_dynamo  # its checks read versions, and reading a parameter waits\n",
        "",
        ("tests/parallel/test_idioms.py", "-k", "compiled"),
    ),
    Mutation(
        "a compiled FSDP is traced",
        "sharding",
        "distlab/parallel/fsdp/fsdp.py",
        "            return self._outside_graph(*args, **kwargs)\n",
        "            pass\n",
        ("tests/parallel/test_idioms.py", "-k", "compiled"),
    ),
    Mutation(
        "hooks on shards are not refused",
        "guards",
        "distlab/parallel/fsdp/fsdp.py",
        "        checks.refuse_hooks([*self._named_shards, *self._replicated.cast])\n",
        "",
        ("tests/parallel/test_idioms.py", "-k", "names"),
    ),
    Mutation(
        "a backward that brings no matrix a gradient is finished",
        "guards",
        "distlab/parallel/fsdp/runtime.py",
        "        if not self.arrived and _lead_to(self._reached, trained):\n",
        "        if False:\n",
        ("tests/parallel/test_idioms.py", "-k", "names"),
    ),
    Mutation(
        "what forward writes to gathered parameters is freed",
        "guards",
        "distlab/parallel/fsdp/runtime.py",
        "        unit.refuse_written()\n",
        "",
        ("tests/parallel/test_idioms.py", "-k", "names"),
    ),
    Mutation(
        "rows are renormalised under ZeRO-1",
        "guards",
        "distlab/parallel/bucketed.py",
        'if getattr(module, "max_norm", None) is not None:\n',
        "if False:\n",
        ("tests/parallel/test_idioms.py", "-k", "names"),
    ),
    Mutation(
        "nested no_sync ends the outer one",
        "averaging",
        "distlab/parallel/base.py",
        "            self._set_synchronizes(before)\n",
        "            self._set_synchronizes(True)\n",
        RANDOM_MODELS,
    ),
    Mutation(
        "a tied parameter is averaged twice",
        "averaging",
        "distlab/parallel/data_parallel.py",
        "named = list(module.named_parameters())",
        "named = list(module.named_parameters(remove_duplicate=False))",
        RANDOM_MODELS,
    ),
    Mutation(
        "naive and overlap do not wait",
        "averaging",
        "distlab/parallel/naive.py",
        "        self._wait(work)\n",
        "",
        RANDOM_MODELS,
    ),
    Mutation(
        "overlap sends in the order of the hooks",
        "averaging",
        "distlab/parallel/overlap.py",
        """        while not self._all_sent() and self._order[len(self._in_flight)] in self._ready and self._may_send():
            self._issue_next()
""",
        """        self._order.remove(index)
        self._order.insert(len(self._in_flight), index)
        self._issue_next()
""",
        RANDOM_MODELS,
    ),
    Mutation(
        "the last bucket is not sent",
        "buckets",
        "distlab/parallel/bucketed.py",
        "            work = self._all_reduce(buffer)\n",
        """            is_last = number + 1 == len(self._buckets)
            work = self._all_reduce(buffer.clone() if is_last else buffer)\n""",
        RANDOM_MODELS,
    ),
    Mutation(
        "gradients on gloo are summed",
        "averaging",
        "distlab/comm/collectives.py",
        "        sent.mul_(1.0 / group.size())\n",
        "        pass\n",
        RANDOM_MODELS,
    ),
    Mutation(
        "a gradient that was accumulated outside its bucket is not sent",
        "buckets",
        "distlab/parallel/buckets.py",
        "    if not in_bucket or gradient.storage_offset() != view.storage_offset():\n",
        "    if not in_bucket and gradient.storage_offset() != view.storage_offset():\n",
        RANDOM_MODELS,
    ),
    Mutation(
        "used flags are ignored",
        "buckets",
        "distlab/parallel/buckets.py",
        "if parameter.grad is None and flags[i].item() > 0:",
        "if parameter.grad is None:",
        RANDOM_MODELS,
    ),
    Mutation(
        "what an earlier step has left in a bucket is sent",
        "buckets",
        "distlab/parallel/buckets.py",
        "                view.zero_()\n",
        "                pass\n",
        RANDOM_MODELS,
    ),
    # -- sharded strategies --------------------------------------------------------------------------------
    Mutation(
        "FSDP's construction broadcasts no buffers",
        "sharding",
        "distlab/parallel/fsdp/fsdp.py",
        "broadcast_all([*module.parameters(), *module.buffers()], self.process_group)",
        "broadcast_all([*module.parameters()], self.process_group)",
        RANDOM_MODELS,
    ),
    Mutation(
        "FSDP's construction from meta broadcasts no buffers",
        "sharding",
        "distlab/parallel/fsdp/fsdp.py",
        "[*self._replicated.masters, *module.buffers()]",
        "[*self._replicated.masters]",
        ("tests/parallel/test_fsdp.py", "-k", "buffers"),
    ),
    Mutation(
        "FSDP2's construction broadcasts no buffers",
        "averaging",
        "distlab/parallel/torch_peers.py",
        "broadcast_all([*module.parameters(), *module.buffers()], self.process_group)",
        "broadcast_all([*module.parameters()], self.process_group)",
        ("tests/parallel/test_behaviour.py",),
    ),
    Mutation(
        "FSDP2's no_sync not restored",
        "averaging",
        "distlab/parallel/torch_peers.py",
        "        self.module.set_requires_gradient_sync(synchronizes)\n",
        "        self.module.set_requires_gradient_sync(False)\n",
        ("tests/parallel/test_accumulation.py", "-k", "no_sync"),
    ),
    Mutation(
        "hybrid sharding does not average between replicas",
        "sharding",
        "distlab/parallel/fsdp/flat_param.py",
        "        if self.replicate is None:\n",
        "        if True:\n",
        ("tests/parallel/test_fsdp.py", "-k", "hybrid"),
    ),
    Mutation(
        "the gradient's norm counts every replica",
        "sharding",
        "distlab/parallel/base.py",
        "squares if self.replicas == 1 else squares / self.replicas",
        "squares",
        ("tests/parallel/test_build.py", "-k", "mesh"),
    ),
    Mutation(
        "an all-reduce in two levels leaves out the last message's last step",
        "averaging",
        "distlab/comm/two_level.py",
        "        while self._steps_left > 1:\n",
        "        while self._steps_left > 2:\n",
        ("tests/parallel/test_contract.py", "-k", "mesh"),
    ),
    Mutation(
        "FSDP's no_sync sends what it accumulates",
        "sharding",
        "distlab/parallel/fsdp/fsdp.py",
        "        self._runtime.synchronize = synchronizes\n",
        "        self._runtime.synchronize = True\n",
        RANDOM_MODELS,
    ),
    Mutation(
        "ZeroOptimizer.close does not wait",
        "sharding",
        "distlab/parallel/sharded_buckets.py",
        "        self.wait()\n        for hook in self._hooks:\n",
        "        for hook in self._hooks:\n",
        RANDOM_MODELS,
    ),
    Mutation(
        "nothing is sent during backward",
        "averaging",
        "distlab/parallel/data_parallel.py",
        "        self._gradient_ready(index)\n",
        "",
        ("tests/parallel/test_behaviour.py",),
    ),
    Mutation(
        "ZeroOptimizer's readers do not wait",
        "sharding",
        "distlab/parallel/sharded_buckets.py",
        "                    parameter.__class__ = in_flight\n",
        "                    pass\n",
        RANDOM_MODELS,
    ),
    Mutation(
        "ZeroOptimizer's forward hooks do not wait",
        "sharding",
        "distlab/parallel/sharded_buckets.py",
        "            self.wait(needed if torch.is_grad_enabled() else None)\n",
        "            pass\n",
        ("tests/parallel/test_zero1_readers.py",),
    ),
    Mutation(
        "ZeroOptimizer does not gather its last bucket",
        "sharding",
        "distlab/parallel/sharded_buckets.py",
        "for number in reversed(range(len(self._flat))):",
        "for number in reversed(range(1, len(self._flat))):",
        RANDOM_MODELS,
    ),
    Mutation(
        "ZeroOptimizer's step does not take changed options",
        "optimizer",
        "distlab/parallel/zero1.py",
        "        self._copy_options_inwards()\n        stepped",
        "        stepped",
        RANDOM_MODELS,
    ),
    Mutation(
        "ZeroOptimizer adds to gradients that were not zeroed",
        "guards",
        "distlab/parallel/bucketed.py",
        "            self._sharded.check_added(index)\n",
        "            pass\n",
        RANDOM_MODELS,
    ),
    Mutation(
        "ZeroOptimizer steps gradients that torch has clipped",
        "guards",
        "distlab/parallel/zero1.py",
        "        self._sharded.check_unedited()\n",
        "",
        ("tests/experiments/test_sabotage.py", "-k", "clipping"),
    ),
    Mutation(
        "ShardedOptimizer keeps a frozen parameter that it has stepped",
        "optimizer",
        "distlab/parallel/sharded_optimizer.py",
        "stepped = (p for p in self._owner if p.requires_grad or p.grad is not None)",
        "stepped = (p for p in self._owner if p.requires_grad)",
        RANDOM_MODELS,
    ),
    Mutation(
        "a DDP's step without finish",
        "guards",
        "distlab/parallel/data_parallel.py",
        "        if self._ready or any(",
        "        if any(",
        RANDOM_MODELS,
    ),
    Mutation(
        "FSDP's step without finish",
        "guards",
        "distlab/parallel/fsdp/fsdp.py",
        "if self._runtime.unfinished or (edited and self._runtime.pending):",
        "if edited and self._runtime.pending:",
        ("tests/parallel/test_fsdp_steps.py", "-k", "finish"),
    ),
    Mutation(
        "FSDP steps gradients that torch has clipped",
        "guards",
        "distlab/parallel/fsdp/fsdp.py",
        "        if name is not None:\n            raise RuntimeError(\n",
        "        if name is not None and self._editing:\n            raise RuntimeError(\n",
        ("tests/parallel/test_fsdp_steps.py", "-k", "edits"),
    ),
    Mutation(
        "micro-batches after a failed backward are dropped",
        "averaging",
        "distlab/parallel/data_parallel.py",
        """                self._recover()
            if self._synchronizes:
""",
        """                if self._synchronizes:
                    self._recover()
            if self._synchronizes:
""",
        RANDOM_MODELS,
    ),
    Mutation(
        "two parameters on the same memory",
        "guards",
        "distlab/parallel/data_parallel.py",
        "        refuse_shared_storage(module)\n",
        "",
        ("tests/parallel/test_refusals.py", "-k", "wrap_or_move"),
    ),
    Mutation(
        "FSDP announces units that share an output in the order of forward",
        "sharding",
        "distlab/parallel/fsdp/runtime.py",
        "        for call in reversed(calls):\n",
        "        for call in calls:\n",
        ("tests/parallel/test_fsdp_outputs.py",),
    ),
    Mutation(
        "FSDP frees a unit whose backward goes on",
        "sharding",
        "distlab/parallel/fsdp/runtime.py",
        "        stay = {unit.index, following, *call.around, *(running.index for running in self._running)}\n",
        "        stay = {unit.index, following, *(running.index for running in self._running)}\n",
        RANDOM_MODELS,
    ),
    Mutation(
        "FSDP keeps the last of several micro-batches",
        "sharding",
        "distlab/parallel/fsdp/flat_param.py",
        "torch._foreach_add_(targets, gradients)",
        "torch._foreach_copy_(targets, gradients)",
        RANDOM_MODELS,
    ),
    Mutation(
        "FSDP's norm counts vectors once per rank",
        "sharding",
        "distlab/parallel/base.py",
        "collectives.sum_tensor(square_sum(sharded, self.device), self.process_group)",
        "collectives.sum_tensor(square_sum(sharded, self.device) + total, self.process_group) - total",
        RANDOM_MODELS,
    ),
    Mutation(
        "FSDP's norms in the compute dtype",
        "sharding",
        "distlab/parallel/fsdp/flat_param.py",
        "    if any(p.ndim >= 2 and p.is_floating_point() for p in owner.parameters()):\n",
        "    if compute_dtype is not None:\n",
        ("tests/parallel/test_fsdp_precision.py",),
    ),
    Mutation(
        "FSDP steps with an optimizer that needs whole matrices",
        "guards",
        "distlab/parallel/fsdp/fsdp.py",
        "        checks.check_elementwise(optimizer)\n",
        "",
        ("tests/parallel/test_fsdp_layout.py", "-k", "elementwise"),
    ),
    Mutation(
        "a module changes after wrapping a DDP",
        "guards",
        "distlab/parallel/data_parallel.py",
        "        step_guard.check_module(self)\n",
        "",
        ("tests/parallel/test_step_checks.py", "-k", "changes_after"),
    ),
    Mutation(
        "a module that changes after its first step is not compared again",
        "guards",
        "distlab/parallel/step_guard.py",
        "    _registrations += 1\n",
        "    _registrations = 1\n",
        ("tests/parallel/test_step_checks.py", "-k", "changes_after"),
    ),
    Mutation(
        "a module changes after wrapping FSDP",
        "guards",
        "distlab/parallel/fsdp/fsdp.py",
        "        step_guard.check_module(self)\n        checks",
        "        checks",
        ("tests/parallel/test_step_checks.py", "-k", "changes_after"),
    ),
    Mutation(
        "a DDP's gradients are edited before finish",
        "guards",
        "distlab/parallel/data_parallel.py",
        "        self._check_unedited()\n",
        "",
        ("tests/parallel/test_step_checks.py", "-k", "edited_before"),
    ),
    Mutation(
        "FSDP's gradients are edited before finish",
        "guards",
        "distlab/parallel/fsdp/runtime.py",
        "        self._check_unedited([*self._shards, *self._replicated])\n",
        "",
        ("tests/parallel/test_step_checks.py", "-k", "edited_before"),
    ),
    Mutation(
        "FSDP's gradients are edited between two backwards",
        "guards",
        "distlab/parallel/fsdp/runtime.py",
        "                self._check_unedited(self._shards)\n",
        "                pass\n",
        ("tests/parallel/test_fsdp_steps.py", "-k", "drops"),
    ),
    Mutation(
        "FSDP's gradients arrive after zero_grad",
        "sharding",
        "distlab/parallel/fsdp/runtime.py",
        "        self.wait_for_gradients()  # nothing is left",
        "        # nothing is left",
        ("tests/parallel/test_fsdp_steps.py", "-k", "drops"),
    ),
    Mutation(
        "FSDP keeps what no_sync() kept and zero_grad dropped",
        "sharding",
        "distlab/parallel/fsdp/flat_param.py",
        "        self.drop_zeroed()\n        fresh",
        "        fresh",
        ("tests/parallel/test_fsdp_steps.py", "-k", "drops"),
    ),
    Mutation(
        "FSDP's finish sends what zero_grad dropped",
        "sharding",
        "distlab/parallel/fsdp/runtime.py",
        "                param.drop_zeroed()\n",
        "                pass\n",
        ("tests/parallel/test_fsdp_steps.py", "-k", "dropped_is_not"),
    ),
    Mutation(
        "ZeroOptimizer's step is not seen by a graph that saved parameters",
        "optimizer",
        "distlab/parallel/zero1.py",
        "        torch.autograd.graph.increment_version(stepped)",
        "        pass",
        ("tests/parallel/test_zero1.py", "-k", "between_forward"),
    ),
    Mutation(
        "a DDP's step after no_sync() alone",
        "guards",
        "distlab/parallel/data_parallel.py",
        "            self._unsent.add(index)\n",
        "",
        ("tests/parallel/test_step_checks.py", "-k", "no_sync_alone"),
    ),
    Mutation(
        "ShardedOptimizer takes L-BFGS",
        "optimizer",
        "distlab/parallel/sharded_optimizer.py",
        "        if issubclass(optimizer_cls, torch.optim.LBFGS):\n",
        "        if False:\n",
        ("tests/parallel/test_sharded_optimizer.py", "-k", "mistakes"),
    ),
    Mutation(
        "a sharded optimizer steps a parameter that was taken from its group",
        "optimizer",
        "distlab/parallel/base.py",
        "        if self._held() != self._noted:\n",
        "        if False:\n",
        ("tests/parallel/test_sharded_optimizer.py", "-k", "from_outside"),
    ),
    Mutation(
        "a sharded optimizer's state is assigned in vain",
        "optimizer",
        "distlab/parallel/base.py",
        "        if self.local is not None:  # torch's constructor",
        "        if False:  # torch's constructor",
        ("tests/parallel/test_sharded_optimizer.py", "-k", "from_outside"),
    ),
    Mutation(
        "a GradScaler steps shards",
        "guards",
        "distlab/parallel/step_guard.py",
        "if scaler.is_enabled() and any(",
        "if any([]) and any(",
        ("tests/parallel/test_step_checks.py", "-k", "scaler"),
    ),
    Mutation(
        "an optimizer built before FSDP steps what is in use no more",
        "guards",
        "distlab/parallel/fsdp/fsdp.py",
        "            entry.parameter.replaced = True",
        "            pass",
        ("tests/parallel/test_fsdp_refusals.py", "-k", "before_wrapping"),
    ),
    # -- kernels -------------------------------------------------------------------------------------------
    Mutation(
        "AdamW's update has the other sign",
        "optimizer",
        "kernels/adamw.py",
        "p = p - rate * (m /",
        "p = p + rate * (m /",
        ("tests/kernels/test_pointwise.py", "-k", "adamw"),
    ),
    Mutation(
        "AdamW decays nothing",
        "optimizer",
        "kernels/adamw.py",
        "    p = p - p * decay\n",
        "",
        ("tests/kernels/test_pointwise.py", "-k", "adamw or decay"),
    ),
    Mutation(
        "the gradient of a norm's weight has the other sign",
        "kernels",
        "kernels/rmsnorm.py",
        "        dw += g * normed\n",
        "        dw -= g * normed\n",
        ("tests/kernels/test_rows.py", "-k", "rms"),
    ),
    Mutation(
        "linear_cross_entropy's dw is that of the last chunk",
        "kernels",
        "kernels/linear_cross_entropy.py",
        "_add_product(dw, dz.T, x[chunk], first == 0)",
        "_add_product(dw, dz.T, x[chunk], True)",
        ("tests/kernels/test_products.py", "-k", "linear_cross_entropy"),
    ),
    Mutation(
        "a causal mask that sees one ahead",
        "attention",
        "kernels/flash_attention/options.py",
        "    hi = shift if causal else",
        "    hi = shift + 1 if causal else",
        ("tests/kernels/test_flash_attention.py", "-k", "plain_cpu or alignment"),
    ),
    Mutation(
        "a window beyond 32 bits",
        "attention",
        "kernels/flash_attention/options.py",
        "        window = None\n    shift",
        "        pass\n    shift",
        ("tests/kernels/test_flash_attention.py", "-k", "window"),
    ),
    Mutation(
        "torch's negative bit is not seen",
        "kernels",
        "kernels/_dispatch.py",
        "(address := x.data_ptr()) and not x.is_neg():",
        "(address := x.data_ptr()):",
        ("tests/kernels/test_every_operation.py", "-k", "values_that_do_not_lie"),
    ),
    Mutation(
        "tensors without memory go to the kernels",
        "kernels",
        "kernels/_dispatch.py",
        "(address := x.data_ptr()) and not x.is_neg():",
        "(address := x.data_ptr()) + 1 and not x.is_neg():",
        ("tests/kernels/test_every_operation.py", "-k", "values_that_do_not_lie"),
    ),
    Mutation(
        "a copy is recorded as a view",
        "kernels",
        "kernels/_dispatch.py",
        " and torch._C._is_alias_of(made[0], args[0])",
        "",
        ("tests/kernels/test_dispatch.py", "-k", "copies"),
    ),
    Mutation(
        "relu of minus infinity",
        "kernels",
        "kernels/matmul.py",
        "y = tl.where(y <= 0, 0.0, y)",
        "y = y * (y > 0)",
        ("tests/kernels/test_products.py", "-k", "relu"),
    ),
    # -- training and checkpoints --------------------------------------------------------------------------
    Mutation(
        "fp16 clipping dropped",
        "optimizer",
        "distlab/train/step.py",
        "            factor *= min(1.0, self.max_grad_norm / (self.grad_norm.item() + 1e-6))\n",
        "            pass\n",
        ("tests/train/test_step.py",),
    ),
    Mutation(
        "fp16 loss scale not restored",
        "resume",
        "distlab/train/loop.py",
        'self.scaler.load_state_dict(extra["scaler"])',
        "pass",
        ("tests/train/test_resume.py", "-k", "scale"),
    ),
    Mutation(
        "ranks without a stored generator repeat the seed",
        "resume",
        "distlab/train/loop.py",
        "train_state.seed_rank(self.config.seed + stored.step, self.context.rank)",
        "train_state.seed_rank(self.config.seed, self.context.rank)",
        ("tests/train/test_resume.py", "-k", "draws"),
    ),
    Mutation(
        "validation with dropout on",
        "data",
        "distlab/train/evaluate.py",
        "    wrapper.eval()\n",
        "",
        ("tests/train/test_loop.py", "-k", "trace"),
    ),
    Mutation(
        "model left in eval after validation",
        "data",
        "distlab/train/evaluate.py",
        "    wrapper.train(was_training)\n",
        "",
        ("tests/train/test_loop.py", "-k", "trace"),
    ),
    Mutation(
        "clip may change on resume",
        "resume",
        "distlab/train/config.py",
        '"beta2", "clip", "dtype"',
        '"beta2", "dtype"',
        ("tests/train/test_resume.py", "-k", "repeated"),
    ),
    Mutation(
        "seed may change on resume",
        "resume",
        "distlab/train/config.py",
        '("batch", "seed", "lr"',
        '("batch", "lr"',
        ("tests/train/test_resume.py", "-k", "repeated"),
    ),
    Mutation(
        "group options other than lr not restored",
        "resume",
        "distlab/checkpoint/train_state.py",
        'for name, value in saved.items()\n            if name != "params"\n',
        'for name, value in saved.items()\n            if name == "lr"\n',
        ("tests/train/test_resume.py", "-k", "option"),
    ),
    Mutation(
        "data identity without its hash",
        "resume",
        "distlab/train/data.py",
        '        "sha256": _digest(data.data, tokens, model.vocab_size, context),\n',
        "",
        ("tests/train/test_resume.py", "-k", "other_data"),
    ),
    Mutation(
        "parts of a made-up index may lie anywhere in a file",
        "resume",
        "distlab/checkpoint/files.py",
        "        _require(offset == ends[name], f",
        "        _require(True, f",
        ("tests/checkpoint/test_hostile_checkpoints.py", "-k", "index"),
    ),
    Mutation(
        "an old checkpoint folder deleted instead of moved aside",
        "resume",
        "distlab/checkpoint/files.py",
        "            final.rename(aside)\n",
        "            shutil.rmtree(final)\n",
        ("tests/checkpoint/test_checkpoint.py", "-k", "lost_its_name"),
    ),
    Mutation(
        "a load leaves ZeRO's parameters as they were",
        "resume",
        "distlab/checkpoint/checkpointer.py",
        "        model.shards_changed()\n",
        "",
        ("tests/checkpoint/test_checkpoint.py",),
    ),
    # -- commands, runs and their files --------------------------------------------------------------------
    Mutation(
        "a peer that sent nothing is a baseline",
        "measuring",
        "experiments/ddp_bench.py",
        " if not wrong_rows([noted[name]])}",
        "}",
        ("tests/experiments/test_own_model.py", "-k", "nobody"),
    ),
    Mutation(
        "a peer that sent nothing is not named",
        "measuring",
        "experiments/ddp_bench.py",
        "silent = recorder.count == 0 and",
        "silent = False and",
        ("tests/experiments/test_own_model.py", "-k", "nobody"),
    ),
    Mutation(
        "only torch's allocator can run out of memory",
        "measuring",
        "distlab/ending.py",
        "isinstance(error, kinds) or NO_MEMORY.search(str(error))",
        "isinstance(error, kinds)",
        ("tests/test_ending.py", "-k", "libraries"),
    ),
    Mutation(
        "a rank that ran out of memory leaves the others to wait for it",
        "measuring",
        "distlab/bench/timing.py",
        "                if not self._fits(partial(timed, step), steps):\n",
        "                if not all(partial(timed, step)() for _ in range(steps)):\n",
        ("tests/experiments/test_ddp_bench.py", "-k", "without_memory"),
    ),
    Mutation(
        "rounds are saved when the last has ended",
        "measuring",
        "distlab/measure/rounds.py",
        "        ended()\n",
        "    ended()\n",
        ("tests/experiments/test_ddp_bench.py", "-k", "what_was_measured and round"),
    ),
    Mutation(
        "explaining may take longer than measuring",
        "measuring",
        "experiments/ddp_bench.py",
        "time.monotonic() - begin < max(took_s, EXPLAINED_S)",
        "time.monotonic() >= begin",
        ("tests/experiments/test_ddp_bench.py", "-k", "what_was_measured and limit"),
    ),
    Mutation(
        "two runs of one name",
        "commands",
        "distlab/experiment.py",
        "            hold(folder, context, progress),\n",
        "",
        ("tests/report/test_run.py", "-k", "second_run"),
    ),
    Mutation(
        "a complete run is measured again",
        "measuring",
        "distlab/experiment.py",
        "            if run.header.complete:\n",
        "            if False:\n",
        ("tests/report/test_run.py", "-k", "complete"),
    ),
    Mutation(
        "a run that was cut off is complete",
        "measuring",
        "distlab/report/run.py",
        "        if not self.cut_off:\n",
        "        if True:\n",
        ("tests/report/test_run.py", "-k", "complete"),
    ),
    Mutation(
        "every run promises to go on",
        "commands",
        "distlab/report/run.py",
        '            write_json(self.records, self.path / "records.json")\n',
        '            write_json(self.records, self.path / "records.json")\n            how_to_continue("more")\n',
        ("tests/report/test_run.py", "-k", "promises"),
    ),
    Mutation(
        "a refused run leaves its folder",
        "commands",
        "distlab/experiment.py",
        "                folder.rmdir()\n",
        "                pass\n",
        ("tests/report/test_run.py", "-k", "refused_run"),
    ),
    Mutation(
        "edited rows are taken as measured",
        "measuring",
        "distlab/report/record.py",
        'if body.pop("digest", accepted) != digest_of(body):',
        'if body.pop("digest", accepted) is None:',
        ("tests/report/test_run.py", "-k", "changed"),
    ),
    Mutation(
        "a file without its checksum is taken as whole",
        "measuring",
        "distlab/report/record.py",
        'accepted = digest_of(body) if body.get("format") in unchecked else None',
        "accepted = digest_of(body)",
        ("tests/report/test_run.py", "-k", "changed"),
    ),
    Mutation(
        "fields of any kind make a record",
        "measuring",
        "distlab/report/record.py",
        '            raise ValueError(f"{source}: field {name!r} must',
        '            ValueError(f"{source}: field {name!r} must',
        ("tests/report/test_run.py", "-k", "changed"),
    ),
    Mutation(
        "rows of another run are gone on with",
        "measuring",
        "distlab/report/run.py",
        "if any((record.experiment, record.commit) != ",
        "if False and any((record.experiment, record.commit) != ",
        ("tests/report/test_run.py", "-k", "changed"),
    ),
    Mutation(
        "names may hold line breaks and escapes",
        "commands",
        "distlab/report/run.py",
        '(not re.fullmatch(r"[\\w.-]+", name) or name in (".", ".."))',
        "name != Path(name).name",
        ("tests/launch/test_bad_input.py", "-k", "name"),
    ),
    Mutation(
        "an empty folder of results is this one",
        "commands",
        "distlab/report/run.py",
        "    if not out or not out.isprintable():\n",
        "    if False:\n",
        ("tests/launch/test_bad_input.py", "-k", "out"),
    ),
    Mutation(
        "ranks take the user's launch.py",
        "commands",
        "launch/ranks.py",
        "[*options, str(COMMAND), *",
        '[*options, "--module", "launch", *',
        ("tests/experiments/test_ddp_bench.py", "-k", "plain_python"),
    ),
    Mutation(
        "the user's folder comes before ours",
        "commands",
        "launch/__main__.py",
        "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))",
        "sys.path.append(str(Path(__file__).resolve().parents[1]))",
        ("tests/experiments/test_ddp_bench.py", "-k", "plain_python"),
    ),
    Mutation(
        "SIGHUP and SIGQUIT are not answered",
        "commands",
        "distlab/ending.py",
        "SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)",
        "SIGNALS = (signal.SIGINT, signal.SIGTERM)",
        ("tests/test_ending.py", "-k", "signal_is_answered"),
    ),
    Mutation(
        "ranks that import are silent",
        "commands",
        "launch/__main__.py",
        'speaks = os.environ.get("ROLE_RANK", "0") == "0"',
        'speaks = "TORCHELASTIC_RUN_ID" not in os.environ',
        ("tests/test_ending.py", "-k", "speaks"),
    ),
    Mutation(
        "a signal before the agent listens is silent",
        "commands",
        "launch/ranks.py",
        "    except SignalException as stopped:\n",
        "    except KeyboardInterrupt:\n        return 130\n    except SignalException as stopped:\n",
        ("tests/test_ending.py", "-k", "agent_listens"),
    ),
    Mutation(
        "a full disk does not say where",
        "commands",
        "distlab/files.py",
        "        error.filename = error.filename or str(path)",
        "        pass",
        ("tests/test_files.py",),
    ),
    Mutation(
        "a full disk under the journal does not say where",
        "commands",
        "distlab/train/metrics.py",
        "            error.filename = self._file.name",
        "            pass",
        ("tests/train/test_run.py", "-k", "full_disk"),
    ),
    Mutation(
        "a file with the name of a temporary folder stays",
        "resume",
        "distlab/checkpoint/files.py",
        "    if path.is_symlink() or path.is_file():\n",
        "    if False:\n",
        ("tests/checkpoint/test_checkpoint.py", "-k", "temporary_folder"),
    ),
    Mutation(
        "the hundredth rejected checkpoint",
        "resume",
        "distlab/checkpoint/files.py",
        "for n in itertools.count(1))",
        "for n in range(1, 100))",
        ("tests/checkpoint/test_checkpoint.py", "-k", "hundredth"),
    ),
    Mutation(
        "weights that are NaN are good",
        "resume",
        "distlab/checkpoint/tensors.py",
        "values.isnan().any()",
        "False",
        ("tests/checkpoint/test_hostile_checkpoints.py", "-k", "no_numbers"),
    ),
    Mutation(
        "a file that became shorter is read",
        "data",
        "distlab/train/loop.py",
        "        whole = is_unchanged(self.train)  # of",
        "        whole = True  # of",
        ("tests/train/test_run.py", "-k", "data_that_changes and training"),
    ),
    Mutation(
        "a step on data that changed is good",
        "data",
        "distlab/train/loop.py",
        "        self._refuse_changed(self.train, whole)\n",
        "",
        ("tests/train/test_run.py", "-k", "data_that_changes and training"),
    ),
    Mutation(
        "validation reads a file that became shorter",
        "data",
        "distlab/train/loop.py",
        "        self._refuse_changed(self.validate)\n        loss = ",
        "        loss = ",
        ("tests/train/test_run.py", "-k", "data_that_changes and validation"),
    ),
    Mutation(
        "validation on data that changed is good",
        "data",
        "distlab/train/loop.py",
        "        self._refuse_changed(self.validate)\n        self.metrics",
        "        self.metrics",
        ("tests/train/test_run.py", "-k", "data_that_changes and validation"),
    ),
    Mutation(
        "a rank looks at its own file alone",
        "data",
        "distlab/train/loop.py",
        'collectives.all_ranks_agree(whole, torch.device("cpu"), self.metrics.group)',
        "whole",
        ("tests/train/test_run.py", "-k", "data_that_changes and place and training"),
    ),
    Mutation(
        "a validation that fails takes the steps with it",
        "data",
        "distlab/train/loop.py",
        """                    if saves:  # before a validation, which may fail
                        self.save()
                    if validates:
                        outcome.validation.append((self.step, self.validation_loss()))
""",
        """                    if validates:
                        outcome.validation.append((self.step, self.validation_loss()))
                    if saves:
                        self.save()
""",
        ("tests/train/test_run.py", "-k", "comes_before"),
    ),
    Mutation(
        "any number of sequences is validated on",
        "data",
        "distlab/train/config.py",
        '"sequences per validation", least=1, most=10**6)',
        '"sequences per validation", least=1)',
        ("tests/launch/test_bad_input.py", "-k", "validate"),
    ),
    Mutation(
        "the memory of every one of many layers",
        "measuring",
        "distlab/theory/memory/peak.py",
        "-max(1, layers // BLOCKS_SEEN)",
        "-1",
        ("tests/train/test_requirements.py", "-k", "many_layers"),
    ),
    Mutation(
        "ranks run what a file was",
        "commands",
        "distlab/testing.py",
        "    if any(_sources.get(file",
        "    if False and any(_sources.get(file",
        ("tests/test_testing.py", "-k", "as_it_is_now"),
    ),
    Mutation(
        "ranks look for the script of a pipe",
        "commands",
        "distlab/testing.py",
        "        del main.__file__",
        "        pass",
        ("tests/test_testing.py", "-k", "through_a_pipe"),
    ),
    # -- arithmetic, order and boundaries, everywhere -----------------------------------------------
    Mutation(
        "a bucket is closed one parameter late",
        "buckets",
        "distlab/parallel/buckets.py",
        "(filled[dtype] + numel) * dtype.itemsize > limit",
        "filled[dtype] * dtype.itemsize > limit",
        ("tests/parallel/test_buckets.py",),
    ),
    Mutation(
        "buckets are planned in the order of registration",
        "buckets",
        "distlab/parallel/buckets.py",
        "range(len(numels) - 1, -1, -1) if order is None",
        "range(len(numels)) if order is None",
        ("tests/parallel/test_buckets.py",),
    ),
    Mutation(
        "gradients of three ranks are divided by two",
        "averaging",
        "distlab/comm/collectives.py",
        "        sent.mul_(1.0 / group.size())\n",
        "        sent.mul_(1.0 / min(group.size(), 2))\n",
        ("tests/comm/test_collectives.py",),
    ),
    Mutation(
        "a broadcast comes from the last rank",
        "averaging",
        "distlab/comm/collectives.py",
        "group_src=source, async_op=True)",
        "group_src=group.size() - 1 - source, async_op=True)",
        ("tests/parallel/test_behaviour.py", "-k", "buffers"),
    ),
    Mutation(
        "coalesced tensors are cut at the wrong place",
        "averaging",
        "distlab/comm/collectives.py",
        "pieces = buffer.split([tensor.numel() for tensor in batch])",
        "pieces = buffer.split([tensor.numel() for tensor in batch[::-1]])[::-1]",
        ("tests/parallel/test_sharded_optimizer.py", "-k", "parity"),
    ),
    Mutation(
        "the whole sum over ranks is this rank's",
        "sharding",
        "distlab/comm/collectives.py",
        'wait(dist.all_reduce(total, group=group, async_op=True), group, "summing a number")',
        "pass",
        ("tests/parallel/test_build.py", "-k", "norm"),
    ),
    Mutation(
        "weight decay is not among the options that are copied inwards",
        "optimizer",
        "distlab/parallel/base.py",
        "            local.update(options_of(outer))\n",
        '            local.update({k: v for k, v in options_of(outer).items() if k != "weight_decay"})\n',
        ("tests/train/test_resume.py", "-k", "option"),
    ),
    Mutation(
        "the norm leaves half-precision gradients out",
        "optimizer",
        "distlab/parallel/base.py",
        "    half = [g for g in gradients if g.itemsize == 2]\n",
        "    half = [g for g in gradients if g.itemsize == 1]\n",
        ("tests/parallel/test_build.py", "-k", "half_precision"),
    ),
    Mutation(
        "clipping divides by the norm without the epsilon",
        "optimizer",
        "distlab/parallel/base.py",
        "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "(max_norm / norm).clamp(max=1.0)",
        ("tests/train/test_step.py", "-k", "epsilon"),
    ),
    Mutation(
        "a slice is a position too late",
        "sharding",
        "distlab/parallel/shard.py",
        "        start = rank * self.slice_numel - self.offsets[index]\n",
        "        start = rank * self.slice_numel - self.offsets[index] + (rank > 0)\n",
        RANDOM_MODELS,
    ),
    Mutation(
        "ranks write portions that overlap",
        "resume",
        "distlab/parallel/shard.py",
        "(which + 1) * values.numel() // holders",
        "(which + 1) * values.numel() // holders + 1",
        ("tests/parallel/test_build.py", "-k", "portions"),
    ),
    Mutation(
        "a portion starts at the shard's start",
        "resume",
        "distlab/parallel/shard.py",
        "start, tensor = self.start + first, values[first:last]",
        "start, tensor = self.start, values[first:last]",
        ("tests/checkpoint/test_checkpoint.py", "-k", "stored_is_unpadded"),
    ),
    Mutation(
        "the last micro-batch is not trained",
        "averaging",
        "distlab/train/step.py",
        "        for number, batch in enumerate(micro_batches):\n",
        "        for number, batch in enumerate(micro_batches[: max(1, len(micro_batches) - 1)]):\n",
        ("tests/train/test_step.py",),
    ),
    Mutation(
        "the loss of micro-batches is summed",
        "averaging",
        "distlab/train/step.py",
        "                loss = loss / len(micro_batches)\n",
        "",
        ("tests/train/test_step.py",),
    ),
    Mutation(
        "a training goes on one step too late",
        "resume",
        "distlab/train/loop.py",
        "        self.step = stored.step\n",
        "        self.step = stored.step + 1\n",
        ("tests/checkpoint/test_checkpoint.py", "-k", "same_world_size"),
    ),
    Mutation(
        "the learning rate is that of the step before",
        "schedule",
        "distlab/train/loop.py",
        "        rate = self.schedule(self.step)\n",
        "        rate = self.schedule(max(0, self.step - 1))\n",
        ("tests/train/test_loop.py", "-k", "alike"),
    ),
    Mutation(
        "generators of ranks that are new after a resume are those of a start",
        "resume",
        "distlab/train/loop.py",
        '        if stored.content["world_size"] <= self.context.rank:  # no generator was saved for this rank\n',
        "        if False:\n",
        ("tests/train/test_resume.py", "-k", "draws"),
    ),
    Mutation(
        "warm-up begins at zero",
        "schedule",
        "distlab/train/schedule.py",
        "return self.peak * (step + 1) / self.warmup",
        "return self.peak * step / self.warmup",
        ("tests/train/test_schedule.py", "-k", "known"),
    ),
    Mutation(
        "the loss scale is doubled a step late",
        "schedule",
        "distlab/train/scaler.py",
        "if self.good_steps == self.growth_interval:",
        "if self.good_steps > self.growth_interval:",
        ("tests/train/test_schedule.py", "-k", "scale"),
    ),
    Mutation(
        "ranks read each other's sequences",
        "data",
        "distlab/train/data.py",
        "first = step * self.batch + self.rank * share",
        "first = step * self.batch",
        ("tests/train/test_token_files.py",),
    ),
    Mutation(
        "every epoch has the order of the first",
        "data",
        "distlab/train/data.py",
        "np.random.default_rng((seed, epoch))",
        "np.random.default_rng((seed, 0))",
        ("tests/train/test_token_files.py",),
    ),
    Mutation(
        "targets are the tokens themselves",
        "data",
        "distlab/train/data.py",
        "whole[:, :-1].contiguous().clamp(min=0), whole[:, 1:].contiguous()",
        "whole[:, :-1].contiguous().clamp(min=0), whole[:, :-1].contiguous()",
        ("tests/train/test_token_files.py",),
    ),
    Mutation(
        "a validation counts what is ignored",
        "data",
        "distlab/train/evaluate.py",
        "(targets != IGNORED).sum().double()",
        "torch.tensor(float(targets.numel()), dtype=torch.float64, device=targets.device)",
        ("tests/train/test_loop.py", "-k", "validation"),
    ),
    Mutation(
        "the log-sum-exp has the other sign",
        "attention",
        "kernels/flash_attention/forward.py",
        "row_max * LN_2 + tl.log(safe_sum)",
        "row_max * LN_2 - tl.log(safe_sum)",
        ("tests/kernels/test_flash_attention.py", "-k", "log_sum_exp"),
    ),
    Mutation(
        "the softmax is not rescaled when the maximum rises",
        "attention",
        "kernels/flash_attention/forward.py",
        "        acc = acc * shrink[:, None]\n",
        "",
        ("tests/kernels/test_flash_attention.py", "-k", "lengths_and_head_dims"),
    ),
    Mutation(
        "dropout drops one level more in forward",
        "kernels",
        "kernels/dropout.py",
        "    kept = random_levels(tl.load(seed_ptr), first, BLOCK) >= threshold\n    y =",
        "    kept = random_levels(tl.load(seed_ptr), first, BLOCK) > threshold\n    y =",
        ("tests/kernels/test_pointwise.py", "-k", "same_elements"),
    ),
    Mutation(
        "a sum in two levels is averaged inside groups only",
        "averaging",
        "distlab/comm/two_level.py",
        "        yield collectives.all_reduce_mean(mine, groups.replicate), groups.replicate\n",
        "",
        ("tests/comm/test_two_level.py",),
    ),
    Mutation(
        "a ring's last round is left out",
        "averaging",
        "distlab/comm/ring.py",
        "    for done in range(ranks - 1):  # rank r has completed chunk r+1\n",
        "    for done in range(ranks - 2):\n",
        ("tests/comm/test_ring.py",),
    ),
    Mutation(
        "a damaged file counts as whole",
        "resume",
        "distlab/checkpoint/files.py",
        '        if found != written["sha256"]:\n',
        "        if False:\n",
        ("tests/checkpoint/test_checkpoint.py", "-k", "damaged"),
    ),
    Mutation(
        "a checkpoint is renamed before its entries are on the disk",
        "resume",
        "distlab/checkpoint/files.py",
        "        sync_folder(temporary)\n",
        "",
        ("tests/checkpoint/test_checkpoint.py", "-k", "flushed"),
    ),
    Mutation(
        "a checkpoint's name is not flushed to the disk",
        "resume",
        "distlab/checkpoint/files.py",
        "        sync_folder(self.path)\n",
        "",
        ("tests/checkpoint/test_checkpoint.py", "-k", "flushed"),
    ),
    Mutation(
        "the gradient of keys lacks the scale",
        "attention",
        "kernels/flash_attention/backward.py",
        "stride_dkt, dk * scale, keep, V)",
        "stride_dkt, dk, keep, V)",
        ("tests/kernels/test_flash_attention.py", "-k", "lengths_and_head_dims"),
    ),
    Mutation(
        "the gradient of the log-sum-exp has the other sign",
        "attention",
        "kernels/flash_attention/backward.py",
        "        delta -= tl.where(hidden",
        "        delta += tl.where(hidden",
        ("tests/kernels/test_flash_attention.py", "-k", "log_sum_exp_and_its"),
    ),
    Mutation(
        "the softcap's slope is left out of the gradient of keys",
        "attention",
        "kernels/flash_attention/backward.py",
        "            dst *= 1.0 - st * st\n",
        "            pass\n",
        ("tests/kernels/test_flash_attention.py", "-k", "softcap"),
    ),
    Mutation(
        "keys see the window of queries",
        "attention",
        "kernels/flash_attention/backward.py",
        "lse2.shape[2], problem.hi, problem.lo,",
        "lse2.shape[2], problem.lo, problem.hi,",
        ("tests/kernels/test_flash_attention.py", "-k", "alignment or window"),
    ),
    Mutation(
        "a window that is one key short",
        "attention",
        "kernels/flash_attention/options.py",
        "else window - shift\n",
        "else window - 1 - shift\n",
        ("tests/kernels/test_flash_attention.py", "-k", "window"),
    ),
    Mutation(
        "query heads are dealt out to key heads in turn",
        "attention",
        "kernels/flash_attention/forward.py",
        "    kv_head = head // kv_group\n",
        "    kv_head = head % (heads // kv_group)\n",
        ("tests/kernels/test_flash_attention.py", "-k", "grouped"),
    ),
    Mutation(
        "the last key tile is read past its end",
        "attention",
        "kernels/flash_attention/forward.py",
        "(phase == 2 and (V.has_hi or V.ragged))",
        "(phase == 2 and V.has_hi)",
        ("tests/kernels/test_flash_attention.py", "-k", "lengths_and_head_dims"),
    ),
    Mutation(
        "a norm's mean is over the tile",
        "kernels",
        "kernels/rmsnorm.py",
        "tl.sum(s * s, 1) / cols + eps",
        "tl.sum(s * s, 1) / BLOCK + eps",
        ("tests/kernels/test_rows.py", "-k", "rms_norm"),
    ),
    Mutation(
        "the gradient of a norm's sum is left out",
        "kernels",
        "kernels/rmsnorm.py",
        "        if TOTAL:\n",
        "        if False:\n",
        ("tests/kernels/test_rows.py", "-k", "add_rms_norm"),
    ),
    Mutation(
        "the mean of a layer norm's gradient is not subtracted",
        "kernels",
        "kernels/layernorm.py",
        " - c2[:, None]) * r",
        ") * r",
        ("tests/kernels/test_rows.py", "-k", "layer_norm"),
    ),
    Mutation(
        "programs after the first are not summed",
        "kernels",
        "kernels/_reduce.py",
        "tl.range(0, count, ROWS)",
        "tl.range(0, 1, ROWS)",
        ("tests/kernels/test_rows.py", "-k", "second_stage"),
    ),
    Mutation(
        "the mean loss counts ignored rows",
        "kernels",
        "kernels/cross_entropy.py",
        "tl.where(kept, 1.0, 0.0)",
        "tl.where(inside, 1.0, 0.0)",
        ("tests/kernels/test_products.py", "-k", "cross_entropy"),
    ),
    Mutation(
        "label smoothing has no gradient",
        "kernels",
        "kernels/cross_entropy.py",
        "total_ptr + row)) - smoothing / cols\n",
        "total_ptr + row))\n",
        ("tests/kernels/test_products.py", "-k", "cross_entropy"),
    ),
    Mutation(
        "rope's gradient is turned forward",
        "kernels",
        "kernels/rope.py",
        "*ctx.saved_tensors, -1.0)",
        "*ctx.saved_tensors, 1.0)",
        ("tests/kernels/test_pointwise.py", "-k", "rope"),
    ),
    Mutation(
        "the slope of swiglu's gate is its sigmoid",
        "kernels",
        "kernels/swiglu.py",
        "sigmoid * (1.0 + gate * (1.0 - sigmoid))",
        "sigmoid",
        ("tests/kernels/test_pointwise.py", "-k", "swiglu"),
    ),
    Mutation(
        "AdamW's second moment is not corrected",
        "optimizer",
        "kernels/adamw.py",
        "math.sqrt(1 - second**step)]",
        "1.0]",
        ("tests/kernels/test_pointwise.py", "-k", "adamw"),
    ),
    Mutation(
        "the depth of a product ends with its last whole tile",
        "kernels",
        "kernels/matmul.py",
        "    for start in tl.range(0, depth, BLOCK_K):\n        left = depth",
        "    for start in tl.range(0, depth // BLOCK_K * BLOCK_K, BLOCK_K):\n        left = depth",
        ("tests/kernels/test_products.py", "-k", "multiple_of_the_tile"),
    ),
)


# -- the command -------------------------------------------------------------------------------------------


def copy_tree(target: Path) -> None:
    """Copy what git knows, and new files that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@dataclass(frozen=True)
class Result:
    """Whether tests noticed; `seen` names the first that did, or says what else happened."""

    killed: bool
    seen: str
    seconds: float


def examine(mutation: Mutation, root: Path, tests: Sequence[str]) -> Result:
    """Apply the mutation to the copy at `root`, run tests there, and undo it.

    Raises:
        RuntimeError: pytest could not run the tests.
    """
    path = root / mutation.file
    before = path.read_text(encoding="utf-8")
    mutation.apply(root)
    variables = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line"]
    command += ["-m", "not commands", *tests]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=root, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Result(False, f"no end within {LIMIT_S:.0f} s", time.monotonic() - begin)
    finally:
        path.write_text(before, encoding="utf-8")
    seconds = time.monotonic() - begin
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.name}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return Result(done.returncode == 1, failed[1] if failed else "", seconds)


def results(
    mutations: Sequence[Mutation], tests: Sequence[str] | None, workers: int
) -> Iterator[tuple[Mutation, Result]]:
    """Examine so many at a time, each in a copy of the tree that no other uses meanwhile."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPool(workers) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(workers):
            copy_tree(Path(folder, str(number)))
            copies.put(Path(folder, str(number)))

        def examined(mutation: Mutation) -> tuple[Mutation, Result]:
            root = copies.get()
            try:
                return mutation, examine(mutation, root, tests or mutation.tests)
            finally:
                copies.put(root)

        yield from pool.imap_unordered(examined, mutations)


def main(argv: Sequence[str] | None = None) -> int:
    """Run mutations; 1 if one survives."""
    categories = sorted({m.category for m in MUTATIONS})
    p = argparse.ArgumentParser("python -m tests.mutations", description=__doc__.splitlines()[0])
    p.add_argument("--only", action="append", metavar="TEXT", help="whose name or file has this; may be repeated [all]")
    p.add_argument("--category", nargs="+", choices=categories, default=categories, metavar="NAME", help="[all]")
    p.add_argument("--workers", type=int, default=2, help="how many at a time [2]")
    p.add_argument("--list", action="store_true", help="print names and files and end")
    p.add_argument("--tests", type=shlex.split, help="arguments of pytest, instead of the entries' own")
    args = p.parse_args(argv)
    if args.workers < 1:
        p.error(f"--workers {args.workers}: at least one")
    of_category = [m for m in MUTATIONS if m.category in args.category]
    chosen = [m for m in of_category if any(text in m.name or text in m.file for text in args.only or [""])]
    if not chosen:
        print(f"no mutation's name or file has {args.only}; --list shows them", file=sys.stderr)
        return 2
    if args.list:
        for mutation in chosen:
            print(f"{mutation.category:10}  {mutation.name}  ({mutation.file})")
        return 0
    survivors = 0
    for mutation, result in results(chosen, args.tests, args.workers):
        survivors += not result.killed
        verdict = "killed  " if result.killed else "SURVIVED"
        print(f"{verdict}  {mutation.name}  ({result.seconds:.0f} s)  {result.seen}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
