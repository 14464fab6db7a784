"""Muon against torch's own, an fp64 textbook loop, the band it promises; on one rank and many."""

import os
import sys

import pytest
import torch

from conftest import torchrun
from device import join_ranks
from muon import Muon, orthogonalize

SHAPES = [(32, 32), (48, 32), (32, 48), (16, 100), (100, 16), (600, 512), (512, 600)]


def textbook(G):
    """The published iteration, for one matrix, in fp64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.double().T if G.size(0) > G.size(1) else G.double()
    X = X / X.norm().clamp(min=1e-7)
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if G.size(0) > G.size(1) else X


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalize_equals_the_textbook(shape):
    """In fp32: square, tall and wide, as a stack."""
    torch.manual_seed(0)
    G = torch.randn(3, *shape)
    for ours, g in zip(orthogonalize(G), G):
        torch.testing.assert_close(ours.double(), textbook(g), rtol=1e-4, atol=1e-4)


def test_singular_values_lie_in_the_band():
    torch.manual_seed(0)
    for shape in [(128, 444), (444, 128), (64, 64)]:
        G = torch.randn(shape)
        S = torch.linalg.svdvals(G)
        if S.min() >= 0.01 * S.norm():
            values = torch.linalg.svdvals(orthogonalize(G[None])[0])
            assert 0.5 <= values.min() and values.max() <= 1.5
    assert (
        torch.linalg.svdvals(torch.randn(128, 444)).min() > 0.01 * 128**0.5
    )  # the band was really tested


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (128, 128)])
@pytest.mark.parametrize("rank", [0, 1, 8, 64])
def test_no_input_exceeds_the_band(shape, rank):
    """Rank-deficient, huge, tiny and zero matrices: never above 1.3, never NaN."""
    torch.manual_seed(1)
    G = torch.randn(shape[0], rank) @ torch.randn(rank, shape[1])
    for scale in (1e-12, 1.0, 1e12):
        assert torch.linalg.svdvals(orthogonalize(scale * G[None])[0]).max() <= 1.3


def params(seed=0, shapes=SHAPES):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def set_gradients(parameters, gradients):
    """Write gradients where Muon expects them: into the views that it has made."""
    for p, gradient in zip(parameters, gradients):
        p.grad.copy_(gradient)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_agrees_with_torch_in_bf16():
    """torch.optim.Muon orthogonalizes in bf16, as we do on CUDA; match_rms_adamw is our scale.

    Tiny matrices only: bf16 is slow on a CPU.
    """
    shapes = [(8, 8), (12, 8), (8, 24)]
    ours, theirs = params(shapes=shapes), params(shapes=shapes)
    a = Muon(ours, lr=0.02, momentum=0.9, weight_decay=0.1, dtype=torch.bfloat16)
    b = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        torch.manual_seed(step)
        gradients = [torch.randn_like(p) for p in ours]
        set_gradients(ours, gradients)
        for p, gradient in zip(theirs, gradients):
            p.grad = gradient.clone()
        a.step()
        b.step()
    # torch's momentum is an average, ours a sum: a factor that orthogonalization removes.
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-3)


def test_agrees_with_a_textbook_loop():
    """Ten steps in fp32 against the rule written out in fp64, with equal and unequal shapes."""
    ours = params(shapes=[*SHAPES, (32, 48), (32, 32)])
    reference = [p.detach().double() for p in ours]
    momentum = [torch.zeros_like(p) for p in reference]
    muon = Muon(ours, lr=0.02, momentum=0.95, weight_decay=0.1)
    for step in range(10):
        torch.manual_seed(step)
        gradients = [torch.randn(p.shape) for p in ours]
        set_gradients(ours, gradients)
        muon.step()
        for p, g, m in zip(reference, gradients, momentum):
            m.mul_(0.95).add_(g.double())
            update = textbook(g.double() + 0.95 * m) * 0.2 * max(p.shape) ** 0.5
            p.mul_(1 - 0.02 * 0.1).sub_(0.02 * update)
    for p, q in zip(ours, reference):
        torch.testing.assert_close(p.double(), q, rtol=1e-4, atol=1e-4)
    for ours_m, m in zip(muon.gather_momentum(), momentum):
        torch.testing.assert_close(ours_m.double(), m, rtol=1e-4, atol=1e-4)


def test_update_has_the_size_of_adamw():
    """The RMS of an update is about 0.2 lr whatever the shape."""
    for shape in [(128, 128), (128, 444), (444, 128)]:
        p = torch.nn.Parameter(torch.zeros(shape))
        muon = Muon([p], lr=1.0, weight_decay=0.0)
        p.grad.copy_(torch.randn(shape))
        muon.step()
        assert 0.15 < p.pow(2).mean().sqrt() < 0.25


def test_a_replaced_gradient_is_noticed():
    """Only Muon.zero_grad may clear gradients: otherwise they would no longer be reduced."""
    p = torch.nn.Parameter(torch.zeros(8, 8))
    muon = Muon([p], lr=1.0)
    p.grad = torch.ones(8, 8)
    with pytest.raises(AssertionError, match="only Muon.zero_grad"):
        muon.reduce()


# ---- over ranks ----------------------------------------------------------------------------------
# 5 and 6 matrices do not split evenly over 4 ranks; the last shape has fewer matrices than ranks.
SHARED_SHAPES = [(16, 16)] * 5 + [(24, 16)] * 6 + [(16, 40)]
N_SLOTS = 4


def train_by_slots(rank, world):
    """Take three steps, the gradients of four slots shared between the ranks; return the result.

    After each step the momentum is gathered and loaded, as through a checkpoint.
    """
    matrices = params(shapes=SHARED_SHAPES)
    muon = Muon(matrices, lr=0.02, momentum=0.9, weight_decay=0.1)
    squares = []
    for step in range(3):
        for slot in range(rank, N_SLOTS, world):
            generator = torch.Generator().manual_seed(step * N_SLOTS + slot)
            for p in matrices:
                p.grad += torch.randn(p.shape, generator=generator)
        squares.append(muon.reduce())
        muon.step()
        muon.zero_grad()
        momentum = [m.clone() for m in muon.gather_momentum()]
        for stack in muon.stacks:
            stack.momentum.fill_(7)
        muon.load_momentum(momentum)
    weights = [p.detach().clone() for p in matrices]
    return {"weights": weights, "momentum": momentum, "squares": squares}


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """What train_by_slots returns on 4 ranks that act as 1, 2 and 4 hosts in turn."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(4, "tests/test_muon.py", str(folder / "ends.pt"), cwd=folder)  # ends without an abort
    return torch.load(folder / "ends.pt")


@pytest.mark.parametrize("n_hosts", [1, 2, 4])
def test_four_ranks_on_any_number_of_hosts_agree_with_one(four_ranks, n_hosts):
    one = train_by_slots(0, 1)
    for kind in ("weights", "momentum", "squares"):
        for ours, theirs in zip(four_ranks[n_hosts][kind], one[kind], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def be_one_of_four_ranks(file):
    rank, world = join_ranks("cpu")
    ends = {}
    for n_hosts in (1, 2, 4):
        os.environ["LOCAL_WORLD_SIZE"] = str(world // n_hosts)
        ends[n_hosts] = train_by_slots(rank, world)
    if rank == 0:
        torch.save(ends, file)


if __name__ == "__main__":
    be_one_of_four_ranks(sys.argv[1])
