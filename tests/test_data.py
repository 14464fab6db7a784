"""The order of the data: exact repetitions, whole documents, a pure function of seed and index."""
import collections
import time

import numpy as np
import pytest

import data
from conftest import tiny_settings
from data import BOS, MASK, N_SPECIAL


def make_corpus(n_documents, seed=0):
    """Tokens and starts; every token that is not <s> occurs once in the whole corpus, so it can be traced."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 90, n_documents)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.arange(N_SPECIAL, N_SPECIAL + starts[-1]).astype(np.uint16)
    tokens[starts[:-1]] = BOS
    return tokens, starts.astype(np.uint64)


def make_stream(n_documents=300, **changes):
    s = tiny_settings(vocab_size=65535, **changes)
    return data.Stream(*make_corpus(n_documents), s), s


@pytest.mark.parametrize("R", [1, 3, 4, 48])
def test_every_token_is_seen_exactly_R_times(R):
    """48 windows in all: each input token of the unique subset comes R times, none other comes, and no window repeats
    before all have been seen."""
    stream, s = make_stream(repetitions=R)
    N, T = 48, s.seq_len
    assert stream.W == -(-N // R)
    windows = [stream.window(i) for i in range(stream.W * R)]
    counts = collections.Counter(np.concatenate([w[:-1] for w in windows]).tolist())
    n_bos = counts.pop(BOS)
    assert set(counts.values()) == {R}
    assert sum(counts.values()) + n_bos == stream.W * T * R


def test_a_window_is_a_piece_of_the_stream():
    """Within a window each document is a contiguous piece of the corpus that ends where the document ends (the one that was
    cut to size aside), the target of each window's last input is the next window's first, and the stream is closed by <s>."""
    stream, s = make_stream(repetitions=4)
    tokens, starts = make_corpus(300)
    ends = set(tokens[starts[1:].astype(int) - 1].tolist())
    stream.start_epoch(0)
    windows = {int(stream.shuffled[i]): stream.window(i) for i in range(stream.W)}
    flat = np.concatenate([windows[i][:-1] for i in range(stream.W)])
    assert all(windows[i][-1] == windows[i + 1][0] for i in range(stream.W - 1)) and windows[stream.W - 1][-1] == BOS
    assert flat[0] == BOS
    pieces = np.split(flat, np.flatnonzero(flat == BOS)[1:])
    cut = [p for p in pieces if len(p) == 1 or p[-1] not in ends]
    assert len(cut) <= 1 and all((np.diff(p[1:]) == 1).all() for p in pieces)


def test_epochs_repack_and_reshuffle_the_same_documents():
    stream, s = make_stream(repetitions=4)
    epochs = [[tuple(stream.window(e * stream.W + i)) for i in range(stream.W)] for e in range(4)]
    assert len({tuple(sorted(t for w in e for t in w[:-1])) for e in epochs}) == 1
    assert len(set(epochs[0]) & set(epochs[1])) < stream.W / 2 and epochs[0] != epochs[1]
    assert (np.diff(stream.shuffled) != 1).any()


def test_order_depends_on_seed_and_index_alone():
    """Random access in any order, by another object, gives the same windows; another seed gives others."""
    stream, s = make_stream(repetitions=4)
    again, _ = make_stream(repetitions=4)
    other, _ = make_stream(repetitions=4, seed=2)
    indices = np.random.default_rng(0).permutation(48)
    first = {i: again.window(i) for i in indices}
    assert all(np.array_equal(stream.window(i), first[i]) for i in range(48))
    assert not any(np.array_equal(other.window(i), first[i]) for i in range(48))


def test_fewer_repetitions_extend_the_unique_subset():
    """The subset at R = 8 is part of the one at R = 2: runs over R differ in amount, not in the choice of documents."""
    small, _ = make_stream(repetitions=8)
    large, _ = make_stream(repetitions=2)
    assert set(small.first) <= set(large.first)


def test_too_small_a_corpus_names_the_repetitions_that_work(capsys):
    tokens, starts = make_corpus(20)
    with pytest.raises(SystemExit) as error:
        data.Stream(tokens, starts, tiny_settings(vocab_size=65535, repetitions=1))
    needed = int(str(error.value).split("at least ")[1])
    data.Stream(tokens, starts, tiny_settings(vocab_size=65535, repetitions=needed))
    with pytest.raises(SystemExit):
        data.Stream(tokens, starts, tiny_settings(vocab_size=65535, repetitions=needed - 1))


def test_validation_scores_the_same_targets_in_both_modes():
    """Weights count each maskable target once in AR, M in sum per sequence in MD; calls are identical, whatever the seed."""
    tokens, starts = make_corpus(100)
    s = tiny_settings(vocab_size=65535, eval_tokens=31 * 32, micro_batch_size=2, seed=1)
    n = 0
    for (x, y, w, prefix), (xt, yt, wt, prefix_t) in data.val_batches(tokens, s):
        assert np.array_equal(y, yt) and (prefix == 0).all() and (prefix_t == 32).all()
        real = w.any(1)  # the last batch is filled up with weight 0
        n += real.sum()
        assert np.array_equal(w[real] == 1, np.pad(y[real, :-1] >= N_SPECIAL, ((0, 0), (0, 1))))
        assert (wt[~real] == 0).all() and not w[:, -1].any() and not (w[y == BOS]).any()
        np.testing.assert_allclose(wt.sum(1), w.sum(1), rtol=1e-5)
        assert x.shape == (2, 32)
        np.testing.assert_array_equal((xt == MASK)[real, 1:], wt[real, :-1] > 0)  # scored is what is masked, one to the left
        assert np.array_equal(x[:, 1:], y[:, :-1]) and (xt[:, 0] == x[:, 0]).all()
    assert n == 31
    again = list(data.val_batches(tokens, tiny_settings(vocab_size=65535, eval_tokens=31 * 32, seed=7)))
    assert all(np.array_equal(a, b) for p, q in zip(data.val_batches(tokens, s), again) for u, v in zip(p, q) for a, b in zip(u, v))


def test_bytes_per_token(corpus):
    """The table's bytes of an encoded text are the bytes of the text."""
    import tokenizers
    text = (corpus / "data/tiny/tokenizer.json").read_text(encoding="utf-8")
    tokenizer = tokenizers.Tokenizer.from_str(text)
    sample = "naïve café – déjà vu 東京 \U0001f600\n\t x"
    ids = tokenizer.encode(sample, add_special_tokens=False).ids
    table = data.open_data(corpus / "data/tiny", 2 ** 16)[1]["token_bytes"]
    assert table[ids].sum() == len(sample.encode())
    assert (table[:N_SPECIAL] == 0).all()


def test_a_million_documents_start_within_a_second():
    """An epoch of 10^6 documents starts in under a second, and a batch of 2,048-token windows takes milliseconds."""
    lengths = np.random.default_rng(0).integers(50, 1000, 10 ** 6)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.uint64)
    tokens = np.broadcast_to(np.uint16(20), starts[-1])
    s = tiny_settings(seq_len=2048, eval_tokens=4096, batch_size=8, micro_batch_size=8, max_steps=30000, repetitions=1, alpha="0")
    stream = data.Stream(tokens, starts, s)
    begin = time.perf_counter()
    stream.start_epoch(0)
    epoch = time.perf_counter() - begin
    data.train_slot(stream, s, 0, 0)
    begin = time.perf_counter()
    for step in range(20):
        data.train_slot(stream, s, step, 0)
    batch = (time.perf_counter() - begin) / 20
    assert epoch < 1 and batch < 0.02, (epoch, batch)
