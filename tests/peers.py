"""
What bench.py measures: each part times our way of doing something and others', the plain form or that of a library, and
yields (what, value, bound). `seconds(**functions)` gives the median time of each.
"""
import collections
import functools
import json
import multiprocessing
import os
import pathlib
import random
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import numpy as np
import tokenizers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # per core
import export  # noqa: E402
import prepare  # noqa: E402
import sample  # noqa: E402
from configurator import Settings, check  # noqa: E402
from data import BOS, MASK, N_SPECIAL, Stream, train_slot  # noqa: E402
from eval import make_items, read_task, score  # noqa: E402
from model import HeadLoss, Transformer, make_mask, pack  # noqa: E402
from muon import Muon  # noqa: E402

SMALL = dict(n_layer=8, n_head=8, n_embd=512, n_ff=1776, vocab_size=8192, seq_len=512, alpha="1/2", batch_size=16,
             max_steps=1, decay_steps=0)
PAPER, Z, HEAD = {}, 1e-4, (8192, 51200, 512)  # the paper's model is the default; z-loss; tokens, vocabulary, width of `head`


def small_model(packed=False):
    """8 layers, width 512, FFN 1,776, vocabulary 8,192, with weights that say something; packed as load_model does."""
    torch.manual_seed(0)
    s = check(Settings(**SMALL))
    model = Transformer(s)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.02)
    model.head.weight.data[BOS] = 0  # never the likeliest: no text ends early
    return model.apply(pack) if packed else model, s


def llama(model, s):
    """The same weights in a Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM
    theirs = LlamaForCausalLM(LlamaConfig(
        vocab_size=s.vocab_size, hidden_size=s.n_embd, intermediate_size=s.n_ff, num_hidden_layers=s.n_layer, bos_token_id=BOS,
        num_attention_heads=s.n_head, rms_norm_eps=s.norm_eps, eos_token_id=None, pad_token_id=3, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": s.rope_theta}, max_position_embeddings=2048))
    theirs.load_state_dict({export.rename(name, 0): p for name, p in model.state_dict().items()})
    return theirs


# ---- training --------------------------------------------------------------------------------------------------------

def matrix_products(s, n):
    """Every matrix product of training the model on n tokens, forward and backward, and nothing else; and its FLOPs."""
    D, inner = s.n_embd, s.n_ff
    shapes = s.n_layer * (4 * [(D, D)] + 2 * [(inner, D)] + [(D, inner)]) + [(s.vocab_size, D)]
    tensors = {(a, b): [torch.randn(size) for size in ((n, b), (a, b), (n, a)) * 2] for a, b in set(shapes)}

    def products():
        for x, w, y, dx, dw, dy in map(tensors.get, shapes):
            torch.mm(x, w.T, out=y)
            torch.mm(dy, w, out=dx)
            torch.mm(dy.T, x, out=dw)
    return products, 6 * n * sum(a * b for a, b in shapes)


def slots(s):
    """One slot of each objective, 8 x 512 tokens of documents of 300 tokens, as tensors: AR, MD."""
    tokens = np.resize(np.append(np.uint16(BOS), np.random.default_rng(0).integers(N_SPECIAL, s.vocab_size, 299, np.uint16)), 300 * 99)
    windows = Stream(tokens, np.arange(100, dtype=np.uint64) * np.uint64(300), s)
    return ([*map(torch.from_numpy, train_slot(windows, s, 0, slot)[:4])] for slot in (0, 1))


def training(seconds):
    model, s = small_model()
    theirs, (ar, md), (products, n_flops) = llama(model, s), slots(s), matrix_products(s, 8 * 512)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or not name.startswith("blocks")]
    dual = Muon(matrices, 1e-9), torch.optim.AdamW(others, 1e-9, fused=True)
    adamw = torch.optim.AdamW(model.parameters(), 1e-9, fused=True)
    slot = dict(ours=lambda: model.loss(*ar, s.z_loss)[0].backward(),
                llama=lambda: theirs(input_ids=ar[0], labels=ar[0], use_cache=False).loss.backward(), products=products)
    t = seconds(**slot, md=lambda: model.loss(*md, s.z_loss)[0].backward(),
                dual=lambda: [optimizer.step() for optimizer in dual], adamw=adamw.step)
    work = 1 + 6 * s.n_layer * s.n_embd * s.seq_len * 8 * 512 / n_flops  # the products and, causal, attention
    yield "forward + backward, eager: speed of transformers' Llama", t.llama / t.ours, ">= 0.95"
    yield "its FLOP/s, eager: of the rate of its matrix products alone", work * t.products / t.ours, ">= 0.8"
    yield "step at alpha 1/2: time at alpha 1", (t.ours + t.md) / 2 / t.ours, "<= 1.08"
    model.hidden, eager = torch.compile(model.hidden, dynamic=False), t
    t = seconds(**slot)
    yield "step of 64 x 512 tokens with Muon: time with AdamW", (8 * t.ours + eager.dual) / (8 * t.ours + eager.adamw), "<= 1.08"
    yield "forward + backward, compiled: speed of transformers' Llama, eager", t.llama / t.ours, ">= 1.15"
    yield "its FLOP/s, compiled: of the rate of its matrix products alone", work * t.products / t.ours, ">= 0.8"


# ---- Muon ------------------------------------------------------------------------------------------------------------

def textbook(G):
    """The published iteration, of one matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.T if G.size(0) > G.size(1) else G
    X = X / X.norm().clamp(min=1e-7)
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if G.size(0) > G.size(1) else X


class TextbookMuon(Muon):
    def update(self, params, lr, momentum, weight_decay):
        for p in params:
            m = self.state[p]["momentum"].mul_(momentum).add_(p.grad)
            direction = textbook(p.grad + momentum * m)
            p.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr * 0.2 * max(p.shape) ** 0.5)


def layers(n, s):
    """The matrices of n layers, with gradients."""
    D, inner = s.n_embd, s.n_ff
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in n * (4 * [(D, D)] + 2 * [(inner, D)] + [(D, inner)])]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def _rank(rank, rounds, folder):
    torch.set_num_threads(1)
    alone = Muon(layers(4, check(Settings(**SMALL))), 1e-9)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    shared, times = Muon(layers(4, check(Settings(**SMALL))), 1e-9), []
    for optimizer in [alone, shared] * (1 + rounds):
        dist.barrier()
        start = time.perf_counter()
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    size = [sum(state["momentum"].nbytes for state in optimizer.state.values()) for optimizer in (alone, shared)]
    with open(f"{folder}/{rank}", "w") as f:
        json.dump([np.median(times[3::2]) / np.median(times[2::2]), size[1] / size[0]], f)
    dist.destroy_process_group()


def muon(seconds):
    t = seconds(**{kind.__name__: kind(layers(1, check(Settings(**PAPER))), 1e-9).step for kind in (Muon, TextbookMuon)})
    yield "Muon.step on one of the paper's 24 equal layers: speed of the textbook's", t.TextbookMuon / t.Muon, ">= 1.3"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (seconds.rounds, folder), nprocs=2)
        ratios = np.max([json.load(open(f"{folder}/{rank}")) for rank in (0, 1)], 0)
    yield "Muon.step on 2 ranks of one thread: time of each doing all", ratios[0], "<= 0.55"
    yield "Muon.step on 2 ranks of one thread: momentum of each doing all", ratios[1], "<= 0.5"


# ---- head and loss -------------------------------------------------------------------------------------------------------

def _peak(name):
    if sys.platform != "linux":
        return float("nan")

    def high_water():
        return int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024
    function = globals()[name]()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts anew
    before = high_water()
    function()
    return high_water() - before


def peak(name):
    """MB that the function made by `name` needs at its peak, beyond what it was made with; in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak, name).result()


def _head(loss):
    (N, V, D), _ = HEAD, torch.manual_seed(0)
    h, W = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    h.grad, W.grad = torch.zeros_like(h), torch.zeros_like(W)
    y, w = torch.randint(V, (N,)), torch.full((N,), 1 / N)
    return lambda: loss(h, W, y, w).backward()


def chunked_head():
    return _head(lambda h, W, y, w: HeadLoss.apply(h, W, y, w, Z)[0])


def plain_head():
    """Without the z-loss, which would cost it another pass over the logits."""
    return _head(lambda h, W, y, w: F.cross_entropy(h @ W.T, y))


def head(seconds):
    t = seconds(ours=chunked_head(), plain=plain_head())
    yield "head and loss, 8,192 tokens x 51,200 vocabulary, width 512: time of the unchunked, without z-loss", t.ours / t.plain, "<= 1.1"
    yield "head and loss: extra memory of the unchunked", peak("chunked_head") / peak("plain_head"), "<= 0.167"


# ---- data ------------------------------------------------------------------------------------------------------------

def stream():
    """10^6 documents of 100 tokens: made, and brought to the start of an epoch of 2,048-token windows."""
    s = check(Settings(**SMALL | dict(seq_len=2048, batch_size=47 * 1024)))
    tokens, starts = np.broadcast_to(np.uint16(20), 10 ** 8), np.arange(10 ** 6 + 1, dtype=np.uint64) * np.uint64(100)

    def start():
        windows = Stream(tokens, starts, s)
        windows.start_epoch(0)
        return windows, s
    return start


@functools.cache
def corpus():
    """The embedded corpus, and a BPE of 8,192 learnt from it."""
    texts = [json.loads(line)["text"] for line in prepare.embedded_corpus()]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer, bpe.decoder = prepare.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=8192, special_tokens=prepare.SPECIALS, initial_alphabet=prepare.ByteLevel.alphabet(), show_progress=False))
    return texts, bpe


def data(seconds):
    (texts, bpe), (model, s), epoch = corpus(), small_model(), stream()
    encode, (ar, _), (windows, long) = prepare.encoder(bpe), slots(s), epoch()
    t = seconds(ours=lambda: [*map(encode, texts)], theirs=lambda: bpe.encode_batch(texts), epoch=epoch,
                slot=lambda: train_slot(windows, long, 0, 1), step=lambda: model.loss(*(x[:2] for x in ar))[0].backward())
    yield "encoding, on one core: speed of tokenizers", t.theirs / t.ours, ">= 4"
    yield "preparing 8 x 2,048 tokens: time of their forward + backward", t.slot / (16 * t.step), "<= 0.01"
    yield "start of an epoch with 10^6 documents: seconds", t.epoch, "<= 1"
    yield "start of an epoch with 10^6 documents: MB", peak("stream"), "<= 100"


# ---- evaluation ------------------------------------------------------------------------------------------------------

@torch.inference_mode()
def plain_ar(model, items):
    """One row per choice, 32 rows in file order, padded, the head everywhere."""
    scores = []
    for first in range(0, len(items), 32):
        batch = items[first:first + 32]
        x = pad_sequence([torch.tensor(c + w) for c, w, *_ in batch], True)
        T = x.shape[1]
        h = model.hidden(x, torch.ones(T, T, dtype=torch.bool).tril()[None, None], torch.arange(T)[None])
        p = torch.log_softmax(model.head(h), -1)[:, :-1].gather(-1, x[:, 1:, None])[..., 0]
        scores += [p[b, len(c) - 1:len(c + w) - 1].sum().item() for b, (c, w, *_) in enumerate(batch)]
    return scores


@torch.inference_mode()
def plain_pll(model, items, n):
    """One row at a time, the head everywhere."""
    scores = []
    for c, w, *_ in items:
        score, T = 0, len(c + w)
        for j in range(len(w)):
            x = torch.tensor([c + w])
            x[0, len(c) + j:len(c) + j + n] = MASK
            h = model.hidden(x, torch.ones(1, 1, T, T, dtype=torch.bool), torch.arange(T)[None])
            score += torch.log_softmax(model.head(h), -1)[0, len(c) + j - 1, w[j]].item()
        scores.append(score)
    return scores


def evaluation(seconds, folder="data/tasks", n=8):
    """The plain scorers use the model as it was trained, ours as load_model gives it, packed."""
    if not os.path.isdir(folder):
        print(f"   skipped  evaluation: it needs {folder}, see: python prepare.py --tasks")
        return
    documents, plain, model = [], small_model()[0], small_model(packed=True)[0]
    for name in ("arc_easy", "hellaswag", "mmlu"):
        documents += [d._replace(doc=0) for d in random.Random(0).sample(read_task(name, folder, 0), n)]
    items = make_items(documents, corpus()[1], 512, False, collections.Counter())
    t = seconds(ours=lambda: score(model, "mmlu", ["ar"], items, 0, collections.Counter()), plain=lambda: plain_ar(plain, items))
    yield f"ar on {n} documents each of ARC-Easy, HellaSwag, MMLU: speed of the plain scorer", t.plain / t.ours, ">= 3"
    few = items[::16]
    t = seconds(ours=lambda: score(model, "mmlu", ["pll1", "pll6"], few, 0, collections.Counter()),
                plain=lambda: [plain_pll(plain, few, n) for n in (1, 6)])
    yield "pll on every 16th choice of them: speed of one row at a time", t.plain / t.ours, ">= 3"


# ---- decoding --------------------------------------------------------------------------------------------------------

def decoding(seconds):
    (model, s), (plain, _) = small_model(packed=True), small_model()
    theirs = llama(plain, s).eval()

    def decode(x, length):
        options = SimpleNamespace(mode="ar", length=length, temperature=0)
        assert sum(1 for _ in sample.extend(model, x.tolist(), None, options)) == length

    def generate(x, length):
        theirs.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=length, min_new_tokens=length, do_sample=False)

    @torch.inference_mode()
    def uncached(B):
        for T in range(16 + 32, 16 + 512, 64):  # 8 of the 512 steps
            x, t = torch.randint(N_SPECIAL, s.vocab_size, (B, T)), torch.arange(T).expand(B, T)
            mask = make_mask(torch.ones_like(x), t, torch.zeros(B, dtype=torch.long))
            model.head(model.hidden(x, mask, t)[:, -1]).argmax(-1)

    for B in (1, 8):
        x = torch.randint(N_SPECIAL, s.vocab_size, (B, 16))
        t = seconds(ours=lambda: decode(x, 128), theirs=lambda: generate(x, 128), long=lambda: decode(x, 512),
                    uncached=lambda: uncached(B))
        yield f"128 tokens, batch {B}: speed of transformers' generate", t.theirs / t.ours, ">= 1.5"
        yield f"512 tokens, batch {B}: speed without a cache, from 8 of its steps", 64 * t.uncached / t.long, ">= 5"


PARTS = {part.__name__: part for part in (training, muon, head, data, evaluation, decoding)}
