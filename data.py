"""
The data of a run, as pure functions: which tokens, in which order, under which objective, with
which masks. Nothing depends on the rank, on the number of devices or on history. So a run resumes
from its step alone, and runs that differ in alpha see the same sequences.

A prepared folder (see prepare.py) holds

    train.bin, val.bin   token ids, uint16 or uint32; every document opens with <s>
    train.idx, val.idx   uint64: where each document starts, and at the end the number of tokens
    tokenizer.json       the tokenizer
    meta.json            counts; the size and the hash of every file

Shapes: B sequences of T tokens. A window has T + 1 tokens: T inputs, and T targets, each one token
later. Throughout, `s` is a Settings (see configurator.py).
"""

import hashlib
import json
import math
import os
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import default_rng  # default_rng(key): the same key gives the same numbers

from errors import die
from tokenizer import SpecialIds, find_special_ids, parse_tokenizer

FORMAT_VERSION = 1
FILES = ("train.bin", "train.idx", "val.bin", "val.idx", "tokenizer.json")

# Second entry of a generator's key, after the seed: one stream of random numbers per purpose.
SUBSET, EPOCH, COUNTS, MASKS = range(4)


# ---- opening a prepared folder -------------------------------------------------------------------
class Split(NamedTuple):
    tokens: np.ndarray  # (number of tokens,)
    starts: np.ndarray  # (documents + 1,): where each document starts, and the end


class Corpus(NamedTuple):
    train: Split
    val: Split
    tokenizer_json: str  # the text of tokenizer.json
    vocab_size: int  # ids are below this
    special: SpecialIds
    files: dict  # {name: fingerprint}: tells whether a run continues on the same data


def token_dtype(vocab_size):
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def fingerprint(path):
    """Return the size and a hash of a file.

    The hash covers all of a file up to 256 MiB, and 256 evenly spaced MiB of a larger one, so it
    is quick at any size.
    """
    MiB, n_samples = 2**20, 256
    size = os.path.getsize(path)
    offsets = range(0, size, MiB)
    if len(offsets) > n_samples:
        offsets = [i * (size - MiB) // (n_samples - 1) for i in range(n_samples)]
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        for offset in offsets:
            file.seek(offset)
            digest.update(file.read(MiB))
    return [size, digest.hexdigest()]


def open_corpus(data_dir):
    """Open a prepared folder, its tokens memory-mapped, after checking it against its meta.json."""
    folder = Path(data_dir)
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        if meta["version"] != FORMAT_VERSION:
            die(f"{data_dir} has format {meta['version']}, not {FORMAT_VERSION}: prepare it again")
        for name in FILES:
            if fingerprint(folder / name) != meta["files"][name]:
                die(f"{folder / name} does not match meta.json: run prepare.py again")

        splits = {}
        for name in ("train", "val"):
            tokens = np.memmap(folder / f"{name}.bin", token_dtype(meta["vocab_size"]), "r")
            starts = np.memmap(folder / f"{name}.idx", np.uint64, "r")
            if starts[0] != 0 or starts[-1] != len(tokens) or (starts[1:] <= starts[:-1]).any():
                raise ValueError(f"the documents of {name}.idx overlap, or go beyond the end")
            splits[name] = Split(tokens, starts)

        tokenizer_json = (folder / "tokenizer.json").read_text("utf-8")
        parse_tokenizer(tokenizer_json)  # refuses a broken one now
        return Corpus(
            train=splits["train"],
            val=splits["val"],
            tokenizer_json=tokenizer_json,
            vocab_size=meta["vocab_size"],
            special=find_special_ids(tokenizer_json),
            files=meta["files"],
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        die(
            f"{data_dir} is not a prepared folder ({os.path.basename(error.filename)} is missing); "
            f"make it with: python prepare.py --input FILES --out {data_dir}, or name another one "
            "with --data_dir"
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        die(f"{data_dir} is damaged ({type(error).__name__}: {error}): run prepare.py again")


# ---- the order of the data -----------------------------------------------------------------------
class Stream:
    """The windows of a run.

    With R repetitions, W = ceil(N / R) of the N windows in a run are unique. A seeded choice of
    documents has exactly W * T tokens, with the last document cut. Every epoch permutes these
    documents anew, packs them into one stream <s> x1 .. xn <s> y1 .. ym ..., closes it with <s>,
    and cuts it into W windows, which are read in shuffled order.

    Only the layout of the current epoch is kept; what `window` returns does not depend on that.
    """

    def __init__(self, corpus, s):
        tokens, starts = corpus.train
        n_windows = s.max_steps * s.batch_size
        self.seed = s.seed
        self.special = corpus.special
        self.tokens = tokens
        self.T = s.seq_len
        # Round first: if repetitions were computed as n_windows / W, this must give exactly W.
        self.W = max(1, math.ceil(round(n_windows / s.repetitions, 6)))
        self.epoch = None

        n_tokens = self.W * self.T
        if n_tokens > len(tokens):
            die(
                f"{s.data_dir} has {len(tokens):,} training tokens, but this run needs "
                f"{n_tokens:,}: lower max_steps, or raise repetitions (0: read all of the text, as "
                "often as needed)"
            )

        # Take documents in a random order until they have n_tokens.
        order = default_rng((s.seed, SUBSET)).permutation(len(starts) - 1)
        lengths = np.diff(starts.astype(np.int64))[order]
        ends = np.cumsum(lengths)
        n_documents = np.searchsorted(ends, n_tokens) + 1
        self.doc_starts = starts[order[:n_documents]].astype(np.int64)  # positions in the file
        self.doc_lengths = lengths[:n_documents]
        self.doc_lengths[-1] -= ends[n_documents - 1] - n_tokens  # the last document is cut

    def start_epoch(self, epoch):
        """Lay out the stream of an epoch, a function of the seed and the epoch alone."""
        self.epoch = epoch
        generator = default_rng((self.seed, EPOCH, epoch))
        documents = generator.permutation(len(self.doc_starts))
        # Where each document ends in the stream, and what to add to a position in the stream to
        # get the position in the file.
        self.ends = np.cumsum(self.doc_lengths[documents])
        self.offsets = self.doc_starts[documents] - (self.ends - self.doc_lengths[documents])
        self.shuffled = generator.permutation(self.W)

    def window(self, index):
        """Return the T + 1 tokens of sequence `index`, counted over the whole run."""
        epoch, i = divmod(index, self.W)
        if epoch != self.epoch:
            self.start_epoch(epoch)
        start = self.shuffled[i] * self.T
        positions = np.arange(start, min(start + self.T + 1, self.W * self.T))
        documents = np.searchsorted(self.ends, positions, side="right")
        x0 = np.full(self.T + 1, self.special.bos)  # <s> closes the stream, and its last window
        x0[: len(positions)] = self.tokens[positions + self.offsets[documents]]
        return x0


# ---- the two objectives: what a window x0 becomes ------------------------------------------------
class Example(NamedTuple):
    inputs: np.ndarray  # (T,)
    weights: np.ndarray  # (T,): the weight of each target's cross-entropy in the loss
    prefix: int  # how many leading positions all queries see: 0 is causal, T bidirectional


def slots_per_step(s):
    """Return the number of slots in a step. A slot is one micro-batch, with one objective."""
    return s.batch_size // s.micro_batch_size


def slot_objective(run_slot, alpha):
    """Return the objective of a slot, or of an array of them, counted over the whole run.

    Of every `den` consecutive slots exactly `num` train AR, where alpha = num / den.
    """
    is_ar = run_slot * alpha.numerator % alpha.denominator < alpha.numerator
    return np.where(is_ar, "ar", "md")


def ar_example(x0, u, generator, special):
    """Eq. 2 per token: the mean over all T targets, a document's closing <s> included."""
    T = len(x0) - 1
    return Example(x0[:-1], np.full(T, 1 / T), prefix=0)


def find_maskable(x0, special):
    """Return the positions in x0 that may be masked.

    This leaves out special tokens, x0[0] (nothing predicts it) and x0[T] (it is not an input).
    """
    return 1 + np.flatnonzero(~np.isin(x0[1:-1], special.all))


def md_example(x0, u, generator, special):
    """Eq. 4 per token: 1/M int_0^1 E[1/t * sum of CE over the masked] dt, for M maskable tokens.

    t is the probability of a mask. In that integral, a set of k masked tokens has weight
    int t^(k-1) (1-t)^(M-k) dt = 1 / (k C(M, k)). The same weights arise if k is uniform on 1..M,
    the k tokens are drawn uniformly, and the loss is their mean CE. So we draw k, from a u that is
    uniform on [0, 1), and never t: this is exact, needs no epsilon and has less variance.
    """
    maskable = find_maskable(x0, special)
    M = len(maskable)
    k = min(1 + int(u * M), M)  # M may be 0
    masked = generator.permutation(maskable)[:k]
    xt = x0[:-1].copy()
    xt[masked] = special.mask
    weights = np.zeros(len(xt))
    weights[masked - 1] = 1 / max(k, 1)  # the token at p is predicted at p - 1
    return Example(xt, weights, prefix=len(xt))


# Each takes a window x0, a number u, a random generator and the special ids; returns an Example.
OBJECTIVES = {"ar": ar_example, "md": md_example}


# ---- batches -------------------------------------------------------------------------------------
class Batch(NamedTuple):
    """Sequences for one objective. In training, each one's weights sum to 1 (0 without targets)."""

    inputs: torch.Tensor  # (B, T) token ids
    targets: torch.Tensor  # (B, T) token ids
    weights: torch.Tensor  # (B, T)
    segments: torch.Tensor  # (B, T): each position's document; never 0, which all segments see
    prefix: torch.Tensor  # (B,): how many leading positions all queries see
    objective: str

    def to(self, device):
        """Copy the tensors to a device. A GPU can fetch them from pinned memory while it works."""
        tensors = self[:-1]
        if device == "cuda":
            tensors = [tensor.pin_memory() for tensor in tensors]
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors), self.objective)


def make_batch(windows, examples, objective, special):
    """Stack windows and the examples that an objective made from them."""
    inputs = np.stack([example.inputs for example in examples])
    targets = np.stack([x0[1:] for x0 in windows])  # the only shift: state i predicts token i + 1
    weights = np.stack([example.weights for example in examples])
    # A document is recognized by the <s> that opens it, which is never masked.
    segments = 1 + np.cumsum(inputs == special.bos, axis=1)
    prefix = np.array([example.prefix for example in examples])
    arrays = inputs, targets, weights.astype(np.float32), segments, prefix
    return Batch(*(torch.from_numpy(array) for array in arrays), objective)


def mask_levels(s, step):
    """Return the u of md_example for every sequence of a step, (slots, micro_batch_size).

    All MD sequences of the step share one jittered regular grid over [0, 1), dealt out by a
    permutation: each u is uniform, and together they cover the mask counts evenly.
    """
    n_slots = slots_per_step(s)
    md = slot_objective(step * n_slots + np.arange(n_slots), Fraction(s.alpha)) == "md"
    n = np.count_nonzero(md) * s.micro_batch_size
    generator = default_rng((s.seed, COUNTS, step))
    grid = (generator.permutation(n) + generator.random()) / max(n, 1)
    levels = np.full((n_slots, s.micro_batch_size), np.nan)  # AR slots have none
    levels[md] = grid.reshape(-1, s.micro_batch_size)
    return levels


def train_batch(stream, s, step, slot):
    """Return the micro_batch_size sequences of one slot, counted within its step."""
    objective = str(slot_objective(step * slots_per_step(s) + slot, Fraction(s.alpha)))
    first = step * s.batch_size + slot * s.micro_batch_size
    windows, examples = [], []
    for i, u in enumerate(mask_levels(s, step)[slot], start=first):
        x0 = stream.window(i)
        generator = default_rng((s.seed, MASKS, i))
        windows.append(x0)
        examples.append(OBJECTIVES[objective](x0, u, generator, stream.special))
    return make_batch(windows, examples, objective, stream.special)


def count_val_windows(corpus, s):
    """Return how many held-out windows a validation reads: whole batches, if it can fill one."""
    n = min(s.eval_tokens, len(corpus.val.tokens) - 1) // s.seq_len
    if n > s.micro_batch_size:
        n -= n % s.micro_batch_size
    return n


def count_val_sequences(corpus, s):
    """Return how many sequences a validation scores: at least 8, each with its own mask count.

    If there are few windows, each is read several times: few mask counts do not give Eq. 4.
    """
    n = count_val_windows(corpus, s)
    return n * math.ceil(8 / n)


def bytes_per_token(corpus, s):
    """Return the mean number of bytes of text per held-out token, not counting special tokens."""
    tokens = corpus.val.tokens[: count_val_windows(corpus, s) * s.seq_len]
    text = parse_tokenizer(corpus.tokenizer_json).decode(tokens.tolist())
    n_special = int(np.isin(tokens, corpus.special.all).sum())  # checkpoints hold no numpy types
    return len(text.encode()) / max(len(tokens) - n_special, 1)


def val_batches(corpus, s, rank=0, world=1):
    """Yield a rank's pairs of batches, AR and MD. Both score the same targets, the maskable ones.

    The masks depend only on the held-out text and the shape of the batches. The weights of a
    sequence sum to its number of targets, so held-out losses are means over tokens. (Training
    also predicts each document's closing <s> in AR, so train_ar is not quite the same quantity.)
    """
    T, B = s.seq_len, s.micro_batch_size
    n_windows = count_val_windows(corpus, s)
    n = count_val_sequences(corpus, s)
    grid = (default_rng((0, COUNTS)).permutation(n) + 0.5) / n
    for first in range(rank * B, n, world * B):
        windows = []
        examples = {"ar": [], "md": []}
        for i in range(first, min(first + B, n)):
            start = i % n_windows * T
            x0 = corpus.val.tokens[start : start + T + 1].astype(np.int64)
            scored = np.zeros(T)
            scored[find_maskable(x0, corpus.special) - 1] = 1
            md = md_example(x0, grid[i], default_rng((0, MASKS, i)), corpus.special)
            windows.append(x0)
            examples["ar"].append(Example(x0[:-1], scored, prefix=0))
            examples["md"].append(md._replace(weights=md.weights * scored.sum()))
        yield [make_batch(windows, examples[name], name, corpus.special) for name in examples]
