"""
The directory of a run: its lock, its checkpoints, the trained model in them, and whether its log
shows overfitting.

It holds ckpt.pt (the newest checkpoint), ckpt_decay.pt (the one before the learning rate decays),
ckpt_STEP.pt (older ones, if asked for) and log.jsonl.
"""

import glob
import os
import pickle
import re
import shutil
import socket
import zipfile
from typing import NamedTuple

import tokenizers
import torch

from configurator import FREE_ON_RESUME, MODEL_SETTINGS, Settings, check
from device import choose_device
from errors import die
from model import Transformer
from tokenizer import SpecialIds, find_special_ids, parse_tokenizer

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


# ---- the run directory ---------------------------------------------------------------------------
def lock_run(out_dir, wait):
    """Lock a run directory for as long as this process lives; return the open lock file.

    With wait, block until it is free: after a restart, a process of the lost host may still hold
    it.
    """
    os.makedirs(out_dir, exist_ok=True)
    file = open(os.path.join(out_dir, ".lock"), "a+")
    if fcntl is None:
        print(f"this system has no file locks: do not train in {out_dir} twice at once")
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        die(f"another process is training in {out_dir}: wait for it, or choose another --out_dir")
    except OSError:
        print(f"the file system of {out_dir} has no locks: do not train in it twice at once")
    return file


def job_name():
    """Return a name for the job that started this process, the same after torchrun restarts it."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        return name
    return f"{socket.gethostname()} {os.getppid()}"


def began_this_run(lock):
    """Say whether the run in the locked directory was begun by this very job."""
    lock.seek(0)
    return lock.read() == job_name()


def claim_run(lock):
    """Write into the lock file which job works here."""
    lock.truncate(0)
    lock.write(job_name())
    lock.flush()


def list_checkpoints(out_dir):
    return sorted(glob.glob(os.path.join(glob.escape(out_dir), "ckpt*.pt")))


# ---- writing and reading checkpoints -------------------------------------------------------------
def save_checkpoint(content, out_dir, *names):
    """Write, sync, rename: a checkpoint is complete or absent, under each of its names."""
    temporary = os.path.join(out_dir, "ckpt.tmp")
    link = os.path.join(out_dir, "ckpt.tmp.link")
    try:
        # A process killed in here leaves these, perhaps as second names of a sound checkpoint.
        remove_if_there(temporary, link)
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        # The file itself gets the last name; the others are links to it.
        for name in names[:-1]:
            try:
                os.link(temporary, link)
            except OSError:  # a file system without hard links
                shutil.copyfile(temporary, link)
            os.replace(link, os.path.join(out_dir, name))
        os.replace(temporary, os.path.join(out_dir, names[-1]))
    except (OSError, RuntimeError) as error:
        remove_if_there(temporary, link)
        # What torch says about a full disk, a RuntimeError, does not mention the disk.
        reason = error if isinstance(error, OSError) else "is the disk full?"
        die(f"could not write {names[-1]} in {out_dir}; the one before is intact ({reason})")


def remove_if_there(*paths):
    for path in paths:
        if os.path.lexists(path):
            os.remove(path)


def prune_checkpoints(out_dir, step, keep):
    """Keep `keep` numbered checkpoints up to this step. Later ones are of a future given up."""
    steps = []
    for file in list_checkpoints(out_dir):
        numbered = re.fullmatch(r"ckpt_([1-9][0-9]*)\.pt", os.path.basename(file))
        if numbered:
            steps.append(int(numbered.group(1)))
    stay = sorted(n for n in steps if n <= step)[-keep:]
    for n in steps:
        if n not in stay:
            os.remove(os.path.join(out_dir, f"ckpt_{n}.pt"))


def find_checkpoint(path):
    """Return the file of a checkpoint, given that file or the directory of a run."""
    file = os.path.join(path, "ckpt.pt") if os.path.isdir(path) else path
    if os.path.isdir(path) and not os.path.isfile(file):
        # A process killed between the names of its first checkpoint has not come to this one.
        file = max(list_checkpoints(path), key=os.path.getmtime, default=file)
    if os.path.isfile(file):
        return file
    die(f"no checkpoint {file}")


def load_checkpoint(path):
    """Check the checksums of a checkpoint, then return its content; nothing in it is executed."""
    file = find_checkpoint(path)
    try:
        # torch.load would accept a flipped bit, and a small file that unpacks to a huge one.
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
            if unpacked > os.path.getsize(file):
                raise ValueError("it is compressed")
            if archive.testzip():
                raise ValueError("a checksum is wrong")
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if not {"model", "settings", "step", "tokenizer"} <= set(content):
            raise ValueError("it was not written by train.py or export.py, or has no tokenizer")
        return content
    except Exception as error:  # zipfile, zlib, struct, pickle and torch have their own kinds
        reason = str(error).partition("\n")[0]
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds something other than weights and numbers"
        others = [other for other in list_checkpoints(os.path.dirname(file)) if other != file]
        advice = f"; you can copy an older one over it: {', '.join(others)}" if others else ""
        die(f"{file} is damaged: {reason}{advice}")


# ---- resuming a run, or starting from another ----------------------------------------------------
CHECKPOINT_FORMAT = 2  # of what continues a run; the weights alone can be read from any format


def check_format(checkpoint):
    """Refuse to continue a run that another version of this code has begun."""
    if checkpoint.get("format") != CHECKPOINT_FORMAT:
        die("an earlier version of this code has begun this run: only that version can continue it")


def check_resumable(checkpoint, s, files):
    """Refuse to resume a run whose settings or data have changed in a way that matters."""
    changed = []
    for name, value in checkpoint["settings"].items():
        new_value = getattr(s, name, "unknown")
        if name not in FREE_ON_RESUME and new_value != value:
            changed.append(f"{name} was {value}, is {new_value}")
    if checkpoint.get("data") != files:
        changed.append(f"the data in {s.data_dir}")
    if changed:
        die(f"cannot resume {s.out_dir}, this has changed: {'; '.join(changed)}")


def adopt_model(checkpoint, s):
    """Give the settings of a run the shape of the model that it starts from."""
    for name in MODEL_SETTINGS:
        setattr(s, name, checkpoint["settings"][name])
    check(s)


def check_tokenizer(checkpoint, corpus):
    """Refuse to go on training a model on data that another tokenizer has made."""
    vocabularies = []
    for text in (checkpoint["tokenizer"], corpus.tokenizer_json):
        vocabularies.append(parse_tokenizer(text).get_vocab())
    if vocabularies[0] != vocabularies[1]:
        die(
            "the data was made with another tokenizer than the checkpoint's: prepare it with "
            "--tokenizer and the tokenizer.json of the checkpoint's own data"
        )


# ---- a trained model, for use --------------------------------------------------------------------
class Trained(NamedTuple):
    model: Transformer
    tokenizer: tokenizers.Tokenizer
    special: SpecialIds
    settings: Settings
    checkpoint: dict


def load_model(path, device="auto", dtype="auto"):
    """Return a trained model, ready for use but not for training."""
    checkpoint = load_checkpoint(path)
    device, dtype = choose_device(device, dtype)
    try:
        settings = check(Settings(**checkpoint["settings"]))
        with torch.device("meta"):  # draws no weights: those of the checkpoint take their place
            model = Transformer(settings, dtype)
        model.load_state_dict(checkpoint["model"], assign=True)
        model.freeze(device)
        tokenizer = parse_tokenizer(checkpoint["tokenizer"])
        special = find_special_ids(checkpoint["tokenizer"])
        largest = max(tokenizer.get_vocab().values())
        if largest >= settings.vocab_size:
            raise ValueError(f"token {largest} of the tokenizer has no embedding")
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:  # the latter from check
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        die(f"the checkpoint in {path} does not fit this code, or has no tokenizer ({reason})")
    return Trained(model, tokenizer, special, settings, checkpoint)


# ---- the paper's overfitted runs -----------------------------------------------------------------
def overfits(records, objective):
    """Say whether a run overfits in "ar" or "md": the paper's footnote, with 2% as its margin.

    It does if at some time after its best the held-out loss was more than 2% above it, while the
    training loss (its mean since the last validation) was below its value at the best.
    """
    val_losses, train_losses = [], []
    since = []  # training losses since the last validation
    for record in records:
        if f"train_{objective}" in record:
            since.append(record[f"train_{objective}"])
        if f"val_{objective}" in record and since:  # an objective without a share has none
            val_losses.append(record[f"val_{objective}"])
            train_losses.append(sum(since) / len(since))
            since = []
    if not val_losses:
        return False
    best = val_losses.index(min(val_losses))
    for val, train in zip(val_losses[best:], train_losses[best:]):
        if val > 1.02 * val_losses[best] and train < train_losses[best]:
            return True
    return False
