"""
Train a dual-objective language model.

    python train.py config/demo.py                                # one process, CPU or one GPU
    python train.py config/demo.py --alpha=7/8 --out_dir=out/x    # every setting can be changed
    python train.py config/demo.py --resume=True                  # go on after a stop, to the same final weights
    torchrun --nproc_per_node=8 train.py config/rep16_a63_64.py   # many GPUs, also over several hosts
"""
import fcntl, glob, json, math, os, shutil, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from fractions import Fraction

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from configurator import FREE_ON_RESUME, die, load_settings
from data import Stream, open_data, train_slot, val_batches
from model import Transformer, choose_device, load_checkpoint
from muon import Muon

# ---- settings, device, ranks -----------------------------------------------------------------------------------------
s = load_settings(sys.argv[1:], __doc__)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
sys.stdout.reconfigure(line_buffering=True)
say = print if rank == 0 else lambda text: None
device, dtype = choose_device(s.device, s.dtype)
S = s.batch_size // s.micro_batch_size  # slots in a step, each a micro-batch of one objective
if S % world:
    die(f"{world} processes cannot share {S} slots (batch_size / micro_batch_size): use a divisor of {S}")
if world > 1:  # a rank that has waited this long for another gives up
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(minutes=10))

def on_device(array):
    return torch.from_numpy(array).to(device, non_blocking=True)

def gather(row):
    """(world, len(row)): the numbers of each rank, known to every rank."""
    table = torch.zeros(world, len(row), device=device)
    table[rank] = torch.as_tensor(row)
    if world > 1:
        dist.all_reduce(table)
    return table.cpu()

# ---- data and run directory ------------------------------------------------------------------------------------------
data, meta = open_data(s.data_dir, s.vocab_size)
stream, tokenizer, token_bytes = Stream(*data["train"], s), meta["tokenizer"], meta["token_bytes"]
if len(data["val"][0]) <= s.seq_len:
    die(f"{s.data_dir}/val.bin has {len(data['val'][0]):,} tokens, less than one window of seq_len {s.seq_len:,}")

has_run, problem = bool(glob.glob(os.path.join(glob.escape(s.out_dir), "ckpt*.pt"))), ""
restarted = gather([float(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))]).any()  # by torchrun, on some host
resume = s.resume or (has_run and restarted)
if s.resume and not has_run:
    die(f"no readable checkpoint in {s.out_dir}: there is nothing to resume")
if rank == 0:
    os.makedirs(s.out_dir, exist_ok=True)
    lock = open(os.path.join(s.out_dir, ".lock"), "w")  # held until this process ends, however it ends
    try:  # after a restart it may take a while until a host that was lost has let go of it
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if restarted else fcntl.LOCK_NB))
    except BlockingIOError:
        problem = f"another process is training in {s.out_dir}: wait for it, or choose another --out_dir"
    except OSError:
        say(f"the file system of {s.out_dir} has no locks: do not train in it twice at once")
if gather([bool(problem)]).any():  # a problem of rank 0 ends all ranks
    die(problem)
if has_run and not resume:
    die(f"{s.out_dir} holds a run already: continue it with --resume=True, or choose another --out_dir")

# ---- model and optimizers --------------------------------------------------------------------------------------------
torch.manual_seed(s.seed)
model = Transformer(s, dtype).to(device)
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
others = [p for name, p in model.named_parameters() if p.ndim == 1 or not name.startswith("blocks")]
muon = Muon(matrices, s.learning_rate, s.momentum, s.weight_decay, dtype if device == "cuda" else torch.float32)
adamw = torch.optim.AdamW(others, s.learning_rate, (0.9, 0.95), weight_decay=s.weight_decay, fused=device != "mps")
if s.compile:
    if device == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        die("torch.compile needs a C++ compiler on a CPU: use --compile=False")
    model.hidden = torch.compile(model.hidden, dynamic=False)

# ---- validation, checkpoints, resume ---------------------------------------------------------------------------------
@torch.no_grad()
def validate():
    """Both held-out losses, in nats per token and bits per byte; the same on any number of ranks."""
    losses, targets, size = [], 0, 0
    for i, (ar, md) in enumerate(val_batches(data["val"][0], s)):
        scored = ar[2] > 0  # the same targets in both
        targets, size = targets + scored.sum(), size + token_bytes[ar[1][scored]].sum()
        losses += [model.loss(*map(on_device, batch))[1].item() if i % world == rank else 0.0 for batch in (ar, md)]
    total = gather(losses).sum(0).double().view(-1, 2).sum(0).tolist()
    return {f"val_{k}{unit}": nats / float(n) for unit, n in (("", targets), ("_bpb", size * math.log(2)))
            for k, nats in zip(("ar", "md"), total)}

def save(name):
    """One file with all that is needed to go on, on any number of devices; it is complete or it is not there."""
    path, momentum, problem = os.path.join(s.out_dir, name), muon.gather_momentum(), ""
    if rank == 0:
        try:
            with open(path + ".tmp", "wb") as f:
                torch.save({"model": model.state_dict(), "momentum": momentum, "adamw": adamw.state_dict(),
                            "step": step, "running": running, "records": records, "settings": vars(s),
                            "data": meta["files"], "tokenizer": tokenizer}, f)
                f.flush()
                os.fsync(f.fileno())
            if name == "ckpt.pt" and s.keep > 1:  # a second name for the file; the newest `keep` of these stay
                kept = {int(f[5:-3]) for f in os.listdir(s.out_dir) if f.startswith("ckpt_") and f[5:-3].isdigit()}
                for old in kept - set(sorted(k for k in kept if k < step)[1 - s.keep:]):
                    os.remove(os.path.join(s.out_dir, f"ckpt_{old}.pt"))
                os.link(path + ".tmp", os.path.join(s.out_dir, f"ckpt_{step}.pt"))
            os.replace(path + ".tmp", path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            problem = f"could not write {path} at step {step}; the one before is intact ({str(error).splitlines()[0]})"
            if os.path.exists(path + ".tmp"):
                os.remove(path + ".tmp")
    if gather([bool(problem)]).any():
        die(problem)

def overfits(records, objective):
    """The paper's overfitted run, made exact: at some time after its best the held-out loss was more than 2% above it,
    while the training loss (its mean since the validation before; none without a share) was below its value there."""
    points, train = [], []
    for r in records:
        train += [r[f"train_{objective}"]] if f"train_{objective}" in r else []
        if f"val_{objective}" in r and train:
            points, train = points + [(r[f"val_{objective}"], sum(train) / len(train))], []
    best = min(range(len(points)), key=lambda i: points[i][0], default=0)
    return any(val > 1.02 * points[best][0] and loss < points[best][1] for val, loss in points[best:])

step, records, running = 0, [], [0.0] * 4  # since the last record: sum of AR losses, their number, the same for MD
if resume:
    ckpt = load_checkpoint(s.out_dir)
    try:
        changed = [f"{k} was {v}, is {getattr(s, k, 'unknown')}" for k, v in ckpt["settings"].items()
                   if k not in FREE_ON_RESUME and getattr(s, k, None) != v]
        if changed or ckpt["data"] != meta["files"]:
            die(f"cannot resume {s.out_dir}, this has changed: {'; '.join(changed) or f'the data in {s.data_dir}'}")
        model.load_state_dict(ckpt["model"])
        muon.scatter_momentum(ckpt["momentum"])
        adamw.load_state_dict(ckpt["adamw"])
        step, running, records = ckpt["step"], ckpt["running"], ckpt["records"]
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        die(f"the checkpoint in {s.out_dir} is of another model: {error}")
    del ckpt
    say(f"resuming {s.out_dir} at step {step}")
if (gather([step]) != step).any():
    die(f"the processes see different checkpoints: {s.out_dir} must be on a file system that all hosts share")
log_file = open(os.path.join(s.out_dir, "log.jsonl") if rank == 0 else os.devnull, "w", buffering=1)  # line by line
log_file.writelines(json.dumps(record) + "\n" for record in records)  # what came after the checkpoint comes again
if s.wandb and rank == 0:
    import wandb
    wandb.init(project="nanodual", name=s.out_dir, config=vars(s))

# ---- the loop: one more round than steps, so that the last weights are evaluated and saved too -----------------------
R, T, alpha, accumulation = s.repetitions, s.seq_len, Fraction(s.alpha), S // world
say(f"{sum(p.numel() for p in model.parameters()):,} parameters on {world} x {device}, {str(dtype)[6:]}; "
    f"{s.data_dir}: {stream.W * T:,} unique tokens x {R} repetitions")
say(f"alpha {alpha}: AR sees each token {float(alpha * R):g} times, MD {float((1 - alpha) * R):g} times"
    + (f"; the mix alternates over steps of {S} slots" if S % alpha.denominator else ""))
signals, stopped, start = [], 0, step  # after SIGTERM or Ctrl-C on any rank, all finish the step, save and exit
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: signals.append(number))
pool = ThreadPoolExecutor(1)
slots = ((t, micro * world + rank) for t in range(step, s.max_steps) for micro in range(accumulation))
upcoming = (pool.submit(train_slot, stream, s, *slot) for slot in slots)  # prepared in the background, one ahead
batch, clock, since = next(upcoming, None), time.time(), step
while True:
    # warmup-stable-decay without the warmup: constant, then linear to 0 over the last decay_steps
    lr = s.learning_rate * min(1, (s.max_steps - step) / max(s.decay_steps, 1))
    last, record = step == s.max_steps, None
    evaluate, log, checkpoint = (last or (every and step % every == 0)
                                 for every in (s.eval_interval, s.log_interval, s.save_interval))
    if (evaluate or (log and step)) and not (records and records[-1]["step"] == step):
        tokens, seconds = s.batch_size * T, (time.time() - clock) / max(step - since, 1)  # of a step
        record = {"step": step, "tokens": step * tokens, "lr": lr}
        record |= {f"train_{k}": running[i] / running[i + 1] for k, i in (("ar", 0), ("md", 2)) if running[i + 1]}
        record |= {"tok_per_s": round(tokens / seconds)} if step > since else {}
        record |= validate() if evaluate else {}
        line = " | ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in record.items())
        line += f" | ETA {timedelta(seconds=round((s.max_steps - step) * seconds))}" if step > since else ""
        records.append(record)
        if last:
            record |= {"done": True, "overfit": overfits(records, "ar") or overfits(records, "md")}
        running = [0.0] * 4
    decays = s.decay_steps and step == s.max_steps - s.decay_steps
    if step > start and decays:
        save("ckpt_decay.pt")
    if step > start and (stopped or checkpoint or decays):  # ckpt.pt is always the newest
        save("ckpt.pt")
    if record:  # after the checkpoint: a log that says done is right
        say(line)
        log_file.write(json.dumps(record) + "\n")
        if s.wandb and rank == 0:
            wandb.log(record, step=step)
        clock, since = time.time(), step
    if last or stopped:
        break

    # ---- one step: its gradient is the mean over S slots, a share alpha of which are AR ----
    stats = torch.zeros(2, 2, device=device)  # sum of losses, their number; of AR and of MD
    for micro in range(accumulation):
        *arrays, ar = batch.result()
        batch = next(upcoming, None)
        loss, ce = model.loss(*map(on_device, arrays), s.z_loss)
        # Eq. (5): alpha L_AR + (1 - alpha) L_MD
        (loss * (s.ar_weight if ar else 1.0) / S).backward()
        stats[0 if ar else 1] += torch.stack((ce, torch.ones_like(ce)))

    # ---- before anything is shared or updated: is every rank sound, was one told to stop? ----
    norm = get_total_norm([p.grad for p in model.parameters()])
    table = gather(torch.cat((stats.flatten(), norm[None], norm.new_tensor(signals[:1] or [0]))))
    if not table.isfinite().all():
        bad = [r for r in range(world) if not table[r].isfinite().all()]
        die(f"loss or gradient is not finite at step {step} on rank {', '.join(map(str, bad))}; nothing was updated "
            f"or saved: try a lower learning_rate")
    stopped = int(table[:, 5].max())
    running = [a + b for a, b in zip(running, table[:, :4].sum(0).tolist())]

    # ---- sum over ranks, a matrix on its owner, the rest everywhere; then update ----
    if world > 1:
        requests = [dist.reduce(p.grad, muon.owner[p], async_op=True) for p in matrices]
        for request in requests + [dist.all_reduce(p.grad, async_op=True) for p in others]:
            request.wait()
    if s.grad_clip:
        complete = [p.grad for p in matrices if muon.owner[p] == rank] + [p.grad for p in others if rank == 0]
        clip_grads_with_norm_(model.parameters(), s.grad_clip, gather(get_total_norm(complete)[None]).norm())
    for optimizer in (muon, adamw):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    step += 1

if world > 1:
    dist.destroy_process_group()
if not last:
    say(f"stopped by a signal at step {step}, saved; go on with --resume=True")
    sys.exit(128 + stopped)
say(f"done, see {s.out_dir}. Next:\n  python eval.py --ckpt {s.out_dir}\n"
    f"  python sample.py --ckpt {s.out_dir} --mode infill --prompt 'Return the<mask:3> of a list.'")
