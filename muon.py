"""
Muon for the hidden matrices, in Moonlight's variant (Liu et al., 2025), which the paper uses:
momentum, Nesterov, an orthogonalized update about as large as AdamW's, decoupled weight decay.
One class for one device or many; all of its communication is here.
"""

import atexit
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from device import TIMEOUT, sum_over_ranks
from errors import die

# torch 2.13 renamed these two; older releases have the old names only.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def orthogonalize(G):
    """Map every matrix U S V^T of a stack (n, rows, cols) to about U V^T.

    Newton-Schulz: X <- aX + (bA + cA^2)X with A = X X^T changes only the singular values. Five
    steps bring all but tiny ones into a band around 1, about 0.7 to 1.2; the coefficients
    trade convergence to 1 for speed.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = G.size(-2) > G.size(-1)
    X = G.mT if tall else G  # so that A is the smaller Gram matrix
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # no singular value exceeds 1
    n_columns = X.size(-1)
    if X.dtype == torch.bfloat16:  # pad with zeros, as model.py's Block does
        X = F.pad(X, (0, -n_columns % 64))
    for _ in range(5):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # bA + cA^2
        X = torch.baddbmm(X, B, X, beta=a)  # aX + BX
    X = X[..., :n_columns]
    return X.mT if tall else X


class Host:
    """The ranks that share this host, and this rank's peers: one rank on every other host.

    Gradients are first scattered within the host, which is fast and gives each rank whole matrices,
    and then summed over the peers.
    """

    def __init__(self):
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if world > 1 else 0
        self.size = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if world > 1 else 1
        self.rank = rank % self.size
        # If sizes differ, this is true on at least one rank.
        if sum_over_ranks(torch.tensor(self.size)) != world * self.size:
            die("every host must run the same number of processes")
        self.n_hosts = world // self.size
        self.group = self.peers = None  # None: all ranks
        if self.n_hosts > 1:
            ranks = torch.arange(world).view(self.n_hosts, self.size)
            self.group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), TIMEOUT)
            self.peers, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), TIMEOUT)
            atexit.register(self.leave)

    def leave(self):
        """Let go of the groups, which otherwise outlive destroy_process_group: see device.py."""
        self.group = self.peers = None


class Stack:
    """Matrices of one shape as views of one tensor (n, rows, cols); gradients are views of another.

    Zeros pad n to a multiple of the number of ranks on a host. Each rank owns one slice of whole
    matrices: it alone updates them and keeps their momentum.
    """

    def __init__(self, params, host):
        per_rank = math.ceil(len(params) / host.size)
        self.params = params
        self.weights = params[0].new_zeros(host.size * per_rank, *params[0].shape)
        self.grads = torch.zeros_like(self.weights)
        self.mine = slice(host.rank * per_rank, (host.rank + 1) * per_rank)
        self.momentum = torch.zeros_like(self.weights[self.mine])
        for p, weight, grad in zip(params, self.weights, self.grads):
            weight.copy_(p.detach())
            p.data = weight
            p.grad = grad  # autograd adds in place to a gradient that is already there


class Muon(torch.optim.Optimizer):
    """Muon, with its work shared between ranks. Call reduce, step and zero_grad, in this order.

    Each matrix shape takes one reduce-scatter of the gradients (and an all-reduce across hosts),
    Newton-Schulz on the rank's own slice, and one all-gather of the weights. Newton-Schulz runs in
    `dtype`.
    """

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.1, dtype=torch.float32):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.dtype = dtype
        self.host = Host()
        by_shape = {}
        for p in self.param_groups[0]["params"]:
            by_shape.setdefault(p.shape, []).append(p)
        self.stacks = [Stack(group, self.host) for group in by_shape.values()]

    def reduce(self):
        """Sum the gradients over all ranks, each matrix on its owner; return their squared norm.

        The other slices keep this rank's own gradients, which nothing reads.
        """
        squares = []
        for stack in self.stacks:
            in_place = stack.params[0].grad.data_ptr() == stack.grads.data_ptr()
            assert in_place, "p.grad was replaced: only Muon.zero_grad may clear gradients"
            grads = stack.grads[stack.mine]
            if self.host.size > 1:
                reduce_scatter(grads, stack.grads, group=self.host.group)  # into my slice
            if self.host.n_hosts > 1:
                dist.all_reduce(grads, group=self.host.peers)
            squares.append(grads.square().sum())
        square = torch.stack(squares).sum()
        if self.host.size > 1:
            dist.all_reduce(square, group=self.host.group)
        return square

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
        for stack in self.stacks:
            weights, grads = stack.weights[stack.mine], stack.grads[stack.mine]
            stack.momentum.mul_(momentum).add_(grads)
            nesterov = grads.add_(stack.momentum, alpha=momentum)  # overwrites the gradient
            update = orthogonalize(nesterov.to(self.dtype))
            scale = 0.2 * max(weights.shape[1:]) ** 0.5  # to an RMS of 0.2, typical of AdamW
            weights.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * scale)
            if self.host.size > 1:
                all_gather(stack.weights, weights, group=self.host.group)

    def zero_grad(self):
        for stack in self.stacks:
            stack.grads.zero_()  # in place, so that p.grad remains a view

    def gather_momentum(self):
        """Return every matrix's momentum, in the order of the parameters. All ranks must call this.

        The result is the same on any number of ranks, and so are checkpoints.
        """
        momentum_of = {}
        for stack in self.stacks:
            momenta = stack.momentum
            if self.host.size > 1:
                momenta = torch.empty_like(stack.weights)
                all_gather(momenta, stack.momentum, group=self.host.group)
            for p, momentum in zip(stack.params, momenta):
                momentum_of[p] = momentum
        return [momentum_of[p] for p in self.param_groups[0]["params"]]

    def load_momentum(self, momenta):
        """Load what gather_momentum returned, on any number of ranks."""
        momentum_of = dict(zip(self.param_groups[0]["params"], momenta, strict=True))
        for stack in self.stacks:
            for momentum, p in zip(stack.momentum, stack.params[stack.mine]):
                momentum.copy_(momentum_of[p])
