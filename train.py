"""
Train a dual-objective language model.

    python train.py config/demo.py                                # one process, CPU or one GPU
    python train.py config/demo.py --alpha=7/8 --out_dir=out/x    # every setting can be changed
    python train.py --resume --out_dir=out/demo                   # continue after a stop, exactly
    python train.py config/demo.py --resume                       # continue, or begin
    python train.py config/demo.py --init_from=out/base           # start from another model
    torchrun --nproc_per_node=8 train.py config/rep16_a63_64.py   # many GPUs, on one or more hosts
"""

import json
import math
import os
import shlex
import signal
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

from errors import die, report

if __name__ == "__main__":
    sys.excepthook = report  # before the large imports, to report a missing package in one line too

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from tqdm import tqdm

import checkpoint
import data
from configurator import FREE_ON_RESUME, fill_in, make_settings, read_settings
from device import all_reduce_gradients, any_rank, choose_device, join_ranks, sum_over_ranks
from model import HeadLoss, Transformer
from muon import Muon

# ---- settings, device, ranks ---------------------------------------------------------------------
if not sys.argv[1:]:
    die("which run? Name a config file, as in: python prepare.py && python train.py config/demo.py")
named = read_settings(sys.argv[1:], __doc__)  # what config files and flags set
s = make_settings(named)
device, dtype = choose_device(s.device, s.dtype)
rank, world = join_ranks(device)


def say(*text):
    if rank == 0:
        print(*text, flush=True)


# ---- the run directory: a new run, one to continue, or one that starts from another model --------
# torchrun counts restarts on each host; a host that replaces a lost one starts at 0, so ask all.
restarted = any_rank(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
if rank == 0:
    lock = checkpoint.lock_run(s.out_dir, wait=restarted)
any_rank(False)  # wait for the lock
newest = checkpoint.newest_checkpoint(s.out_dir)
if newest and not s.resume:
    die(f"{s.out_dir} already holds a run: continue it with --resume, or choose another --out_dir")
if s.resume and not newest and set(named) <= set(FREE_ON_RESUME):
    die(f"there is no run in {s.out_dir} to continue; to begin one, name a config file too")

saved = None
if newest:
    saved = checkpoint.load_checkpoint(newest)
    if saved.get("format") != checkpoint.CHECKPOINT_FORMAT:
        die(
            f"{newest} cannot be continued: another version wrote it, or it is an imported model; "
            f"to start a run from it, use --init_from={newest} and another --out_dir"
        )
    # The directory may have been moved, and this may be another machine.
    here = {"out_dir": s.out_dir, "device": s.device}
    s = make_settings(saved["settings"] | here | named)
    _, dtype = choose_device(device, s.dtype)
elif s.init_from:
    saved = checkpoint.load_checkpoint(s.init_from)
if s.init_from:  # when resuming too: the run's own checkpoint has the same shape
    checkpoint.adopt_model(saved, s)
if s.extra_head:
    die("extra_head is for reading the released models; it cannot be trained")
if device == "cuda" and s.compile and s.n_embd < 16 * s.n_head:
    die(
        f"heads are {s.n_embd // s.n_head} wide, but compiled attention on a GPU needs at least "
        "16: lower n_head, or use --compile=False"
    )

# ---- data ----------------------------------------------------------------------------------------
corpus = data.open_corpus(s.data_dir)
if newest:
    checkpoint.check_same_data(saved, s, corpus.files)
elif saved:
    checkpoint.check_tokenizer(saved, corpus)
fill_in(s, corpus.vocab_size, len(corpus.train.tokens))
if newest:
    checkpoint.check_resumable(saved, s)
stream = data.Stream(corpus, s)
n_val = len(corpus.val.tokens)
if n_val <= s.seq_len:
    die(
        f"{s.data_dir} has {n_val:,} held-out tokens, less than one window of {s.seq_len:,}: lower "
        "seq_len, or hold out more with prepare.py --val or --val_fraction"
    )
n_slots = data.slots_per_step(s)
tokens_per_step = s.batch_size * s.seq_len
decay_steps = round(s.decay * s.max_steps)
milestones = {int(text) for text in s.milestones.split(",") if text}
if decay_steps > 0:
    milestones.add(s.max_steps - decay_steps)  # from there a run can be extended
if n_slots % world != 0:
    die(
        f"{world} processes cannot share {n_slots} slots (batch_size / micro_batch_size) evenly: "
        "start fewer, or lower micro_batch_size"
    )

# ---- model and optimizers ------------------------------------------------------------------------
# Muon trains the matrices of the blocks; AdamW the embedding, the head and the norms.
torch.manual_seed(s.seed)
model = Transformer(s, dtype).to(device)
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
others = [p for name, p in model.named_parameters() if p.ndim == 1 or "blocks" not in name]
muon = Muon(
    matrices,
    s.learning_rate,
    s.momentum,
    s.weight_decay,
    dtype=dtype if device == "cuda" else torch.float32,
)
adamw = torch.optim.AdamW(
    others, s.learning_rate, (0.9, 0.95), weight_decay=s.weight_decay, fused=device != "mps"
)
if s.compile and device != "mps":
    for block in model.blocks:
        block.compile(dynamic=False)
    if device == "cuda":
        model.sparse = True
        HeadLoss.sequence_loss = torch.compile(HeadLoss.sequence_loss, dynamic=False)
    say("compiling: the first step and the first validation take a minute or two longer")

# ---- where the run stands ------------------------------------------------------------------------
step = 0
records = []  # what log.jsonl holds
# For each objective, since the last record: the sum of its losses and the number of sequences.
running = {name: [0.0, 0.0] for name in data.OBJECTIVES}
if saved:
    try:
        model.load_state_dict(saved["model"])
        if checkpoint.extends(saved, s, corpus.files):  # otherwise a new run begins
            muon.load_momentum(saved["momentum"])
            # The moments are the checkpoint's; weight decay and the like are this run's.
            groups = adamw.state_dict()["param_groups"]
            adamw.load_state_dict({"state": saved["adamw"]["state"], "param_groups": groups})
            step = saved["step"]
            records = saved["records"]
            running = saved["running"]
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        die(f"the checkpoint in {newest or s.init_from} belongs to another model: {error}")
    if newest:
        say(f"continuing {s.out_dir} at step {step}")
    else:
        if step >= s.max_steps:
            die(f"{s.init_from} already has {step} steps: raise max_steps")
        say(f"starting from {s.init_from} at step {step}")
        for record in records:  # the run continues: it is no longer done
            record.pop("done", None)
            record.pop("overfit", None)
if sum_over_ranks(torch.tensor(step)) != step * world:
    die(f"the processes see different checkpoints: all hosts must share {s.out_dir}")
del saved

if rank == 0:
    log_file = open(os.path.join(s.out_dir, "log.jsonl"), "w", buffering=1)  # line by line
    for record in [{"settings": vars(s)}, *records]:  # what followed the checkpoint is redone
        log_file.write(json.dumps(record) + "\n")
    if s.wandb:
        import wandb

        id_file = Path(s.out_dir, "wandb_id")  # a resumed run keeps its id there
        if not (newest and id_file.exists()):
            id_file.write_text(uuid.uuid4().hex)
        run_id = id_file.read_text()
        wandb.init(project="nanodual", name=s.out_dir, id=run_id, resume="allow", config=vars(s))


# ---- validation, checkpoints, log ----------------------------------------------------------------
nats_to_bits = 1 / (math.log(2) * data.bytes_per_token(corpus, s))  # per token -> per byte


@torch.no_grad()
def validate():
    """Return both held-out losses, in nats per token and bits per byte, on any number of ranks."""
    total = torch.zeros(3, dtype=torch.float64)  # sums: AR losses, MD losses, targets
    n_batches = math.ceil(data.count_val_sequences(corpus, s) / s.micro_batch_size / world)
    silent = True if rank > 0 else None  # None: only a terminal shows it
    batches = data.val_batches(corpus, s, rank, world)
    for ar, md in tqdm(batches, "validation", n_batches, leave=False, disable=silent):
        losses = []
        for batch in (ar, md):
            # z_loss does not affect ce. It is passed to share the compiled code with training.
            _, ce = model.loss(batch.to(device), s.z_loss)
            losses.append(ce.item())
        total += torch.tensor([*losses, ar.weights.sum()], dtype=torch.float64)
    total_ar, total_md, n_targets = sum_over_ranks(total).tolist()
    val_ar = total_ar / n_targets
    val_md = total_md / n_targets
    return {
        "val_ar": val_ar,
        "val_md": val_md,
        "val_ar_bpb": val_ar * nats_to_bits,
        "val_md_bpb": val_md * nats_to_bits,
    }


def save():
    """Save everything that is needed to continue, on any number of devices."""
    momentum = muon.gather_momentum()
    if rank > 0:
        return
    # Copies: the matrices are views of Muon's stacks, and a view is saved with its whole stack.
    weights = {name: p.to("cpu", copy=True) for name, p in model.state_dict().items()}
    content = {
        "format": checkpoint.CHECKPOINT_FORMAT,
        "model": weights,
        "momentum": [m.to("cpu", copy=True) for m in momentum],
        "adamw": adamw.state_dict(),
        "step": step,
        "running": running,
        "records": records,
        "settings": vars(s),
        "data": corpus.files,
        "tokenizer": corpus.tokenizer_json,
    }
    checkpoint.save_checkpoint(content, s.out_dir, stay=milestones)


def write_record(record):
    """Print a record, and append it to log.jsonl."""
    cells = []
    for name, value in record.items():
        if isinstance(value, float):
            value = f"{value:.5g}"
        elif not isinstance(value, bool):
            value = f"{value:,}"
        cells.append(f"{name} {value}")
    if "tok_per_s" in record:
        tokens_left = (s.max_steps - step) * tokens_per_step
        cells.append(f"ETA {timedelta(seconds=tokens_left // max(record['tok_per_s'], 1))}")
    say(" | ".join(cells))
    if rank == 0:
        log_file.write(json.dumps(record) + "\n")
        if s.wandb:
            wandb.log(record, step=step)


# ---- signals: after SIGTERM or Ctrl-C on any rank, all finish the step, save and exit ------------
first_step = step
stop_signal = 0


def ask_to_stop(number, frame):
    global stop_signal
    if step == first_step or number == stop_signal == signal.SIGINT:
        sys.exit(128 + number)  # there is nothing new to save, or it is the second Ctrl-C
    if number == signal.SIGINT and rank == 0:
        os.write(2, b"\nfinishing this step, then saving; press again to quit at once\n")
    stop_signal = number


signal.signal(signal.SIGTERM, ask_to_stop)
signal.signal(signal.SIGINT, ask_to_stop)

# ---- what this run will do -----------------------------------------------------------------------
alpha = Fraction(s.alpha)
n_unique = stream.W * s.seq_len
R = s.max_steps * s.batch_size / stream.W  # less than was asked for if there are few windows
deviation = math.sqrt(R * alpha * (1 - alpha))
say(
    f"{sum(p.numel() for p in model.parameters()):,} parameters on {world} x {device}, "
    f"{str(dtype).removeprefix('torch.')}; {s.max_steps:,} steps of {tokens_per_step:,} tokens"
)
say(
    f"{s.data_dir}: {len(corpus.train.tokens):,} training tokens, "
    f"{n_unique / len(corpus.train.tokens):.1%} of them used, {R:.4g} times each"
)
say(
    f"alpha {alpha}: a token is seen by AR {float(alpha * R):.4g} times on average, by MD "
    f"{float((1 - alpha) * R):.4g} times (standard deviation {deviation:.1f})"
)
if alpha * R > 32:
    say("AR tends to overfit beyond about 16 repetitions: --alpha=auto gives it that many")
if n_slots % alpha.denominator != 0:
    say(
        f"a step has {n_slots} slots, not a multiple of {alpha.denominator}, so the share of AR "
        "varies from step to step"
    )


# ---- the loop: one more round than steps, so that the last weights are evaluated and saved too ---
def prefetch(step, slot):
    """Start preparing a batch in the background; past the last slot, one for the next step."""
    step, slot = step + slot // n_slots, slot % n_slots
    if step < s.max_steps:
        return pool.submit(data.train_batch, stream, s, step, slot)


def due(interval):
    return step == s.max_steps or (interval > 0 and step % interval == 0)


pool = ThreadPoolExecutor(max_workers=1)
upcoming = prefetch(step, rank)
logged_step = step
clock = time.perf_counter()
stopping = False
while True:
    # ---- between two steps: evaluate, log, save --------------------------------------------------
    last = step == s.max_steps
    # Constant, then linear to 0 over the last decay_steps; no warmup.
    lr = s.learning_rate
    if decay_steps > 0:
        lr *= min(1.0, (s.max_steps - step) / decay_steps)
    record = None
    is_new = step > first_step or step == 0  # otherwise the checkpoint already has its record
    if is_new and (due(s.eval_interval) or (due(s.log_interval) and step > 0)):
        record = {"step": step, "tokens": step * tokens_per_step, "lr": lr}
        for name, (total, count) in running.items():
            if count > 0:
                record[f"train_{name}"] = total / count
        if step > logged_step:
            seconds = time.perf_counter() - clock
            record["tok_per_s"] = round((step - logged_step) * tokens_per_step / seconds)
        if due(s.eval_interval):
            record |= validate()
        records.append(record)
        if last:
            record["done"] = True
            record["overfit"] = any(checkpoint.overfits(records, name) for name in running)
        running = {name: [0.0, 0.0] for name in data.OBJECTIVES}
    if step > first_step and (due(s.save_interval) or step in milestones or stopping):
        save()
    if record:  # after the checkpoint, so that a log that says "done" is right
        write_record(record)
        clock = time.perf_counter()
        logged_step = step
    if last or stopping:
        break

    # ---- forward and backward: batch_size sequences, a share alpha of them AR, the rest MD -------
    # For each objective: the sum of its losses over sequences, and the number of sequences.
    losses = {name: torch.zeros(2, device=device) for name in data.OBJECTIVES}
    for slot in range(rank, n_slots, world):
        batch = upcoming.result().to(device)
        upcoming = prefetch(step, slot + world)
        loss, ce = model.loss(batch, s.z_loss)  # each the sum over the slot's sequences
        # Eq. 5, alpha L_AR + (1 - alpha) L_MD, is a mean over sequences, a share alpha of them AR.
        # Within a sequence, weights sum to 1; backward() sums over slots; ranks are summed below.
        objective_weight = s.ar_weight if batch.objective == "ar" else 1.0
        (loss * objective_weight / s.batch_size).backward()
        losses[batch.objective][0] += ce
        losses[batch.objective][1] += s.micro_batch_size

    # ---- sum the gradients over the ranks --------------------------------------------------------
    matrix_square = muon.reduce()  # each matrix on its owner, which alone updates it
    all_reduce_gradients(others)  # embedding, head, norms: on every rank
    norm = (matrix_square + get_total_norm([p.grad for p in others]) ** 2) ** 0.5

    # ---- before anything is updated: is everything finite, was anyone told to stop? --------------
    totals = sum_over_ranks(torch.stack(list(losses.values()))).tolist()
    if not math.isfinite(norm.item() + sum(total for total, _ in totals)):
        die(
            f"loss or gradient is not finite at step {step}, so nothing was updated; no checkpoint "
            "is affected: try a lower learning_rate"
        )
    stopping = any_rank(stop_signal > 0)
    for name, (total, count) in zip(losses, totals):
        running[name][0] += total
        running[name][1] += count

    # ---- update ----------------------------------------------------------------------------------
    if s.grad_clip > 0:
        clip_grads_with_norm_(model.parameters(), s.grad_clip, norm)
    for optimizer in (muon, adamw):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    step += 1

pool.shutdown()
folder = shlex.quote(s.out_dir)
if not last:
    say(f"stopped at step {step}, saved; to continue: python train.py --resume --out_dir={folder}")
    sys.exit(128 + (stop_signal or signal.SIGTERM))  # 0: another rank got the signal
say(f"done, see {s.out_dir}. Next:")
say(f"  python eval.py --ckpt {folder}")
say(f"  python sample.py --ckpt {folder}")
say(f"  python sweep.py plot --results {folder}")
