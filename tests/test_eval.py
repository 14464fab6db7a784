"""eval.py: the strings of the nine tasks, and every way of scoring against a scorer without any of its economies."""
import collections
import csv
import json
import os
import runpy
import shutil
import sys

import numpy as np
import pytest
import tokenizers
import torch

import eval as ev
import model as model_py
from conftest import ROOT, random_model, run, tiny_settings
from data import default_rng, open_data
from model import BOS, MASK

WORDS = ("rain sun moon tree river stone bird fish cloud sand wood fire ice wind leaf root star hill lake road door lamp cup "
         "hat coat").split()


# ----------------------------------------------------------------------------------------------------------------------
# a model, a tokenizer, and small files in the layouts of the releases

def choices(texts, labels="ABCDE"):
    return [{"text": text, "label": label} for text, label in zip(texts, labels)]


def record(task, i):
    """The i-th record of a made-up release file; every record is another."""
    w = [WORDS[(i * 7 + j * 3 + j * j) % len(WORDS)] for j in range(8)]
    if task == "blimp":
        return {"sentence_good": f"The {w[0]} is {w[1]}.", "sentence_bad": f"The {w[0]} are {w[2]}."}
    if task == "hellaswag":
        return {"activity_label": w[0], "ctx_a": f"A {w[1]} falls.", "ctx_b": f"the {w[2]}", "label": i % 4,
                "endings": [f"goes {w[3]}.", f"is a {w[4]}  now. [title] {w[5]}", f"[step] {w[6]} {w[7]}", w[5]]}
    if task == "mmlu":
        return [f" What is a {w[0]}? ", w[1], w[2] + " ", "the " + w[3], w[4], "ABCD"[i % 4]]
    if task == "piqa":
        return {"goal": f"get a {w[0]}", "sol1": f"Use the {w[1]} ", "sol2": f"Use the  {w[2]} {w[3]}"}
    if task == "socialiqa":
        return {"context": f"{w[0]} met {w[1]}.", "question": "Why?", "answerA": w[2], "answerB": w[3], "answerC": w[2]}
    return {"question": {"stem": f"Where is the {w[0]}?", "choices": choices([w[1], w[2], w[1] + " " + w[3], w[4]])},
            "answerKey": "ABCD"[i % 4]}


def write_tasks(folder, n=3):
    for name, task in list(ev.TASKS.items())[:9]:
        (folder / name).mkdir(parents=True)
        for k in range(task.n_files):
            with open(folder / name / task.file.replace("*", f"sub_{k:02}"), "w", newline="") as f:
                records = [record(name, n * k + i) for i in range(n)]
                csv.writer(f).writerows(records) if name == "mmlu" else f.writelines(json.dumps(r) + "\n" for r in records)
        if task.labels:
            (folder / name / task.labels).write_text("".join(f"{(name == 'socialiqa') + i % 2}\n" for i in range(n)))
    return folder


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("raw") / "tasks")


@pytest.fixture(scope="session")
def tokenizer(corpus):
    return tokenizers.Tokenizer.from_file(str(corpus / "data" / "tiny" / "tokenizer.json"))


@pytest.fixture(scope="session")
def model():
    return random_model(tiny_settings()).eval()


@pytest.fixture
def checkpoint(tmp_path, corpus, model):
    """A run directory; data/tiny is where its settings say."""
    settings = vars(tiny_settings(seq_len=256, eval_tokens=640, data_dir=str(corpus / "data" / "tiny")))
    (tmp_path / "run").mkdir()
    torch.save({"model": model.state_dict(), "settings": settings, "step": 7,
                "tokenizer": (corpus / "data" / "tiny" / "tokenizer.json").read_text()}, tmp_path / "run" / "ckpt.pt")
    return tmp_path / "run"


def run_main(monkeypatch, *args):
    """eval.py as a script, in this process."""
    monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, args)])
    runpy.run_path(os.path.join(ROOT, "eval.py"), run_name="__main__")


def items_of(documents, tokenizer, window=10 ** 6, pmi=False, counts=None):
    return ev.make_items(documents, tokenizer, window, pmi, collections.Counter() if counts is None else counts)


def document(context, completions, gold=0, doc=0, subtask=None):
    return ev.Document(subtask, doc, context, completions, gold)


def score(model, modes, items, N=0, task="arc_easy", counts=None):
    values = ev.score(model, task, modes, items, N, collections.Counter() if counts is None else counts)
    return {mode: np.array(v) for mode, v in values.items()}


QUESTIONS = [document("Question: Where is the moon?\nAnswer:", [" rain", " sun", " rain and sun", " rainy", " x"], doc=3),
             document("Question: Why?\nAnswer:", [" sun", " sun", " stone"], doc=4),
             document("", ["The bird sings.", "The bird sing."], doc=5),
             document("Answer:", [" sun", " a long answer: of many words, really"], doc=6)]


# ----------------------------------------------------------------------------------------------------------------------
# the plain scorer: one row, one forward pass, a mask written out

@torch.inference_mode()
def log_p(model, tokens, visible):
    """(T, V) of a single row; visible[q, k]: position q sees position k."""
    T = len(tokens)
    h = model.hidden(torch.tensor([tokens]), visible[None, None], torch.arange(T)[None])
    return torch.log_softmax(model.head(h)[0].double(), -1)


def plain(model, mode, c, w, N=0, key=()):
    T, m, L = len(c + w), len(c), len(w)
    everything = torch.ones(T, T, dtype=torch.bool)
    if mode in ("ar", "prefix"):
        visible = everything.tril()
        if mode == "prefix":
            visible[:, :m] = True
        p = log_p(model, c + w, visible)
        return sum(p[m + j - 1, w[j]].item() for j in range(L))

    def hide(masked):
        return log_p(model, [MASK if q - m in masked else t for q, t in enumerate(c + w)], everything)
    if mode == "mc":
        generator = default_rng(key)
        jitter, total = generator.random(), 0
        for s in range(N):
            k = 1 + int((s + jitter) / N * L)
            masked = generator.permutation(L)[:k]
            p = hide(set(masked.tolist()))
            total += L / k * sum(p[m + j - 1, w[j]].item() for j in masked)
        return total / N
    n = int(mode[3:])
    return sum(hide(set(range(j, j + n)))[m + j - 1, w[j]].item() for j in range(L))


def test_every_mode_equals_the_plain_scorer(model, tokenizer):
    items = items_of(QUESTIONS, tokenizer, pmi=True)
    values = score(model, ["ar", "prefix", "pll1", "pll2", "pll6", "mc"], items, 5, task="blimp")
    for mode, got in values.items():
        if mode != "mc_stderr":
            expected = [plain(model, mode, c, w, 5, (1, 2, doc, choice)) for c, w, doc, choice in items]
            np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=mode)


def test_single_steps_give_the_ar_sum(model, tokenizer):
    """One forward pass for each token, on what precedes it."""
    (c, w, _, _), *_ = items_of(QUESTIONS[3:], tokenizer)[1:]
    steps = [log_p(model, (c + w)[:p], torch.ones(p, p).tril().bool())[-1, (c + w)[p]].item() for p in range(len(c), len(c + w))]
    assert score(model, ["ar"], [(c, w, 0, 0)])["ar"][0] == pytest.approx(sum(steps), rel=1e-5)


def test_scores_do_not_depend_on_batches_or_order(model, tokenizer, monkeypatch):
    items = items_of(QUESTIONS, tokenizer, pmi=True)
    modes = ["ar"], ["pll1", "pll6"], ["prefix", "mc"]
    before = [score(model, group, items, 4 * ("mc" in group)) for group in modes]
    for name, value in (("TOKENS", 10), ("PADDING", 0.9), ("PACK", 2), ("CHUNK", 128)):
        monkeypatch.setattr(ev, name, value)
        shuffle = np.random.default_rng(len(name)).permutation(len(items))
        for group, expected in zip(modes, before):
            got = score(model, group, [items[i] for i in shuffle], 4 * ("mc" in group))
            for mode in group:
                np.testing.assert_allclose(got[mode], expected[mode][shuffle], rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# invariants

def test_pll_under_causal_attention_is_the_ar_sum(model, tokenizer, monkeypatch):
    """What is masked lies in the future; this also proves the shift."""
    items = items_of(QUESTIONS, tokenizer)
    ar = score(model, ["ar"], items)["ar"]
    bidirectional = score(model, ["pll1", "pll3"], items)
    monkeypatch.setattr(ev, "make_mask", lambda segments, positions, prefix: model_py.make_mask(segments, positions, 0 * prefix))
    for mode, value in score(model, ["pll1", "pll3", "pll20"], items).items():
        np.testing.assert_allclose(value, ar, rtol=1e-5)
        if mode in bidirectional:
            assert abs(bidirectional[mode] - ar).max() > 0.1


def test_prefix_is_ar_only_without_a_context(model, tokenizer):
    items = items_of(QUESTIONS, tokenizer)
    ar, prefix = score(model, ["ar"], items)["ar"], score(model, ["prefix"], items)["prefix"]
    empty = [i for i, item in enumerate(items) if item[0] == (BOS,)]
    assert empty == [8, 9]  # the third question
    np.testing.assert_allclose(ar[empty], prefix[empty], rtol=1e-6)
    assert (abs(ar - prefix)[[i for i in range(len(items)) if i not in empty]] > 1e-3).all()


def test_pll_with_many_masks_depends_only_on_what_is_left(model, tokenizer):
    """From n = L on nothing changes."""
    items = [(c, w[:4], doc, choice) for c, w, doc, choice in items_of(QUESTIONS, tokenizer)]
    values = score(model, ["pll3", "pll4", "pll5", "pll6"], items)
    np.testing.assert_array_equal(values["pll4"], values["pll6"])
    assert abs(values["pll3"] - values["pll4"]).max() > 1e-3


def test_pmi_of_the_unconditional_context_is_zero(model, tokenizer):
    """Also in mc, because both contexts have the same masks."""
    items = items_of(QUESTIONS[3:], tokenizer, pmi=True)
    assert items[:2] == items[2:] and items[0] != items[1]
    (c, w, doc, choice), u = items[1], (BOS, 20, 30)
    masks = [[np.frombuffer(row, np.int32).reshape(-1, 3)[len(context):, 0].tolist() for (row, _), _ in
              ev.masked_reads([(context, w, doc, choice)], ["mc"], 32, "mmlu")] for context in (c, u)]
    assert masks[0] == masks[1] and len({str(x) for x in masks[0]}) > 10
    other = [np.frombuffer(row, np.int32).reshape(-1, 3)[len(c):, 0].tolist() for (row, _), _ in
             ev.masked_reads([(c, w, doc + 1, choice)], ["mc"], 32, "mmlu")]
    assert other != masks[0]


def test_mc_of_one_token_is_pll1_in_one_row(model):
    items = [((BOS, 20, 21), (token,), 0, choice) for choice, token in enumerate((30, 31, 32))]
    counts = collections.Counter()
    values = score(model, ["pll1", "pll6", "mc"], items, 256, counts=counts)
    assert counts["rows"] == 1  # for three answers and all modes
    np.testing.assert_allclose(values["mc"], values["pll1"], rtol=1e-6)
    np.testing.assert_array_equal(values["pll1"], values["pll6"])
    assert (values["mc_stderr"] == 0).all()


def test_mc_of_two_tokens_is_the_mean_over_both_orders_and_knows_its_error(model):
    c, (a, b) = (BOS, 20, 21, 22), (30, 31)
    everything = torch.ones(6, 6, dtype=torch.bool)
    both, second, first = (log_p(model, [*c, *w], everything) for w in ((MASK, MASK), (a, MASK), (MASK, b)))
    exact = (both[3, a] + second[4, b] + both[4, b] + first[3, a]).item() / 2
    many = score(model, ["mc"], [(c, (a, b), doc, 0) for doc in range(200)], 31)
    spread = many["mc"].std()
    assert abs(many["mc"].mean() - exact) < 4 * spread / 200 ** 0.5
    assert 0.7 * spread < many["mc_stderr"].mean() < 1.4 * spread
    assert score(model, ["mc"], [(c, (a, b), 0, 0)], 4096)["mc"][0] == pytest.approx(exact, abs=0.05 * spread * 31 ** 0.5)


# ----------------------------------------------------------------------------------------------------------------------
# what is computed, and how often

def test_a_context_is_computed_once(model):
    c = (BOS, *range(20, 60))
    items = [(c, w, 0, i) for i, w in enumerate([(70, 71, 72), (70, 71, 80, 81), (70, 90)])]
    (row, reads), = ev.causal_reads(items, ["prefix"])
    tokens, segments, positions = np.frombuffer(row[0], np.int32).reshape(-1, 3).T
    assert tokens.tolist() == [*c, 70, 70, 71, 70, 71, 80] and row[1] == len(c)  # (70, 90), (70, 71, 72), (70, 71, 80, 81)
    assert segments.tolist() == [0] * len(c) + [1, 2, 2, 3, 3, 3]
    assert positions.tolist() == [*range(len(c)), 41, 41, 42, 41, 42, 43]
    assert len(reads) == 9
    counts = collections.Counter()
    score(model, ["ar"], items, counts=counts)
    assert (counts["rows"], counts["tokens"]) == (1, len(c) + 6)


def test_equal_rows_are_computed_once(model):
    """pll1 and pll6 share the row of the last token; completions of a length share the row that is all masks."""
    c, counts = (BOS, 20), collections.Counter()
    score(model, ["pll1", "pll6"], [(c, (30, 31, 32), 0, 0), (c, (40, 41, 42), 0, 1)], counts=counts)
    assert counts["rows"] == 2 * 3 + 1 + 2 * 1  # pll1: three each; pll6: all masks once, then one masked token fewer each
    counts.clear()
    score(model, ["ar"], [((BOS, 20), (30, 31), doc, 0) for doc in range(9)], counts=counts)
    assert counts["rows"] == 1


def test_padding_is_small(model, tokenizer, tasks):
    counts = collections.Counter()
    items = items_of(ev.read_task("mmlu", tasks, 2), tokenizer)
    for modes in (["ar"], ["pll1"]):
        score(model, modes, items[:200], counts=counts)
    assert counts["padding"] < 0.03 * counts["tokens"]


def test_equal_completions_are_one_item_and_the_first_wins(tokenizer):
    items = items_of(QUESTIONS, tokenizer)
    assert items[5] == items[6] != items[7] and len({*items}) == 5 + 2 + 2 + 2 == len(items) - 1
    same = [document("", ["Same.", "Same."], gold) for gold in (0, 1)]
    assert ev.judge("blimp", same, [-3.0] * 4)["accuracy"] == 0.5  # right if the gold is the first


def test_a_long_question_loses_the_left_of_its_context(tokenizer):
    d, counts = document("one two three four five six seven\nAnswer:", [" sun", " rain and moon"]), collections.Counter()
    whole, *_ = items_of([d], tokenizer)
    longest = max(len(w) for _, w, *_ in items_of([d], tokenizer))
    items = items_of([d, QUESTIONS[2]], tokenizer, window=longest + 6, counts=counts)
    assert items[0][0] == items[1][0] == (BOS, *whole[0][-5:])
    assert counts["truncated"] == 1
    items = items_of([d], tokenizer, window=3)
    assert items[0][0] == (BOS,) and len(items[1][1]) == longest  # a completion is never cut


def test_a_token_across_the_border_is_refused():
    """A tokenizer without any splitting, which has learnt ': s' as one token."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.train_from_iterator(["Answer: sun", "r: s", ": s"] * 9 + ["Answer: rain"], tokenizers.trainers.BpeTrainer(vocab_size=40))
    with pytest.raises(SystemExit, match="a token lies across the end of 'Answer:'"):
        items_of([document("Answer:", [" rain", " sun"])], bpe)


# ----------------------------------------------------------------------------------------------------------------------
# scores

def test_raw_char_pmi_and_normalisation():
    """Two documents that each score decides in another way: raw prefers the short, char the long, pmi the unlikely."""
    d = [document("c", [" a", " abc", " abcdefg"], gold) for gold in (0, 1, 2)]
    given, unconditional = [-3.0, -4.5, -7.5], [-1.0, -3.0, -9.0]
    for name, best in (("blimp", 0), ("arc_easy", 2), ("arc_challenge", 2)):
        task = ev.TASKS[name]
        both = task.score == "pmi"
        result = ev.judge(name, d[best:best + 1], given + unconditional * both)
        assert result["accuracy"] == 1 and result["normalized"] == 1 and result["stderr"] == 0
        result = ev.judge(name, d, given * 3 + unconditional * 3 * both)
        assert result["accuracy"] == pytest.approx(1 / 3)
        assert result["normalized"] == pytest.approx((1 / 3 - task.chance) / (1 - task.chance))
        assert result["stderr"] == pytest.approx((2 / 9 / 3) ** 0.5) and result["n"] == 3
    # char counts the space: -2.1 / 2 is more than -4.4 / 4; without it, -2.1 / 1 would be less than -4.4 / 3
    spaced = [document("c", [" a", " abc"], 0)]
    assert ev.judge("arc_easy", spaced, [-2.1, -4.4])["accuracy"] == 1
    assert ev.judge("arc_easy", spaced, [-2.1, -4.0])["accuracy"] == 0


def test_macro_average():
    """Subtasks count alike, whatever their size."""
    d = [document("", ["a", "b"], 0, i, "small" if i < 1 else "large") for i in range(5)]
    result = ev.judge("mmlu", d, [0.0, -1.0] + [-1.0, 0.0] * 3 + [0.0, -1.0])
    assert result["subtasks"] == {"small": 1.0, "large": 0.25} and result["accuracy"] == 0.625
    assert result["stderr"] == pytest.approx((0.25 * 0.75 / 4) ** 0.5 / 2)


# ----------------------------------------------------------------------------------------------------------------------
# strings

ARC = {"stem": "Why?", "choices": choices(["x", "y", "z"], "123")}
FIVE = {"stem": "Two  spaces", "choices": choices(list("vwxyz"))}
SWAG = {"activity_label": "Cooking", "ctx_a": "A man cooks. [title] Then he rests", "ctx_b": "the man", "label": "2", "endings": [
    "eats. [title] Done. [step] He sleeps .", "[substeps] Take  it.", "goes [a] b", "ends."]}
LINE = "The following are multiple choice questions (with answers) about {}.\n\nQuestion: "


@pytest.mark.parametrize("task, r, more, expected", [
    ("arc_easy", {"question": ARC, "answerKey": "3"}, None, ("Question: Why?\nAnswer:", [" x", " y", " z"], 2)),
    ("arc_challenge", {"question": FIVE, "answerKey": "E"}, None,
     ("Question: Two  spaces\nAnswer:", [" v", " w", " x", " y", " z"], 4)),
    ("commonsenseqa", {"question": FIVE, "answerKey": "A"}, None,
     ("Question: Two  spaces\nAnswer:", [" v", " w", " x", " y", " z"], 0)),
    ("openbookqa", {"question": ARC, "answerKey": "1 "}, None, ("Question: Why?\nAnswer:", [" x", " y", " z"], 0)),
    ("blimp", {"sentence_good": "It is.", "sentence_bad": "It are."}, "sub", ("", ["It is.", "It are."], 0)),
    ("hellaswag", SWAG, None, ("Cooking: A man cooks. Then he rests The man",
                               [" eats. Done. He sleeps .", "  Take it.", " goes b", " ends."], 2)),
    ("hellaswag", {**SWAG, "ctx_a": "One. [header] Two.", "ctx_b": ""}, None,
     ("Cooking: One. Two.", [" eats. Done. He sleeps .", "  Take it.", " goes b", " ends."], 2)),
    ("mmlu", [" Is it\nso? \n", "yes ", " no", "a, b", "4", "D"], "high_school_x",
     (LINE.format("high school x") + "Is it\nso?\nAnswer:", [" yes ", "  no", " a, b", " 4"], 3)),
    ("piqa", {"goal": "open it", "sol1": "pull  it ", "sol2": "push"}, "1", ("Goal: open it\nAnswer:", [" pull  it ", " push"], 1)),
    ("socialiqa", {"context": "A met B.", "question": "Why?", "answerA": "a", "answerB": "b", "answerC": "c"}, "3",
     ("Question: A met B. Why?\nAnswer:", [" a", " b", " c"], 2)),
])
def test_strings(task, r, more, expected):
    context, completions, gold = ev.render(task, r, more)
    assert (context, list(completions), gold) == expected


def test_documents_are_numbered_over_all_files(tasks):
    d = ev.read_task("mmlu", tasks, 2)
    assert [x.doc for x in d[:4]] == [0, 1, 3, 4] and len(d) == 2 * 57
    assert [x.subtask for x in d[:4]] == ["sub_00"] * 2 + ["sub_01"] * 2 and "about sub 00.\n" in d[0].context
    assert d[2].completions[0] == " " + record("mmlu", 3)[1]
    assert [x.gold for x in ev.read_task("socialiqa", tasks, 3)] == [0, 1, 0]  # from the file of labels
    assert len(ev.read_task("blimp", tasks, 1)) == 67 and [x.subtask for x in ev.read_task("piqa", tasks, 2)] == [None] * 2


def test_the_tasks_are_those_of_the_paper():
    nine = dict(list(ev.TASKS.items())[:9])
    assert [t.n for t in nine.values()] == [2376, 1172, 67000, 1221, 10042, 14042, 500, 1838, 1954] and len(ev.TASKS) == 10
    assert {name for name, t in nine.items() if t.score == "pmi"} == {"arc_challenge", "commonsenseqa", "openbookqa"}
    assert {name for name, t in nine.items() if t.score == "raw"} == {"blimp"}


# ----------------------------------------------------------------------------------------------------------------------
# the script

def test_heldout(corpus, tokenizer, model):
    """The true continuation stands at its place; the others are as long and from other passages; all are held out."""
    s = tiny_settings(data_dir=str(corpus / "data" / "tiny"))
    val, _ = open_data(s.data_dir, s.vocab_size)[0]["val"]
    stream = " ".join(map(str, val.tolist()))
    d = list(ev.heldout({"settings": s}, tokenizer, 0))
    assert len(d) > 20 and [x.gold for x in d[:5]] == [0, 1, 2, 3, 0]
    for x in d:
        c, *joint = x.tokens
        assert len(c) == 16 and {len(ids) for ids in joint} == {24} and all(ids[:16] == c for ids in joint)
        assert x.context == tokenizer.decode(c) and x.completions[2] == tokenizer.decode(joint[2][16:])
        assert [" ".join(map(str, ids)) in stream for ids in joint].index(True) == x.gold
    assert [x.doc for x in ev.heldout({"settings": s}, tokenizer, 3)] == [0, 1, 2]
    with pytest.raises(SystemExit, match="trained on"):
        list(ev.heldout({"settings": s, "data": {}}, tokenizer, 3))


def test_dump_without_a_checkpoint(tasks, tmp_path, monkeypatch):
    with pytest.raises(SystemExit) as end:
        run_main(monkeypatch, "--data", tasks, "--limit", 2, "--dump", tmp_path / "d")
    assert not end.value.code
    lines = [json.loads(line) for line in open(tmp_path / "d")]
    assert list(dict.fromkeys(x["task"] for x in lines)) == list(ev.TASKS)[:9]
    first = next(x for x in lines if x["task"] == "openbookqa")
    assert first == {"task": "openbookqa", "subtask": None, "doc": 0, "choice": 0, "context": "Question: Where is the rain?\nAnswer:",
                     "completion": " " + record("openbookqa", 0)["question"]["choices"][0]["text"], "uncond_context": "Answer:", "gold": 0}
    assert [x["uncond_context"] for x in lines if x["task"] == "piqa"] == [None] * 4


def test_the_script_from_strings_to_table(tasks, checkpoint, model, tokenizer, tmp_path, monkeypatch, capsys):
    names = "openbookqa,piqa,blimp,heldout"
    run_main(monkeypatch, "--ckpt", checkpoint, "--data", tasks, "--tasks", names, "--limit", 1, "--mc", 3,
             "--dump", tmp_path / "new" / "d", "--json", tmp_path / "new" / "j")  # folders are made
    assert sorted(os.listdir(tmp_path / "new")) == ["d", "j"]  # and no temporary files are left
    os.rename(tmp_path / "new" / "d", tmp_path / "d"), os.rename(tmp_path / "new" / "j", tmp_path / "j")
    lines, report = [json.loads(line) for line in open(tmp_path / "d")], json.load(open(tmp_path / "j"))
    modes = ["ar", "prefix", "pll1", "pll6", "mc"]
    for x in lines[:4] + lines[5:8]:
        contexts = {"": x["context"]} | ({"_uncond": "Answer:"} if x["task"] == "openbookqa" else {})
        for end, context in contexts.items():
            c = (BOS, *tokenizer.encode(context).ids)
            w = tuple(tokenizer.encode(context + x["completion"]).ids[len(c) - 1:])
            for mode in modes:
                key = (1, list(ev.TASKS).index(x["task"]), x["doc"], x["choice"])
                assert x[mode + end] == pytest.approx(plain(model, mode, c, w, 3, key), rel=1e-5)
    assert "ar_uncond" not in next(x for x in lines if x["task"] == "piqa")
    # the table by hand, from the lines
    for task in names.split(","):
        for mode in modes:
            hits = []
            for doc in {x["doc"] for x in lines if x["task"] == task}:
                rows = [x for x in lines if x["task"] == task and x["doc"] == doc]
                by = [x[mode] - x[mode + "_uncond"] if task == "openbookqa" else
                      x[mode] / len(x["completion"]) if task == "piqa" else x[mode] for x in rows]
                hits.append(by.index(max(by)) == rows[0]["gold"])
            assert report["tasks"][task][mode]["accuracy"] == pytest.approx(np.mean(hits))
            assert report["tasks"][task][mode]["n"] == len(hits)
        best = report["tasks"][task]["pll"]
        assert best["accuracy"] == max(report["tasks"][task][f"pll{n}"]["accuracy"] for n in (1, 6)) and "test" in best["chosen"]
    nine = [t for name, t in report["tasks"].items() if name != "heldout"]
    assert report["average"]["ar"] == pytest.approx(np.mean([t["ar"]["normalized"] for t in nine])) and len(nine) == 3
    out = capsys.readouterr().out
    assert "chosen on the test score" in out and "average of 3" in out and "padding" in out and "nats" in out


def test_an_interrupted_run_goes_on(tasks, checkpoint, tmp_path, monkeypatch):
    """What is finished is not computed again; another limit is another run."""
    args = ["--ckpt", checkpoint, "--data", tasks, "--tasks", "piqa,arc_easy", "--json", tmp_path / "j"]
    load, calls, stop = model_py.load_model, [], [10 ** 6]

    def load_counting(path):
        model, *rest = load(path)
        hidden = model.hidden

        def counting(*args):
            calls.append(1)
            if len(calls) > stop[0]:
                raise KeyboardInterrupt
            return hidden(*args)
        model.hidden = counting
        return model, *rest
    monkeypatch.setattr(model_py, "load_model", load_counting)
    run_main(monkeypatch, *args, "--limit", 3)
    whole, expected = len(calls), json.load(open(tmp_path / "j"))
    for file in checkpoint.glob("eval-*"):
        file.unlink()
    calls.clear()
    stop[0] = whole - 1
    with pytest.raises(KeyboardInterrupt):
        run_main(monkeypatch, *args, "--limit", 3)
    calls.clear()
    stop[0] = 10 ** 6
    run_main(monkeypatch, *args, "--limit", 3)
    assert 0 < len(calls) < whole / 2
    assert json.load(open(tmp_path / "j"))["tasks"] == expected["tasks"]
    for changed in (["--limit", 2], ["--limit", 3, "--pll", "1"]):
        calls.clear()
        run_main(monkeypatch, *args, *changed)
        assert len(calls) > 1
    assert all(file.suffix == ".json" for file in checkpoint.glob("eval-*"))


def test_heldout_alone_has_no_average(checkpoint, tmp_path, monkeypatch, capsys):
    """The average is over the nine tasks of the paper; heldout is none of them."""
    run_main(monkeypatch, "--ckpt", checkpoint, "--data", tmp_path, "--limit", 2, "--modes", "ar", "--json", tmp_path / "j")
    out = capsys.readouterr().out
    assert "heldout" in out and "average" not in out and json.load(open(tmp_path / "j"))["average"] == {}


def test_two_ranks_equal_one(tasks, checkpoint, tmp_path, monkeypatch):
    """Also when strings and bytes hash differently on each rank, as they do without PYTHONHASHSEED."""
    args = ["--data", tasks, "--tasks", "openbookqa,piqa,heldout", "--limit", 3, "--mc", 3]
    torch.set_num_threads(1)
    shutil.copytree(checkpoint, tmp_path / "other")
    run(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--no-python",
        "sh", "-c", 'PYTHONHASHSEED=$((RANK + 1)) exec "$0" "$@"', sys.executable, os.path.join(ROOT, "eval.py"),
        "--ckpt", "other", "--dump", "two", *map(str, args), cwd=tmp_path)
    run_main(monkeypatch, "--ckpt", checkpoint, "--dump", tmp_path / "one", *args)
    assert open(tmp_path / "one").read() == open(tmp_path / "two").read()


# ----------------------------------------------------------------------------------------------------------------------
# bad input: one line that says what is wrong

def spoil_line(path, number, text):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:number] + [text] + lines[number + 1:]))


@pytest.mark.parametrize("task, spoil, message", [
    ("piqa", lambda f: (f / "valid.jsonl").unlink(), "0 files valid.jsonl"),
    ("piqa", lambda f: (f / "valid-labels.lst").unlink(), "valid-labels.lst"),
    ("piqa", lambda f: (f / "valid-labels.lst").write_text("0\n"), "record 2 is wrong"),
    ("piqa", lambda f: (f / "valid-labels.lst").write_text("0\n2\n0\n"), "record 2 is wrong.*number 2 of"),
    ("piqa", lambda f: (f / "valid.jsonl").write_bytes((f / "valid.jsonl").read_bytes()[:-30]), "record 3 is wrong"),
    ("piqa", lambda f: (f / "valid.jsonl").write_text(""), "0 records"),
    ("blimp", lambda f: (f / "sub_05.jsonl").unlink(), "66 files"),
    ("arc_easy", lambda f: spoil_line(f / "ARC-Easy-Test.jsonl", 1, "[]\n"), "record 2 is wrong"),
    ("arc_easy", lambda f: spoil_line(f / "ARC-Easy-Test.jsonl", 2, json.dumps({"question": ARC, "answerKey": "F"}) + "\n"), "record 3"),
    ("hellaswag", lambda f: spoil_line(f / "hellaswag_val.jsonl", 0, json.dumps({**SWAG, "endings": ["a", " [b] "]}) + "\n"),
     "record 1 is wrong.*empty completion"),
    ("mmlu", lambda f: spoil_line(f / "sub_03_test.csv", 1, "question,a,b,c,D\n"), "sub_03_test.csv, record 2 is wrong"),
])
def test_bad_task_files(task, spoil, message, tasks, tmp_path):
    shutil.copytree(tasks / task, tmp_path / task)
    assert ev.read_task(task, tmp_path, 2)
    spoil(tmp_path / task)
    with pytest.raises((SystemExit, FileNotFoundError), match=message) as error:
        ev.read_task(task, tmp_path, 2)
    assert "\n" not in str(error.value)


def test_a_part_of_a_release_needs_a_limit(tasks):
    for limit in (0, 4):
        with pytest.raises(SystemExit, match="3 records in 1 files ARC-Easy-Test.jsonl, not 2,376"):
            ev.read_task("arc_easy", tasks, limit)


@pytest.mark.parametrize("args, message", [
    (["--tasks", "arc_esay"], "no task named 'arc_esay', did you mean 'arc_easy'"),
    (["--modes", "ar,prefx"], "no mode named 'prefx', did you mean 'prefix'"),
    (["--pll", "1,0"], "--pll takes numbers"),
    (["--pll", "x"], "--pll takes numbers"),
    (["--limit", "-1"], "--limit"),
    (["--ckpt", "nowhere"], "nowhere"),
    (["--data", "nowhere", "--tasks", "piqa"], "nowhere"),
    (["--tasks", "heldout", "--ckpt", ""], "--ckpt"),
    (["--ckpt", ""], "--ckpt"),
])
def test_bad_flags(args, message, checkpoint, tasks, monkeypatch):
    with pytest.raises((SystemExit, FileNotFoundError), match=message):
        run_main(monkeypatch, "--ckpt", checkpoint, "--data", tasks, "--limit", 1, *args)


def test_a_checkpoint_without_tokenizer(checkpoint, tasks, monkeypatch):
    contents = torch.load(checkpoint / "ckpt.pt")
    del contents["tokenizer"]
    torch.save(contents, checkpoint / "ckpt.pt")
    with pytest.raises(SystemExit, match="no tokenizer"):
        run_main(monkeypatch, "--ckpt", checkpoint, "--data", tasks, "--limit", 1)
