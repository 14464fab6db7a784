"""
The paper's left-shift closure, executed: predicting a token at its left neighbor loses nothing.

For a bidirectional transformer f that predicts token i at i, the appendix builds a g that predicts
it at i - 1. It first computes f, then shifts: an attention head whose query i selects the key
i + 1. Here both are transformers of this project, rotary positions and RMSNorm included.
"""

import torch

from conftest import BOS, MASK, random_model, tiny_settings
from model import Transformer, make_mask

N_TOKENS = 16


@torch.no_grad()
def shift_left(f, s):
    """Build g from f, with two more blocks, and with width for a copy of the state and a constant.

    The residual stream of g is [state of f, shifted state, constant, zeros].
    """
    D, K = s.n_embd, s.n_embd // s.n_head
    wide = 2 * D + K
    state, copy, constant = slice(0, D), slice(D, 2 * D), 2 * D
    settings = tiny_settings(
        n_layer=s.n_layer + 2,
        n_embd=wide,
        n_head=2 * s.n_head + 1,
        n_ff=max(s.n_ff, 2 * D),
        norm_eps=s.norm_eps * D / wide,
    )
    gain = (D / wide) ** 0.5  # since RMSNorm divides by the root of the width
    g = Transformer(settings, torch.float64).double()
    for p in g.parameters():
        p.zero_()
    identity = torch.eye(D, dtype=torch.float64)

    # Mirror f on the first D coordinates; the others are still 0, and no norm notices them.
    g.embed.weight[:, state] = f.embed.weight
    for old, new in zip(f.blocks, g.blocks):
        new.attention_norm.weight[state] = old.attention_norm.weight * gain
        new.ff_norm.weight[state] = old.ff_norm.weight * gain
        for name in ("q", "k", "v", "o"):
            getattr(new, name).weight[state, state] = getattr(old, name).weight
        new.gate.weight[: s.n_ff, state] = old.gate.weight
        new.up.weight[: s.n_ff, state] = old.up.weight
        new.down.weight[state, : s.n_ff] = old.down.weight

    # A constant that does not depend on the input: silu(z) z + silu(-z) (-z) = z^2, and the
    # squares of a normalized state sum to D. From now on it outweighs the state in every norm.
    large = 1e5
    block = g.blocks[-2]
    block.ff_norm.weight[state] = gain
    for layer in (block.gate, block.up):
        layer.weight[:D, state] = identity
        layer.weight[D : 2 * D, state] = -identity
    block.down.weight[constant, : 2 * D] = large / D

    # The shift. Rotated, this query and this key have the product sum_f cos(w_f (j - i - 1)), a
    # multiple of which selects the key at j = i + 1. The values are the states.
    block = g.blocks[-1]
    block.attention_norm.weight.fill_(1.0)
    frequency = s.rope_theta ** -(torch.arange(0, K, 2) / K)
    query = torch.cat((frequency.cos(), frequency.sin()))
    key = torch.cat((torch.ones(K // 2), torch.zeros(K // 2)))
    for head in range(s.n_head):
        rows = slice(head * K, (head + 1) * K)
        block.q.weight[rows, constant] = query.double() * 100
        block.k.weight[rows, constant] = key.double()
    block.v.weight[state, state] = identity
    # The shifted state, in turn, must outweigh the constant in the last norm.
    block.o.weight[copy, state] = identity * large**3

    g.norm.weight[copy] = f.norm.weight * gain
    g.head.weight[:, copy] = f.head.weight
    return g


@torch.no_grad()
def probabilities(model, tokens):
    positions = torch.arange(N_TOKENS).expand(tokens.shape)
    everything = torch.full((len(tokens),), N_TOKENS)
    mask = make_mask(torch.ones_like(tokens), positions, everything)
    return model.head(model.hidden(tokens, mask, positions)).softmax(-1)


def test_left_shift_closure():
    """g(x) at i equals f(x) at i + 1, for random weights and random masked inputs.

    This confirms the construction to five digits in fp64: attention selects one key, and one part
    of a state outweighs another, only in the limit, which large weights approach. It does not show
    that training finds such weights, nor that g must be wider and deeper than f.
    """
    s = tiny_settings(n_layer=3)
    f = random_model(s).double()
    f.dtype = torch.float64
    for p in f.parameters():
        if p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)  # norms whose gains are not all 1
    g = shift_left(f, s)

    torch.manual_seed(0)
    tokens = torch.randint(16, s.vocab_size, (64, N_TOKENS))
    tokens[torch.rand(tokens.shape) < 0.4] = MASK
    tokens[:, 0] = BOS
    expected, found = probabilities(f, tokens), probabilities(g, tokens)
    torch.testing.assert_close(found[:, :-1], expected[:, 1:], rtol=1e-5, atol=1e-9)
    assert (expected[:, :-1] - expected[:, 1:]).abs().max() > 0.1  # without the shift it fails
