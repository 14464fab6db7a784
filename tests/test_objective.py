"""The objective itself, through data.py and model.py, against brute force."""

import collections
import itertools
import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data
from conftest import (
    BOS,
    MASK,
    N_SPECIAL,
    SPECIAL,
    make_corpus,
    random_model,
    random_stream,
    tiny_settings,
)

ar_example = partial(data.ar_example, u=None, generator=None, special=SPECIAL)
DOCUMENT = np.array([BOS, 20, 33, 21, 47, BOS])  # four tokens, and the <s> that closes the window


class Fixed:
    """Stands in for a random generator: returns the permutation it is given."""

    def __init__(self, order):
        self.order = order

    def permutation(self, values):
        return np.asarray(values)[list(self.order)]


def log_probabilities(model, tokens, causal=False):
    """Return (T, V) for one short document, without make_mask and loss."""
    tokens = torch.as_tensor(tokens)[None]
    T = tokens.shape[1]
    mask = torch.ones(1, 1, T, T, dtype=torch.bool)
    if causal:
        mask = mask.tril()
    h = model.hidden(tokens, mask, torch.arange(T)[None])
    return F.log_softmax(h @ model.head.weight.T, -1)[0]


def test_md_loss_is_the_any_order_likelihood():
    """All masks of four tokens, weighted as in training: the NLL averaged over all 24 orders."""
    model = random_model(tiny_settings())
    examples = []
    for order in itertools.permutations(range(4)):
        for k in (1, 2, 3, 4):
            examples.append(data.md_example(DOCUMENT, (k - 0.5) / 4, Fixed(order), SPECIAL))
    assert len({tuple(example.inputs) for example in examples}) == 15
    batch = data.make_batch([DOCUMENT] * len(examples), examples, "md", SPECIAL)
    loss = model.loss(batch)[1].item() / len(examples)

    total = 0
    for order in itertools.permutations(range(1, 5)):
        x = DOCUMENT[:-1].copy()
        x[1:] = MASK
        for p in order:
            total -= log_probabilities(model, x)[p - 1, DOCUMENT[p]].item()
            x[p] = DOCUMENT[p]
    assert loss == pytest.approx(total / 24 / 4, rel=1e-5)


def test_ar_loss_is_the_chain_rule():
    """Each target, the closing <s> too, from a pass that has seen only what comes before it."""
    model = random_model(tiny_settings())
    batch = data.make_batch([DOCUMENT], [ar_example(DOCUMENT)], "ar", SPECIAL)
    nll = []
    for i in range(1, 6):
        nll.append(-log_probabilities(model, DOCUMENT[:i], causal=True)[-1, DOCUMENT[i]].item())
    assert model.loss(batch)[1].item() == pytest.approx(np.mean(nll), rel=1e-5)


@pytest.mark.parametrize("alpha", ["0", "1/4", "1/2", "63/64", "1"])
def test_zero_head_gives_ln_v_for_every_alpha(alpha):
    """Uniform predictions: both losses are ln V. A wrong weight or normalization shows here."""
    s = tiny_settings(alpha=alpha)
    model = random_model(s)
    torch.nn.init.zeros_(model.head.weight)
    stream = random_stream(s)
    for slot in range(4):
        batch = data.train_batch(stream, s, 0, slot)
        ce = model.loss(batch)[1].item() / len(batch.inputs)
        assert ce == pytest.approx(math.log(300), rel=1e-6)


def test_weights_of_a_training_sequence_sum_to_1():
    s = tiny_settings(alpha="1/2")
    stream = random_stream(s)
    for slot in range(4):
        batch = data.train_batch(stream, s, 0, slot)
        torch.testing.assert_close(batch.weights.sum(1), torch.ones(2))


def test_a_copier_has_zero_loss_only_with_the_right_shift():
    """A model that outputs its next input token: hopeless if the shift is missing or done twice."""
    rng = np.random.default_rng(0)
    x0 = np.append(BOS, rng.permutation(np.arange(N_SPECIAL, 48)))
    weights = np.ones(32)
    weights[-1] = 0  # its target is not among the inputs
    batch = data.make_batch([x0], [data.Example(x0[:-1], weights, 32)], "md", SPECIAL)
    model = random_model(tiny_settings(n_embd=64, n_head=1, vocab_size=64, n_layer=1))

    def copy_next(tokens, mask, positions):
        return 50 * F.one_hot(tokens.roll(-1, 1), 64).float()

    model.hidden = copy_next
    with torch.no_grad():
        model.head.weight.copy_(torch.eye(64))
    assert model.loss(batch)[1] < 1e-6
    assert model.loss(batch._replace(targets=batch.inputs))[1] > 100
    assert model.loss(batch._replace(targets=batch.targets.roll(-1, 1)))[1] > 100


def test_expected_weight_is_flat_and_special_tokens_stay():
    """By enumeration of k: every maskable position has 1/M; both ends and every <s> have 0."""
    x0 = np.array([30, 31, BOS, 32, 33, 34, BOS, 35, 36, 37])  # M = 6 of T = 9
    maskable = [1, 3, 4, 5, 7, 8]
    total = np.zeros(9)
    for k in range(1, 7):
        for shift in range(6):  # cyclic orders: each place comes equally often among the first k
            order = np.roll(np.arange(6), shift)
            x, weights, _ = data.md_example(x0, (k - 0.5) / 6, Fixed(order), SPECIAL)
            masked = np.flatnonzero(x == MASK)
            assert len(masked) == k
            assert set(masked) <= set(maskable)
            assert np.array_equal(masked - 1, np.flatnonzero(weights))
            total += weights / 36
    expected = np.zeros(9)
    expected[np.array(maskable) - 1] = 1 / 6
    np.testing.assert_allclose(total, expected, atol=1e-12)


def test_random_masks_are_uniform_and_spare_special_tokens():
    """10^5 draws: k is uniform on 1..M, places are uniform, no special token is ever masked."""
    x0 = np.array([BOS, 30, 31, 32, BOS, 33, 34, 35, BOS])
    M, n = 6, 100_000
    rng = np.random.default_rng(0)
    counts, total = np.zeros(M + 1), np.zeros(8)
    for _ in range(n):
        x, weights, _ = data.md_example(x0, rng.random(), rng, SPECIAL)
        assert x[0] == BOS and x[4] == BOS
        counts[(x == MASK).sum()] += 1
        total += weights
    sigma = (1 / M / n) ** 0.5  # weight of a place: at most 1, mean 1/M
    assert counts[0] == 0
    assert (np.abs(counts[1:] / n - 1 / M) < 5 * sigma).all()
    assert (np.abs((total / n)[[0, 1, 2, 4, 5, 6]] - 1 / M) < 5 * sigma).all()
    assert (total[[3, 7]] == 0).all()


def test_a_window_without_maskable_tokens_has_no_md_loss():
    x0 = np.array([BOS, BOS, BOS, 40])
    x, weights, _ = data.md_example(x0, 0.5, np.random.default_rng(0), SPECIAL)
    assert (x == BOS).all() and (weights == 0).all()


def shares_masked(batch):
    """Return, for each sequence, approximately the u that it was given."""
    maskable = (batch.targets[:, :-1] >= N_SPECIAL).sum(1)
    return ((batch.inputs == MASK).sum(1) - 0.5) / maskable


def test_mask_counts_are_stratified_over_the_step():
    """The mask counts of a step's MD sequences, over all its slots, fill a regular grid."""
    s = tiny_settings(alpha="1/4", max_steps=4)
    stream = random_stream(s)
    shares = []
    for slot in range(4):
        batch = data.train_batch(stream, s, 1, slot)
        if batch.objective == "md":
            shares += shares_masked(batch).tolist()
    assert len(shares) == 6
    assert (np.abs(np.sort(shares) - (np.arange(6) + 0.5) / 6) < 1 / 6).all()


def test_mask_counts_are_unbiased():
    """With one MD sequence a step, its count is uniform: the grid is jittered anew each step."""
    s = tiny_settings(
        alpha="0",
        batch_size=1,
        micro_batch_size=1,
        max_steps=2000,
        repetitions=2000,
    )
    stream = random_stream(s)
    shares = [shares_masked(data.train_batch(stream, s, step, 0)).item() for step in range(2000)]
    assert abs(np.mean(shares) - 0.5) < 5 * (1 / 12 / 2000) ** 0.5
    assert np.std(shares) > 0.25


@pytest.mark.parametrize("den", range(1, 257))
def test_alpha_is_exact_over_every_den_slots(den):
    slots = np.arange(3 * den)
    for num in {0, 1, den // 3, den // 2, den - 1, den}:
        alpha = Fraction(num, den)
        ar = data.slot_objective(slots, alpha) == "ar"
        n_ar = np.convolve(ar, np.ones(alpha.denominator), "valid")
        assert (n_ar == alpha.numerator).all()


def test_ar_sees_a_token_alpha_R_times_on_average():
    """And with the standard deviation that train.py prints, sqrt(R alpha (1 - alpha))."""
    s = tiny_settings(alpha="1/4", repetitions=64, max_steps=64 * 8, vocab_size=65535)
    documents = np.split(np.arange(N_SPECIAL, N_SPECIAL + 4000), 100)
    corpus = make_corpus([np.append(BOS, text) for text in documents])
    stream = data.Stream(corpus, s)
    seen = collections.Counter()
    for step in range(s.max_steps):
        for slot in range(4):
            batch = data.train_batch(stream, s, step, slot)
            if batch.objective == "ar":
                seen.update(batch.inputs.flatten().tolist())
    del seen[BOS]
    counts = list(seen.values())
    assert np.mean(counts) == pytest.approx(16, rel=0.01)
    assert np.std(counts) == pytest.approx((64 * 1 / 4 * 3 / 4) ** 0.5, rel=0.2)


def test_same_sequences_and_objectives_on_any_number_of_ranks():
    """At a fixed micro-batch size, who computes what does not matter; alpha changes no sequence."""
    s, other = tiny_settings(alpha="3/4"), tiny_settings(alpha="1/4")
    seen = []
    for world in (1, 2, 4):
        stream = random_stream(s)
        pairs = []
        for rank in range(world):
            for micro in range(4 // world):
                batch = data.train_batch(stream, s, 2, micro * world + rank)
                for targets, inputs in zip(batch.targets.tolist(), batch.inputs.tolist()):
                    pairs.append((targets, inputs, batch.objective))
        seen.append(sorted(pairs))
    assert seen[0] == seen[1] == seen[2]
    assert sum(objective == "ar" for _, _, objective in seen[0]) == 6

    stream = random_stream(other)
    targets = []
    for slot in range(4):
        targets += data.train_batch(stream, other, 2, slot).targets.tolist()
    assert sorted(targets) == [target for target, _, _ in seen[0]]
