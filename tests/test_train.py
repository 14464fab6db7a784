"""Whole runs of train.py, as a user starts them: resume, ranks, signals, log."""

import json
import os
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data
from checkpoint import find_checkpoint, load_model, newest_checkpoint, overfits
from conftest import (
    N_SPECIAL,
    ROOT,
    flags,
    random_model,
    random_stream,
    read_records,
    run,
    tiny_settings,
    torchrun,
)
from model import Transformer, make_mask
from muon import Muon
from test_muon import textbook


def load(path):
    return torch.load(path, weights_only=True)


def newest(folder):
    """Return the newest checkpoint of a run."""
    return load(newest_checkpoint(folder))


def weights(folder):
    return newest(folder)["model"]


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_close(a, b, tolerance=1e-4):
    for name in a:
        difference = (a[name] - b[name]).norm() / a[name].norm()
        assert difference <= tolerance, (name, difference)


def differ(a, b, tolerance):
    return any((a[name] - b[name]).norm() > tolerance * a[name].norm() for name in a)


def train(corpus, out, *extra, n=1, **changes):
    arguments = ["train.py", *flags(data_dir="data/tiny", out_dir=out, **changes), *extra]
    if n == 1:
        return run(*arguments, cwd=corpus)
    return torchrun(n, *arguments, cwd=corpus)


@pytest.fixture(scope="session")
def whole(corpus):
    """The uninterrupted run that the others are compared with."""
    train(corpus, "out/whole")
    return corpus / "out/whole"


# ---- the log -------------------------------------------------------------------------------------
def test_the_log_has_every_promised_field(whole):
    """Held-out losses fall, the rate decays to 0, and the last record alone says done."""
    log = read_records(whole)
    assert [record["step"] for record in log] == list(range(7))
    for record in log[1:]:
        assert record["tokens"] == record["step"] * 256
        assert record["tok_per_s"] > 0
        assert {"lr", "train_ar", "train_md"} <= record.keys()
    validated = [record for record in log if "val_ar" in record]
    assert [record["step"] for record in validated] == [0, 2, 4, 6]
    for name in ("val_ar", "val_md", "val_ar_bpb", "val_md_bpb"):
        assert validated[-1][name] < validated[0][name]
    assert [record["lr"] for record in log] == pytest.approx([0.007] * 5 + [0.0035, 0.0])
    assert log[-1]["done"] is True and log[-1]["overfit"] is False
    assert not any("done" in record for record in log[:-1])


def test_validation_equals_a_plain_cross_entropy(whole, corpus):
    """val_ar of the final weights, recomputed over the held-out targets that can be masked."""
    model = load_model(str(whole)).model
    tokens = np.fromfile(corpus / "data/tiny/val.bin", np.uint16).astype(np.int64)
    positions = torch.arange(32)[None]
    total = count = 0
    for i in range(min(640, len(tokens) - 1) // 32):
        x0 = torch.from_numpy(tokens[i * 32 : i * 32 + 33])[None]
        segments = 1 + (x0[:, :-1] == 1).cumsum(1)
        mask = make_mask(segments, positions, torch.tensor([0]))
        with torch.no_grad():
            logits = model.head(model.hidden(x0[:, :-1], mask, positions))
        ce = F.cross_entropy(logits[0], x0[0, 1:], reduction="none")
        scored = x0[0, 1:] >= N_SPECIAL
        scored[-1] = False
        total += ce[scored].sum().item()
        count += scored.sum().item()
    last = read_records(whole)[-1]
    assert last["val_ar"] == pytest.approx(total / count, rel=1e-5)
    opened = data.open_corpus(corpus / "data/tiny")
    n_bytes = data.bytes_per_token(opened, tiny_settings())
    assert last["val_ar_bpb"] == pytest.approx(total / count / n_bytes / np.log(2), rel=1e-5)


def test_start_up_names_the_mean_and_spread_of_repetitions(corpus):
    output = train(corpus, "out/spread", alpha="1/4", repetitions=4, max_steps=2)
    assert "by AR 1 times on average, by MD 3 times (standard deviation 0.9)" in output


def test_repetitions_are_those_that_the_windows_allow(corpus):
    """16 windows in all, a fifteenth of them unique: two, each read 8 times."""
    output = train(corpus, "out/few", alpha="1/2", repetitions=15, max_steps=2)
    assert "used, 8 times each" in output and "by AR 4 times" in output
    assert "AR tends to overfit" not in output


def test_a_resumed_run_keeps_its_dtype(corpus):
    train(corpus, "out/bf16", dtype="bfloat16", max_steps=1)
    command = ["train.py", "--resume", "--out_dir=out/bf16", "--device=cpu"]
    assert "on 1 x cpu, bfloat16" in run(*command, cwd=corpus)


def test_too_many_repetitions_of_ar_are_said(corpus):
    output = train(corpus, "out/often", alpha="3/4", repetitions=48, max_steps=6)
    assert "by AR 36 times" in output and "overfit beyond about 16 repetitions" in output


def test_overfit_is_the_papers_definition():
    """2% above the best held-out loss while training improves, but not noise or divergence."""

    def records(*pairs):
        return [{"val_ar": 7.0}] + [{"train_ar": train, "val_ar": val} for train, val in pairs]

    assert overfits(records((5, 5), (4, 4.5), (3, 4.6), (2, 4.8)), "ar")
    assert not overfits(records((5, 5), (4, 4.5), (3, 4.55)), "ar")  # within 2%
    assert not overfits(records((5, 5), (4, 4.5), (4.5, 5)), "ar")  # training got worse too
    assert not overfits(records((5, 5), (4, 4.5), (3, 4.4), (2, 4.3)), "ar")
    assert overfits(records((5, 5), (4, 4.5), (3, 4.8), (2.9, 4.55)), "ar")  # it came back
    assert not overfits(records((5, 5), (4, 4.5), (3, 4.8)), "md")
    # The training loss is its mean since the last validation.
    between = [{"train_ar": 2.0}, {"train_ar": 9.0, "val_ar": 4.8}]
    assert not overfits(records((5, 5), (4, 4.5)) + between, "ar")


def test_the_newest_checkpoint_has_the_highest_step(tmp_path):
    """Numbers, not names, are compared. A run of an earlier version calls its newest ckpt.pt."""
    with pytest.raises(SystemExit, match="there is no checkpoint in"):
        find_checkpoint(str(tmp_path))
    for name in ("ckpt_9.pt", "ckpt_10.pt", "ckpt_best.pt", "ckpt.tmp"):
        (tmp_path / name).touch()
    assert find_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt_10.pt")
    assert find_checkpoint(str(tmp_path / "ckpt_9.pt")) == str(tmp_path / "ckpt_9.pt")
    (tmp_path / "ckpt.pt").touch()
    assert find_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt.pt")


# ---- the same bits -------------------------------------------------------------------------------
def test_same_seed_same_bits(whole, corpus):
    train(corpus, "out/again")
    assert_same_bits(weights(whole), weights(corpus / "out/again"))
    train(corpus, "out/seed2", seed=2)
    assert differ(weights(whole), weights(corpus / "out/seed2"), 0.01)


# Runs train.py, and sends it a signal at the moment its record of a step is written.
INTERRUPTED = """
import json, os, runpy, sys
script, step, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.argv = [script] + sys.argv[4:]
folder = [a for a in sys.argv if a.startswith("--out_dir=")][0].removeprefix("--out_dir=")
dumps = json.dumps
def interrupt(record):
    if record.get("step") == step:
        with open(folder + "/log.jsonl", "a") as log:
            log.write('{"step": 4, "tor')
        os.kill(os.getpid(), number)
    return dumps(record)
json.dumps = interrupt
runpy.run_path(script, run_name="__main__")
"""


def interrupted(corpus, out, step, number, code, **changes):
    script = os.path.join(ROOT, "train.py")
    arguments = [script, str(step), str(int(number))]
    arguments += flags(data_dir="data/tiny", out_dir=out, **changes)
    command = [sys.executable, "-c", INTERRUPTED, *arguments]
    return run(*command, cwd=corpus, code=code, PYTHONPATH=ROOT)


def log_without_speed(folder):
    records = read_records(folder)
    for record in records:
        record.pop("tok_per_s", None)
    return records


@pytest.mark.parametrize("step, saved", [(3, 2), (4, 4), (6, 6)])
def test_resume_after_kill_is_bit_exact(whole, corpus, step, saved):
    """SIGKILL while a record is written, then --resume: the same weights and the same log."""
    out = f"out/killed{step}"
    interrupted(corpus, out, step, signal.SIGKILL, -signal.SIGKILL)
    output = train(corpus, out, "--resume")
    assert f"at step {saved}" in output
    assert_same_bits(weights(whole), weights(corpus / out))
    assert log_without_speed(whole) == log_without_speed(corpus / out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_resumes_bit_exactly(whole, corpus, number):
    """The step under way is finished and saved; the exit status is the signal's."""
    out = f"out/signal{int(number)}"
    output = interrupted(corpus, out, 1, number, 128 + number, save_interval=0)
    assert "saved" in output and "done" not in output
    assert ("press again to quit" in output) == (number == signal.SIGINT)
    assert newest(corpus / out)["step"] == 2
    train(corpus, out, "--resume", save_interval=0)
    assert_same_bits(weights(whole), weights(corpus / out))
    assert log_without_speed(whole) == log_without_speed(corpus / out)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_change_nothing_but_rounding(whole, corpus, n):
    """4 slots on 1, 2 or 4 processes: weights to 1e-4, every logged loss to 1e-4."""
    train(corpus, f"out/ranks{n}", n=n)
    assert_close(weights(whole), weights(corpus / f"out/ranks{n}"))
    for a, b in zip(read_records(whole), read_records(corpus / f"out/ranks{n}"), strict=True):
        assert a.keys() == b.keys()
        for name in ("train_ar", "train_md", "val_ar", "val_md"):
            if name in a:
                assert a[name] == pytest.approx(b[name], rel=1e-4)


def test_resume_on_another_number_of_ranks(whole, corpus):
    """Two processes until step 4, then one: the momentum of both owners is in the checkpoint."""
    train(corpus, "out/moved", n=2)
    folder = corpus / "out/moved"
    (folder / "ckpt_6.pt").unlink()
    assert "at step 4" in train(corpus, "out/moved", "--resume")
    assert_close(weights(whole), weights(folder))


def test_clipping_uses_the_norm_of_the_whole_gradient(corpus):
    """One and two processes agree, and clipping does something."""
    changes = dict(max_steps=2, alpha="1/2")
    train(corpus, "out/clip1", grad_clip=0.01, **changes)
    train(corpus, "out/clip2", grad_clip=0.01, n=2, **changes)
    train(corpus, "out/clip0", **changes)
    assert_close(weights(corpus / "out/clip1"), weights(corpus / "out/clip2"))
    assert differ(weights(corpus / "out/clip0"), weights(corpus / "out/clip1"), 1e-3)


# ---- checkpoints ---------------------------------------------------------------------------------
def test_the_newest_the_start_of_the_decay_and_milestones_stay(corpus):
    """Milestones are also saved where no interval asks for them; nothing else is kept."""
    changes = dict(save_interval=2, max_steps=5, decay=0.4, milestones="1,9")
    train(corpus, "out/stay", **changes)
    folder = corpus / "out/stay"
    steps = {file.name: load(file)["step"] for file in folder.glob("*.pt")}
    assert steps == {"ckpt_1.pt": 1, "ckpt_3.pt": 3, "ckpt_5.pt": 5}

    # With a flipped bit in the newest, the error names what can take its place.
    content = bytearray((folder / "ckpt_5.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "ckpt_5.pt").write_bytes(content)
    arguments = ["--resume", "--out_dir=out/stay"]
    error = run("train.py", *arguments, cwd=corpus, code=1)
    assert "error: out/stay/ckpt_5.pt is damaged" in error
    assert "remove it to continue from out/stay/ckpt_3.pt" in error
    (folder / "ckpt_5.pt").unlink()
    assert "at step 3" in run("train.py", *arguments, cwd=corpus)


def test_without_a_decay_the_rate_stays(corpus):
    """The last record included; and only the newest checkpoint is kept."""
    train(corpus, "out/flat", decay=0.0, max_steps=3)
    assert [record["lr"] for record in read_records(corpus / "out/flat")] == [0.007] * 4
    assert [file.name for file in (corpus / "out/flat").glob("*.pt")] == ["ckpt_3.pt"]


def test_the_settings_of_a_run_are_the_defaults_of_its_continuation(whole, corpus):
    """--resume and the directory, even a copy, are enough; any other setting given must agree."""
    copy = corpus / "out/run"  # the default of out_dir
    shutil.copytree(whole, copy)
    (copy / "ckpt_6.pt").unlink()
    output = run("train.py", "--resume", cwd=corpus)
    assert "continuing out/run at step 4" in output
    assert_same_bits(weights(whole), weights(copy))
    changed = ["--resume", "--out_dir=out/run", "--learning_rate=0.1"]
    error = run("train.py", *changed, cwd=corpus, code=1)
    assert "learning_rate was 0.007, is 0.1" in error


def test_resume_begins_a_run_that_is_not_there(whole, corpus):
    """This is what a job script needs. With neither a run nor settings, there is nothing to do."""
    train(corpus, "out/begun", "--resume")
    assert_same_bits(weights(whole), weights(corpus / "out/begun"))
    error = run("train.py", "--resume", "--out_dir=out/nowhere", cwd=corpus, code=1)
    assert "there is no run in out/nowhere to continue" in error
    error = run("train.py", *flags(data_dir="data/tiny", out_dir="out/begun"), cwd=corpus, code=1)
    assert "out/begun already holds a run: continue it with --resume" in error


def test_a_run_of_an_earlier_version_is_refused_but_its_model_is_taken(whole, corpus):
    """It has another format, and settings that no longer exist."""
    content = newest(whole)
    content["format"] = 2
    content["settings"] |= {"decay_steps": 2, "keep": 1}
    (corpus / "out/earlier").mkdir()
    torch.save(content, corpus / "out/earlier/ckpt.pt")
    error = run("train.py", "--resume", "--out_dir=out/earlier", cwd=corpus, code=1)
    assert "cannot be continued: another version wrote it" in error
    output = train(corpus, "out/later", "--init_from=out/earlier", max_steps=1)
    assert "starting from out/earlier at step 0" in output
    assert load_model(str(corpus / "out/earlier")).settings.n_layer == 2


def test_a_checkpoint_holds_no_padding(whole, corpus):
    """Matrices live in stacks, padded for the ranks; they are saved at their own size."""
    train(corpus, "out/padded", n=4, max_steps=1, decay=0.0, alpha="1/2")
    content = newest(corpus / "out/padded")
    for tensor in [*content["model"].values(), *content["momentum"]]:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4


# ---- starting from another run -------------------------------------------------------------------
def test_a_run_can_be_extended_from_before_its_decay(corpus):
    """With R and steps doubled, the data is the same; every bit equals that of the longer run."""
    train(corpus, "out/short", max_steps=6, repetitions=2)
    longer = dict(max_steps=12, decay=1 / 6, repetitions=4)
    train(corpus, "out/long", **longer)
    start = "--init_from=out/short/ckpt_4.pt"
    assert "starting from" in train(corpus, "out/extended", start, **longer)
    assert_same_bits(weights(corpus / "out/long"), weights(corpus / "out/extended"))
    assert log_without_speed(corpus / "out/long") == log_without_speed(corpus / "out/extended")


def test_an_extended_run_has_its_own_settings_and_is_not_done(whole, corpus):
    """Weight decay is that of the new run in both optimizers; only its last record says done."""
    changes = dict(max_steps=8, repetitions=3, weight_decay=0.7)
    output = train(corpus, "out/onward", "--init_from=out/whole", **changes)
    assert "starting from out/whole at step 6" in output
    groups = newest(corpus / "out/onward")["adamw"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.7]
    log = read_records(corpus / "out/onward")
    assert [record["step"] for record in log] == list(range(9))
    assert [record["step"] for record in log if "done" in record] == [8]


def test_init_from_takes_the_model_and_refuses_other_tokens(whole, corpus, tmp_path):
    """The shape of the model comes from the checkpoint, whatever the config says."""
    changes = dict(n_layer=1, n_embd=64, max_steps=8, repetitions=3)
    train(corpus, "out/adopted", "--init_from=out/whole", **changes)
    assert weights(corpus / "out/adopted").keys() == weights(whole).keys()
    train(corpus, "out/adopted", "--init_from=out/whole", "--resume", **changes)

    text = "".join(f'{{"text": "other {i} words {i * i}"}}\n' for i in range(3000))
    (corpus / "other.jsonl").write_text(text)
    arguments = ["--input", "other.jsonl", "--out", "data/other", "--vocab_size", "310"]
    run("prepare.py", *arguments, cwd=corpus)
    arguments = flags(data_dir="data/other", out_dir="out/other", max_steps=8)
    error = run("train.py", *arguments, "--init_from=out/whole", cwd=corpus, code=1)
    assert "another tokenizer" in error


def test_init_from_on_other_data_or_batches_begins_a_run_of_its_own(whole, corpus):
    """At step 0, with its own log and count of tokens: only the model is taken over."""
    arguments = ["--input", "text.jsonl", "--out", "data/more", "--val_fraction", "0.3"]
    run("prepare.py", *arguments, "--tokenizer", "data/tiny/tokenizer.json", cwd=corpus)
    changes = [dict(data_dir="data/more"), dict(batch_size=16), dict(seq_len=16), dict(seed=2)]
    for change in changes:
        out = f"out/own_{'_'.join(change)}"
        settings = dict(data_dir="data/tiny", max_steps=2, init_from="out/whole") | change
        output = run("train.py", *flags(**settings, out_dir=out), cwd=corpus)
        assert "starting from out/whole at step 0" in output
        log = read_records(corpus / out)
        assert [record["step"] for record in log] == [0, 1, 2]
        assert log[0]["val_ar"] < 5.3  # the model of step 6, not an untrained one


# Stands in for the package, and records how it is called.
WANDB = """
import json
def note(*call):
    with open("wandb_calls.jsonl", "a") as file:
        file.write(json.dumps(call) + "\\n")
def init(**arguments):
    note("init", arguments["id"], arguments["resume"])
def log(record, step):
    note("log", step, sorted(record))
"""


def test_a_resumed_run_continues_the_same_one_in_wandb(corpus, tmp_path):
    (tmp_path / "wandb.py").write_text(WANDB)
    arguments = ["train.py", "--wandb", *flags(data_dir=corpus / "data/tiny", out_dir="out/w")]
    run(*arguments, cwd=tmp_path, PYTHONPATH=tmp_path)
    (tmp_path / "out/w/ckpt_6.pt").unlink()
    run(*arguments, "--resume", cwd=tmp_path, PYTHONPATH=tmp_path)
    run(*arguments, "--out_dir=out/v", cwd=tmp_path, PYTHONPATH=tmp_path)
    calls = [json.loads(line) for line in open(tmp_path / "wandb_calls.jsonl")]
    starts = [call for call in calls if call[0] == "init"]
    assert [resume for _, _, resume in starts] == ["allow"] * 3
    first, again, other = [run_id for _, run_id, _ in starts]
    assert first == again != other
    assert [call[1] for call in calls if call[0] == "log"] == [*range(7), 5, 6, *range(7)]


# ---- one step, against loops written out here ----------------------------------------------------
def test_the_ar_weight_changes_the_mixture(whole, corpus):
    train(corpus, "out/weight2", ar_weight=2)
    assert differ(weights(whole), weights(corpus / "out/weight2"), 0.01)


def test_gradient_is_the_mean_over_sequences():
    """Slot by slot with the scale of train.py, and as one mean over all eight sequences."""
    s = tiny_settings(alpha="3/4")
    a, b = random_model(s), random_model(s)
    stream = random_stream(s)
    losses = []
    for slot in range(4):
        batch = data.train_batch(stream, s, 0, slot)
        (a.loss(batch)[0] / s.batch_size).backward()
        for i in range(2):
            one = [tensor[i : i + 1] for tensor in batch[:-1]]
            losses.append(b.loss(data.Batch(*one, batch.objective))[0])
    torch.stack(losses).mean().backward()
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_one_batch_can_be_learned():
    """Both losses of one repeated batch vanish: gradients, optimizers and shift work together."""
    s = tiny_settings(n_embd=64, n_ff=128)
    torch.manual_seed(0)
    model = Transformer(s)
    stream = random_stream(s)
    batches = [data.train_batch(stream, s, 0, slot) for slot in range(4)]
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [Muon(matrices, 0.01), torch.optim.AdamW(others, 0.01)]
    for _ in range(150):
        losses = [model.loss(batch)[0] / 2 for batch in batches]
        sum(losses).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert max(losses) < 0.1


def test_three_steps_equal_a_plain_loop(corpus):
    """Slots, weights, z-loss, decay, who optimizes what: fp64 Newton-Schulz and torch's AdamW."""
    changes = dict(
        alpha="3/4",
        ar_weight=2.0,
        z_loss=0.1,
        max_steps=3,
        decay=2 / 3,
        weight_decay=0.5,
        momentum=0.8,
    )
    train(corpus, "out/plain", **changes)
    s = tiny_settings(**changes)
    torch.manual_seed(s.seed)
    model = Transformer(s)
    stream = data.Stream(data.open_corpus(corpus / "data/tiny"), s)
    state = dict(model.named_parameters())
    hidden = {k: p for k, p in state.items() if k.startswith("blocks") and "norm" not in k}
    others = [p for k, p in state.items() if k not in hidden]
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.5)
    momentum = {k: torch.zeros_like(p) for k, p in hidden.items()}
    positions = torch.arange(32).expand(2, 32)
    for step, lr in enumerate((0.007, 0.007, 0.0035)):
        for slot in range(4):
            batch = data.train_batch(stream, s, step, slot)
            assert (batch.objective == "ar") == ((step * 4 + slot) * 3 % 4 < 3)
            prefix = torch.tensor([0 if batch.objective == "ar" else 32] * 2)
            mask = make_mask(1 + (batch.inputs == 1).cumsum(1), positions, prefix)
            logits = model.hidden(batch.inputs, mask, positions[:1]) @ model.head.weight.T
            losses = F.cross_entropy(logits.mT, batch.targets, reduction="none")
            losses = losses + 0.1 * logits.logsumexp(-1) ** 2
            objective_weight = 2 if batch.objective == "ar" else 1
            ((losses * batch.weights).sum() * objective_weight / 8).backward()
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        for k, p in hidden.items():
            momentum[k] = 0.8 * momentum[k] + p.grad
            update = textbook(p.grad + 0.8 * momentum[k]).float() * 0.2 * max(p.shape) ** 0.5
            p.data = p.data * (1 - lr * 0.5) - lr * update
        model.zero_grad()
    assert_close({k: p.data for k, p in state.items()}, weights(corpus / "out/plain"), 1e-4)
