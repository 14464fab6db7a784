"""The objective itself, through data.py and model.py, against brute force."""
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data
from conftest import random_model, tiny_settings
from data import BOS, MASK, N_SPECIAL

DOCUMENT = np.array([BOS, 20, 33, 21, 47, BOS])  # <s>, four tokens, and the <s> that closes the window


def tensors(x, y, w, prefix):
    return (torch.as_tensor(np.stack(a)) for a in (x, y, w, prefix))


class Fixed:
    """In place of a random generator: the permutation it is told."""
    def __init__(self, order):
        self.order = order

    def permutation(self, values):
        return np.asarray(values)[list(self.order)]


def log_probabilities(model, tokens, causal=False):
    """(T, V) by a forward pass on one short document: nothing of make_mask or loss."""
    tokens = torch.as_tensor(tokens)[None]
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool)
    h = model.hidden(tokens, mask.tril() if causal else mask, torch.arange(tokens.shape[1])[None])
    return F.log_softmax(h @ model.head.weight.T, -1)[0]


def test_md_loss_is_the_any_order_likelihood():
    """All masks of four tokens, weighted as in training, give the NLL averaged over the 24 orders of unmasking them."""
    model = random_model(tiny_settings())
    examples = [data.md_example(DOCUMENT, (k - 0.5) / 4, Fixed(order))
                for order in itertools.permutations(range(4)) for k in (1, 2, 3, 4)]
    assert len({tuple(x) for x, _ in examples}) == 15
    n = len(examples)
    batch = tensors([x for x, _ in examples], [DOCUMENT[1:]] * n, [(w / n).astype(np.float32) for _, w in examples], [5] * n)
    loss = model.loss(*batch)[1].item()

    total = 0
    for order in itertools.permutations(range(1, 5)):
        x = DOCUMENT[:-1].copy()
        x[1:] = MASK
        for p in order:
            total -= log_probabilities(model, x)[p - 1, DOCUMENT[p]].item()
            x[p] = DOCUMENT[p]
    assert loss == pytest.approx(total / 24 / 4, rel=1e-5)


def test_ar_loss_is_the_chain_rule():
    """Each target, the closing <s> included, from a forward pass that has seen only what comes before it."""
    model = random_model(tiny_settings())
    x, w = data.ar_example(DOCUMENT)
    loss = model.loss(*tensors([x], [DOCUMENT[1:]], [w.astype(np.float32)], [0]))[1].item()
    nll = [-log_probabilities(model, DOCUMENT[:i], causal=True)[-1, DOCUMENT[i]].item() for i in range(1, 6)]
    assert loss == pytest.approx(np.mean(nll), rel=1e-5)


@pytest.mark.parametrize("alpha", ["0", "1/4", "1/2", "63/64", "1"])
def test_zero_head_gives_ln_v_for_every_alpha(alpha):
    """Uniform predictions: both losses, and their mixture, are ln V. A wrong weight or normalisation shows here."""
    s = tiny_settings(alpha=alpha)
    model = random_model(s)
    torch.nn.init.zeros_(model.head.weight)
    stream = synthetic_stream(s)
    total = 0
    for slot in range(4):
        *batch, ar = data.train_slot(stream, s, 0, slot)
        loss = model.loss(*map(torch.as_tensor, batch))[1].item()
        assert loss == pytest.approx(math.log(300), rel=1e-6)
        total += loss / 4
    assert total == pytest.approx(math.log(300), rel=1e-6)


def synthetic_stream(s, n_documents=60, seed=0):
    rng = np.random.default_rng(seed)
    documents = [np.append(BOS, rng.integers(N_SPECIAL, s.vocab_size, rng.integers(3, 60))) for _ in range(n_documents)]
    starts = np.cumsum([0] + [len(d) for d in documents]).astype(np.uint64)
    return data.Stream(np.concatenate(documents).astype(np.uint16), starts, s)


def test_a_copier_has_zero_loss_only_with_the_right_shift():
    """A model that outputs its next input token: perfect on visible targets if state i is scored on token i + 1, and
    hopeless if the shift is missing or done twice."""
    rng = np.random.default_rng(0)
    x0 = np.append(BOS, rng.permutation(np.arange(N_SPECIAL, 48)))
    x, y = torch.as_tensor(x0[None, :-1]), torch.as_tensor(x0[None, 1:])
    s = tiny_settings(n_embd=64, n_head=1, vocab_size=64, n_layer=1)
    model = random_model(s)
    model.hidden = lambda tokens, mask, positions: 50 * F.one_hot(tokens.roll(-1, 1), 64).float()
    with torch.no_grad():
        model.head.weight.copy_(torch.eye(64))
    w = torch.ones(1, 32)
    w[0, -1] = 0  # its target is not among the inputs
    prefix = torch.tensor([32])
    assert model.loss(x, y, w, prefix)[1] < 1e-6
    assert model.loss(x, x, w, prefix)[1] > 100
    assert model.loss(x, y.roll(-1, 1), w, prefix)[1] > 100


def test_expected_weight_is_flat_and_specials_stay():
    """Every maskable position has expected weight 1/M, by enumeration of k; both ends and every <s> have weight 0 and are
    never masked, k = M included."""
    x0 = np.array([30, 31, BOS, 32, 33, 34, BOS, 35, 36, 37])  # M = 6 of T = 9
    maskable = [1, 3, 4, 5, 7, 8]
    total = np.zeros(9)
    for k in range(1, 7):
        for shift in range(6):  # cyclic orders: each position comes equally often among the first k
            x, w = data.md_example(x0, (k - 0.5) / 6, Fixed(np.roll(np.arange(6), shift)))
            assert (x == MASK).sum() == k == (w > 0).sum()
            assert set(np.flatnonzero(x == MASK)) <= set(maskable)
            assert np.array_equal(np.flatnonzero(x == MASK) - 1, np.flatnonzero(w))
            total += w / 36
    expected = np.zeros(9)
    expected[np.array(maskable) - 1] = 1 / 6
    np.testing.assert_allclose(total, expected, atol=1e-12)


def test_random_masks():
    """10^5 draws: k is uniform on 1..M, positions are uniform, no special token is ever masked."""
    x0 = np.array([BOS, 30, 31, 32, BOS, 33, 34, 35, BOS])
    M, n = 6, 100_000
    rng = np.random.default_rng(0)
    ks, total = np.zeros(M + 1), np.zeros(8)
    for i in range(n):
        x, w = data.md_example(x0, rng.random(), rng)
        ks[(x == MASK).sum()] += 1
        total += w
        assert x[0] == BOS and x[4] == BOS
    assert ks[0] == 0 and (np.abs(ks[1:] / n - 1 / M) < 5 * (1 / M / n) ** 0.5).all()
    sigma = (1 / M / n) ** 0.5  # weight of a position: at most 1, mean 1/M
    weights = (total / n)[[0, 1, 2, 4, 5, 6]]
    assert (np.abs(weights - 1 / M) < 5 * sigma).all() and (total[[3, 7]] == 0).all()


def test_a_window_without_maskable_tokens_has_no_md_loss():
    x, w = data.md_example(np.array([BOS, BOS, BOS, 40]), 0.5, np.random.default_rng(0))
    assert (x == BOS).all() and (w == 0).all()


def test_counts_are_stratified_over_the_step():
    """The k of a step's MD sequences, over all its slots, fill the grid: one in each n-th of [0, 1)."""
    s = tiny_settings(alpha="1/4", max_steps=4)
    stream = synthetic_stream(s)
    shares = []
    for slot in range(4):
        x, y, w, prefix, ar = data.train_slot(stream, s, 1, slot)
        if not ar:
            M = (y[:, :-1] >= N_SPECIAL).sum(1)
            shares += list(((x == MASK).sum(1) - 0.5) / M)
    assert len(shares) == 6
    assert (np.abs(np.sort(shares) - (np.arange(6) + 0.5) / 6) < 1 / 6).all()


def test_counts_are_unbiased():
    """With one MD sequence in a step its k is uniform on 1..M: the grid is jittered anew in every step."""
    s = tiny_settings(alpha="0", batch_size=1, micro_batch_size=1, max_steps=2000, repetitions=2000, decay_steps=0)
    stream, u = synthetic_stream(s), []
    for step in range(2000):
        x, y, *_ = data.train_slot(stream, s, step, 0)
        u.append(((x == MASK).sum() - 0.5) / (y[:, :-1] >= N_SPECIAL).sum())
    assert abs(np.mean(u) - 0.5) < 5 * (1 / 12 / 2000) ** 0.5 and np.std(u) > 0.25


@pytest.mark.parametrize("den", range(1, 257))
def test_alpha_is_exact_over_every_den_slots(den):
    slots = np.arange(3 * den)
    for num in {0, 1, den // 3, den // 2, den - 1, den}:
        alpha = Fraction(num, den)
        ar = data.is_ar(slots, alpha)
        share = np.convolve(ar, np.ones(alpha.denominator), "valid")
        assert (share == alpha.numerator).all()


def test_same_sequences_and_objectives_on_any_number_of_ranks():
    """At a fixed micro-batch the (sequence, objective) pairs of a step do not depend on who computes them; and runs that
    differ in alpha see the same sequences."""
    s, other = tiny_settings(alpha="3/4"), tiny_settings(alpha="1/4")
    seen = []
    for world in (1, 2, 4):
        stream = synthetic_stream(s)
        pairs = []
        for rank in range(world):
            for micro in range(4 // world):
                x, y, w, prefix, ar = data.train_slot(stream, s, 2, micro * world + rank)
                pairs += [(tuple(t), tuple(i), ar) for t, i in zip(y, x)]
        seen.append(sorted(pairs))
    assert seen[0] == seen[1] == seen[2]
    assert sum(ar for _, _, ar in seen[0]) == 6
    stream = synthetic_stream(other)
    targets = sorted(tuple(t) for slot in range(4) for t in data.train_slot(stream, other, 2, slot)[1])
    assert targets == sorted(t for t, _, _ in seen[0])
