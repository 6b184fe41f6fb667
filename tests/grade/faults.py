"""Faults that are planted in the right solutions: each must break the invariant that is named.

A fault is one replacement of text. Most are faults that students make and that the public suites
do not see.
"""

from dataclasses import dataclass
from pathlib import Path

SUBMISSIONS = Path(__file__).parent / "submissions"


@dataclass(frozen=True)
class Fault:
    """A fault and the invariant that it breaks.

    Attributes:
        name: the fault in a few words.
        style: right solution that is changed.
        part: part that has the fault.
        title: invariant that must be reported as broken.
        old, new: text and its replacement.
        is_public: True if a suite in the public form finds it, see `public_suite.py`.
    """

    name: str
    style: str
    part: str
    title: str
    old: str
    new: str
    is_public: bool = False

    def plant(self, folder: Path) -> None:
        """Write the submission with the fault into a folder, with the others that it imports."""
        for file in SUBMISSIONS.glob("*.py"):
            text = file.read_text()
            if file.stem == self.style:
                assert text.count(self.old) == 1, f"{self.name}: {text.count(self.old)} places"
                text = text.replace(self.old, self.new)
            (folder / file.name).write_text(text)


FAULTS = [
    Fault(
        name="the sum, not the mean",
        style="classes",
        part="ddp-individual",
        title="gradients are the mean over ranks",
        old="""        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
""",
        new="",
        is_public=True,
    ),
    Fault(
        name="no broadcast",
        style="closures",
        part="ddp",
        title="every rank starts from rank 0's parameters",
        old="""    with torch.no_grad():
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, 0)
""",
        new="",
        is_public=True,
    ),
    Fault(
        name="buffers are not broadcast",
        style="flat_buffers",
        part="ddp-individual",
        title="every rank starts from rank 0's buffers",
        old="[each.data for each in [*module.parameters(), *module.buffers()]]",
        new="[each.data for each in module.parameters()]",
    ),
    Fault(
        name="divided twice",
        style="closures",
        part="ddp-bucketed",
        title="gradients are the mean over ranks",
        old="parameter.grad.copy_(mean.view(parameter.shape))",
        new="parameter.grad.copy_(mean.view(parameter.shape) / dist.get_world_size())",
        is_public=True,
    ),
    Fault(
        name="a tied weight is sent twice",
        style="classes",
        part="ddp",
        title="tied weights are averaged once",
        old="        trained = [each for each in module.parameters() if each.requires_grad]\n"
        "        self.order",
        new="        named = module.named_parameters(remove_duplicate=False)\n"
        "        trained = [each for _, each in named if each.requires_grad]\n"
        "        self.order",
        is_public=True,
    ),
    Fault(
        name="a hook on frozen parameters",
        style="flat_buffers",
        part="ddp",
        title="frozen parameters stay, and the others are right",
        old="[each for each in module.parameters() if each.requires_grad][::-1]",
        new="list(module.parameters())[::-1]",
        is_public=True,
    ),
    Fault(
        name="everything is sent after backward",
        style="classes",
        part="ddp-individual",
        title="communication begins before backward ends",
        old="        self.ready.add(parameter)\n        self.send_ready()\n\n    def send_ready",
        new="        self.ready.add(parameter)\n\n    def send_ready",
    ),
    Fault(
        name="handles are kept",
        style="closures",
        part="ddp",
        title="50 steps leave nothing behind",
        old="    module.record.started.clear()\n",
        new="""    done = getattr(module.record, "done", [])
    module.record.done = done + module.record.started
    module.record.started.clear()
""",
    ),
    Fault(
        name="buckets are not reset",
        style="closures",
        part="ddp",
        title="the second step is also right",
        old="            offset += parameter.numel()\n    reset_record(module)\n",
        new="            offset += parameter.numel()\n",
        is_public=True,
    ),
    Fault(
        name="messages go out in the order of the hooks",
        style="classes",
        part="ddp",
        title="the order of gradients does not matter",
        old="        self.ready.add(parameter)\n        self.send_ready()\n\n    def send_ready",
        new="        self.ready.add(parameter)\n"
        "        self.works.append(dist.all_reduce(parameter.grad, async_op=True))\n\n"
        "    def send_ready",
    ),
    Fault(
        name="the size of buckets is ignored",
        style="flat_buffers",
        part="ddp-bucketed",
        title="buckets of 0.0001 MiB: as many messages as that gives",
        old='float("inf") if bucket_size_mb is None else bucket_size_mb * 1024 * 1024',
        new='float("inf")',
    ),
    Fault(
        name="buckets that are not full are not sent",
        style="classes",
        part="ddp-bucketed",
        title="a layer that no rank uses does no harm",
        old="""        for bucket in self.buckets[self.sent :]:
            bucket.send()
        for bucket in self.buckets:
            bucket.finish()
""",
        new="""        for bucket in self.buckets[: self.sent]:
            bucket.finish()
""",
    ),
    Fault(
        name="the optimizer is not sharded",
        style="closures",
        part="sharded-optimizer",
        title="each rank keeps its share of the state",
        old="            hide()\n            return None\n",
        new="            return None\n",
    ),
    Fault(
        name="updated parameters are not sent",
        style="classes",
        part="sharded-optimizer",
        title="three steps are those of AdamW, on every rank",
        old="                works.append("
        "dist.broadcast(parameter.data, src=owner, async_op=True))\n",
        new="                assert owner < dist.get_world_size()\n",
        is_public=True,
    ),
    Fault(
        name="a late group is not sharded",
        style="classes",
        part="sharded-optimizer",
        title="parameters of a late group are also shared out",
        old="        mine = ["
        'each for each in group["params"] if self.owner[each] == dist.get_rank()]\n',
        new="""        mine = [
            each for each in group["params"] if self.owner[each] == dist.get_rank()
        ]
        if len(self.param_groups) > 1:
            mine = group["params"]
""",
    ),
    Fault(
        name="a scheduler changes nothing",
        style="flat_buffers",
        part="sharded-optimizer",
        title="a scheduler's learning rate arrives",
        old="                        local.param_groups[0][name] = value\n",
        new="                        local.param_groups[0].setdefault(name, value)\n",
    ),
    Fault(
        name="the closure is ignored",
        style="flat_buffers",
        part="sharded-optimizer",
        title="step(closure) returns the loss",
        old="loss = closure() if closure is not None else None",
        new="loss = None",
    ),
    Fault(
        name="layers are not freed after forward",
        style="closures",
        part="fsdp",
        title="layers are freed after they were used",
        old="        make_shard(weight)\n        if output.requires_grad:\n",
        new="        if output.requires_grad:\n",
    ),
    Fault(
        name="the shard is a view of the whole weight",
        style="closures",
        part="fsdp",
        title="each rank holds its share of the parameters",
        old="padded.chunk(world)[dist.get_rank()].clone()",
        new="padded.chunk(world)[dist.get_rank()]",
    ),
    Fault(
        name="master weights have the dtype of computation",
        style="flat_buffers",
        part="fsdp",
        title="compute_dtype=float16: master weights and gradients are fp32",
        old="        self.shard = nn.Parameter(mine, requires_grad",
        new="        mine = mine.to(compute_dtype or mine.dtype)\n"
        "        self.shard = nn.Parameter(mine, requires_grad",
    ),
    Fault(
        name="the causal mask is off by one",
        style="classes",
        part="attention-pytorch",
        title="causal: powers of two: forward",
        old="masked_fill(column > row[:, None], -torch.inf)",
        new="masked_fill(column > row[:, None] + 1, -torch.inf)",
        is_public=True,
    ),
    Fault(
        name="no maximum is subtracted",
        style="closures",
        part="attention-pytorch",
        title="scores up to ±50 and equal scores: forward",
        old="m_new = torch.maximum(m, scores.max(-1).values)",
        new="m_new = torch.zeros_like(m)",
    ),
    Fault(
        name="probabilities are saved",
        style="closures",
        part="attention-pytorch",
        title="memory does not grow with the square of the length",
        old="            ctx.save_for_backward(q, k, v, out, lse)\n",
        new="            ctx.save_for_backward(q, k, v, out, lse)\n"
        "            ctx.p = torch.exp(masked_scores(q, k, is_causal) - lse.unsqueeze(-1))\n",
    ),
    Fault(
        name="eps is outside the root",
        style="flat_buffers",
        part="rmsnorm-pytorch",
        title="large means, ±50, zeros: forward",
        old="1 / torch.sqrt(rows.pow(2).sum(1, keepdim=True) / rows.shape[1] + eps)",
        new="1 / (torch.sqrt(rows.pow(2).sum(1, keepdim=True) / rows.shape[1]) + eps)",
    ),
]
