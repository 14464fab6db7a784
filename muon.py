"""
Muon for the hidden matrices, in the variant of Moonlight (Liu et al., 2025) that the paper uses: momentum, Nesterov,
an orthogonalised update of the size of AdamW's, decoupled weight decay. One class for one device or many.
"""
import torch
import torch.distributed as dist

def orthogonalize(G):
    """
    Of each matrix U S V^T in a stack (n, rows, cols), about U V^T: five Newton-Schulz steps X <- aX + bAX + cA^2X with
    A = X X^T bring singular values into a band around 1 (0.7 to 1.2), not to 1, if they are not minute to begin with.
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # steep at 0: small singular values grow fast
    X = G.mT if G.size(-2) > G.size(-1) else G
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # all singular values are now at most 1
    # every step multiplies X from the left by Q = aI + bA + cA^2, and these all commute. So for a wide X it is cheaper
    # to follow A alone, A <- Q A Q, collect P = Q5 .. Q1 and apply it once. fp32 only: bf16 rounding of A can blow up.
    wide = X.dtype == torch.float32 and X.size(-1) > 1.5 * X.size(-2)
    for step in range(5):
        if step == 0 or not wide:
            A = X @ X.mT
        Q = torch.baddbmm(A, A, A, beta=b, alpha=c)
        Q.diagonal(dim1=-2, dim2=-1).add_(a)
        if wide:
            P = Q if step == 0 else Q @ P
            A = Q @ A @ Q if step < 4 else None
        else:
            X = Q @ X
    X = P @ X if wide else X
    return X.mT if G.size(-2) > G.size(-1) else X

class Muon(torch.optim.Optimizer):
    """
    Each matrix has one owner, which alone keeps its momentum, orthogonalises, updates and then broadcasts it; the
    gradient needs to be complete on the owner only. Small matrices of one shape are orthogonalised as a stack.
    """

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.1, dtype=torch.float32):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.params, self.dtype = self.param_groups[0]["params"], dtype
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        shapes = [tuple(sorted(p.shape)) for p in self.params]  # equal cost: dealt out in turn
        self.owner = {p: shapes[:i].count(shapes[i]) % self.world for i, p in enumerate(self.params)}
        for p in self.params:
            if self.owner[p] == self.rank:
                self.state[p]["momentum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        group, requests, stacks = self.param_groups[0], [], {}
        for i, p in enumerate(self.params):  # a stack: one shape, and big matrices by themselves
            stacks.setdefault((p.shape, i if p.numel() >= 2 ** 18 else None), []).append(p)
        for stack in stacks.values():
            mine = [p for p in stack if self.owner[p] == self.rank]
            if mine:
                self.update(mine, group["lr"], group["momentum"], group["weight_decay"])
            if self.world > 1:  # in the same order on every rank, while the next update is computed
                requests += [dist.broadcast(p, self.owner[p], async_op=True) for p in stack]
        for request in requests:
            request.wait()

    def update(self, params, lr, momentum, weight_decay):
        for p in params:
            m = self.state[p]["momentum"].mul_(momentum).add_(p.grad)
            p.grad.add_(m, alpha=momentum)  # Nesterov: g + mu m, in place of the gradient
        for p, direction in zip(params, orthogonalize(torch.stack([p.grad for p in params]).to(self.dtype))):
            scale = 0.2 * max(p.shape) ** 0.5  # an update of RMS 0.2, as AdamW's typically is
            p.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr * scale)

    def gather_momentum(self):
        """Every momentum, in the order of the parameters, on rank 0: a checkpoint does not depend on the ranks."""
        momentum = []
        for p in self.params:
            m = self.state[p]["momentum"] if self.owner[p] == self.rank else torch.empty_like(p)
            if self.rank == self.owner[p] != 0:
                dist.send(m, 0)
            elif self.rank == 0 != self.owner[p]:
                dist.recv(m, self.owner[p])
            momentum += [m] if self.rank == 0 else []
        return momentum

    def scatter_momentum(self, momentum):
        for p, m in zip(self.params, momentum, strict=True):
            if self.owner[p] == self.rank:
                self.state[p]["momentum"].copy_(m)
