"""The model against perturbation, the unchunked loss, FlexAttention, and transformers' Llama."""

import pytest
import torch
import torch.nn.functional as F

import model as model_file
from configurator import Settings
from conftest import BOS, random_model, tiny_settings
from data import Batch
from model import HeadLoss, Transformer, make_mask

T = 16
TOKENS = torch.tensor(
    [[30, 31, 32, BOS, 40, 41, 42, 43, 44, BOS, 50, 51, 52, 53, 54, 55]]
)  # three documents
SEGMENTS = 1 + (TOKENS == BOS).cumsum(1)
POSITIONS = torch.arange(T)[None]
SHARED = torch.tensor([[0] * 6 + [1] * 4 + [2] * 6])  # a context and two choices


def make_batch(tokens, targets, prefix, objective="ar"):
    """Return a batch of whole windows, every target with the same weight."""
    weights = torch.full(tokens.shape, 1 / T)
    segments = 1 + (tokens == BOS).cumsum(1)
    return Batch(tokens, targets, weights, segments, torch.tensor([prefix]), objective)


def reach(prefix, segments=SEGMENTS, positions=POSITIONS):
    """(T, T) bool: does changing input j change hidden state i?"""
    model = random_model(tiny_settings(n_layer=3, n_head=2))
    mask = make_mask(segments, positions, torch.tensor([prefix]))
    before = model.hidden(TOKENS, mask, positions)
    seen = torch.zeros(T, T, dtype=torch.bool)
    for j in range(T):
        tokens = TOKENS.clone()
        tokens[0, j] = 99
        seen[:, j] = (model.hidden(tokens, mask, positions) != before).any(-1)[0]
    return seen


def test_causal_mode_cannot_see_the_future_nor_another_document():
    same = SEGMENTS[0][:, None] == SEGMENTS[0]
    assert torch.equal(reach(0), same.tril())


def test_bidirectional_mode_sees_its_whole_document_and_no_other():
    assert torch.equal(reach(T), SEGMENTS[0][:, None] == SEGMENTS[0])


def test_prefix_mode_is_bidirectional_in_the_prefix_and_causal_after_it():
    one = torch.ones_like(SEGMENTS)
    expected = torch.ones(T, T, dtype=torch.bool).tril()
    expected[:5, :5] = True
    assert torch.equal(reach(5, one), expected)


def test_choices_share_a_context_and_are_blind_to_each_other():
    """Segment 0 is the context; segments 1 and 2 both continue it, from the same position."""
    positions = torch.tensor([[*range(6), *range(6, 10), *range(6, 12)]])
    expected = torch.zeros(T, T, dtype=torch.bool)
    expected[:6, :6] = expected[:6, :6].logical_not().tril()
    expected[6:, :6] = True
    expected[6:10, 6:10] = torch.ones(4, 4).tril() > 0
    expected[10:, 10:] = torch.ones(6, 6).tril() > 0
    assert torch.equal(reach(0, SHARED, positions), expected)
    # and a packed choice has the same states as alone
    model = random_model(tiny_settings())
    packed = model.hidden(TOKENS, make_mask(SHARED, positions, torch.tensor([0])), positions)[
        0, 10:
    ]
    alone = torch.cat((TOKENS[:, :6], TOKENS[:, 10:]), 1)
    t = torch.arange(12)[None]
    alone = model.hidden(alone, make_mask(torch.ones_like(t), t, torch.tensor([0])), t)[0, 6:]
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("prefix", [0, 5, T])
@pytest.mark.parametrize("segments", [SEGMENTS, SHARED, torch.ones_like(SEGMENTS)])
def test_flex_attention_agrees_with_the_dense_mask(monkeypatch, prefix, segments):
    """The sparse mask, with FlexAttention run on the CPU, gives what the dense mask gives."""
    model = random_model(tiny_settings())
    prefix = torch.tensor([prefix])
    dense = make_mask(segments, POSITIONS, prefix)
    expected = model.hidden(TOKENS, dense, POSITIONS)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda function: function)  # needs no C++ compiler
        sparse = make_mask(segments, POSITIONS, prefix, sparse=True)
    assert isinstance(sparse, model_file.BlockMask)
    found = model.hidden(TOKENS, sparse, POSITIONS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("z", [0.0, 1e-2])
def test_loss_by_sequences_equals_the_plain_one(z):
    """Loss, cross-entropy and gradients, with some weights of 0, against autograd's."""
    torch.manual_seed(0)
    h = torch.randn(3, 23, 32, requires_grad=True)
    head = torch.randn(300, 32, requires_grad=True)
    targets = torch.randint(300, (3, 23))
    weights = torch.rand(3, 23)
    weights[0, 3] = 0
    logits = h @ head.T
    ce = F.cross_entropy(logits.mT, targets, reduction="none")
    expected = (weights * (ce + z * logits.logsumexp(-1) ** 2)).sum()
    gradients = torch.autograd.grad(3 * expected, (h, head))

    loss, plain = HeadLoss.apply(h, head, targets, weights, z)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(plain, (weights * ce).sum())
    for ours, theirs in zip(torch.autograd.grad(3 * loss, (h, head)), gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(HeadLoss.apply(h, head, targets, weights, z)[0], expected)


def test_validation_saves_nothing_for_a_backward_pass(monkeypatch):
    """Under no_grad the head's parameter still asks for a gradient; none is kept."""
    saved = []
    context = torch.autograd.function.FunctionCtx
    monkeypatch.setattr(context, "save_for_backward", lambda ctx, *tensors: saved.append(tensors))
    model = random_model(tiny_settings())
    batch = make_batch(TOKENS, TOKENS, 0)
    with torch.no_grad():
        model.loss(batch)
    assert not saved
    model.loss(batch)
    assert saved


def test_a_cache_changes_nothing():
    """Tokens one by one, with keys and values kept, have the same states as all at once."""
    model = random_model(tiny_settings())
    mask = make_mask(torch.ones_like(TOKENS), POSITIONS, torch.tensor([5]))
    expected = model.hidden(TOKENS, mask, POSITIONS)
    caches = model.new_caches(1, T)
    states = []
    for new in (slice(0, 7), *(slice(i, i + 1) for i in range(7, T))):
        rows = mask[:, :, new, : new.stop]
        states.append(model.hidden(TOKENS[:, new], rows, POSITIONS[:, new], caches))
    torch.testing.assert_close(torch.cat(states, 1), expected, rtol=1e-5, atol=1e-5)


def test_the_papers_model_has_its_size():
    with torch.device("meta"):
        model = Transformer(Settings())
    assert sum(p.numel() for p in model.parameters()) == 467_600_384
    assert sum(p.numel() for p in model.blocks.parameters()) + 1024 == 362_742_784


def test_initialization_follows_the_papers_rule():
    """Normal, cut at two sigma (which leaves a deviation of 0.88 sigma); output matrices are 0."""
    s = tiny_settings(n_embd=256, n_ff=512, vocab_size=2000, n_layer=3)
    torch.manual_seed(0)
    model = Transformer(s)
    inner = (2 / (5 * 256)) ** 0.5
    expected = {
        "q": inner,
        "k": inner,
        "v": inner,
        "embed": (2 / 2256) ** 0.5,
        "head": (2 / 2256) ** 0.5,
    }
    for name, p in model.named_parameters():
        kind = name.split(".")[-2]
        if kind in ("o", "down"):
            assert not p.any()
        elif p.ndim == 1:
            assert (p == 1).all()
        else:
            std = expected.get(kind) or inner * (1 / (2 * (int(name.split(".")[1]) + 1))) ** 0.5
            assert (
                p.std().item() == pytest.approx(0.8796 * std, rel=0.02) and p.abs().max() <= 2 * std
            ), name


def test_logits_equal_transformers_llama():
    """It is literally a plain Llama: LlamaForCausalLM with these weights agrees."""
    from transformers import LlamaConfig, LlamaForCausalLM

    s = tiny_settings(n_layer=3, n_head=4, n_embd=64, n_ff=100, rope_theta=160000.0)
    ours = random_model(s)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=s.vocab_size,
            hidden_size=s.n_embd,
            intermediate_size=s.n_ff,
            num_hidden_layers=s.n_layer,
            num_attention_heads=s.n_head,
            rms_norm_eps=s.norm_eps,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": s.rope_theta},
        )
    ).eval()
    names = {
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "attention_norm": "input_layernorm",
        "ff_norm": "post_attention_layernorm",
        **{k: f"self_attn.{k}_proj" for k in "qkvo"},
        **{k: f"mlp.{k}_proj" for k in ("gate", "up", "down")},
    }
    state = {}
    for name, p in ours.named_parameters():
        *path, kind, _ = name.split(".")
        layer = f"model.layers.{path[1]}." if path else ""
        state[f"{layer}{names[kind]}.weight"] = p.detach()
    llama.load_state_dict(state)
    tokens = torch.randint(16, 300, (2, 32))
    positions = torch.arange(32).expand(2, 32)
    mask = make_mask(torch.ones_like(tokens), positions, torch.zeros(2, dtype=torch.long))
    with torch.no_grad():
        torch.testing.assert_close(
            ours.head(ours.hidden(tokens, mask, positions)),
            llama(tokens).logits,
            rtol=1e-4,
            atol=1e-4,
        )


def test_bf16_arithmetic_of_cuda_stays_close_to_fp32():
    """What CUDA computes, rounding included, on the CPU: bf16 activations, fp32 parameters."""
    exact, rounded = random_model(tiny_settings()), random_model(tiny_settings())
    rounded.dtype = torch.bfloat16
    batch = make_batch(TOKENS, TOKENS.roll(-1, 1), 0)
    for model in (exact, rounded):
        model.loss(batch, 1e-4)[0].backward()
    for (name, p), q in zip(exact.named_parameters(), rounded.parameters()):
        assert q.grad.dtype == torch.float32
        assert (p.grad - q.grad).norm() < 0.05 * p.grad.norm(), name
    mask = make_mask(SEGMENTS, POSITIONS, torch.tensor([0]))
    assert rounded.hidden(TOKENS, mask, POSITIONS).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.bfloat16, 0.01)])
def test_zeros_that_fill_up_the_swiglu_change_nothing(dtype, tolerance):
    """Gradients where a cast pads n_ff = 48 to 64, against those without the zeros."""
    filled, plain = random_model(tiny_settings()), random_model(tiny_settings())
    for block in plain.blocks:
        for layer in (block.gate, block.up, block.down):
            layer.padding = (0, 0, 0, 0)
    for model in (filled, plain):
        model.dtype = dtype
        model.loss(make_batch(TOKENS, TOKENS.roll(-1, 1), 0))[0].backward()
    assert filled.blocks[0].gate.cast(dtype).shape == (64, 32)
    assert filled.blocks[0].down.cast(dtype).shape == (32, 64)
    for (name, p), q in zip(filled.named_parameters(), plain.parameters()):
        assert (p.grad - q.grad).norm() <= tolerance * q.grad.norm(), name


@torch.no_grad()
def test_matrices_cast_once_give_what_matrices_cast_at_every_use_give():
    models = random_model(tiny_settings()), random_model(tiny_settings())
    models[1].dtype = models[0].dtype = torch.bfloat16
    models[1].freeze("cpu")
    assert models[1].blocks[0].gate.weight.shape == (64, 32)
    mask = make_mask(SEGMENTS, POSITIONS, torch.tensor([0]))
    found, expected = (model.head(model.hidden(TOKENS, mask, POSITIONS)) for model in models)
    assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"extra_head": True}], ids=["ours", "released"])
def test_packed_matrices_give_the_same_states_and_predictions(settings):
    s = tiny_settings(n_embd=512, n_layer=1, **settings)
    model = random_model(s)
    mask = make_mask(SEGMENTS, POSITIONS, torch.tensor([0]))
    expected = model.head(model.hidden(TOKENS, mask, POSITIONS))
    model.freeze("cpu")
    assert model.head.packed is not None
    found = model.head(model.hidden(TOKENS, mask, POSITIONS))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_one_graph_serves_all_blocks_and_both_objectives():
    """Compiled block by block, there is one graph without breaks, and no recompilation later."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    model = random_model(tiny_settings(n_layer=3))
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(dynamic=False, fullgraph=True, backend=counter)
    for prefix in (0, T, 0, T, T, 0):
        tokens = torch.randint(1, 300, (1, T))
        model.loss(make_batch(tokens, tokens, prefix), 1e-4)[0].backward()
    assert counter.frame_count == 1
