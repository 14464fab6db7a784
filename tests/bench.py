"""
Measure how fast this project is, as ratios of times that anyone can check on any machine.

    python tests/bench.py --json bench.json                                       # about 40 minutes
    python tests/bench.py --only training,head --rounds 3
    python tests/bench.py --only cost --devices 8 --peak_flops 989e12 --mfu 0.4   # only arithmetic

Each part compares our way of doing something with another: the plain form, or a library's. The two
take turns, and the median counts. "A: speed of B" is the speed of A divided by that of B, and so
are "A: time of B" and the like. This needs requirements-dev.txt; `evaluation` reads data/tasks.
"""

import argparse
import functools
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # encoding is measured on one core

import export  # noqa: E402
import prepare  # noqa: E402
import sample  # noqa: E402
from checkpoint import Trained  # noqa: E402
from configurator import Settings, check  # noqa: E402
from data import Batch, Corpus, Split, Stream, train_batch  # noqa: E402
from errors import die, suggest, write_atomically  # noqa: E402
from eval import distinct_items, make_modes, make_questions, score  # noqa: E402
from model import HeadLoss, Transformer, make_mask  # noqa: E402
from muon import Muon  # noqa: E402
from tasks import TASKS, read_task  # noqa: E402
from tokenizer import SpecialIds, parse_tokenizer, train_tokenizer  # noqa: E402

SMALL = dict(n_layer=8, n_head=8, n_embd=512, n_ff=1776, vocab_size=8192, seq_len=512)
SMALL |= dict(alpha="1/2", batch_size=16, max_steps=1, decay=0.0)
PAPER = {}  # the defaults are the paper's
HEAD = dict(B=4, T=2048, V=51200, D=512)  # sequences, tokens, vocabulary, width
Z_LOSS = 1e-4
SPECIAL = SpecialIds(bos=1, mask=4, all=tuple(range(16)))  # as prepare.py numbers them
N_SPECIAL = len(SPECIAL.all)


class Row(NamedTuple):
    """One line of the table."""

    what: str
    value: float
    bound: str = ""  # what we want, such as ">= 1.5"


def seconds(rounds, **functions):
    """Return the median time of each function, over rounds in which they take turns."""
    times = {name: [] for name in functions}
    for _ in range(1 + rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    medians = {name: np.median(values[1:]) for name, values in times.items()}  # the first warms up
    return SimpleNamespace(**medians)


def small_model():
    """Return a model with 8 layers, width 512 and no zero matrices, and its settings."""
    torch.manual_seed(0)
    s = check(Settings(**SMALL))
    model = Transformer(s)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.02)
    model.head.weight.data[SPECIAL.bos] = 0  # never the likeliest: no text ends early
    return model, s


def llama(model, s):
    """Return transformers' Llama with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=s.vocab_size,
        hidden_size=s.n_embd,
        intermediate_size=s.n_ff,
        num_hidden_layers=s.n_layer,
        num_attention_heads=s.n_head,
        rms_norm_eps=s.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": s.rope_theta},
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=SPECIAL.bos,
        eos_token_id=None,
        pad_token_id=3,
    )
    theirs = LlamaForCausalLM(config)
    weights = {export.rename(name, "llama"): p for name, p in model.state_dict().items()}
    theirs.load_state_dict(weights)
    return theirs


# ---- training ------------------------------------------------------------------------------------
def make_stream(tokens, document_length, s):
    """Return a stream over tokens that are cut into documents of equal length."""
    starts = np.arange(0, len(tokens) + 1, document_length, dtype=np.uint64)
    split = Split(tokens, starts)
    return Stream(Corpus(split, split, "", s.vocab_size, SPECIAL, {}), s)


def make_batches(s):
    """Return an AR and an MD batch: 8 x 512 tokens, from documents of 300 tokens."""
    text = np.random.default_rng(0).integers(N_SPECIAL, s.vocab_size, 299, np.uint16)
    document = np.append(np.uint16(SPECIAL.bos), text)
    stream = make_stream(np.tile(document, 99), 300, s)
    return train_batch(stream, s, 0, 0), train_batch(stream, s, 0, 1)


def block_shapes(s):
    """Return the shapes of a block's matrices."""
    D, inner = s.n_embd, s.n_ff
    return [(D, D)] * 4 + [(inner, D)] * 2 + [(D, inner)]


def matrix_products(s, n):
    """Return every matrix product of training on n tokens as one function, and its FLOPs."""
    shapes = s.n_layer * block_shapes(s) + [(s.vocab_size, s.n_embd)]
    tensors = {}
    for a, b in set(shapes):
        sizes = [(n, b), (a, b), (n, a)]  # input, weight, output
        tensors[a, b] = [torch.randn(size) for size in sizes + sizes]  # and their gradients

    def multiply():
        for shape in shapes:
            x, w, y, dx, dw, dy = tensors[shape]
            torch.mm(x, w.T, out=y)
            torch.mm(dy, w, out=dx)
            torch.mm(dy.T, x, out=dw)

    return multiply, 6 * n * sum(a * b for a, b in shapes)


def training(args):
    model, s = small_model()
    theirs = llama(model, s)
    ar, md = make_batches(s)
    n_tokens = ar.inputs.numel()
    multiply, n_flops = matrix_products(s, n_tokens)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "blocks" not in name]
    muon = Muon(matrices, 1e-9)
    adamw_of_others = torch.optim.AdamW(others, 1e-9, fused=True)
    adamw = torch.optim.AdamW(model.parameters(), 1e-9, fused=True)

    def train_ours(batch=ar):
        model.loss(batch, Z_LOSS)[0].backward()

    def train_llama():
        theirs(input_ids=ar.inputs, labels=ar.inputs, use_cache=False).loss.backward()

    def step_dual():
        muon.step()
        adamw_of_others.step()

    # The work is the products plus attention, over half of the window since it is causal.
    work = 1 + 6 * s.n_layer * s.n_embd * s.seq_len * n_tokens / n_flops
    name = "forward + backward"
    slot = dict(ours=train_ours, llama=train_llama, products=multiply)
    md_slot = functools.partial(train_ours, md)
    t = seconds(args.rounds, **slot, md=md_slot, dual=step_dual, adamw=adamw.step)
    yield Row(f"{name}, eager: speed of transformers' Llama", t.llama / t.ours, ">= 0.95")
    rate = work * t.products / t.ours
    yield Row(f"{name}, eager: FLOP/s of its matrix products alone", rate, ">= 0.8")
    yield Row("step at alpha 1/2: time at alpha 1", (t.ours + t.md) / 2 / t.ours, "<= 1.08")

    for block in model.blocks:
        block.compile(dynamic=False)
    compiled = seconds(args.rounds, **slot)
    ratio = (8 * compiled.ours + t.dual) / (8 * compiled.ours + t.adamw)
    yield Row("step of 64 x 512 tokens with Muon: time with AdamW", ratio, "<= 1.08")
    speed = compiled.llama / compiled.ours
    yield Row(f"{name}, compiled: speed of transformers' Llama, eager", speed, ">= 1.15")
    rate = work * compiled.products / compiled.ours
    yield Row(f"{name}, compiled: FLOP/s of its matrix products alone", rate, ">= 0.8")


# ---- Muon ----------------------------------------------------------------------------------------
def textbook(G):
    """Orthogonalize one matrix by the published iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = G.size(0) > G.size(1)
    X = G.T if tall else G
    X = X / X.norm().clamp(min=1e-7)
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if tall else X


class TextbookMuon(Muon):
    """The same update, one matrix at a time."""

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        for stack in self.stacks:
            for p, m in zip(stack.params, stack.momentum):
                m.mul_(group["momentum"]).add_(p.grad)
                update = textbook(p.grad + group["momentum"] * m)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def make_muon(kind, n_layers, settings):
    """Return an optimizer for the matrices of n layers, with gradients."""
    shapes = n_layers * block_shapes(check(Settings(**settings)))
    optimizer = kind([torch.nn.Parameter(torch.randn(shape)) for shape in shapes], 1e-9)
    for stack in optimizer.stacks:
        stack.grads.normal_()
    return optimizer


def measure_rank(rank, rounds, settings, folder):
    """Write Muon's time and memory on one of two ranks, relative to those of a single rank."""
    torch.set_num_threads(1)
    alone = make_muon(Muon, 4, settings)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    shared = make_muon(Muon, 4, settings)

    def step_together(optimizer):
        dist.barrier()
        optimizer.step()
        dist.barrier()

    t = seconds(
        rounds,
        alone=functools.partial(step_together, alone),
        shared=functools.partial(step_together, shared),
    )
    sizes = []
    for optimizer in (alone, shared):
        sizes.append(sum(stack.momentum.nbytes for stack in optimizer.stacks))
    ratios = [t.shared / t.alone, sizes[1] / sizes[0]]
    Path(folder, str(rank)).write_text(json.dumps(ratios))
    dist.destroy_process_group()


def muon(args):
    ours = make_muon(Muon, 1, PAPER)
    theirs = make_muon(TextbookMuon, 1, PAPER)
    t = seconds(args.rounds, ours=ours.step, textbook=theirs.step)
    name = "Muon.step on one of the paper's 24 equal layers"
    yield Row(f"{name}: speed of one matrix at a time", t.textbook / t.ours, ">= 1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure_rank, (args.rounds, SMALL, folder), nprocs=2)
        ratios = [json.loads(Path(folder, rank).read_text()) for rank in ("0", "1")]
    time_ratio, memory_ratio = np.max(ratios, axis=0)
    name = "Muon.step on 2 ranks, one thread each"
    yield Row(f"{name}: time if each does everything", time_ratio, "<= 0.55")
    yield Row(f"{name}: momentum if each does everything", memory_ratio, "<= 0.5")


# ---- head and loss -------------------------------------------------------------------------------
class HeadInputs(NamedTuple):
    h: torch.Tensor  # (B, T, D)
    W: torch.Tensor  # (V, D)
    targets: torch.Tensor  # (B, T)


def make_head_inputs():
    torch.manual_seed(0)
    B, T, V, D = HEAD.values()
    h = torch.randn(B, T, D, requires_grad=True)
    W = torch.randn(V, D, requires_grad=True)
    for tensor in (h, W):
        tensor.grad = torch.zeros_like(tensor)
    return HeadInputs(h, W, torch.randint(V, (B, T)))


def our_head(inputs, z_loss=Z_LOSS):
    weights = torch.full(inputs.targets.shape, 1 / inputs.targets.numel())
    HeadLoss.apply(inputs.h, inputs.W, inputs.targets, weights, z_loss)[0].backward()


def plain_head(inputs):
    """Compute all logits at once, without z-loss, which would cost another pass over them."""
    logits = inputs.h.flatten(0, 1) @ inputs.W.T
    F.cross_entropy(logits, inputs.targets.flatten()).backward()


def read_peak():
    """Return the peak memory of this process, in MB, since the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status).group(1)) / 1024


def measure_peak(make, use):
    """Return how many MB use(make()) needs at its peak, beyond what make() returns."""
    if sys.platform != "linux":
        return float("nan")
    inputs = make()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = read_peak()
    use(inputs)
    return read_peak() - before


def peak(make, use):
    """Measure a peak in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_peak, make, use).result()


def head(args):
    inputs = make_head_inputs()
    t = seconds(
        args.rounds,
        ours=functools.partial(our_head, inputs),
        plain=functools.partial(plain_head, inputs),
    )
    name = "head and loss, 4 x 2,048 tokens, vocabulary 51,200, width 512"
    yield Row(f"{name}: time of all at once, without z-loss", t.ours / t.plain, "<= 1.1")
    ratio = peak(make_head_inputs, our_head) / peak(make_head_inputs, plain_head)
    yield Row(f"{name}: extra memory of all at once", ratio, "<= 0.167")


# ---- data ----------------------------------------------------------------------------------------
def many_documents():
    """Return 10^6 documents of 100 tokens, and settings with windows of 2,048 tokens."""
    s = check(Settings(**SMALL | dict(seq_len=2048, batch_size=47 * 1024)))
    return np.broadcast_to(np.uint16(20), 10**8), s


def start_epoch(inputs):
    tokens, s = inputs
    stream = make_stream(tokens, 100, s)
    stream.start_epoch(0)
    return stream


@functools.cache
def embedded_corpus():
    """Return the texts of the embedded corpus, and a tokenizer with 8,192 ids learned from them."""
    texts = prepare.embedded_corpus()
    tokenizer = parse_tokenizer(train_tokenizer(texts, 8192))
    return texts, tokenizer


def data(args):
    texts, tokenizer = embedded_corpus()
    with mock.patch("os.cpu_count", return_value=1):
        encode = prepare.make_encoder(tokenizer, np.uint16)
    model, s = small_model()
    ar, _ = make_batches(s)
    two_sequences = Batch(*(tensor[:2] for tensor in ar[:-1]), ar.objective)
    documents = many_documents()
    stream = start_epoch(documents)
    t = seconds(
        args.rounds,
        ours=lambda: encode(texts),
        theirs=lambda: tokenizer.encode_batch(texts),
        epoch=lambda: start_epoch(documents),
        slot=lambda: train_batch(stream, documents[1], 0, 1),
        step=lambda: model.loss(two_sequences)[0].backward(),
    )
    yield Row("encoding, on one core: speed of tokenizers", t.theirs / t.ours, ">= 4")
    ratio = t.slot / (16 * t.step)
    yield Row("preparing 8 x 2,048 tokens: time of their forward + backward", ratio, "<= 0.01")
    name = "start of an epoch with 10^6 documents"
    yield Row(f"{name}: seconds", t.epoch, "<= 1")
    yield Row(f"{name}: MB", peak(many_documents, start_epoch), "<= 100")


# ---- evaluation ----------------------------------------------------------------------------------
@torch.inference_mode()
def plain_ar(model, items):
    """Score one row for each item, 32 in a batch, padded, with the head applied everywhere."""
    scores = []
    for first in range(0, len(items), 32):
        batch = items[first : first + 32]
        x = pad_sequence([torch.tensor(c + w) for c, w in batch], batch_first=True)
        T = x.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        h = model.hidden(x, causal[None, None], torch.arange(T)[None])
        p = torch.log_softmax(model.head(h), -1)[:, :-1].gather(-1, x[:, 1:, None])[..., 0]
        for row, (c, w) in zip(p, batch):
            scores.append(row[len(c) - 1 : len(c + w) - 1].sum().item())
    return scores


@torch.inference_mode()
def plain_pll(model, items, n_masks):
    """Score one row at a time, with the head applied everywhere."""
    scores = []
    for c, w in items:
        T = len(c + w)
        score = 0
        for i in range(len(w)):
            x = torch.tensor([c + w])
            x[0, len(c) + i : len(c) + i + n_masks] = SPECIAL.mask
            h = model.hidden(x, torch.ones(1, 1, T, T, dtype=torch.bool), torch.arange(T)[None])
            score += torch.log_softmax(model.head(h), -1)[0, len(c) + i - 1, w[i]].item()
        scores.append(score)
    return scores


def evaluation(args, folder="data/tasks", n=8):
    if not os.path.isdir(folder):
        print(f"   skipped  evaluation: it needs {folder}, see: python prepare.py --tasks")
        return
    model, s = small_model()
    frozen, _ = small_model()
    frozen.freeze("cpu")
    trained = Trained(model, embedded_corpus()[1], SPECIAL, s, {})
    questions = []
    for name in ("arc_easy", "hellaswag", "mmlu"):
        documents = random.Random(0).sample(read_task(name, folder), n)
        questions += make_questions(TASKS[name], documents, trained)
    items = distinct_items(questions)
    few = items[::16]
    ar = make_modes(["ar"], [], 0, SPECIAL.mask)
    pll = make_modes(["pll"], [1, 6], 0, SPECIAL.mask)
    t = seconds(
        args.rounds,
        ar=lambda: score(frozen, items, ar),
        plain_ar=lambda: plain_ar(model, items),
        pll=lambda: score(frozen, few, pll),
        plain_pll=lambda: [plain_pll(model, few, n_masks) for n_masks in (1, 6)],
    )
    name = f"{n} documents each of ARC-Easy, HellaSwag, MMLU"
    yield Row(f"ar on {name}: speed of a plain scorer", t.plain_ar / t.ar, ">= 3")
    what = "pll on every 16th of their choices: speed of one row at a time"
    yield Row(what, t.plain_pll / t.pll, ">= 3")


# ---- decoding ------------------------------------------------------------------------------------
def decoding(args):
    model, s = small_model()
    theirs = llama(model, s).eval()
    model.freeze("cpu")

    def decode(x, length):
        options = SimpleNamespace(mode="ar", length=length, temperature=0)
        tokens = list(sample.extend(model, SPECIAL, x, 1024, None, options))
        assert len(tokens) == length

    def generate(x, length):
        theirs.generate(
            x,
            attention_mask=torch.ones_like(x),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
        )

    @torch.inference_mode()
    def decode_without_cache(n_sequences):
        """Run 8 of the 512 steps that decode 512 tokens."""
        for T in range(16 + 32, 16 + 512, 64):
            x = torch.randint(N_SPECIAL, s.vocab_size, (n_sequences, T))
            positions = torch.arange(T).expand(n_sequences, T)
            no_prefix = torch.zeros(n_sequences, dtype=torch.long)
            mask = make_mask(torch.ones_like(x), positions, no_prefix)
            model.head(model.hidden(x, mask, positions)[:, -1]).argmax(-1)

    for n_sequences in (1, 8):
        x = torch.randint(N_SPECIAL, s.vocab_size, (n_sequences, 16))
        t = seconds(
            args.rounds,
            ours=functools.partial(decode, x, 128),
            theirs=functools.partial(generate, x, 128),
            long=functools.partial(decode, x, 512),
            uncached=functools.partial(decode_without_cache, n_sequences),
        )
        name = f"tokens, batch {n_sequences}"
        yield Row(f"128 {name}: speed of transformers' generate", t.theirs / t.ours, ">= 1.5")
        ratio = 64 * t.uncached / t.long
        yield Row(f"512 {name}: speed without a cache, from 8 of its steps", ratio, ">= 5")


# ---- cost, by arithmetic -------------------------------------------------------------------------
def cost(args):
    """Count the memory and the FLOPs of training the paper's model."""
    s = check(Settings())
    D, n = s.n_embd, args.devices
    matrices = s.n_layer * sum(a * b for a, b in block_shapes(s))
    tables = 2 * s.vocab_size * D  # embedding and head
    norms = (2 * s.n_layer + 1) * D
    numbers = {
        "weights (gradients take as much)": matrices + tables + norms,
        "Muon's momentum, with 8 devices a host": matrices / min(n, 8),
        "AdamW's two moments": 2 * (tables + norms),
        "logits of a sequence": s.seq_len * s.vocab_size,
    }
    for what, count in numbers.items():
        yield Row(f"{what}: GB on each of {n} devices", 4 * count / 1e9)

    # 6 for each weight in a matrix product, and twice that for each key that attention sees.
    for what, n_keys in (("AR", s.seq_len / 2), ("MD", s.seq_len)):
        flops = 6 * (matrices + tables / 2) + 12 * s.n_layer * D * n_keys
        yield Row(f"{what}: GFLOPs a token", flops / 1e9)
        if args.peak_flops > 0:
            speed = n * args.mfu * args.peak_flops / flops
            yield Row(f"{what}: tokens/s of {n} devices, MFU {args.mfu:.0%}", speed)


# ---- the script ----------------------------------------------------------------------------------
PARTS = {
    "training": training,
    "muon": muon,
    "head": head,
    "data": data,
    "evaluation": evaluation,
    "decoding": decoding,
    "cost": cost,
}


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)} (all)")
    flag("--rounds", type=int, default=7, help="how often everything is timed (7)")
    flag("--json", default="", help="a file to write the table to")
    flag("--devices", type=int, default=1, help="for cost: how many devices share the work (1)")
    flag("--peak_flops", type=float, default=0.0, help="for cost: FLOP/s of a device")
    flag("--mfu", type=float, default=0.4, help="for cost: the share of them that is used (0.4)")
    args = parser.parse_args()
    args.only = args.only.split(",")
    for name in args.only:
        if name not in PARTS:
            die(f"no part '{name}'{suggest(name, list(PARTS))}")
    if min(args.devices, args.rounds) < 1:
        die("--devices and --rounds must be at least 1")
    return args


def main():
    args = parse_arguments()
    table = []
    for name in args.only:
        for row in PARTS[name](args):
            print(f"{row.value:10.4g}  {row.bound:<9}{name}: {row.what}", flush=True)
            table.append({"part": name, **row._asdict(), "value": float(row.value)})
            if args.json:
                write_atomically(args.json, json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
