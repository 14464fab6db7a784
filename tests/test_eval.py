"""eval.py: every mode against a scorer without its shortcuts; then judging, and the script."""

import itertools
import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from numpy.random import default_rng

import eval as ev
import model as model_file
from checkpoint import Trained
from conftest import BOS, MASK, ROOT, SPECIAL, random_model, run, tiny_settings
from data import open_corpus
from eval import Item, Question
from tasks import TASKS, Document, Task
from test_tasks import make_record, write_tasks
from tokenizer import SpecialIds, parse_tokenizer

RAW = Task("raw", 1 / 2, 0)
CHAR = Task("char", 1 / 4, 0)
PMI = Task("pmi", 1 / 4, 0)


# ---- a model, documents, and short ways to score them --------------------------------------------
@pytest.fixture(scope="session")
def model():
    return random_model(tiny_settings()).eval()


@pytest.fixture(scope="session")
def trained(corpus, model):
    folder = corpus / "data" / "tiny"
    tokenizer_json = (folder / "tokenizer.json").read_text()
    settings = tiny_settings(seq_len=256, data_dir=str(folder))
    checkpoint = {"tokenizer": tokenizer_json}
    return Trained(model, parse_tokenizer(tokenizer_json), SPECIAL, settings, checkpoint)


def save_checkpoint(trained, folder):
    content = {
        "model": trained.model.state_dict(),
        "settings": vars(trained.settings),
        "step": 7,
        "tokenizer": Path(trained.settings.data_dir, "tokenizer.json").read_text(),
    }
    folder.mkdir()
    torch.save(content, folder / "ckpt_7.pt")
    return folder


@pytest.fixture
def checkpoint(tmp_path, trained):
    """Return a run directory that holds a checkpoint of the model."""
    return save_checkpoint(trained, tmp_path / "run")


@pytest.fixture(scope="module")
def task_files(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("raw") / "tasks")


def document(context, completions, gold=0, number=0, subtask=None):
    return Document(subtask, number, context, completions, gold)


DOCUMENTS = [
    document("Question: Where?\nAnswer:", [" rain", " sun", " rain and sun", " rainy", " x"]),
    document("Question: Why?\nAnswer:", [" sun", " sun", " stone"]),
    document("", ["The bird sings.", "The bird sing."]),
    document("Answer:", [" sun", " a long answer: of many words, really"]),
]


@pytest.fixture(scope="session")
def items(trained):
    questions = ev.make_questions(PMI, DOCUMENTS, trained)
    return ev.distinct_items(questions)


def score(model, items, names, mask_counts=(1, 6), n_draws=5):
    """Return {mode: array}, for items in any order."""
    modes = ev.make_modes(names, mask_counts, n_draws, MASK)
    values = ev.score(model, items, modes)
    return {mode: np.array(v) for mode, v in values.items()}


@pytest.fixture
def batches(monkeypatch):
    """Collect the batches of rows that are computed."""
    computed = []
    pad_batch = ev.pad_batch

    def collect(rows):
        computed.append(rows)
        return pad_batch(rows)

    monkeypatch.setattr(ev, "pad_batch", collect)
    return computed


def count_rows(batches):
    return sum(len(rows) for rows in batches)


# ---- the plain scorer: one row, one forward pass, a mask written out -----------------------------
@torch.inference_mode()
def log_p(model, tokens, visible):
    """Return (T, V) for one row, where position q sees position k if visible[q, k]."""
    T = len(tokens)
    h = model.hidden(torch.tensor([tokens]), visible[None, None], torch.arange(T)[None])
    return torch.log_softmax(model.head(h)[0].double(), -1)


def plain_causal(model, item, bidirectional_context):
    c, w = item
    T = len(c + w)
    visible = torch.ones(T, T, dtype=torch.bool).tril()
    if bidirectional_context:
        visible[:, : len(c)] = True
    p = log_p(model, c + w, visible)
    return sum(p[len(c) + i - 1, w[i]].item() for i in range(len(w)))


def plain_masked(model, item, masked):
    """Return log p of every token of the completion, given that some are masked."""
    c, w = item
    T = len(c + w)
    tokens = list(c + w)
    for i in masked:
        tokens[len(c) + i] = MASK
    p = log_p(model, tokens, torch.ones(T, T, dtype=torch.bool))
    return [p[len(c) + i - 1, w[i]].item() for i in range(len(w))]


def plain(model, mode, item, n_draws=5):
    L = len(item.completion)
    if mode in ("ar", "prefix"):
        return plain_causal(model, item, mode == "prefix")
    if mode == "mc":
        generator = default_rng(item.completion)
        jitter = generator.random()
        total = 0
        for draw in range(n_draws):
            k = 1 + int((draw + jitter) / n_draws * L)
            masked = generator.permutation(L)[:k]
            p = plain_masked(model, item, masked)
            total += L / k * sum(p[i] for i in masked)
        return total / n_draws
    n_masks = L if mode == "chain" else int(mode[3:])
    return sum(plain_masked(model, item, range(i, min(i + n_masks, L)))[i] for i in range(L))


ALL_MODES = ["ar", "prefix", "pll1", "pll2", "pll6", "chain", "mc"]


def test_every_mode_equals_the_plain_scorer(model, items):
    values = score(model, items, ev.MODES, mask_counts=(1, 2, 6))
    assert list(values) == ALL_MODES
    for mode, got in values.items():
        expected = [plain(model, mode, item) for item in items]
        np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=mode)


def test_single_steps_give_the_ar_sum(model, items):
    """One forward pass for each token, on what precedes it."""
    item = items[-1]
    c, w = item
    expected = 0
    for i in range(len(w)):
        tokens = c + w[:i]
        causal = torch.ones(len(tokens), len(tokens)).tril().bool()
        expected += log_p(model, tokens, causal)[-1, w[i]].item()
    values = score(model, [item], ["ar"])
    assert values["ar"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "name, value",
    [("MAX_TOKENS", {"cpu": 10}), ("MAX_PADDING", 0.9), ("MAX_BRANCHES", 2), ("CHUNK", 3)],
)
def test_scores_do_not_depend_on_batches(name, value, model, items, batches, monkeypatch):
    before = score(model, items, ev.MODES)
    batches_before = batches.copy()
    batches.clear()
    monkeypatch.setattr(ev, name, value)
    after = score(model, items, ev.MODES)
    assert batches != batches_before
    for mode in before:
        np.testing.assert_allclose(after[mode], before[mode], rtol=1e-5)


# ---- invariants ----------------------------------------------------------------------------------
def test_pll_and_chain_under_causal_attention_are_the_ar_sum(model, items, monkeypatch):
    """What is masked lies in the future. This also proves the shift."""
    bidirectional = score(model, items, ["ar", "pll", "chain"], mask_counts=(1, 3))

    hidden = model.hidden

    def causal_hidden(tokens, mask, positions):
        T = tokens.shape[1]
        return hidden(tokens, torch.ones(1, 1, T, T, dtype=torch.bool).tril(), positions)

    monkeypatch.setattr(model, "hidden", causal_hidden)
    causal = score(model, items, ["pll", "chain"], mask_counts=(1, 3))
    for mode in ("pll1", "pll3", "chain"):
        np.testing.assert_allclose(causal[mode], bidirectional["ar"], rtol=1e-5)
        assert abs(bidirectional[mode] - bidirectional["ar"]).max() > 0.1


def test_prefix_is_ar_only_without_a_context(model, items):
    values = score(model, items, ["ar", "prefix"])
    difference = abs(values["ar"] - values["prefix"])
    empty = np.array([item.context == (BOS,) for item in items])
    assert empty.sum() == 2
    assert (difference[empty] == 0).all()
    assert (difference[~empty] > 1e-3).all()


def test_pll_with_as_many_masks_as_tokens_is_chain(model, items):
    short = [Item(c, w[:4]) for c, w in items]
    values = score(model, list(dict.fromkeys(short)), ["pll", "chain"], mask_counts=(3, 4, 6))
    np.testing.assert_array_equal(values["pll4"], values["chain"])
    np.testing.assert_array_equal(values["pll6"], values["chain"])
    assert abs(values["pll3"] - values["chain"]).max() > 1e-3


def test_chain_and_ar_are_likelihoods_but_pll_is_not():
    """Over all completions of one length, the probabilities sum to 1."""
    model = random_model(tiny_settings(vocab_size=20)).eval()
    every_pair = [Item((BOS, 17, 18), w) for w in itertools.product(range(20), repeat=2)]
    values = score(model, every_pair, ["ar", "prefix", "pll", "chain"], mask_counts=(1,))
    for mode in ("ar", "prefix", "chain"):
        assert np.exp(values[mode]).sum() == pytest.approx(1, abs=1e-5)
    assert abs(np.exp(values["pll1"]).sum() - 1) > 1e-3


def test_pmi_of_the_unconditional_context_is_zero(trained):
    """Also in mc, because the masks depend on the completion alone."""
    (question,) = ev.make_questions(PMI, DOCUMENTS[3:], trained)
    assert question.given == question.unconditional

    def masks(item):
        rows = [row for row, _ in ev.mc_rows([item], 32, MASK)]
        return [row.trunk[len(item.context) :] for row in rows]

    item = question.given[1]
    assert masks(item) == masks(Item((BOS, 20, 30), item.completion))
    assert len(set(masks(item))) > 10


def test_mc_of_one_token_is_pll1_in_one_row(model, batches):
    items = [Item((BOS, 20, 21), (token,)) for token in (30, 31, 32)]
    values = score(model, items, ["pll", "chain", "mc"], n_draws=256)
    assert count_rows(batches) == 1  # for three answers and all modes
    np.testing.assert_allclose(values["mc"], values["pll1"], rtol=1e-6)


def test_mc_of_two_tokens_is_the_mean_over_both_orders(model):
    item = Item((BOS, 20, 21, 22), (30, 31))
    first, second = plain_masked(model, item, [0, 1])
    exact = (first + plain_masked(model, item, [1])[1]) / 2
    exact += (second + plain_masked(model, item, [0])[0]) / 2
    values = score(model, [item], ["mc"], n_draws=4096)
    assert values["mc"][0] == pytest.approx(exact, rel=0.01)
    few = score(model, [item], ["mc"], n_draws=1)
    assert few["mc"][0] != pytest.approx(exact, rel=0.01)


# ---- what is computed, and how often -------------------------------------------------------------
def test_completions_of_a_context_share_its_row():
    c = (BOS, *range(20, 60))
    items = [Item(c, w) for w in [(70, 90), (70, 71, 72), (70, 71, 80, 81)]]
    ((row, reads),) = ev.causal_rows(items, bidirectional_context=True)
    assert row == ev.Row(c, ((70,), (70, 71), (70, 71, 80)), prefix=len(c))
    places = [[read.place for read in reads if read.item == item] for item in items]
    assert places == [[40, 41], [40, 42, 43], [40, 44, 45, 46]]

    tokens, segments, positions, prefix = ev.pad_batch([row])
    assert tokens[0].tolist() == [*c, 70, 70, 71, 70, 71, 80]
    assert segments[0].tolist() == [0] * 41 + [1, 2, 2, 3, 3, 3]
    assert positions[0].tolist() == [*range(41), 41, 41, 42, 41, 42, 43]
    assert prefix.tolist() == [41]


def test_equal_rows_are_computed_once(model, batches):
    """pll1 and pll6 share the row of the last token; completions of one length share all masks."""
    items = [Item((BOS, 20), w) for w in [(30, 31, 32), (40, 41, 42)]]
    score(model, items, ["pll"])
    three_of_pll1, all_masks, two_masks = 2 * 3, 1, 2 * 1
    assert count_rows(batches) == three_of_pll1 + all_masks + two_masks


@pytest.mark.parametrize("context, n_rows", [((BOS,), 1), ((BOS, 20), 2)])
def test_without_a_context_ar_and_prefix_share_their_row(context, n_rows, model, batches):
    score(model, [Item(context, (30, 31))], ["ar", "prefix"])
    assert count_rows(batches) == n_rows


def test_equal_items_of_several_questions_are_one(trained):
    questions = ev.make_questions(CHAR, DOCUMENTS + DOCUMENTS, trained)
    n_distinct = 5 + 2 + 2 + 2
    assert len(ev.distinct_items(questions)) == n_distinct
    assert sum(len(question.given) for question in questions) == 2 * (n_distinct + 1)


def test_scores_do_not_depend_on_how_many_logits_exist_at_a_time(trained, monkeypatch):
    questions = ev.make_questions(CHAR, DOCUMENTS, trained)
    items = ev.distinct_items(questions)
    expected = score(trained.model, items, ["ar", "pll"])
    monkeypatch.setattr(ev, "MAX_LOGITS", 3)
    found = score(trained.model, items, ["ar", "pll"])
    for mode in expected:
        np.testing.assert_allclose(found[mode], expected[mode], rtol=1e-5)


def test_padding_is_small(trained, task_files, batches):
    documents = ev.read_task("mmlu", task_files, 2)
    questions = ev.make_questions(TASKS["mmlu"], documents, trained)
    score(trained.model, ev.distinct_items(questions)[:100], ["ar", "pll"])
    n_tokens = sum(ev.length(row) for rows in batches for row in rows)
    n_places = sum(len(rows) * ev.length(rows[0]) for rows in batches)
    assert n_tokens < n_places < 1.03 * n_tokens


def test_the_special_tokens_are_those_of_the_checkpoint(trained):
    other = trained._replace(special=SpecialIds(bos=9, mask=7, all=(7, 9)))
    questions = ev.make_questions(CHAR, DOCUMENTS, other)
    items = ev.distinct_items(questions) + ev.heldout_questions(other, 1)[0].given
    assert all(item.context[0] == 9 for item in items)
    modes = ev.make_modes(["pll", "chain", "mc"], [1, 6], 4, mask=7)
    for make_rows in modes.values():
        for row, _ in make_rows(items):
            assert 7 in row.trunk and MASK not in row.trunk


# ---- questions -----------------------------------------------------------------------------------
def test_a_long_question_loses_the_left_of_its_context(trained):
    long = document("one two three four five six seven\nAnswer:", [" sun", " rain and moon"])
    (whole,) = ev.make_questions(CHAR, [long], trained)
    assert not whole.is_cut
    longest = max(len(item.completion) for item in whole.given)

    narrow = trained._replace(settings=tiny_settings(seq_len=longest + 6))
    questions = ev.make_questions(CHAR, [long, DOCUMENTS[2]], narrow)
    assert [question.is_cut for question in questions] == [True, False]
    for item in questions[0].given:
        assert item.context == (BOS, *whole.given[0].context[-5:])


def test_a_completion_is_never_cut(trained):
    narrow = trained._replace(settings=tiny_settings(seq_len=3))
    (cut,) = ev.make_questions(CHAR, DOCUMENTS[3:], narrow)
    (whole,) = ev.make_questions(CHAR, DOCUMENTS[3:], trained)
    assert [item.completion for item in cut.given] == [item.completion for item in whole.given]
    assert cut.given[0].context == (BOS,)


def test_a_token_across_the_border_is_refused(trained):
    """A tokenizer without any splitting, which has learned ': s' as one token."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    texts = ["Answer: sun", "r: s", ": s"] * 9 + ["Answer: rain"]
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=40))
    other = trained._replace(tokenizer=bpe)
    with pytest.raises(SystemExit, match="after 'Answer:'"):
        ev.make_questions(CHAR, [document("Answer:", [" rain", " sun"])], other)


def test_heldout_asks_for_the_true_continuation_among_four(trained):
    corpus = open_corpus(trained.settings.data_dir)
    stream = " ".join(map(str, corpus.val.tokens.tolist()))
    questions = ev.heldout_questions(trained, 1000, n_completion=8)
    assert len(questions) > 20
    for number, question in enumerate(questions):
        assert question.document.number == number
        assert question.document.gold == number % 4
        is_true = []
        for item, text in zip(question.given, question.document.completions):
            assert len(item.context) == 17 and len(item.completion) == 8
            assert BOS not in item.context[1:] + item.completion
            assert trained.tokenizer.decode(item.completion) == text
            passage = " ".join(map(str, item.context[1:] + item.completion))
            is_true.append(passage in stream)
        assert is_true.index(True) == question.document.gold
        assert is_true.count(True) == 1


def test_heldout_asks_the_same_whatever_the_limit(trained):
    many = ev.heldout_questions(trained, 50, n_completion=4)
    assert ev.heldout_questions(trained, 3, n_completion=4) == many[:3]


def test_heldout_takes_1000_passages_or_as_many_as_asked(checkpoint, tmp_path, monkeypatch):
    def count(*args):
        evaluate(monkeypatch, "--ckpt", checkpoint, "--tasks", "heldout", "--modes", "ar", *args)
        return json.loads((tmp_path / "j").read_text())["tasks"]["heldout"]["ar"]["n"]

    short = ["--completion", 1, "--context", 1, "--json", tmp_path / "j"]
    assert count(*short) == 1000
    assert count(*short, "--limit", 1003) == 1003


def test_a_stride_of_one_completion_asks_for_every_token_once(trained):
    """Completions do not overlap, contexts do; a document's first context is never asked for."""
    tokens, starts = open_corpus(trained.settings.data_dir).val
    expected = []
    for start, end in itertools.pairwise(starts.tolist()):
        for place in range(start + 1 + 16, end - 3, 4):
            expected.append(tuple(tokens[place - 16 : place + 4].tolist()))
    questions = ev.heldout_questions(trained, 10**6, n_context=16, n_completion=4, stride=4)
    true_items = [question.given[question.document.gold] for question in questions]
    passages = [item.context[1:] + item.completion for item in true_items]
    assert sorted(passages) == sorted(expected)
    assert len(passages) > 3 * len(ev.heldout_questions(trained, 10**6, 16, 4))


@pytest.mark.parametrize("n_context, n_completion, expected", [(0, 0, (64, 32)), (40, 5, (40, 5))])
def test_lengths_of_heldout_can_be_chosen(n_context, n_completion, expected, trained):
    (question,) = ev.heldout_questions(trained, 1, n_context, n_completion)
    item = question.given[0]
    assert (len(item.context) - 1, len(item.completion)) == expected


@pytest.mark.parametrize(
    "seq_len, n_context, message",
    [(256, 248, "window of this model has 256"), (4096, 2000, "has 0 held-out passages of 2008")],
)
def test_heldout_refuses_what_does_not_fit(seq_len, n_context, message, trained):
    data_dir = trained.settings.data_dir
    settings = tiny_settings(seq_len=seq_len, eval_tokens=seq_len, data_dir=data_dir)
    with pytest.raises(SystemExit, match=f"{message}.*shorten --context {n_context}"):
        ev.heldout_questions(trained._replace(settings=settings), 1, n_context, 8)


def test_heldout_refuses_other_data(trained):
    other = trained._replace(checkpoint={**trained.checkpoint, "data": {}})
    with pytest.raises(SystemExit, match="not what this checkpoint was trained on"):
        ev.heldout_questions(other, 1)


def test_an_imported_model_without_held_out_text_is_sent_to_the_tasks(trained, tmp_path):
    settings = tiny_settings(data_dir=str(tmp_path / "none"))
    with pytest.raises(SystemExit, match="imported model has no held-out text.*prepare.py --tasks"):
        ev.heldout_questions(trained._replace(settings=settings), 1)


def test_heldout_refuses_data_of_another_tokenizer(trained):
    """An imported checkpoint does not say what it was trained on, but it has its own tokenizer."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    other = trained._replace(checkpoint={"tokenizer": tokenizer.to_str()})
    with pytest.raises(SystemExit, match="another tokenizer"):
        ev.heldout_questions(other, 1)


# ---- judging -------------------------------------------------------------------------------------
def make_question(texts, gold=0, subtask=None, number=0):
    """Return a question whose items are told apart by their numbers."""
    given = [Item((number,), (i,)) for i in range(len(texts))]
    unconditional = [Item((-1,), (i,)) for i in range(len(texts))]
    return Question(document("c", texts, gold, number, subtask), given, unconditional)


def judge(task, question, given, unconditional=()):
    """Return the points of one question."""
    log_p = dict(zip(question.given + question.unconditional, [*given, *unconditional]))
    points, _ = ev.judge(task, [question], log_p)
    return points[0]


@pytest.mark.parametrize("task, best", [(RAW, 0), (CHAR, 2), (PMI, 1)])
def test_raw_prefers_the_short_char_the_long_and_pmi_the_unlikely(task, best):
    given, unconditional = [-3.0, -4.5, -7.5], [-1.0, -9.0, -8.0]
    for gold in range(3):
        question = make_question([" a", " abc", " abcdefg"], gold)
        assert judge(task, question, given, unconditional) == (1 if gold == best else 0)


def test_char_counts_the_space():
    """-2.1 / 2 is more than -4.4 / 4; without the space, -2.1 / 1 is less than -4.4 / 3."""
    question = make_question([" a", " abc"])
    assert judge(CHAR, question, [-2.1, -4.4]) == 1
    assert judge(CHAR, question, [-2.1, -4.0]) == 0


@pytest.mark.parametrize(
    "given, gold, expected",
    [
        ([-3.0, -3.0], 0, 1 / 2),
        ([-3.0, -3.0], 1, 1 / 2),
        ([-3.0, -3.0, -3.0, -4.0], 2, 1 / 3),
        ([-3.0, -3.0, -4.0], 2, 0),
        ([-3.0, -4.0, -4.0], 0, 1),
    ],
)
def test_ties_share_the_point(given, gold, expected):
    assert judge(RAW, make_question(["a"] * len(given), gold), given) == expected


def test_a_model_without_an_opinion_solves_half_of_blimp(trained, tmp_path, monkeypatch, capsys):
    """The right answer always comes first in BLiMP."""
    model = random_model(tiny_settings()).eval()
    torch.nn.init.zeros_(model.head.weight)
    documents = [document("", ["It is.", "It am."], subtask=name) for name in "aabb"]
    questions = ev.make_questions(TASKS["blimp"], documents, trained._replace(model=model))
    items = ev.distinct_items(questions)
    assert len({len(item.completion) for item in items}) == 1
    modes = ev.make_modes(["ar"], [1], 1, MASK)
    values = ev.score(model, items, modes)
    log_p = {"ar": dict(zip(items, values["ar"]))}
    result = ev.evaluate_task(TASKS["blimp"], questions, log_p)["ar"]
    assert result["accuracy"] == 0.5 and result["normalized"] == 0 and result["ties"] == 4


def results_of(points_by_subtask, task=TASKS["mmlu"]):
    """Return the result of a mode that has these points on these subtasks."""
    questions, log_p = [], {}
    for subtask, points in points_by_subtask.items():
        for point in points:
            question = make_question(["a", "b"], subtask=subtask, number=len(questions))
            log_p |= {question.given[0]: -1.0, question.given[1]: -2.0 if point else -0.5}
            questions.append(question)
    return ev.evaluate_task(task, questions, {"ar": log_p})["ar"]


def test_subtasks_count_alike_whatever_their_size():
    result = results_of({"small": [1, 1], "large": [1, 0, 0, 0]})
    assert result["subtasks"] == {"small": 1.0, "large": 0.25}
    assert result["accuracy"] == 0.625 and result["n"] == 6
    assert result["normalized"] == pytest.approx((0.625 - 1 / 4) / (3 / 4))


def test_standard_errors_are_from_the_unbiased_variance():
    result = results_of({None: [1, 0, 0, 0]}, CHAR)
    variance = (0.75**2 + 3 * 0.25**2) / 3
    assert result["stderr"] == pytest.approx((variance / 4) ** 0.5)
    result = results_of({"a": [1, 0], "b": [1, 0, 0, 0]})
    expected = (0.5 / 2 + variance / 4) ** 0.5 / 2
    assert result["stderr"] == pytest.approx(expected)


@pytest.mark.parametrize("points", [{None: [1]}, {"a": [1], "b": [0]}, {"a": [1], "b": [0, 1]}])
def test_one_document_has_no_standard_error(points):
    result = results_of(points)
    assert result["stderr"] is None and result["nats_per_token_stderr"] is None


def test_nothing_is_printed_where_there_is_no_standard_error(
    checkpoint, task_files, tmp_path, monkeypatch, capsys
):
    flags = ["--data", task_files, "--tasks", "blimp,piqa,heldout", "--limit", 1, "--mc", 1]
    evaluate(monkeypatch, "--ckpt", checkpoint, *flags, "--json", tmp_path / "j")
    assert "±" not in capsys.readouterr().out
    for row in json.loads((tmp_path / "j").read_text())["tasks"].values():
        assert all(result["stderr"] is None for result in row.values())


def test_differences_from_ar_are_paired():
    """Both modes vary a lot from question to question; their difference hardly varies."""
    rng = default_rng(0)
    questions = [make_question(["a", "b"], number=number) for number in range(50)]
    log_p = {"ar": {}, "prefix": {}}
    nats = rng.normal(-5, 3, 50)
    differences = rng.normal(0.1, 0.01, 50)
    for question, value, difference in zip(questions, nats, differences):
        log_p["ar"] |= {question.given[0]: value, question.given[1]: -5.0}
        log_p["prefix"] |= {question.given[0]: value + difference, question.given[1]: -5.0}
    results = ev.evaluate_task(RAW, questions, log_p)
    assert "minus_ar" not in results["ar"]
    minus_ar = results["prefix"]["minus_ar"]
    assert results["ar"]["nats_per_token"] == pytest.approx(nats.mean())
    assert results["ar"]["nats_per_token_stderr"] == pytest.approx(nats.std(ddof=1) / 50**0.5)
    assert minus_ar["nats_per_token"] == pytest.approx(differences.mean())
    stderr = differences.std(ddof=1) / 50**0.5
    assert minus_ar["nats_per_token_stderr"] == pytest.approx(stderr)
    changed = (nats + differences > -5).astype(float) - (nats > -5)
    assert minus_ar["accuracy"] == pytest.approx(changed.mean())
    assert minus_ar["stderr"] == pytest.approx(changed.std(ddof=1) / 50**0.5)


def test_nats_per_token_are_those_of_the_right_completion():
    wrong, right = Item((1,), (5, 6)), Item((1,), (7, 7, 7, 7))
    question = Question(document("c", ["a", "b"], gold=1), [wrong, right], [])
    _, nats = ev.judge(RAW, [question], {wrong: -3.0, right: -2.0})
    assert nats.tolist() == [-0.5]


def test_combinations_are_those_of_the_papers_table():
    """The paper's model with 32 repetitions, alpha = 1/2: scores for 1 to 6 masks (appendix)."""
    rows = {
        "arc_easy": [18.7, 24.1, 25.5, 26.3, 26.0, 26.3],
        "arc_challenge": [4.7, 3.3, 3.8, 2.7, 1.9, 2.6],
        "blimp": [65.2, 63.9, 62.5, 60.3, 60.5, 60.3],
        "commonsenseqa": [29.4, 32.8, 33.9, 34.1, 34.1, 34.1],
        "hellaswag": [29.8, 27.0, 26.7, 27.1, 26.7, 26.4],
        "mmlu": [2.0, 3.5, 3.1, 2.9, 3.3, 3.3],
        "openbookqa": [9.1, 7.7, 8.5, 9.3, 7.2, 6.9],
        "piqa": [33.1, 34.3, 35.1, 35.4, 35.6, 36.8],
        "socialiqa": [11.4, 13.3, 13.7, 13.5, 14.4, 14.4],
    }
    results = {"heldout": {f"pll{n}": {"accuracy": 1, "normalized": 99} for n in range(1, 7)}}
    for name, scores in rows.items():
        results[name] = {}
        for n, value in enumerate(scores, 1):
            results[name][f"pll{n}"] = {"accuracy": value / 100, "normalized": value}
    combinations = ev.combine_pll(results, range(1, 7))
    printed = {"1-2": 24.1, "1-3": 24.5, "1-4": 24.6, "1-5": 24.7, "1-6": 24.8}
    assert combinations == pytest.approx(printed, abs=0.1)


# ---- the script ----------------------------------------------------------------------------------
def evaluate(monkeypatch, *args):
    """Run the script in this process."""
    monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, args)])
    ev.main()


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_strings_can_be_dumped_without_a_checkpoint(task_files, tmp_path, monkeypatch):
    evaluate(monkeypatch, "--data", task_files, "--limit", 2, "--dump", tmp_path / "d")
    lines = read_lines(tmp_path / "d")
    assert list(dict.fromkeys(line["task"] for line in lines)) == list(TASKS)
    first = next(line for line in lines if line["task"] == "openbookqa")
    text = make_record("openbookqa", 0)["question"]["choices"][0]["text"]
    assert first == {
        "task": "openbookqa",
        "subtask": None,
        "doc": 0,
        "choice": 0,
        "context": "Question: Where is the rain?\nAnswer:",
        "completion": " " + text,
        "uncond_context": "Answer:",
        "gold": 0,
    }
    piqa = [line["uncond_context"] for line in lines if line["task"] == "piqa"]
    assert piqa == [None] * 4


NAMES = ["blimp", "openbookqa", "piqa", "heldout"]
MODE_NAMES = ["ar", "prefix", "pll1", "pll6", "chain", "mc"]


@pytest.fixture(scope="module")
def evaluated(trained, task_files, tmp_path_factory):
    """Return what one evaluation of four tasks in all modes prints, reports and dumps."""
    folder = tmp_path_factory.mktemp("evaluated")
    save_checkpoint(trained, folder / "run")
    flags = ["--ckpt", "run", "--data", str(task_files), "--tasks", ",".join(NAMES)]
    flags += ["--modes", "ar,prefix,pll,chain", "--mc", "3", "--limit", "2"]
    output = run("eval.py", *flags, "--dump", "new/d", "--json", "new/j", cwd=folder)
    assert sorted(os.listdir(folder / "new")) == ["d", "j"]  # and no temporary file
    return output, json.loads((folder / "new/j").read_text()), read_lines(folder / "new/d")


def test_the_dump_holds_the_scores_of_the_plain_scorer(evaluated, trained):
    _, _, lines = evaluated
    chosen = [line for line in lines if line["task"] in ("openbookqa", "piqa")][:10]
    for line in chosen:
        contexts = {"": line["context"]}
        if line["task"] == "openbookqa":
            contexts["_uncond"] = "Answer:"
        for ending, context in contexts.items():
            c = (BOS, *trained.tokenizer.encode(context).ids)
            joint = trained.tokenizer.encode(context + line["completion"]).ids
            item = Item(c, tuple(joint[len(c) - 1 :]))
            assert line["tokens"] == len(item.completion)
            for mode in MODE_NAMES:
                expected = plain(trained.model, mode, item, n_draws=3)
                assert line[mode + ending] == pytest.approx(expected, rel=1e-5)
    assert "ar_uncond" not in chosen[-1]


def test_the_report_follows_from_the_dump(evaluated):
    _, report, lines = evaluated
    for name, mode in itertools.product(NAMES, MODE_NAMES):
        documents = {}
        for line in lines:
            if line["task"] == name:
                documents.setdefault(line["doc"], []).append(line)
        points, nats = [], []
        for choices in documents.values():
            scores = []
            for line in choices:
                value = line[mode]
                if name == "openbookqa":
                    value -= line[f"{mode}_uncond"]
                if name == "piqa":
                    value /= len(line["completion"])
                scores.append(value)
            gold = choices[0]["gold"]
            points.append((scores[gold] == max(scores)) / scores.count(max(scores)))
            nats.append(choices[gold][mode] / choices[gold]["tokens"])
        result = report["tasks"][name][mode]
        assert result["n"] == len(points)
        assert result["accuracy"] == pytest.approx(np.mean(points))
        assert result["nats_per_token"] == pytest.approx(np.mean(nats))


def test_the_average_is_over_the_papers_tasks(evaluated):
    output, report, _ = evaluated
    normalized = [report["tasks"][name]["ar"]["normalized"] for name in NAMES if name in TASKS]
    assert len(normalized) == 3 and "average of 3" in output
    assert report["average"]["ar"] == pytest.approx(np.mean(normalized))


def test_pll_is_the_best_number_of_masks_and_says_so(evaluated):
    output, report, _ = evaluated
    assert "chosen on the test score" in output
    for row in report["tasks"].values():
        assert row["pll"]["accuracy"] == max(row["pll1"]["accuracy"], row["pll6"]["accuracy"])
        assert row["pll"]["best"] in ("pll1", "pll6")


def test_heldout_alone_has_no_average(checkpoint, tmp_path, monkeypatch, capsys):
    flags = ["--ckpt", checkpoint, "--data", tmp_path, "--limit", 2, "--modes", "ar"]
    evaluate(monkeypatch, *flags, "--json", tmp_path / "j")
    output = capsys.readouterr().out
    assert "heldout" in output and "average" not in output
    assert json.loads((tmp_path / "j").read_text())["average"] == {}


def test_heldout_prints_differences_from_ar_with_their_errors(
    checkpoint, tmp_path, monkeypatch, capsys
):
    flags = ["--ckpt", checkpoint, "--tasks", "heldout", "--limit", 5, "--completion", 4]
    evaluate(monkeypatch, *flags, "--json", tmp_path / "j")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    row = json.loads((tmp_path / "j").read_text())["tasks"]["heldout"]
    for mode in ("prefix", "pll1", "pll6"):
        minus_ar = row[mode]["minus_ar"]
        expected = [mode]
        for value, error, digits in (
            (row[mode]["nats_per_token"], row[mode]["nats_per_token_stderr"], 3),
            (100 * minus_ar["accuracy"], 100 * minus_ar["stderr"], 1),
            (minus_ar["nats_per_token"], minus_ar["nats_per_token_stderr"], 4),
        ):
            expected += [f"{value:.{digits}f}", f"±{error:.{digits}f}"]
        assert expected in lines


def test_many_mask_counts_print_the_table_of_combinations(
    checkpoint, tmp_path, monkeypatch, capsys
):
    flags = ["--ckpt", checkpoint, "--tasks", "heldout", "--limit", 4, "--completion", 4]
    flags += ["--modes", "pll", "--json", tmp_path / "j"]
    evaluate(monkeypatch, *flags, "--pll", "1,2,3,4,5,6")
    report = json.loads((tmp_path / "j").read_text())
    assert list(report["combinations"]) == ["1-2", "1-3", "1-4", "1-5", "1-6"]
    lines = [line.split()[-5:] for line in capsys.readouterr().out.splitlines()]
    assert list(report["combinations"]) in lines
    assert [f"{100 * value:.1f}" for value in report["combinations"].values()] in lines
    row = report["tasks"]["heldout"]
    best = max(row["pll1"]["normalized"], row["pll3"]["normalized"])
    assert report["combinations"]["1-3"] == pytest.approx(best)
    evaluate(monkeypatch, *flags, "--pll", "1,6")
    assert "1-6" not in capsys.readouterr().out


def narrow_checkpoint(trained, folder, seq_len, vocab_size=300):
    """Write a checkpoint of another model, trained on the same data; return its directory."""
    settings = tiny_settings(
        seq_len=seq_len, vocab_size=vocab_size, data_dir=trained.settings.data_dir
    )
    other = trained._replace(model=random_model(settings).eval(), settings=settings)
    return save_checkpoint(other, folder)


def test_contexts_that_were_cut_are_counted(trained, task_files, tmp_path, monkeypatch, capsys):
    flags = ["--data", task_files, "--tasks", "mmlu,blimp", "--limit", 1, "--modes", "ar"]
    for seq_len, n_cut in ((16, 57), (256, 0)):
        folder = narrow_checkpoint(trained, tmp_path / f"run{seq_len}", seq_len)
        evaluate(monkeypatch, "--ckpt", folder, *flags, "--json", tmp_path / "j")
        assert json.loads((tmp_path / "j").read_text())["contexts_cut"] == n_cut
        assert ("57 contexts were too long" in capsys.readouterr().out) == (n_cut > 0)


@pytest.mark.parametrize(
    "seq_len, lengths", [(2, None), (3, [1, 1]), (4, [0, 0]), (5, [1, 3]), (5, [3, 1])]
)
def test_the_smallest_windows_and_an_odd_vocabulary_can_be_evaluated(
    seq_len, lengths, trained, task_files, tmp_path, monkeypatch
):
    folder = narrow_checkpoint(trained, tmp_path / "run", seq_len, vocab_size=301)
    flags = ["--ckpt", folder, "--data", task_files, "--limit", 3, "--modes", "ar,prefix,pll,chain"]
    flags += ["--mc", 3, "--json", tmp_path / "j"]
    if lengths is None:
        with pytest.raises(SystemExit, match="window of this model has 2: shorten --context"):
            evaluate(monkeypatch, *flags, "--tasks", "heldout", "--context", 1, "--completion", 1)
        flags += ["--tasks", "openbookqa,blimp"]
    else:
        flags += ["--tasks", "openbookqa,blimp,heldout"]
        flags += ["--context", lengths[0], "--completion", lengths[1]]
    evaluate(monkeypatch, *flags)
    for by_mode in json.loads((tmp_path / "j").read_text())["tasks"].values():
        for mode in MODE_NAMES:
            assert np.isfinite(by_mode[mode]["nats_per_token"])


# ---- resuming ------------------------------------------------------------------------------------
@pytest.fixture
def forward_passes(monkeypatch):
    """Count forward passes; after passes["allowed"] of them, end the process as Ctrl-C does."""
    passes = Counter(allowed=10**6)
    hidden = model_file.Transformer.hidden

    def counting(self, *args):
        passes["done"] += 1
        if passes["done"] > passes["allowed"]:
            raise KeyboardInterrupt
        return hidden(self, *args)

    monkeypatch.setattr(model_file.Transformer, "hidden", counting)
    return passes


def test_an_interrupted_evaluation_resumes(
    checkpoint, task_files, tmp_path, monkeypatch, forward_passes
):
    """What is finished is not computed again, and the report is that of an uninterrupted run."""
    flags = ["--ckpt", checkpoint, "--data", task_files, "--tasks", "piqa,arc_easy", "--limit", 3]
    flags += ["--json", tmp_path / "j"]
    evaluate(monkeypatch, *flags)
    expected = json.loads((tmp_path / "j").read_text())
    n_whole = forward_passes["done"]
    for file in checkpoint.glob("eval-*"):
        file.unlink()

    forward_passes.update(done=-n_whole, allowed=n_whole - 1 - 10**6)
    with pytest.raises(KeyboardInterrupt):
        evaluate(monkeypatch, *flags)
    forward_passes.update(done=-n_whole, allowed=10**6)
    evaluate(monkeypatch, *flags)
    assert 0 < forward_passes["done"] < n_whole
    assert json.loads((tmp_path / "j").read_text()) == expected
    assert [file.suffix for file in checkpoint.glob("eval-*")] == [".json"]


@pytest.mark.parametrize("change", [["--limit", 2], ["--pll", "1"], ["--modes", "ar"], ["--mc", 2]])
def test_other_flags_are_another_evaluation(change, checkpoint, monkeypatch, forward_passes):
    flags = ["--ckpt", checkpoint, "--tasks", "heldout", "--limit", 3, "--completion", 2]
    evaluate(monkeypatch, *flags)
    n_passes = forward_passes["done"]
    evaluate(monkeypatch, *flags)
    assert forward_passes["done"] == n_passes
    evaluate(monkeypatch, *flags, *change)
    assert forward_passes["done"] > n_passes


DAMAGES = {
    "empty": lambda content: b"",
    "a list": lambda content: b"[]",
    "no scores": lambda content: b'{"heldout": 3}',
    "too few scores": lambda content: b'{"heldout": {"ar": [-1.0]}}',
    "no checksum": lambda content: content.partition(b"\n")[2],
    "cut": lambda content: content[:-50],
    "other numbers": lambda content: content.replace(b"3", b"4"),
    "not text": lambda content: content + b"\xff",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_scores_are_computed_again(name, checkpoint, monkeypatch, capsys):
    """Whatever has become of the file: not JSON, JSON of another shape, or another number."""
    flags = ["--ckpt", checkpoint, "--tasks", "heldout", "--limit", 3, "--modes", "ar"]
    evaluate(monkeypatch, *flags)
    table = capsys.readouterr().out
    (file,) = checkpoint.glob("eval-*")
    content = file.read_bytes()
    file.write_bytes(DAMAGES[name](content))
    evaluate(monkeypatch, *flags)
    output = capsys.readouterr()
    assert output.out == table and "is damaged: scoring again" in output.err
    assert file.read_bytes() == content


@pytest.mark.parametrize("name", ["eval.py", "tasks.py", "model.py", "data.py", "checkpoint.py"])
def test_saved_scores_of_other_code_are_not_used(name, trained, checkpoint, tmp_path, monkeypatch):
    """They depend on every module that takes part, and on the checkpoint."""
    for file in Path(ROOT).glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(ev, "__file__", str(tmp_path / "eval.py"))
    file = checkpoint / "ckpt_7.pt"
    args = SimpleNamespace(ckpt=str(file), tasks=["heldout"], modes=["ar"], pll=[1], mc=256)
    questions = {"heldout": ev.heldout_questions(trained, 2)}

    def find():
        return ev.find_saved_scores(args, questions, trained.model)

    before = find()
    assert before == find()
    with open(tmp_path / name, "a") as file:
        file.write("# changed\n")
    assert find() != before
    before = find()
    with open(checkpoint / "ckpt_7.pt", "ab") as content:
        content.write(b"changed")
    assert find() != before


def test_two_ranks_equal_one(checkpoint, task_files, tmp_path, monkeypatch):
    """Also when strings hash differently on each rank, as they do without PYTHONHASHSEED."""
    flags = ["--data", task_files, "--tasks", "openbookqa,piqa,heldout", "--limit", 3, "--mc", 3]
    shutil.copytree(checkpoint, tmp_path / "other")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    seeded = ["--no-python", "sh", "-c", 'PYTHONHASHSEED=$((RANK + 1)) exec "$0" "$@"']
    script = [sys.executable, os.path.join(ROOT, "eval.py"), "--ckpt", "other", "--dump", "two"]
    run(*launcher, *seeded, *script, *map(str, flags), cwd=tmp_path)
    evaluate(monkeypatch, "--ckpt", checkpoint, "--dump", tmp_path / "one", *flags)
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()


# ---- mistakes: one line that says what is wrong --------------------------------------------------
@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tasks arc_esay", "no task named 'arc_esay', did you mean 'arc_easy'"),
        ("--modes ar,prefx", "no mode named 'prefx', did you mean 'prefix'"),
        ("--pll 1,0", "--pll takes numbers of masks"),
        ("--pll x", "--pll takes numbers of masks"),
        ("--limit -1", "--limit.*must be at least 0"),
        ("--context -1", "--context.*must be at least 0"),
        ("--ckpt nowhere", "nowhere"),
        ("--data nowhere --tasks piqa", "no folder nowhere/piqa: .*prepare.py --tasks"),
        ("--ckpt=", "which model.*--ckpt out/demo"),
        ("--ckpt= --dump d --tasks heldout", "heldout needs --ckpt"),
        ("--ckpt= --dump d --data nowhere", "heldout needs --ckpt.*prepare.py --tasks"),
    ],
)
def test_a_wrong_flag_is_one_line_that_says_what_to_do(
    flags, message, checkpoint, task_files, monkeypatch
):
    known = ["--ckpt", checkpoint, "--data", task_files, "--limit", 1]
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{message}[^\n]*$"):
        evaluate(monkeypatch, *known, *flags.split())


@pytest.mark.parametrize("flag", ["--json", "--dump"])
@pytest.mark.parametrize("path", ["folder", "file/x", "file/new/x"])
def test_an_output_that_cannot_be_written_is_refused_at_the_start(
    flag, path, checkpoint, tmp_path, monkeypatch
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(ev, "load_model", None)  # what comes next would fail
    with pytest.raises(SystemExit, match=f"^error: cannot write [^\n]*{path}: [^\n]*$"):
        evaluate(monkeypatch, "--ckpt", checkpoint, flag, tmp_path / path)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_earlier_result_stays_until_there_is_a_new_one(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "j").write_text("earlier")
    monkeypatch.setattr(ev, "load_model", None)
    with pytest.raises(TypeError):
        evaluate(monkeypatch, "--ckpt", checkpoint, "--json", tmp_path / "j")
    assert (tmp_path / "j").read_text() == "earlier"


def test_a_bare_call_is_one_helpful_line(tmp_path):
    output = run("eval.py", cwd=tmp_path, code=1)
    assert output.count("\n") == 1
    assert "--ckpt out/demo" in output


def test_every_flag_has_a_help_text(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        evaluate(monkeypatch, "--help")
    _, *flags = re.split(r"\n  (?=--)", capsys.readouterr().out)
    assert len(flags) == 12
    for flag in flags:
        name, placeholder, *text = flag.split()
        assert text, name


def test_a_checkpoint_without_a_tokenizer_is_refused(checkpoint, monkeypatch):
    content = torch.load(checkpoint / "ckpt_7.pt")
    del content["tokenizer"]
    torch.save(content, checkpoint / "ckpt_7.pt")
    with pytest.raises(SystemExit, match="no tokenizer"):
        evaluate(monkeypatch, "--ckpt", checkpoint, "--tasks", "heldout")


def test_a_model_that_has_diverged_is_refused(checkpoint, monkeypatch):
    content = torch.load(checkpoint / "ckpt_7.pt")
    content["model"]["norm.weight"].fill_(float("nan"))
    torch.save(content, checkpoint / "ckpt_7.pt")
    with pytest.raises(SystemExit, match="not finite"):
        evaluate(monkeypatch, "--ckpt", checkpoint, "--tasks", "heldout", "--limit", 1)
