"""The order of the data: exact repetitions, whole documents, a pure function of seed and index."""

import collections
import json
import time

import numpy as np
import pytest
import tokenizers

import data
from configurator import fill_in
from conftest import BOS, MASK, N_SPECIAL, SPECIAL, make_corpus, tiny_settings
from tokenizer import find_special_ids, parse_tokenizer


def traceable_corpus(n_documents=300, seed=0):
    """Return a corpus in which every token but <s> occurs once, so that it can be traced."""
    rng = np.random.default_rng(seed)
    documents, first = [], N_SPECIAL
    for length in rng.integers(2, 90, n_documents):
        documents.append(np.append(BOS, np.arange(first, first + length - 1)))
        first += length - 1
    return make_corpus(documents)


def make_stream(**changes):
    return data.Stream(traceable_corpus(), tiny_settings(vocab_size=65535, **changes))


@pytest.mark.parametrize("R", [1, 3, 4, 48])
def test_every_token_is_seen_exactly_R_times(R):
    """48 windows in all: each token of the unique subset is an input R times, and no other is."""
    stream = make_stream(repetitions=R)
    assert stream.W == -(-48 // R)
    windows = [stream.window(i) for i in range(stream.W * R)]
    counts = collections.Counter(np.concatenate([x0[:-1] for x0 in windows]).tolist())
    n_bos = counts.pop(BOS)
    assert set(counts.values()) == {R}
    assert sum(counts.values()) + n_bos == stream.W * stream.T * R


def test_a_window_is_a_piece_of_the_stream():
    """Documents are whole but for the one cut to size; a window's last token opens the next."""
    stream = make_stream(repetitions=4)
    tokens, starts = traceable_corpus().train
    last_tokens = set(tokens[starts[1:].astype(int) - 1].tolist())
    stream.start_epoch(0)
    windows = {int(stream.shuffled[i]): stream.window(i) for i in range(stream.W)}
    for i in range(stream.W - 1):
        assert windows[i][-1] == windows[i + 1][0]
    assert windows[stream.W - 1][-1] == BOS  # closes the stream

    flat = np.concatenate([windows[i][:-1] for i in range(stream.W)])
    assert flat[0] == BOS
    pieces = np.split(flat, np.flatnonzero(flat == BOS)[1:])
    for piece in pieces:
        assert (np.diff(piece[1:]) == 1).all()
    cut = [piece for piece in pieces if len(piece) == 1 or piece[-1] not in last_tokens]
    assert len(cut) <= 1


def test_epochs_repack_and_reshuffle_the_same_documents():
    stream = make_stream(repetitions=4)
    epochs = []
    for epoch in range(4):
        indices = range(epoch * stream.W, (epoch + 1) * stream.W)
        epochs.append([tuple(stream.window(i)) for i in indices])
    inputs = {tuple(sorted(token for x0 in epoch for token in x0[:-1])) for epoch in epochs}
    assert len(inputs) == 1
    assert epochs[0] != epochs[1]
    assert len(set(epochs[0]) & set(epochs[1])) < stream.W / 2
    assert (np.diff(stream.shuffled) != 1).any()


def test_order_depends_on_seed_and_index_alone():
    """Random access, in any order and by another object, gives the same windows."""
    stream, again = make_stream(repetitions=4), make_stream(repetitions=4)
    other = make_stream(repetitions=4, seed=2)
    windows = {i: again.window(i) for i in np.random.default_rng(0).permutation(48)}
    for i in range(48):
        assert np.array_equal(stream.window(i), windows[i])
        assert not np.array_equal(other.window(i), windows[i])


def test_fewer_repetitions_extend_the_unique_subset():
    """Runs over R differ in the amount of data, not in the choice of documents."""
    small, large = make_stream(repetitions=8), make_stream(repetitions=2)
    assert set(small.doc_starts) <= set(large.doc_starts)


def test_at_least_one_window_is_unique():
    """However many repetitions are asked for, the run reads it again and again."""
    stream = make_stream(repetitions=10**9)
    assert stream.W == 1
    assert sorted(stream.window(0)) == sorted(stream.window(47))


def test_too_small_a_corpus_says_what_would_fit():
    corpus = traceable_corpus(20)
    with pytest.raises(SystemExit, match="raise repetitions .0: read all of the text"):
        data.Stream(corpus, tiny_settings(vocab_size=65535, repetitions=1.0))


@pytest.mark.parametrize("n_tokens", [33, 900, 1000, 10007, 99999])
@pytest.mark.parametrize("max_steps, repetitions", [(6, 0.0), (0, 1.0), (0, 2.4), (0, 0.5)])
def test_all_of_the_text_is_read_where_a_setting_is_0(n_tokens, max_steps, repetitions):
    """This holds for any text, and no window is read twice before all others are read once."""
    s = tiny_settings(max_steps=max_steps, repetitions=repetitions, vocab_size=0)
    fill_in(s, n_ids=300, n_tokens=n_tokens)
    tokens = np.full(n_tokens, 20, np.uint16)
    split = data.Split(tokens, np.array([0, n_tokens], np.uint64))
    stream = data.Stream(data.Corpus(split, split, "", 300, SPECIAL, {}), s)
    n_windows, n_read = n_tokens // 32, s.max_steps * 8
    assert s.vocab_size == 300
    if max_steps > 0:
        assert stream.W == min(n_windows, n_read)
        assert s.repetitions == pytest.approx(n_read / stream.W)
    else:
        assert s.max_steps == max(1, int(repetitions * n_windows) // 8)
        assert stream.W <= n_windows
        if n_read < repetitions * n_windows:
            assert n_read / stream.W == pytest.approx(max(1, repetitions), rel=0.1)


@pytest.mark.parametrize("max_steps", [0, 6])
def test_less_than_one_repetition_reads_a_part_of_the_text_once(max_steps):
    """It needs no more text than it reads, and reports the repetitions correctly."""
    corpus = traceable_corpus(100)
    n_tokens = len(corpus.train.tokens)
    s = tiny_settings(max_steps=max_steps, repetitions=0.01, vocab_size=65535)
    fill_in(s, n_ids=65535, n_tokens=n_tokens)
    assert s.repetitions == 1
    assert data.Stream(corpus, s).W == s.max_steps * s.batch_size


def test_validation_scores_the_same_targets_in_both_modes():
    """Each maskable target counts once in AR; in MD the weights sum to the same number."""
    corpus = traceable_corpus(100)
    s = tiny_settings(vocab_size=65535, eval_tokens=31 * 32, micro_batch_size=2)
    n = 0
    for ar, md in data.val_batches(corpus, s):
        n += len(ar.inputs)
        assert ar.objective == "ar" and (ar.prefix == 0).all()
        assert md.objective == "md" and (md.prefix == 32).all()
        assert (ar.targets == md.targets).all()
        assert (ar.inputs[:, 1:] == ar.targets[:, :-1]).all()
        maskable = ar.targets >= N_SPECIAL
        maskable[:, -1] = False  # its target is not an input
        assert (ar.weights == maskable).all()
        np.testing.assert_allclose(md.weights.sum(1), ar.weights.sum(1), rtol=1e-5)
        # What is scored is what is masked, one to the left.
        assert ((md.inputs == MASK)[:, 1:] == (md.weights > 0)[:, :-1]).all()
    assert n == 30  # whole batches


@pytest.mark.parametrize("n_windows", [1, 2, 3, 5, 8, 20])
def test_few_held_out_windows_measure_eq_4_too(n_windows):
    """Their mask counts lie on a fine grid: the mean of a steep curve is its integral."""
    s = tiny_settings(vocab_size=65535, eval_tokens=n_windows * 32)
    shares, masked = [], []
    for ar, md in data.val_batches(traceable_corpus(100), s):
        assert (ar.targets == md.targets).all()
        masked += (md.inputs == MASK).tolist()
        shares += ((md.inputs == MASK).sum(1) / ar.weights.sum(1)).tolist()
    assert len(shares) == data.count_val_sequences(traceable_corpus(100), s) >= 8
    assert len({tuple(row) for row in masked}) == len(masked)  # not the same masks again
    assert np.mean(np.array(shares) ** 3) == pytest.approx(1 / 4, abs=0.04)


def test_validation_is_the_same_whatever_the_seed():
    corpus = traceable_corpus(100)
    pairs = [list(data.val_batches(corpus, tiny_settings(seed=seed))) for seed in (1, 7)]
    for first, second in zip(*pairs):
        for batch, again in zip(first, second):
            assert all((a == b).all() for a, b in zip(batch[:-1], again[:-1]))


def test_segments_number_the_documents_of_a_window():
    x0 = np.array([30, 31, BOS, 40, 41, BOS, 50])
    batch = data.make_batch([x0], [data.ar_example(x0, None, None, SPECIAL)], "ar", SPECIAL)
    assert batch.segments.tolist() == [[1, 1, 2, 2, 2, 3]]


def test_bytes_per_token_are_those_of_the_text(corpus):
    """The bytes of the validated tokens, counted token by token with another way of decoding."""
    opened = data.open_corpus(corpus / "data/tiny")
    s = tiny_settings()
    vocabulary = json.loads(opened.tokenizer_json)["model"]["vocab"]
    n_bytes = {i: len(piece) for piece, i in vocabulary.items()}  # a character spells a byte
    read = opened.val.tokens[: data.count_val_windows(opened, s) * s.seq_len]
    ordinary = [int(token) for token in read if token >= N_SPECIAL]
    expected = sum(n_bytes[token] for token in ordinary) / len(ordinary)
    assert data.bytes_per_token(opened, s) == pytest.approx(expected)


def test_a_tokenizer_encodes_texts_whole_and_special_tokens_as_text():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    letters = tokenizers.trainers.BpeTrainer(vocab_size=7)  # no merges
    tokenizer.train_from_iterator(["ab<mask>"], letters)
    tokenizer.add_special_tokens(["<mask>"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    parsed = parse_tokenizer(tokenizer.to_str())
    for text in ("ab", "ab" * 20, "a<mask>b"):
        assert parsed.encode(text).tokens == list(text)


def test_special_ids_come_from_the_tokenizer():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.add_tokens(["plain"])
    tokenizer.add_special_tokens(["<|pad|>", "<|endoftext|>", "<mask>"])
    assert find_special_ids(tokenizer.to_str()) == (2, 3, (1, 2, 3))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.add_special_tokens(["<s>"])
    with pytest.raises(ValueError, match="no <mask>"):
        find_special_ids(tokenizer.to_str())


def test_large_vocabularies_need_four_bytes():
    assert data.token_dtype(65536) == np.uint16
    assert data.token_dtype(65537) == np.uint32


def test_a_million_documents_take_little_time():
    """An epoch starts within a second; a batch of 2,048-token windows takes milliseconds of CPU."""
    lengths = np.random.default_rng(0).integers(50, 1000, 10**6)
    starts = np.append(0, np.cumsum(lengths)).astype(np.uint64)
    tokens = np.broadcast_to(np.uint16(20), starts[-1])
    split = data.Split(tokens, starts)
    s = tiny_settings(
        seq_len=2048,
        eval_tokens=4096,
        batch_size=8,
        micro_batch_size=8,
        max_steps=30000,
        repetitions=1,
        alpha="0",
    )
    stream = data.Stream(data.Corpus(split, split, "", 300, SPECIAL, {}), s)
    begin = time.process_time()
    stream.start_epoch(0)
    epoch = time.process_time() - begin
    data.train_batch(stream, s, 0, 0)
    begin = time.process_time()
    for step in range(20):
        data.train_batch(stream, s, step, 0)
    batch = (time.process_time() - begin) / 20
    assert epoch < 1 and batch < 0.02, (epoch, batch)
