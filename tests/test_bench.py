"""bench.py: its arithmetic, and that the things it compares compute the same."""
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import peers
from configurator import Settings, check
from conftest import ROOT, TINY, random_model
from model import Linear, Transformer, load_model
from muon import Muon
from test_eval import QUESTIONS, items_of, model, score, tokenizer  # noqa: F401
from test_sample import save_checkpoint


def bench(*flags, code=0):
    child = subprocess.run([sys.executable, f"{ROOT}/bench.py", *flags], capture_output=True, text=True)
    assert child.returncode == code
    return child.stdout if code == 0 else child.stderr


def test_cost_of_the_papers_model(tmp_path):
    bench("--only", "cost", "--devices=8", "--peak_flops=1e15", "--mfu=0.5", f"--json={tmp_path}/b.json")
    value = {row["what"]: row["value"] for row in json.loads((tmp_path / "b.json").read_text())}
    with torch.device("meta"):
        paper = Transformer(check(Settings()))
    matrices = sum(p.numel() for p in paper.blocks.parameters() if p.ndim == 2)
    total = sum(p.numel() for p in paper.parameters())
    assert value["weights, as of gradients: GB on each of 8 devices"] == pytest.approx(4 * total / 1e9)
    assert value["Muon's momentum: GB on each of 8 devices"] == pytest.approx(matrices / 2 / 1e9)
    assert value["AdamW's two moments: GB on each of 8 devices"] == pytest.approx(8 * (total - matrices) / 1e9)
    # a matrix product costs 2 per weight and token, its backward pass 4; QK and AV the same, over 2,048 keys or half of them
    products = 6 * (matrices + paper.head.weight.numel())
    assert value["AR: GFLOPs a token"] == pytest.approx((products + 24 * 6 * 2 * 1024 * 1024) / 1e9)
    assert value["MD: GFLOPs a token"] == pytest.approx((products + 24 * 6 * 2 * 1024 * 2048) / 1e9)
    assert value["AR: tokens/s of 8 devices, MFU 50%"] == pytest.approx(4e6 / value["AR: GFLOPs a token"])


@pytest.mark.parametrize("flags, message", [
    (["--only", "cost,decodng"], "no part 'decodng', did you mean 'decoding'?"),
    (["--only", "cost", "--devices=0"], "--devices and --rounds are at least 1")])
def test_bad_flags(flags, message):
    assert bench(*flags, code=1) == f"error: {message}\n"


@pytest.mark.parametrize("part", ["training", "muon", "head", "data", "decoding"])
def test_every_part_measures_what_it_says(part, monkeypatch):
    """Each on a tiny model, with a clock of our own: every function is called, every value is the right way round."""
    monkeypatch.setattr(peers, "SMALL", TINY | dict(seq_len=512, batch_size=16, micro_batch_size=8, max_steps=1,
                                                    decay_steps=0, eval_tokens=4096))
    monkeypatch.setattr(peers, "PAPER", TINY)
    monkeypatch.setattr(peers, "HEAD", (64, 300, 8))
    monkeypatch.setattr(peers, "peak", lambda name: {"chunked_head": 1, "plain_head": 8, "stream": 50}[name])
    monkeypatch.setattr(peers.torch, "compile", lambda function, dynamic: function)

    times = dict(ours=2, llama=3, theirs=3, plain=3, Muon=2, TextbookMuon=3, md=4, dual=6, adamw=5, products=1, epoch=0.5,
                 slot=0.16, step=1, long=4, uncached=1)

    def seconds(**functions):
        for function in functions.values():
            function()
        return SimpleNamespace(**{name: times[name] for name in functions})
    seconds.rounds = 1
    rows = list(peers.PARTS[part](seconds))
    for what, value, bound in rows:
        assert value > 0 and bound.split()[0] in ("<=", ">=") and float(bound.split()[1]) > 0, what
    expected = {"training": [1.5, None, 1.5, 22 / 21, 1.5, None], "muon": [1.5], "head": [2 / 3, 1 / 8],
                "data": [1.5, 0.01, 0.5, 50], "decoding": [1.5, 16, 1.5, 16]}[part]
    assert all(e is None or row[1] == pytest.approx(e) for e, row in zip(expected, rows))
    assert part != "muon" or rows[2][1] == 0.5  # half of the momentum on each of two ranks


def test_memory_of_a_million_documents():
    """At least the permutation of 10^6 documents in 8 bytes each, at most 100 MB; measured in a process of its own."""
    assert 8 < peers.peak("stream") < 100


# ---- what is compared gives the same ---------------------------------------------------------------------------------

def test_plain_scorers(model, tokenizer):  # noqa: F811
    items = items_of(QUESTIONS, tokenizer)
    values = score(model, ["ar", "pll1", "pll6"], items)
    assert values["ar"] == pytest.approx(peers.plain_ar(model, items), rel=1e-5)
    for n in (1, 6):
        assert values[f"pll{n}"] == pytest.approx(peers.plain_pll(model, items, n), rel=1e-5)


def test_textbook_muon():
    pairs = [[torch.nn.Parameter(p.clone()) for p in peers.layers(1, check(Settings(**TINY)))] for _ in range(2)]
    for p, q in zip(*pairs):
        q.data.copy_(p.data)
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    Muon(pairs[0], 0.1).step()
    peers.TextbookMuon(pairs[1], 0.1).step()
    for p, q in zip(*pairs):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


def test_head_losses(monkeypatch):
    monkeypatch.setattr(peers, "HEAD", (64, 300, 8))
    monkeypatch.setattr(peers, "Z", 0)
    gradients = []
    for make in (peers.chunked_head, peers.plain_head):
        run = make()
        run()
        h, W = run.__closure__[[*run.__code__.co_freevars].index("h")], run.__closure__[[*run.__code__.co_freevars].index("W")]
        gradients.append((h.cell_contents.grad, W.cell_contents.grad))
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs)


def test_a_packed_model_is_the_same_model(tmp_path):
    """load_model packs the weights for the CPU: the hidden states and logits are those of the model that was saved."""
    save_checkpoint(tmp_path)
    packed, _, checkpoint = load_model(tmp_path, "cpu")
    plain = random_model(checkpoint["settings"])
    plain.load_state_dict(checkpoint["model"])
    assert all("forward" in vars(layer) for layer in packed.modules() if isinstance(layer, Linear))
    x, t = torch.randint(16, 20, (3, 7)), torch.arange(7).expand(3, 7)
    mask = peers.make_mask(torch.ones_like(x), t, torch.tensor([0, 3, 7]))
    with torch.no_grad():
        expected = plain.head(plain.hidden(x, mask, t))
        torch.testing.assert_close(packed.head(packed.hidden(x, mask, t)), expected, rtol=1e-5, atol=1e-5)
        places = torch.tensor([2, 5, 20])
        torch.testing.assert_close(packed.head(packed.hidden(x, mask, t, None, places)), expected.flatten(0, 1)[places],
                                   rtol=1e-5, atol=1e-5)
