"""Whole runs of train.py, as a user starts them: resume, ranks, signals, log."""
import os
import signal
import sys

import numpy as np
import pytest
import torch

import data
from conftest import ROOT, flags, random_model, read_log, run, tiny_settings, torchrun
from data import N_SPECIAL
from model import Transformer, load_model, make_mask
from muon import Muon
from test_objective import synthetic_stream


def weights(folder):
    return torch.load(folder / "ckpt.pt", weights_only=True)["model"]


def assert_same_bits(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def assert_close(a, b, tolerance=1e-4):
    for k in a:
        assert (a[k] - b[k]).norm() <= tolerance * a[k].norm(), (k, (a[k] - b[k]).norm() / a[k].norm())


def train(corpus, out, *extra, n=1, **changes):
    arguments = ["train.py", *flags(data_dir="data/tiny", out_dir=out, **changes), *extra]
    return run(*arguments, cwd=corpus) if n == 1 else torchrun(n, *arguments, cwd=corpus)


@pytest.fixture(scope="session")
def whole(corpus):
    """The uninterrupted run that the others are compared with."""
    train(corpus, "out/whole")
    return corpus / "out/whole"


def test_log(whole):
    """One record per log step with the contract's fields; held-out losses fall; the last record says done."""
    log = read_log(whole)
    assert [r["step"] for r in log] == list(range(7))
    for r in log[1:]:
        assert r["tokens"] == r["step"] * 256 and r["tok_per_s"] > 0 and {"lr", "train_ar", "train_md"} <= r.keys()
    evaluated = [r for r in log if "val_ar" in r]
    assert [r["step"] for r in evaluated] == [0, 2, 4, 6]
    for k in ("val_ar", "val_md", "val_ar_bpb", "val_md_bpb"):
        assert evaluated[-1][k] < evaluated[0][k]
    assert [r["lr"] for r in log] == pytest.approx([0.007] * 5 + [0.0035, 0.0])
    assert log[-1]["done"] is True and log[-1]["overfit"] is False and not any("done" in r for r in log[:-1])


def test_validation_by_hand(whole, corpus):
    """val_ar of the final weights, recomputed with a plain cross-entropy over the held-out targets that can be masked; bits
    per byte from the text's own bytes."""
    model, tokenizer, checkpoint = load_model(str(whole))
    tokens = np.fromfile(corpus / "data/tiny/val.bin", np.uint16).astype(np.int64)
    n = min(640, len(tokens) - 1) // 32
    total = count = size = 0
    for i in range(n):
        x0 = torch.from_numpy(tokens[i * 32:i * 32 + 33])[None]
        segments, positions = 1 + (x0[:, :-1] == 1).cumsum(1), torch.arange(32)[None]
        with torch.no_grad():
            h = model.hidden(x0[:, :-1], make_mask(segments, positions, torch.tensor([0])), positions)
            ce = torch.nn.functional.cross_entropy(model.head(h)[0], x0[0, 1:], reduction="none")
        on = x0[0, 1:] >= N_SPECIAL
        on[-1] = False
        total, count = total + ce[on].sum().item(), count + on.sum().item()
        size += sum(len(t) for t in map(tokenizer.id_to_token, x0[0, 1:][on].tolist()))
    last = read_log(whole)[-1]
    assert last["val_ar"] == pytest.approx(total / count, rel=1e-5)
    assert last["val_ar_bpb"] == pytest.approx(total / size / np.log(2), rel=1e-5)


def test_same_seed_same_bits(whole, corpus):
    train(corpus, "out/again")
    assert_same_bits(weights(whole), weights(corpus / "out/again"))
    other = train(corpus, "out/seed2", seed=2)
    assert not torch.equal(weights(whole)["head.weight"], weights(corpus / "out/seed2")["head.weight"]), other


# runs train.py, and at the moment its record of a step is written sends it a signal
INTERRUPTED = """
import json, os, runpy, sys
script, step, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.argv = [script] + sys.argv[4:]
dumps = json.dumps
def interrupt(record):
    if record["step"] == step:
        open([a for a in sys.argv if a.startswith("--out_dir=")][0][10:] + "/log.jsonl", "a").write('{"step": 4, "tor')
        os.kill(os.getpid(), number)
    return dumps(record)
json.dumps = interrupt
runpy.run_path(script, run_name="__main__")
"""


def interrupted(corpus, out, step, number, code, **changes):
    return run(sys.executable, "-c", INTERRUPTED, os.path.join(ROOT, "train.py"), str(step), str(int(number)),
               *flags(data_dir="data/tiny", out_dir=out, **changes), cwd=corpus, code=code, PYTHONPATH=ROOT)


def without_speed(folder):
    return [{k: v for k, v in r.items() if k != "tok_per_s"} for r in read_log(folder)]


@pytest.mark.parametrize("step, saved", [(3, 2), (4, 4), (6, 6)])
def test_resume_after_kill_is_bit_exact(whole, corpus, step, saved):
    """SIGKILL while a record is written, then --resume: the same weights, and the same log but for the speed."""
    out = f"out/killed{step}"
    interrupted(corpus, out, step, signal.SIGKILL, -signal.SIGKILL)
    output = train(corpus, out, "--resume=True")
    assert f"at step {saved}" in output
    assert_same_bits(weights(whole), weights(corpus / out))
    assert without_speed(whole) == without_speed(corpus / out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_resumes_bit_exactly(whole, corpus, number):
    """The step under way is finished and saved; the exit status is the signal's; the rest follows with --resume."""
    out = f"out/signal{int(number)}"
    output = interrupted(corpus, out, 1, number, 128 + number, save_interval=0)
    assert "saved" in output and "done" not in output
    assert torch.load(corpus / out / "ckpt.pt", weights_only=True)["step"] == 2
    (corpus / out / "log.jsonl").write_text((corpus / out / "log.jsonl").read_text().replace('{"step": 4, "tor', ""))
    train(corpus, out, "--resume=True", save_interval=0)
    assert_same_bits(weights(whole), weights(corpus / out))
    assert without_speed(whole) == without_speed(corpus / out)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_change_nothing_but_rounding(whole, corpus, n):
    """4 slots on 1, 2 or 4 processes: weights to 1e-4, every logged loss to 1e-4."""
    train(corpus, f"out/ranks{n}", n=n)
    assert_close(weights(whole), weights(corpus / f"out/ranks{n}"))
    for a, b in zip(read_log(whole), read_log(corpus / f"out/ranks{n}"), strict=True):
        assert a.keys() == b.keys()
        for k in ("train_ar", "train_md", "val_ar", "val_md"):
            assert k not in a or a[k] == pytest.approx(b[k], rel=1e-4)


def test_resume_on_another_number_of_ranks(whole, corpus):
    """Two processes until step 4, then one: equal to rounding; the momentum of both owners is in the checkpoint."""
    train(corpus, "out/moved", n=2, keep=5)
    folder = corpus / "out/moved"
    os.replace(folder / "ckpt_4.pt", folder / "ckpt.pt")
    assert "at step 4" in train(corpus, "out/moved", "--resume=True")
    assert_close(weights(whole), weights(folder))


def test_grad_clip_over_ranks(corpus):
    """Clipping uses the norm of the whole gradient: one and two processes agree, and it does something (Adam and Muon
    are blind to a constant factor, but not to one that changes from step to step)."""
    train(corpus, "out/clip1", grad_clip=0.01, max_steps=2)
    train(corpus, "out/clip2", grad_clip=0.01, max_steps=2, n=2)
    assert_close(weights(corpus / "out/clip1"), weights(corpus / "out/clip2"))
    train(corpus, "out/clip0", max_steps=2)
    a, b = weights(corpus / "out/clip0"), weights(corpus / "out/clip1")
    assert any((a[k] - b[k]).norm() > 1e-3 * a[k].norm() for k in a)


def test_keep_and_decay_checkpoints(corpus):
    train(corpus, "out/keep", keep=2, save_interval=1, max_steps=5, decay_steps=2)
    folder = corpus / "out/keep"
    names = sorted(f.name for f in folder.glob("*.pt"))
    assert names == ["ckpt.pt", "ckpt_4.pt", "ckpt_5.pt", "ckpt_decay.pt"]
    steps = [torch.load(folder / n, weights_only=True)["step"] for n in names]
    assert steps == [5, 4, 5, 3]
    # a flipped bit in the newest: it is named and skipped, the one before is used
    for name in ("ckpt.pt", "ckpt_5.pt"):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    output = train(corpus, "out/keep", "--resume=True", keep=2, save_interval=1, max_steps=5, decay_steps=2)
    assert "skipping out/keep/ckpt.pt" in output and "at step 4" in output
    # the same with only the oldest left: newer numbers, which are damaged, give way
    for name in ("ckpt.pt", "ckpt_4.pt", "ckpt_5.pt"):
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    output = train(corpus, "out/keep", "--resume=True", keep=2, save_interval=1, max_steps=5, decay_steps=2)
    assert "at step 3" in output and sorted(f.name for f in folder.glob("ckpt_?.pt")) == ["ckpt_4.pt", "ckpt_5.pt"]


def test_ar_weight(whole, corpus):
    """The paper's factor 2 on AR changes the mixture."""
    train(corpus, "out/weight2", ar_weight=2)
    a, b = weights(whole), weights(corpus / "out/weight2")
    assert any((a[k] - b[k]).norm() > 0.01 * a[k].norm() for k in a)


def test_overfit_is_the_papers_definition():
    """Held-out loss 2% above its best while the training loss is below its value there; noise and divergence are not."""
    source = open(os.path.join(ROOT, "train.py")).read()
    start = source.index("def overfits")
    space = {}
    exec(source[start:source.index("\n\n", start)], space)

    def records(*pairs):
        return [{"val_ar": 7.0}] + [{"train_ar": t} if v is None else {"train_ar": t, "val_ar": v} for t, v in pairs]
    overfits = space["overfits"]
    assert overfits(records((5, 5), (4, 4.5), (3, 4.6), (2, 4.8)), "ar")
    assert not overfits(records((5, 5), (4, 4.5), (3, 4.55)), "ar")          # within 2%
    assert not overfits(records((5, 5), (4, 4.5), (4.5, 5)), "ar")           # training got worse too
    assert not overfits(records((5, 5), (4, 4.5), (3, 4.4), (2, 4.3)), "ar")
    assert overfits(records((5, 5), (4, 4.5), (3, 4.8), (2.9, 4.55)), "ar")  # came back, but it was there
    assert not overfits(records((5, 5), (4, 4.5), (3, 4.8)), "md")


def test_gradient_is_the_mean_over_slots():
    """Accumulating S slots with loss / S equals the gradient of the mean loss over all sequences, objectives mixed."""
    s = tiny_settings(alpha="3/4")
    a, b = random_model(s), random_model(s)
    stream, total = synthetic_stream(s), 0
    for slot in range(4):
        *batch, ar = data.train_slot(stream, s, 0, slot)
        x, y, w, prefix = map(torch.as_tensor, batch)
        (a.loss(x, y, w, prefix)[0] / 4).backward()
        for i in range(2):
            total = total + b.loss(x[i:i + 1], y[i:i + 1], w[i:i + 1] * 2, prefix[i:i + 1])[0] / 8
    total.backward()
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_one_batch_can_be_learned():
    """Both losses of one repeated batch go down to almost nothing: gradients, optimizers and shift work together."""
    s = tiny_settings(n_embd=64, n_ff=128)
    torch.manual_seed(0)
    model = Transformer(s)
    stream = synthetic_stream(s)
    batches = [[torch.as_tensor(a) for a in data.train_slot(stream, s, 0, slot)[:4]] for slot in range(4)]
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [Muon(matrices, 0.02), torch.optim.AdamW(rest, 0.02)]
    for _ in range(150):
        losses = [model.loss(*batch)[0] for batch in batches]
        sum(losses).backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    assert max(losses) < 0.1


def test_against_a_plain_loop(corpus):
    """Three steps of train.py equal a loop written out here: slots, weights of the objectives, z-loss, decay, which optimizer
    has which parameters, AdamW's constants; with fp64 Newton-Schulz and torch's own AdamW."""
    from test_muon import textbook
    changes = dict(alpha="3/4", ar_weight=2.0, z_loss=0.1, max_steps=3, decay_steps=2, weight_decay=0.5, momentum=0.8)
    train(corpus, "out/plain", **changes)
    s = tiny_settings(**changes)
    torch.manual_seed(s.seed)
    model = Transformer(s)
    tokens, starts = (np.fromfile(corpus / f"data/tiny/train.{end}", kind) for end, kind in (("bin", "u2"), ("idx", "u8")))
    stream = data.Stream(tokens, starts, s)
    state = dict(model.named_parameters())
    hidden = {k: p for k, p in state.items() if k.startswith("blocks") and "norm" not in k}
    adamw = torch.optim.AdamW([p for k, p in state.items() if k not in hidden], betas=(0.9, 0.95), weight_decay=0.5)
    momentum = {k: torch.zeros_like(p) for k, p in hidden.items()}
    for step, lr in enumerate((0.007, 0.007, 0.0035)):
        for slot in range(4):
            x, y, w, prefix, ar = data.train_slot(stream, s, step, slot)
            assert ar == ((step * 4 + slot) * 3 % 4 < 3)
            x, y, w = map(torch.as_tensor, (x, y, w))
            mask = make_mask(1 + (x == 1).cumsum(1), torch.arange(32).expand(2, 32), torch.as_tensor(prefix))
            logits = model.hidden(x, mask, torch.arange(32)[None]) @ model.head.weight.T
            losses = torch.nn.functional.cross_entropy(logits.mT, y, reduction="none") + 0.1 * logits.logsumexp(-1) ** 2
            ((losses * w).sum() * (2 if ar else 1) / 4).backward()
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        for k, p in hidden.items():
            momentum[k] = 0.8 * momentum[k] + p.grad
            update = textbook(p.grad + 0.8 * momentum[k]).float() * 0.2 * max(p.shape) ** 0.5
            p.data = p.data * (1 - lr * 0.5) - lr * update
        model.zero_grad()
    assert_close({k: p.data for k, p in state.items()}, weights(corpus / "out/plain"), 1e-4)
