"""
The model: one Llama transformer, used causally, bidirectionally, or with a bidirectional prefix. The attention mask
is an argument, so one set of weights serves every mode and nothing is switched or mutated.
Shapes: B sequences, T positions, D width, H heads, K head width, V vocabulary.
"""
import glob, os, zipfile

import tokenizers
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from configurator import Settings, check, die
from data import BOS, MASK

def make_mask(segments, positions, prefix):
    """Who sees whom: the one rule behind every mode. A query sees a key of its own segment (a document of a window) or
    of segment 0 (a context that all segments share), if the key is not in the future or among the first `prefix`
    positions: prefix 0 is causal (AR), T is bidirectional (MD), anything between is a prefix language model.
    segments, positions: (B, T); prefix: (B,). On CUDA a sparse block mask for FlexAttention, elsewhere (B, 1, T, T)."""
    def rule(b, h, q, k):
        together = (segments[b, k] == segments[b, q]) | (segments[b, k] == 0)
        return together & ((positions[b, k] <= positions[b, q]) | (positions[b, k] < prefix[b]))
    B, T = segments.shape
    if segments.is_cuda:
        return torch.compile(create_block_mask)(rule, B, None, T, T, device=segments.device)
    b, t = (torch.arange(n, device=segments.device) for n in (B, T))
    return rule(b[:, None, None, None], None, t[:, None], t)

# ---- the transformer -------------------------------------------------------------------------------------------------
class Linear(nn.Module):
    def __init__(self, d_in, d_out, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d_out, d_in))  # fp32, whatever the type of the input
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias if self.bias is None else self.bias.to(x.dtype))

class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)

def rotary(positions, K, theta, dtype):
    """Cosine and sine of the angles by which a head's coordinate pairs (i, i + K/2) turn at each position."""
    frequency = theta ** -(torch.arange(0, K, 2, device=positions.device) / K)
    angle = positions[:, None, :, None] * torch.cat((frequency, frequency))  # (B, 1, T, K)
    return angle.cos().to(dtype), angle.sin().to(dtype)

def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin

class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.n_head = s.n_head
        self.attention_norm, self.ff_norm = RMSNorm(s.n_embd, s.norm_eps), RMSNorm(s.n_embd, s.norm_eps)
        self.q, self.k, self.v, self.o = (Linear(s.n_embd, s.n_embd) for _ in range(4))
        self.gate, self.up, self.down = Linear(s.n_embd, s.n_ff), Linear(s.n_embd, s.n_ff), Linear(s.n_ff, s.n_embd)

    def forward(self, x, cos, sin, mask, cache=None, places=None):
        B, T, D = x.shape
        h = self.attention_norm(x)
        q, k, v = (f(h).view(B, T, self.n_head, -1).transpose(1, 2) for f in (self.q, self.k, self.v))  # (B, H, T, K)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:  # (2, B, H, S, K): the mask has a column for every key so far, the last T are those of x
            S = mask.shape[-1]
            cache[0, :, :, S - T:S], cache[1, :, :, S - T:S] = k, v
            k, v = cache[:, :, :, :S]
        sparse = isinstance(mask, BlockMask)
        y = flex_attention(q, k, v, block_mask=mask) if sparse else F.scaled_dot_product_attention(q, k, v, mask)
        y = y.transpose(1, 2).reshape(B, T, D)
        if places is not None:
            x, y = x.flatten(0, 1)[places], y.flatten(0, 1)[places]
        x = x + self.o(y)
        h = self.ff_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

class Transformer(nn.Module):
    def __init__(self, s, dtype=torch.float32):
        super().__init__()
        self.dtype, self.head_width, self.rope_theta = dtype, s.n_embd // s.n_head, s.rope_theta
        self.embed = nn.Embedding(s.vocab_size, s.n_embd)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.n_layer))
        self.norm, self.head = RMSNorm(s.n_embd, s.norm_eps), Linear(s.n_embd, s.vocab_size, bias=s.extra_head)
        self.projection = Linear(s.n_embd, s.n_embd) if s.extra_head else None
        # normal, cut at two sigma: std sqrt(2 / 5D) into a block, in its SwiGLU damped with depth; sqrt(2 / (D + V))
        # for embedding and head. Weights out of a block stay 0, so that every block starts as the identity.
        def initialize(std, *layers):
            for layer in layers:
                nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
        inner, outer = (2 / (5 * s.n_embd)) ** 0.5, (2 / (s.n_embd + s.vocab_size)) ** 0.5
        for i, block in enumerate(self.blocks):
            initialize(inner, block.q, block.k, block.v)
            initialize(inner * (1 / (2 * (i + 1))) ** 0.5, block.gate, block.up)
        initialize(outer, self.embed, self.head)

    def hidden(self, tokens, mask, positions, cache=None, places=None):
        """tokens (B, T), a mask of make_mask, positions (B or 1, T) -> hidden states (B, T, D); state i predicts token
        i + 1 in every mode (the paper's masked next-token prediction). With a cache (one tensor per block, for the keys
        and values of S tokens) only the T newest tokens are given, and the last T rows of the mask. With places (n,) in
        the flattened batch, only their states are computed to the end: (n, D)."""
        cos, sin = rotary(positions, self.head_width, self.rope_theta, self.dtype)
        x = self.embed(tokens).to(self.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, mask, cache and cache[i], places if block is self.blocks[-1] else None)
        h = self.norm(x)
        return h if self.projection is None else F.gelu(self.projection(h), approximate="tanh")

    def loss(self, tokens, targets, weights, prefix, z_loss=0.0):
        """Of one slot, both objectives alike: the sum of weights * (CE + z_loss * logsumexp^2), and of weights * CE.
        Documents are told apart by their <s>, which is never masked. prefix: (B,), 0 for AR and T for MD."""
        if self.projection is not None:
            die("extra_head is there to read the released models; it cannot be trained")
        B, T = tokens.shape
        positions = torch.arange(T, device=tokens.device).expand(B, T)
        segments = 1 + (tokens == BOS).cumsum(1)
        h = self.hidden(tokens, make_mask(segments, positions, prefix), positions[:1])
        return HeadLoss.apply(h.flatten(0, 1), self.head.weight, targets.flatten(), weights.flatten(), z_loss)

class HeadLoss(torch.autograd.Function):
    """The head and its loss, sum_i w_i (CE_i + z lse_i^2), with h (N, D), head (V, D), targets and w (N,). No more than
    CHUNK logits exist at a time: the gradient of a chunk is computed at once, in the forward pass."""
    CHUNK = 2 ** 24

    @staticmethod
    def forward(ctx, h, head, targets, w, z):
        loss, ce = torch.zeros(2, device=h.device)
        W, size = head.to(h.dtype), max(1, HeadLoss.CHUNK // len(head))
        training = ctx.needs_input_grad[0]  # of h: a parameter such as head asks for a gradient under no_grad too
        if training:
            ctx.save_for_backward(dh := torch.empty_like(h), dW := torch.zeros_like(head))
        for i in range(0, len(h), size):
            x, y, w_i = h[i:i + size], targets[i:i + size, None], w[i:i + size, None]
            logits = (x @ W.T).float()  # (C, V)
            target, top = logits.gather(-1, y), logits.amax(-1, keepdim=True)
            e = logits.sub_(top).exp_()
            total = e.sum(-1, keepdim=True)
            lse = top + total.log()
            ce += (w_i * (lse - target)).sum()
            loss += (w_i * (lse - target + z * lse ** 2)).sum()
            if training:
                # d loss / d logits = w ((1 + 2 z lse) softmax - onehot(target))
                d = e.mul_(w_i * (1 + 2 * z * lse) / total).scatter_add_(-1, y, -w_i).to(h.dtype)
                dh[i:i + size] = d @ W
                dW += d.T @ x
        ctx.mark_non_differentiable(ce)
        return loss, ce

    @staticmethod
    def backward(ctx, grad, _):
        dh, dW = ctx.saved_tensors
        return dh.mul_(grad), dW.mul_(grad), None, None, None

# ---- devices and checkpoints -----------------------------------------------------------------------------------------
def choose_device(device, dtype):
    """The device and the type of the forward pass; bf16 is for CUDA: CPUs without it are hundreds of times slower."""
    has = [d for d in ("cuda", "mps") if getattr(torch, d).is_available()] + ["cpu"]
    device = has[0] if device == "auto" else device
    if device not in has:
        die(f"this machine has no '{device}', only: {', '.join(has)}")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return device, torch.bfloat16 if dtype == "bfloat16" or (dtype == "auto" and device == "cuda") else torch.float32

def load_checkpoint(path):
    """The contents of a checkpoint file, or of the newest readable one in a run directory; nothing is executed."""
    files = [path] if os.path.isfile(path) else glob.glob(os.path.join(glob.escape(path), "ckpt*.pt"))
    for file in sorted(files, key=lambda f: (os.path.basename(f) == "ckpt.pt", os.path.getmtime(f)), reverse=True):
        try:
            with zipfile.ZipFile(file) as archive:  # torch.load would accept a flipped bit
                if sum(m.file_size for m in archive.infolist()) > os.path.getsize(file) or archive.testzip():
                    raise ValueError("a checksum is wrong, or it is compressed")
            checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            if not {"model", "settings", "step"} <= set(checkpoint):
                raise ValueError("not a checkpoint of train.py")
            return checkpoint
        except Exception as error:  # zipfile, zlib, struct, pickle and torch have their own kinds
            print(f"skipping {file}, it is damaged: {str(error).partition(chr(10))[0]}")
    die(f"no {'readable checkpoint in' if os.path.exists(path) else 'such checkpoint:'} {path}")

def pack(layer):
    """For use on a CPU: the weights in the layout of oneDNN, whose products of few tokens are twice as fast or more."""
    if isinstance(layer, Linear):
        weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), 512)  # tokens; also best for fewer
        layer.forward = lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, layer.bias, "none", [], "")

def load_model(path, device="auto", dtype="auto"):
    """A trained model for use, not for training, its tokenizer, and its checkpoint (with settings as an object)."""
    checkpoint = load_checkpoint(path)
    device, dtype = choose_device(device, dtype)
    try:
        checkpoint["settings"] = check(Settings(**checkpoint["settings"]))
        with torch.device("meta"):
            model = Transformer(checkpoint["settings"], dtype)
        model.load_state_dict(checkpoint["model"], assign=True)
        tokenizer = tokenizers.Tokenizer.from_str(checkpoint["tokenizer"])
        model.embed.weight[max(tokenizer.get_vocab().values())]  # every token has an embedding
        model.to(device, dtype).eval()  # cast once, not at every use
        if device == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available():
            model.apply(pack)
    except BaseException as error:  # tokenizers, written in Rust, panics with a kind of its own
        die(f"the checkpoint in {path} does not fit this code, or has no tokenizer ({type(error).__name__}: {error})")
    tokenizer.encode_special_tokens = True  # a literal <mask> in a text is text
    return model, tokenizer, checkpoint
