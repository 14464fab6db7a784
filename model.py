"""
The model: one Llama transformer, used causally, bidirectionally, or with a bidirectional prefix.
The attention mask is an argument, so one set of weights serves every mode with nothing to switch.

Shapes: B sequences, T positions, D width, H heads, K head width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


@torch.no_grad()  # compiled code depends on the grad mode: now validation shares training's
def make_mask(segments, positions, prefix, sparse=False):
    """Return who sees whom: the one rule of attention, in every mode.

    A query sees a key of its own segment (a document of a window), or of segment 0 (a context that
    all segments share), if the key is not in the future, or is among the first `prefix` positions.
    A prefix of 0 is causal (AR), T is bidirectional (MD), any other is a prefix language model.

    segments, positions: (B, T); prefix: (B,). The mask is a boolean (B, 1, T, T), or, if sparse, a
    BlockMask for FlexAttention, which lets a GPU skip the blocks that nothing sees.
    """

    def sees(b, h, query, key):  # as FlexAttention calls it; all heads h see the same
        together = (segments[b, key] == segments[b, query]) | (segments[b, key] == 0)
        in_the_past = positions[b, key] <= positions[b, query]
        in_prefix = positions[b, key] < prefix[b]
        return together & (in_the_past | in_prefix)

    B, T = segments.shape
    if sparse:
        # torch keeps what it compiled: only the first call is slow.
        return torch.compile(create_block_mask)(sees, B, None, T, T, device=segments.device)
    b = torch.arange(B, device=segments.device)[:, None, None, None]
    t = torch.arange(T, device=segments.device)
    return sees(b, None, t[:, None], t)


# ---- the transformer -----------------------------------------------------------------------------
class Linear(nn.Module):
    """A matrix in fp32, applied in the type of its input.

    In any type but fp32 it may be padded with rows and columns of zeros: see Block.
    """

    def __init__(self, d_in, d_out, zero_rows=0, zero_columns=0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d_out, d_in))
        self.padding = (0, zero_columns, 0, zero_rows)
        self.packed = None  # the matrix in oneDNN's layout: see freeze

    def cast(self, dtype):
        """Return the matrix cast to a type and padded, or itself if it has that type already."""
        if self.weight.dtype == dtype:  # fp32, or cast and padded already: see freeze
            return self.weight
        weight = self.weight.to(dtype)
        return F.pad(weight, self.padding) if any(self.padding) else weight

    def forward(self, x):
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return F.linear(x, self.cast(x.dtype))


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, with its weight cast to the type of the input, as in Linear."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rotary(positions, head_width, theta, dtype):
    """Return cosine and sine, (B, T, 1, K), of the angles by which each position turns a head."""
    exponent = torch.arange(0, head_width, 2, device=positions.device) / head_width
    frequency = theta**-exponent
    angle = positions[:, :, None, None] * torch.cat((frequency, frequency))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x, cos, sin):
    """Turn the coordinate pairs (i, i + K/2) of every head."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class KVCache:
    """The keys and values that a block has computed so far, so that new tokens can see them."""

    def __init__(self, shape, dtype, device):
        """shape: (B, H, S, K), where S is the largest number of tokens it can hold."""
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def extend(self, keys, values):
        """Add the keys and values of the newest tokens, and return those of all tokens so far."""
        start, self.length = self.length, self.length + keys.shape[2]
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.n_head = s.n_head
        self.attention_norm = RMSNorm(s.n_embd, s.norm_eps)
        self.q = Linear(s.n_embd, s.n_embd)
        self.k = Linear(s.n_embd, s.n_embd)
        self.v = Linear(s.n_embd, s.n_embd)
        self.o = Linear(s.n_embd, s.n_embd)
        self.ff_norm = RMSNorm(s.n_embd, s.norm_eps)
        # Tensor cores want rows that are multiples of 128 bytes, so in bf16 n_ff is padded to a
        # multiple of 64. The padding stays 0 throughout, silu(0) * 0, and changes nothing.
        padding = -s.n_ff % 64
        self.gate = Linear(s.n_embd, s.n_ff, zero_rows=padding)
        self.up = Linear(s.n_embd, s.n_ff, zero_rows=padding)
        self.down = Linear(s.n_ff, s.n_embd, zero_columns=padding)

    def split_heads(self, x):
        B, T, D = x.shape
        return x.view(B, T, self.n_head, D // self.n_head)  # (B, T, H, K)

    def forward(self, x, cos, sin, mask, cache=None):
        h = self.attention_norm(x)
        q = rotate(self.split_heads(self.q(h)), cos, sin)
        k = rotate(self.split_heads(self.k(h)), cos, sin)
        v = self.split_heads(self.v(h))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H, T, K)
        if cache is not None:
            k, v = cache.extend(k, v)
        if isinstance(mask, BlockMask):
            y = flex_attention(q, k, v, block_mask=mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))

        h = self.ff_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ReleasedHead(Linear):
    """The head of the paper's released models: one more layer, and a bias. Not for training."""

    def __init__(self, d_in, d_out):
        super().__init__(d_in, d_out)
        self.projection = Linear(d_in, d_in)
        self.bias = nn.Parameter(torch.zeros(d_out))

    def forward(self, x):
        h = F.gelu(self.projection(x), approximate="tanh")
        return super().forward(h) + self.bias.to(x.dtype)


class Transformer(nn.Module):
    def __init__(self, s, dtype=torch.float32):
        """s: settings; dtype: the type of the forward pass. The parameters are fp32."""
        super().__init__()
        self.dtype = dtype
        self.head_width = s.n_embd // s.n_head
        self.rope_theta = s.rope_theta
        self.sparse = False  # FlexAttention in loss(); train.py sets it where it compiles
        self.embed = nn.Embedding(s.vocab_size, s.n_embd)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.n_layer))
        self.norm = RMSNorm(s.n_embd, s.norm_eps)
        Head = ReleasedHead if s.extra_head else Linear
        self.head = Head(s.n_embd, s.vocab_size)
        self.initialize()

    def initialize(self):
        """Draw the weights as the released code does: normal, truncated at two sigma.

        The matrices that write to the residual stream (o, down) stay 0, so that every block starts
        as the identity. The deeper a block, the smaller its SwiGLU weights.
        """
        V, D = self.embed.weight.shape
        inner_std = (2 / (5 * D)) ** 0.5
        outer_std = (2 / (D + V)) ** 0.5

        def draw(layer, std):
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)

        for i, block in enumerate(self.blocks):
            for layer in (block.q, block.k, block.v):
                draw(layer, inner_std)
            for layer in (block.gate, block.up):
                draw(layer, inner_std * (1 / (2 * (i + 1))) ** 0.5)
        draw(self.embed, outer_std)
        draw(self.head, outer_std)

    def hidden(self, tokens, mask, positions, caches=None):
        """Return the last hidden states (B, T, D). State i predicts token i + 1 in every mode.

        This is the paper's masked next-token prediction: a token is predicted from its left
        neighbor, whether it is masked or still to come.

        tokens: (B, T); mask: from make_mask; positions: (B or 1, T). With caches (new_caches),
        only the T newest tokens are given, and the last T rows of the mask.
        """
        cos, sin = rotary(positions, self.head_width, self.rope_theta, self.dtype)
        x = self.embed(tokens).to(self.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, mask, caches[i] if caches else None)
        return self.norm(x)

    def freeze(self, device):
        """Make the model faster to use, on this device, and impossible to train.

        Every matrix is cast once instead of at every use. On a CPU, wide ones are packed for
        oneDNN: 1.3 to 2.5 times as fast on two cores from width 512 up, but slower below.
        """
        is_wide = self.embed.embedding_dim >= 512
        pack = device == "cpu" and is_wide and torch.backends.mkldnn.is_available()
        for layer in self.modules():
            if isinstance(layer, Linear):
                layer.weight = nn.Parameter(layer.cast(self.dtype), requires_grad=False)
                if pack:
                    # 512: the number of tokens to optimize for; also the best for fewer
                    layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight, 512)
        self.to(device, self.dtype)

    def new_caches(self, n_sequences, n_tokens):
        """Return empty caches, one for each block, for up to n_tokens tokens."""
        shape = (n_sequences, self.blocks[0].n_head, n_tokens, self.head_width)
        return [KVCache(shape, self.dtype, self.embed.weight.device) for _ in self.blocks]

    def loss(self, batch, z_loss=0.0):
        """Return the loss of a batch, and its cross-entropy alone, for either objective.

        Both are sums over the targets, weighted by batch.weights: of CE + z_loss * logsumexp^2,
        and of CE alone.
        """
        B, T = batch.inputs.shape
        positions = torch.arange(T, device=batch.inputs.device).expand(B, T)
        mask = make_mask(batch.segments, positions, batch.prefix, self.sparse)
        h = self.hidden(batch.inputs, mask, positions[:1])  # one row of angles serves all
        return HeadLoss.apply(h, self.head.weight, batch.targets, batch.weights, z_loss)


# ---- the loss ------------------------------------------------------------------------------------
class HeadLoss(torch.autograd.Function):
    """The head and its loss: the sum over all positions of w (CE + z lse^2), lse = logsumexp.

    The logits of all sequences would not fit in memory. Only one sequence's logits exist at a time,
    and their gradient is computed right away, in the forward pass; backward only scales it.
    """

    @staticmethod
    def sequence_loss(logits, targets, weights, z):
        """Return a sequence's loss, its cross-entropy, and the gradient of the loss.

        logits and gradient (T, V), targets and weights (T, 1). It works in place, because memory
        traffic matters on a CPU; on a GPU, train.py compiles it.
        """
        dtype = logits.dtype
        logits = logits.float()
        target = logits.gather(-1, targets)
        top = logits.amax(-1, keepdim=True)
        e = logits.sub_(top).exp_()
        total = e.sum(-1, keepdim=True)
        lse = top + total.log()  # logsumexp
        ce = weights * (lse - target)
        loss = ce + weights * z * lse**2
        # d loss / d logits = w ((1 + 2 z lse) softmax - onehot(target))
        slope = weights * (1 + 2 * z * lse)
        gradient = e.mul_(slope / total).to(dtype)
        at_target = slope * (target - lse).exp() - weights
        gradient.scatter_(-1, targets, at_target.to(dtype))  # replaces: p - 1 in fp32, then cast
        return loss.sum(), ce.sum(), gradient

    @staticmethod
    def forward(ctx, h, head, targets, weights, z):
        """h (B, T, D), head (V, D), targets and weights (B, T) -> the loss, and the sum of w CE."""
        W = head.to(h.dtype)
        loss, ce = torch.zeros(2, device=h.device)
        training = ctx.needs_input_grad[0]  # not [1]: always true for a parameter
        if training:
            dh = torch.empty_like(h)
            dW = torch.zeros_like(head)
        for i, x in enumerate(h):
            logits = x @ W.T
            loss_i, ce_i, gradient = HeadLoss.sequence_loss(
                logits, targets[i, :, None], weights[i, :, None], z
            )
            loss += loss_i
            ce += ce_i
            if training:
                dh[i] = gradient @ W
                dW += gradient.T @ x
        if training:
            ctx.save_for_backward(dh, dW)
        ctx.mark_non_differentiable(ce)
        return loss, ce

    @staticmethod
    def backward(ctx, grad, _):
        dh, dW = ctx.saved_tensors
        return dh.mul_(grad), dW.mul_(grad), None, None, None  # in place: this is called once
