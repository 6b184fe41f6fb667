"""A right solution with flat buffers: gradients, shards and states are parts of long vectors."""

import torch
import torch.distributed as dist
from classes import TritonRMSNorm
from closures import get_flashattention_autograd_function_triton
from torch import nn

__all__ = ["get_flashattention_autograd_function_triton"]


def first_rank(group):
    """Return the global rank of a group's first member."""
    return 0 if group is None else dist.get_global_rank(group, 0)


def broadcast_flat(module, group=None):
    """Copy the first rank's parameters and buffers, in one message per dtype."""
    tensors = [each.data for each in [*module.parameters(), *module.buffers()]]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, first_rank(group), group=group)
        sizes = [tensor.numel() for tensor in same]
        for tensor, values in zip(same, flat.split(sizes), strict=True):
            tensor.copy_(values.view_as(tensor))


# -- data parallelism ------------------------------------------------------------------------------


class FlatDDP(nn.Module):
    """Gradients are views of one buffer, parts of which are sent during backward."""

    def __init__(self, module, limit_bytes, group=None):
        super().__init__()
        self.module = module
        self.group = group
        broadcast_flat(module, group)
        self.parameters_sent = [each for each in module.parameters() if each.requires_grad][::-1]
        total = sum(each.numel() for each in self.parameters_sent)
        self.buffer = torch.zeros(total, device=self.parameters_sent[0].device)
        self.views = {}
        self.bucket_of = {}
        self.ends = []  # of the buckets, in elements
        self.counts = []  # parameters of each bucket
        start, bucket_start = 0, 0
        for parameter in self.parameters_sent:
            end = start + parameter.numel()
            if not self.ends or 4 * (end - bucket_start) > limit_bytes:
                self.ends.append(end)
                self.counts.append(0)
                bucket_start = start
            self.ends[-1] = end
            self.counts[-1] += 1
            self.bucket_of[parameter] = len(self.ends) - 1
            self.views[parameter] = self.buffer[start:end].view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self.on_gradient)
            start = end
        self.reset()

    def forward(self, *args):
        return self.module(*args)

    def reset(self):
        self.missing = list(self.counts)
        self.is_there = set()
        self.works = []

    def on_gradient(self, parameter):
        view = self.views[parameter]
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view
        self.is_there.add(parameter)
        self.missing[self.bucket_of[parameter]] -= 1
        self.send()

    def send(self):
        while len(self.works) < len(self.ends) and self.missing[len(self.works)] == 0:
            bucket = len(self.works)
            start = 0 if bucket == 0 else self.ends[bucket - 1]
            part = self.buffer[start : self.ends[bucket]]
            part /= dist.get_world_size(self.group)
            self.works.append(dist.all_reduce(part, group=self.group, async_op=True))

    def finish(self):
        for parameter in self.parameters_sent:
            if parameter not in self.is_there:
                view = self.views[parameter]
                if parameter.grad is None:
                    view.zero_()
                parameter.grad = view
        self.missing = [0] * len(self.missing)
        self.send()
        for work in self.works:
            work.wait()
        self.reset()


def get_ddp_individual_parameters(module, group=None):
    return FlatDDP(module, 0, group)


def get_ddp_bucketed(module, bucket_size_mb, group=None):
    limit = float("inf") if bucket_size_mb is None else bucket_size_mb * 1024 * 1024
    return FlatDDP(module, limit, group)


def get_ddp(module, group=None):
    return FlatDDP(module, 4 * 1024 * 1024, group)


def ddp_individual_parameters_on_after_backward(model, optimizer):
    model.finish()


def ddp_bucketed_on_train_batch_start(model, optimizer):
    pass


def ddp_bucketed_on_after_backward(model, optimizer):
    model.finish()


def ddp_on_after_backward(model, optimizer):
    model.finish()


# -- sharded optimizer -----------------------------------------------------------------------------


class FlatOptimizer(torch.optim.Optimizer):
    """The parameters of a group become views of a vector, of which each rank steps one part."""

    def __init__(self, params, optimizer_cls, **options):
        self.optimizer_cls = optimizer_cls
        self.options = options
        self.flats = []  # a padded vector per group
        self.pieces = []  # per group: (parameter, first, last, piece that this rank steps)
        self.locals = []  # an optimizer per group, or None
        super().__init__(params, options)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        parameters = [each for each in group["params"] if each.requires_grad]
        world, rank = dist.get_world_size(), dist.get_rank()
        total = sum(each.numel() for each in parameters)
        share = -(-total // world)
        flat = parameters[0].new_zeros(share * world, requires_grad=False)
        mine_first, mine_last = rank * share, (rank + 1) * share
        pieces = []
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            flat[start:end] = parameter.data.reshape(-1)
            parameter.data = flat[start:end].view(parameter.shape)
            first, last = max(start, mine_first), min(end, mine_last)
            if first < last:
                piece = nn.Parameter(flat[first:last])
                pieces.append((parameter, first - start, last - start, piece))
            start = end
        self.flats.append(flat)
        self.pieces.append(pieces)
        local = None
        if pieces:
            options = {name: value for name, value in group.items() if name != "params"}
            local = self.optimizer_cls([{"params": [each[3] for each in pieces], **options}])
        self.locals.append(local)

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for index, group in enumerate(self.param_groups):
            local = self.locals[index]
            if local is not None:
                for name, value in group.items():
                    if name != "params":
                        local.param_groups[0][name] = value
                for parameter, first, last, piece in self.pieces[index]:
                    piece.grad = None
                    if parameter.grad is not None:
                        piece.grad = parameter.grad.reshape(-1)[first:last]
                local.step()
            share = self.flats[index].numel() // dist.get_world_size()
            mine = self.flats[index].split(share)[dist.get_rank()].clone()
            dist.all_gather_into_tensor(self.flats[index], mine)
        return loss

    def state_dict(self):
        raise RuntimeError("each rank has a part of the state; saving it is not supported")


def get_sharded_optimizer(params, optimizer_cls, **options):
    return FlatOptimizer(params, optimizer_cls, **options)


# -- FSDP ------------------------------------------------------------------------------------------


class Unit:
    """The parameters of one layer as a vector, of which this rank keeps one part."""

    def __init__(self, owners, compute_dtype):
        parameters = []
        for places in owners:
            layer, name = places[0]
            parameters.append(layer._parameters[name])
        self.owners = owners  # per parameter: the (layer, attribute) where it is used
        self.shapes = [each.shape for each in parameters]
        self.sizes = [each.numel() for each in parameters]
        world = dist.get_world_size()
        self.share = -(-sum(self.sizes) // world)
        flat = parameters[0].new_zeros(self.share * world, requires_grad=False)
        flat[: sum(self.sizes)] = torch.cat([each.data.reshape(-1) for each in parameters])
        mine = flat.split(self.share)[dist.get_rank()].clone()
        self.shard = nn.Parameter(mine, requires_grad=parameters[0].requires_grad)
        self.dtype = compute_dtype or mine.dtype
        self.whole = None
        for places in owners:
            for layer, name in places:
                del layer._parameters[name]

    def gathered(self, dtype):
        whole = self.shard.data.new_empty(self.share * dist.get_world_size(), dtype=dtype)
        dist.all_gather_into_tensor(whole, self.shard.data.to(dtype))
        return whole

    def split(self, whole):
        parts = whole[: sum(self.sizes)].split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def before_forward(self, layer, inputs):
        self.whole = GatherFlat.apply(self.shard, self)
        for places, part in zip(self.owners, self.split(self.whole), strict=True):
            for layer, name in places:
                setattr(layer, name, part)

    def after_forward(self, layer, inputs, output):
        for places in self.owners:
            for layer, name in places:
                delattr(layer, name)
        self.free()
        if output.requires_grad:
            output.register_hook(self.before_backward)

    def before_backward(self, gradient):
        storage = self.whole.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.whole.numel() * self.whole.element_size())
            # Through .data: autograd must not take it for a change of the values.
            mine = self.shard.data.to(self.dtype)
            dist.all_gather_into_tensor(self.whole.data, mine)

    def free(self):
        if self.whole is not None:
            self.whole.untyped_storage().resize_(0)


class GatherFlat(torch.autograd.Function):
    """Gathers a unit; its backward reduces the gradient to this rank's part."""

    @staticmethod
    def forward(ctx, shard, unit):
        ctx.unit = unit
        return unit.gathered(unit.dtype)

    @staticmethod
    def backward(ctx, gradient):
        unit = ctx.unit
        unit.free()
        total = gradient.float().contiguous()
        mine = total.new_empty(unit.share)
        dist.reduce_scatter_tensor(mine, total)
        return mine.div_(dist.get_world_size()), None


class FlatFSDP(nn.Module):
    """A unit per layer. Weights that several layers share belong to the whole module's unit."""

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        broadcast_flat(module)
        self.module = module
        self.names = {}
        places = {}
        for prefix, layer in module.named_modules():
            for name, parameter in layer._parameters.items():
                if parameter is None:
                    continue
                places.setdefault(parameter, []).append((layer, name))
                self.names[(layer, name)] = f"{prefix}.{name}" if prefix else name
        of_layer = {}
        for used_at in places.values():
            layer = used_at[0][0] if len(used_at) == 1 else module
            of_layer.setdefault(layer, []).append(used_at)
        self.units = []
        for layer, owners in of_layer.items():
            unit = Unit(owners, compute_dtype)
            self.units.append(unit)
            layer.register_forward_pre_hook(unit.before_forward)
            layer.register_forward_hook(unit.after_forward)
        self.shards = nn.ParameterList([unit.shard for unit in self.units])

    def forward(self, *args):
        return self.module(*args)

    def finish(self):
        for unit in self.units:
            unit.free()

    def full(self):
        found = {}
        for unit in self.units:
            parts = unit.split(unit.gathered(torch.float32))
            for places, part in zip(unit.owners, parts, strict=True):
                for place in places:
                    found[self.names[place]] = part
        return found


def get_fsdp(module, compute_dtype=None):
    return FlatFSDP(module, compute_dtype)


def fsdp_on_after_backward(model, optimizer):
    model.finish()


def fsdp_gather_full_params(model):
    return model.full()


# -- kernels ---------------------------------------------------------------------------------------


class Flash(torch.autograd.Function):
    """Tiles of queries; the keys that a causal tile cannot see are left out."""

    Q_TILE, K_TILE = 16, 32

    @staticmethod
    def tiles(q, k, is_causal):
        for i in range(0, q.shape[1], Flash.Q_TILE):
            rows = torch.arange(i, min(i + Flash.Q_TILE, q.shape[1]), device=q.device)
            end = min(k.shape[1], i + Flash.Q_TILE) if is_causal else k.shape[1]
            for j in range(0, end, Flash.K_TILE):
                columns = torch.arange(j, min(j + Flash.K_TILE, k.shape[1]), device=q.device)
                scores = q[:, rows].float() @ k[:, columns].float().mT / q.shape[-1] ** 0.5
                if is_causal:
                    scores = torch.where(rows[:, None] >= columns, scores, -torch.inf)
                yield rows, columns, scores

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        total = torch.zeros(q.shape, device=q.device)
        highest = torch.full(q.shape[:2], -torch.inf, device=q.device)
        weights = torch.zeros_like(highest)
        for rows, columns, scores in Flash.tiles(q, k, is_causal):
            higher = torch.maximum(highest[:, rows], scores.amax(-1))
            factor = torch.exp(highest[:, rows] - higher)
            part = torch.exp(scores - higher[..., None])
            total[:, rows] = total[:, rows] * factor[..., None] + part @ v[:, columns].float()
            weights[:, rows] = weights[:, rows] * factor + part.sum(-1)
            highest[:, rows] = higher
        out = (total / weights[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, highest + weights.log())
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx, upstream):
        q, k, v, out, lse = ctx.saved_tensors
        do = upstream.float()
        delta = (do * out.float()).sum(-1)
        dq, dk, dv = (torch.zeros(each.shape, device=each.device) for each in (q, k, v))
        for rows, columns, scores in Flash.tiles(q, k, ctx.is_causal):
            p = torch.exp(scores - lse[:, rows, None])
            dv[:, columns] += p.mT @ do[:, rows]
            dp = do[:, rows] @ v[:, columns].float().mT
            ds = p * (dp - delta[:, rows, None]) / q.shape[-1] ** 0.5
            dq[:, rows] += ds @ k[:, columns].float()
            dk[:, columns] += ds.mT @ q[:, rows].float()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class Norm(torch.autograd.Function):
    """RMSNorm over rows of a matrix."""

    @staticmethod
    def forward(ctx, x, g, eps=1e-5):
        rows = x.reshape(-1, x.shape[-1]).float()
        inverse = 1 / torch.sqrt(rows.pow(2).sum(1, keepdim=True) / rows.shape[1] + eps)
        ctx.save_for_backward(x, g, inverse)
        return (rows * inverse * g.float()).to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx, upstream):
        x, g, inverse = ctx.saved_tensors
        up = upstream.reshape(-1, x.shape[-1]).float()
        normal = x.reshape(up.shape).float() * inverse
        dg = torch.einsum("rd,rd->d", up, normal)
        scaled = up * g.float()
        along = (scaled * normal).sum(1, keepdim=True) / x.shape[-1]
        dx = inverse * (scaled - normal * along)
        return dx.view(x.shape).to(x.dtype), dg.to(g.dtype), None


def get_flashattention_autograd_function_pytorch():
    return Flash


def get_rmsnorm_autograd_function_pytorch():
    return Norm


def get_rmsnorm_autograd_function_triton():
    return TritonRMSNorm


def gradients_of(upstream, x, g):
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), g.detach().requires_grad_()
        return torch.autograd.grad(Norm.apply(*leaves), leaves, upstream)


def rmsnorm_backward_x_pytorch(upstream, x, g):
    return gradients_of(upstream, x, g)[0]


def rmsnorm_backward_g_pytorch(upstream, x, g):
    return gradients_of(upstream, x, g)[1]
