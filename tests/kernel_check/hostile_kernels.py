"""Kernels that hang, exit, crash, print or change what they must not, for `distlab kernel`."""

import ctypes
import os
import sys
import time

import torch
import torch.nn.functional as F

KEPT_RESULTS = {}
KEPT_GRADIENTS = {}


def right(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def hangs_exits_or_breaks_the_gpu(x, weight):
    """Hang at 3 rows, exit at 5, and break the GPU at 16.

    After the last of these no call of a GPU works. On a CPU the checker is told so.
    """
    rows = x.shape[0]
    while rows == 3:
        pass
    if rows == 5:
        os._exit(7)
    if rows == 16:
        for name in ("distlab.kernel_check.judge", "distlab.kernel_check.report", "__main__"):
            sys.modules[name].works = lambda device: False
    return right(x, weight)


def hangs(x, weight):
    while True:
        pass


def slowly(graph, inputs):
    """Compile for 1,000 columns in 1.5 seconds, and for others at once."""
    if any(each.shape == (1000,) for each in inputs):
        time.sleep(1.5)
    return graph.forward


slow_to_compile = torch.compile(right, backend=slowly, dynamic=False)


def crashes_or_prints(x, weight):
    """Crash at 3 rows, and print without end at 2 wide ones, which are among the last inputs."""
    if x.shape[0] == 3:
        ctypes.string_at(0)
    while x.shape == (2, 1000):
        print("x" * 1_000_000)
    return right(x, weight)


def raises(x, weight):
    raise KeyError("no such\nthing")


def refuses_strides(x, weight):
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    return right(x, weight)


def overflows(x, y):
    """Add, with a product on the way that is infinite in fp16."""
    return x * 8 / 8 + y


def changes_its_input(x, weight):
    with torch.no_grad():
        x.mul_(2)
    return right(x, weight)


class RightByAutograd(torch.autograd.Function):
    """Right. Kernels below have its forward or its backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return right(x, weight)

    @staticmethod
    def backward(ctx, upstream):
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            result = right(*leaves)
        return torch.autograd.grad(result, leaves, upstream)


class ChangesTheUpstreamGradient(RightByAutograd):
    """Right, but the gradient of x is written over that of the result."""

    @staticmethod
    def backward(ctx, upstream):
        of_x, of_weight = RightByAutograd.backward(ctx, upstream)
        if 0 not in upstream.stride():
            upstream.copy_(of_x)
            of_x = upstream
        return of_x, of_weight


class ReturnsABufferThatItKeeps(RightByAutograd):
    """Right until the next call with the same sizes."""

    @staticmethod
    def forward(ctx, x, weight):
        result = RightByAutograd.forward(ctx, x, weight)
        buffer = KEPT_RESULTS.setdefault((x.shape, x.dtype), result)
        return buffer.copy_(result).view_as(buffer)


class KeepsAGradient(RightByAutograd):
    """Right until the next backward with the same sizes."""

    @staticmethod
    def backward(ctx, upstream):
        of_x, of_weight = RightByAutograd.backward(ctx, upstream)
        buffer = KEPT_GRADIENTS.setdefault((of_x.shape, of_x.dtype), of_x)
        return buffer.copy_(of_x).view_as(buffer), of_weight


def changes_its_input_in_inference(x, weight):
    """Right where a gradient is asked for."""
    if x.requires_grad:
        return right(x, weight)
    return x.copy_(right(x, weight))


def keeps_a_buffer_in_inference(x, weight):
    """Right where a gradient is asked for."""
    result = right(x, weight)
    if torch.is_grad_enabled():
        return result
    return KEPT_RESULTS.setdefault((x.shape, x.dtype, "inference"), result).copy_(result)


def returns_no_tensor(x, weight):
    return None


class WeightOfTheFirst64Rows(torch.autograd.Function):
    """Right, but rows after the first 64 are left out of the gradient of the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return right(x, weight)

    @staticmethod
    def backward(ctx, upstream):
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            result = right(x, weight)
            first = right(x[..., :64, :], weight)
        (of_x,) = torch.autograd.grad(result, x, upstream)
        (of_weight,) = torch.autograd.grad(first, weight, upstream[..., :64, :])
        return of_x, of_weight


class WeightSummedInHalf(RightByAutograd):
    """Right in fp32. In half precision the gradient of the weight is summed row by row."""

    @staticmethod
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        of_x, _ = RightByAutograd.backward(ctx, upstream)
        normed = right(x.float(), torch.ones_like(weight, dtype=torch.float32))
        of_weight = torch.zeros_like(weight)
        for row in (upstream * normed).reshape(-1, weight.numel()):
            of_weight = of_weight + row.to(weight.dtype)
        return of_x, of_weight


def softmax_through_the_maximum(x):
    """Right, but the gradient of the maximum is computed. It is the rounding of a whole row."""
    values = x.float()
    largest = values.amax(-1, keepdim=True)
    largest = torch.where(largest == float("-inf"), 0.0, largest)
    powered = (values - largest).exp()
    return (powered / powered.sum(-1, keepdim=True)).to(x.dtype)


class SoftmaxOffset(torch.autograd.Function):
    """Softmax whose gradient is too large by 16 roundings of the upstream gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.softmax(-1)

    @staticmethod
    def backward(ctx, upstream):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = x.softmax(-1)
        (of_x,) = torch.autograd.grad(result, x, upstream)
        return of_x + 16 * torch.finfo(torch.float32).eps * upstream.abs()


def attention_of_scores(q, k, v):
    """Attention as a textbook has it, in the dtype of the inputs."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def attention_of_logsumexp(q, k, v):
    """Attention whose weights are exp(s − lse). They are as exact as a score is in fp32."""
    scores = q.float() @ k.float().mT / q.shape[-1] ** 0.5
    weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    return (weights @ v.float()).to(q.dtype)


class AttentionOffset(torch.autograd.Function):
    """Attention whose gradient of q is too large by 1 %."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx, upstream):
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            result = F.scaled_dot_product_attention(*leaves)
        of_q, of_k, of_v = torch.autograd.grad(result, leaves, upstream)
        return of_q * 1.01, of_k, of_v
