"""The benchmark: its arithmetic is right, and the things it compares compute the same."""

import functools
import itertools
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import tokenizers
import torch

import bench
import tasks
from configurator import Settings, check
from conftest import TINY, prose, random_model, run, tiny_settings
from eval import Item, make_modes, score
from model import Transformer
from muon import Muon
from test_tasks import write_tasks


# ---- cost ----------------------------------------------------------------------------------------
def test_the_cost_is_that_of_the_papers_model(tmp_path):
    flags = ["--only", "cost", "--devices=8", "--peak_flops=1e15", "--mfu=0.5"]
    run("tests/bench.py", *flags, "--json=table.json", cwd=tmp_path)
    rows = json.loads((tmp_path / "table.json").read_text())
    value = {row["what"]: row["value"] for row in rows}
    with torch.device("meta"):
        paper = Transformer(check(Settings()))
    matrices = sum(p.numel() for p in paper.blocks.parameters() if p.ndim == 2)
    total = sum(p.numel() for p in paper.parameters())
    # A matrix product costs 2 FLOPs for each weight and token, and 4 more in the backward pass. So
    # do QK and AV, over 2,048 keys or half of them.
    products = 6 * (matrices + paper.head.weight.numel())
    expected = {
        "weights (gradients take as much): GB on each of 8 devices": 4 * total / 1e9,
        "Muon's momentum, with 8 devices a host: GB on each of 8 devices": 4 * matrices / 8 / 1e9,
        "AdamW's two moments: GB on each of 8 devices": 8 * (total - matrices) / 1e9,
        "logits of a sequence: GB on each of 8 devices": 4 * 2048 * 51200 / 1e9,
        "AR: GFLOPs a token": (products + 24 * 6 * 2 * 1024 * 1024) / 1e9,
        "MD: GFLOPs a token": (products + 24 * 6 * 2 * 1024 * 2048) / 1e9,
        "AR: tokens/s of 8 devices, MFU 50%": 4e6 / value["AR: GFLOPs a token"],
        "MD: tokens/s of 8 devices, MFU 50%": 4e6 / value["MD: GFLOPs a token"],
    }
    assert value == pytest.approx(expected)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--only", "cost,decodng"], "no part 'decodng', did you mean 'decoding'?"),
        (["--only", "cost", "--devices=0"], "--devices and --rounds must be at least 1"),
    ],
)
def test_a_mistake_is_one_line(flags, message, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench.py", *flags])
    with pytest.raises(SystemExit) as error:
        bench.main()
    assert error.value.code == f"error: {message}"


# ---- times ---------------------------------------------------------------------------------------
# Each function's time by our clock, and the values that follow; those of muon's ranks are real.
TIMES = dict(ours=2, llama=3, theirs=3, plain=3, textbook=3, products=1, md=4, dual=6, adamw=5)
TIMES |= dict(epoch=0.5, slot=0.16, step=1, long=4, uncached=1, ar=2, plain_ar=3, pll=2)
TIMES |= dict(plain_pll=3)
VALUES = {
    "training": [1.5, None, 1.5, 22 / 21, 1.5, None],
    "muon": [1.5, None, 0.5],
    "head": [2 / 3, 1 / 8],
    "data": [1.5, 0.01, 0.5, 50],
    "evaluation": [1.5, 1.5],
    "decoding": [1.5, 16, 1.5, 16],
}
PEAKS = {bench.our_head: 1, bench.plain_head: 8, bench.start_epoch: 50}


def one_by_one(rounds, **functions):
    """Call every function, and return the times in TIMES."""
    for function in functions.values():
        function()
    return SimpleNamespace(**{name: TIMES[name] for name in functions})


@pytest.fixture
def tiny_bench(monkeypatch, corpus, tmp_path):
    """The benchmark on a tiny model, a tiny corpus and tiny tasks, with a clock of our own."""
    small = dict(seq_len=512, batch_size=16, micro_batch_size=8, max_steps=1, decay=0.0)
    tokenizer = tokenizers.Tokenizer.from_file(str(corpus / "data/tiny/tokenizer.json"))
    write_tasks(tmp_path / "data/tasks", n=8)
    changes = {
        "SMALL": TINY | small | dict(eval_tokens=4096),
        "PAPER": TINY,
        "HEAD": dict(B=2, T=32, V=300, D=8),
        "seconds": one_by_one,
        "peak": lambda make, use: PEAKS[use],
        "embedded_corpus": lambda: (prose(9), tokenizer),
        "read_task": functools.partial(tasks.read_task, limit=8),
    }
    for name, value in changes.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, dynamic: None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("part", VALUES)
def test_every_part_measures_what_it_says(part, tiny_bench):
    """Every function can be called, and no ratio is upside down."""
    rows = list(bench.PARTS[part](SimpleNamespace(rounds=1)))
    assert len(rows) == len(VALUES[part])
    for row, expected in zip(rows, VALUES[part]):
        sign, number = row.bound.split()
        assert sign in ("<=", ">=") and float(number) > 0
        assert row.value > 0
        assert expected is None or row.value == pytest.approx(expected)


def test_the_median_is_taken_after_a_first_round():
    calls = []
    clock = itertools.count()  # each call takes 1, the second of each round 3
    with mock.patch("time.perf_counter", side_effect=lambda: next(clock)):
        t = bench.seconds(
            3,
            ours=lambda: calls.append("ours"),
            theirs=lambda: calls.append([next(clock), next(clock)]),
        )
    assert t.ours == 1 and t.theirs == 3
    assert len(calls) == 8 and calls[::2] == ["ours"] * 4


def test_a_million_documents_need_less_than_100_MB():
    """At least 8 MB: a permutation of 10^6 documents, in 8 bytes each."""
    assert 8 < bench.peak(bench.many_documents, bench.start_epoch) < 100


# ---- what is compared computes the same ----------------------------------------------------------
def test_plain_scorers_give_the_scores_of_eval():
    model = random_model(tiny_settings())
    contexts = [(1, 20, 30, 40), (1, 50)]
    completions = [(60,), (61, 62, 63), tuple(range(64, 72))]
    items = [Item(context, w) for context in contexts for w in completions]
    values = score(model, items, make_modes(["ar", "pll"], [1, 6], 0, bench.SPECIAL.mask))
    assert values["ar"] == pytest.approx(bench.plain_ar(model, items), rel=1e-5)
    for n in (1, 6):
        assert values[f"pll{n}"] == pytest.approx(bench.plain_pll(model, items, n), rel=1e-5)


def test_one_matrix_at_a_time_gives_the_update_of_muon():
    ours, theirs = (bench.make_muon(kind, 1, TINY) for kind in (Muon, bench.TextbookMuon))
    for stack, other in zip(ours.stacks, theirs.stacks):
        other.weights.copy_(stack.weights)
        other.grads.copy_(stack.grads)
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
    for stack, other in zip(ours.stacks, theirs.stacks):
        torch.testing.assert_close(stack.weights, other.weights, rtol=1e-3, atol=1e-5)


def test_both_heads_give_the_same_gradients(monkeypatch):
    monkeypatch.setattr(bench, "HEAD", dict(B=2, T=32, V=300, D=8))
    ours, theirs = bench.make_head_inputs(), bench.make_head_inputs()
    bench.our_head(ours, z_loss=0)
    bench.plain_head(theirs)
    torch.testing.assert_close(ours.h.grad, theirs.h.grad)
    torch.testing.assert_close(ours.W.grad, theirs.W.grad)


def test_our_model_is_the_llama_that_it_is_compared_with(tiny_bench):
    model, s = bench.small_model()
    x = torch.randint(16, 300, (2, 9))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        ours = model.head(model.hidden(x, causal, torch.arange(9)[None]))
        torch.testing.assert_close(ours, bench.llama(model, s)(x).logits, rtol=1e-4, atol=1e-4)
