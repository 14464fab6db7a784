"""
The data of a run, as pure functions: which tokens, in which order, under which objective, with which masks. Nothing
depends on rank, number of devices or history: a run resumes from its step alone, and alpha changes no sequence.
A prepared folder holds train.bin and val.bin (uint16 tokens; every document opens with <s>), train.idx and val.idx
(uint64: where each document starts, and the end), tokenizer.json and meta.json (counts, sizes, hashes).
"""
import hashlib, json, os, pathlib, sys
from fractions import Fraction

import numpy as np
from numpy.random import default_rng  # of a key: a generator that depends on it alone
from configurator import die

BOS, MASK, N_SPECIAL = 1, 4, 16  # <s> opens each document, <mask> hides a token; all ids below N_SPECIAL are special
VERSION, FILES = 1, ("train.bin", "train.idx", "val.bin", "val.idx", "tokenizer.json")
SUBSET, EPOCH, COUNTS, MASKS = range(4)  # independent random streams

def fingerprint(path, block=2 ** 20, blocks=256):
    """[size, hash]: of the whole file up to 256 MiB, of 256 evenly spaced MiB of a larger one, so quick at any size."""
    size, digest = os.path.getsize(path), hashlib.blake2b(digest_size=16)
    with open(path, "rb") as f:
        for i in range(min(blocks, -(-size // block))):
            f.seek(max(i * block, i * (size - block) // (blocks - 1)))
            digest.update(f.read(block))
    return [size, digest.hexdigest()]

def open_data(data_dir, vocab_size):
    """{split: (tokens, starts)}, memory-mapped, and what meta.json says, after checking one against the other."""
    try:
        meta = json.loads(pathlib.Path(data_dir, "meta.json").read_bytes())
        for name in FILES:
            if meta["version"] != VERSION or fingerprint(f"{data_dir}/{name}") != meta["files"][name]:
                die(f"{data_dir}/{name} is not what meta.json says, or not of format {VERSION}: run prepare.py again")
        if meta["vocab_size"] > vocab_size:
            die(f"{data_dir} has {meta['vocab_size']} token ids: vocab_size {vocab_size} is too small")
        kinds = (".bin", np.uint16), (".idx", np.uint64)
        data = {k: [np.memmap(f"{data_dir}/{k}{end}", dtype, "r") for end, dtype in kinds] for k in ("train", "val")}
        for tokens, starts in data.values():
            if starts[0] != 0 or starts[-1] != len(tokens) or (starts[1:] <= starts[:-1]).any():
                raise ValueError("documents overlap, or go beyond the end")
        meta["tokenizer"] = pathlib.Path(data_dir, "tokenizer.json").read_text("utf-8")
        meta["token_bytes"] = np.zeros(2 ** 16)  # how much text a token stands for: BPE spells each byte as a character
        for token, i in json.loads(meta["tokenizer"])["model"]["vocab"].items():
            meta["token_bytes"][i] = len(token) if i >= N_SPECIAL else 0
        return data, meta
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, FileNotFoundError) as error:
        die(f"{data_dir} is not prepared, or damaged ({type(error).__name__}: {error}); "
            f"make it with: python prepare.py [--input FILES --out {data_dir}]")

class Stream:
    """The windows of a run. Repetition R means: of the N windows in all, W = ceil(N / R) are unique. A seeded choice of
    documents gives exactly W * T tokens (the last one is cut); every epoch permutes the documents anew, packs them into
    one stream <s> x1 .. xn <s> y1 .. ym ..., closes it with <s>, and cuts it into W windows, read in shuffled order."""
    def __init__(self, tokens, starts, s):
        T, N = s.seq_len, s.max_steps * s.batch_size
        self.tokens, self.T, self.W, self.seed, self.epoch = tokens, T, -(-N // s.repetitions), s.seed, None
        if len(tokens) < self.W * T:
            n = len(tokens) // T  # windows
            advice = f"raise repetitions to at least {-(-N // n)}" if n else f"less than one window of seq_len {T:,}"
            die(f"corpus has {len(tokens):,} tokens, this run needs {self.W * T:,}: {advice}")
        order = default_rng((s.seed, SUBSET)).permutation(len(starts) - 1)
        ends = np.cumsum((starts[1:] - starts[:-1]).astype(np.int64)[order])
        n = np.searchsorted(ends, self.W * T) + 1
        self.first = starts[order[:n]].astype(np.int64)  # where the chosen documents begin in the file
        self.length = np.diff(ends[:n - 1], prepend=0, append=self.W * T)

    def start_epoch(self, epoch):
        self.epoch, generator = epoch, default_rng((self.seed, EPOCH, epoch))
        documents = generator.permutation(len(self.first))
        self.bounds = np.append(0, np.cumsum(self.length[documents]))  # where each begins in the stream, and the end
        self.offset = self.first[np.append(documents, 0)] - self.bounds  # at the end <s>, as any document opens
        self.shuffled = generator.permutation(self.W)

    def window(self, index):
        """(T + 1,) tokens: the T inputs and, shifted by one, the T targets of global sequence `index`."""
        epoch, i = divmod(index, self.W)
        if epoch != self.epoch:
            self.start_epoch(epoch)
        places = self.shuffled[i] * self.T + np.arange(self.T + 1)
        documents = np.searchsorted(self.bounds, places, side="right") - 1
        return self.tokens[places + self.offset[documents]].astype(np.int64)

# ---- the two objectives: inputs and weights of a window; the targets of both are x0[1:], the project's one shift -----
def is_ar(slot, alpha):
    """Slot `slot`, counted over all steps, runs AR; of any `den` in a row exactly `num` do, where alpha = num/den."""
    return slot * alpha.numerator % alpha.denominator < alpha.numerator

def ar_example(x0):
    """Eq. (2), per token: clean inputs, the mean over all T targets, a document's closing <s> included."""
    return x0[:-1], np.full(len(x0) - 1, 1 / (len(x0) - 1))

def md_example(x0, u, generator):
    """Eq. (4), per token: 1/M int_0^1 E[1/t sum of CE over the masked] dt, where t is the probability of each mask.
    A set of k of M masks has weight int t^(k-1) (1-t)^(M-k) dt = 1 / (k C(M, k)) in it: as if k were uniform on 1..M,
    the set uniform given k, and the loss the mean CE over its k tokens. So we draw k, by u in [0, 1), and no t: exact,
    no epsilon, less variance. Never masked: special tokens, x0[0] (nothing predicts it), x0[T] (it is not an input)."""
    maskable = 1 + np.flatnonzero(x0[1:-1] >= N_SPECIAL)
    k = min(1 + int(u * len(maskable)), len(maskable))
    masked = generator.permutation(maskable)[:k]
    xt, w = x0[:-1].copy(), np.zeros(len(x0) - 1)
    xt[masked], w[masked - 1] = MASK, 1 / max(k, 1)  # the token at p is predicted at p - 1
    return xt, w

def collate(windows, examples, prefix, vocab_size):
    """Inputs, targets, weights: (B, T); prefix: (B,)."""
    inputs, weights = map(np.stack, zip(*examples))
    if np.max(windows) >= vocab_size:
        sys.exit(f"error: the data hold token id {np.max(windows)}, but vocab_size is {vocab_size}")  # on any rank
    return inputs, np.stack(windows)[:, 1:], weights.astype(np.float32), np.full(len(windows), prefix)

def train_slot(stream, s, step, slot):
    """Slot 0 <= slot < S of a step: micro_batch_size sequences, one objective; loss = the mean over its sequences."""
    B, S = s.micro_batch_size, s.batch_size // s.micro_batch_size
    first = step * s.batch_size + slot * B
    ar = is_ar(step * S + np.arange(S), Fraction(s.alpha))
    windows = [stream.window(i) for i in range(first, first + B)]
    if ar[slot]:
        examples = map(ar_example, windows)
    else:  # one jittered grid over [0, 1) for all MD sequences of the step, dealt out by a permutation
        generator, n = default_rng((s.seed, COUNTS, step)), B * np.count_nonzero(~ar)
        u = ((generator.permutation(n) + generator.random()) / n).reshape(-1, B)[np.count_nonzero(~ar[:slot])]
        examples = [md_example(x0, u[i], default_rng((s.seed, MASKS, first + i))) for i, x0 in enumerate(windows)]
    x, y, w, prefix = collate(windows, examples, 0 if ar[slot] else s.seq_len, s.vocab_size)
    return x, y, w / np.float32(B), prefix, bool(ar[slot])

def val_batches(tokens, s):
    """(ar, md) batches of the same maskable targets; a row's weights sum to their number; the masks never change."""
    T, B, n = s.seq_len, s.micro_batch_size, min(s.eval_tokens, len(tokens) - 1) // s.seq_len
    grid = (default_rng((0, COUNTS)).permutation(n) + 0.5) / n
    for first in range(0, n, B):
        rows = range(first, first + B)  # the last batch is filled up with windows of weight 0
        windows = [tokens[i % n * T:i % n * T + T + 1].astype(np.int64) for i in rows]
        on = [np.append(x0[1:-1] >= N_SPECIAL, False) * (i < n) for i, x0 in zip(rows, windows)]
        md = [md_example(x0, grid[i % n], default_rng((0, MASKS, i))) for i, x0 in zip(rows, windows)]
        yield (collate(windows, [(x0[:-1], w) for x0, w in zip(windows, on)], 0, s.vocab_size),
               collate(windows, [(xt, w * m.sum()) for (xt, w), m in zip(md, on)], T, s.vocab_size))
