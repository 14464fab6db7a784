"""
The directory of a run: its lock, its checkpoints, the trained model in them, and whether its log
shows overfitting.

The directory holds log.jsonl and checkpoints named ckpt_STEP.pt: the newest, the one at which the
learning rate begins to decay, and the milestones.
"""

import glob
import os
import pickle
import re
import zipfile
from typing import NamedTuple

import tokenizers
import torch

from configurator import FREE_ON_RESUME, MODEL_SETTINGS, Settings, check, make_settings
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

    With wait, block until it is free: after a restart, a lost process may still hold it.
    """
    try:
        os.makedirs(out_dir, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        die(f"cannot train in {out_dir}: a file is in the way; --out_dir takes a directory")
    file = open(os.path.join(out_dir, ".lock"), "w")
    if fcntl is None:
        print(f"this system has no file locks: do not start two runs in {out_dir} at once")
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        die(f"another process is training in {out_dir}: wait for it, or choose another --out_dir")
    except OSError:
        print(f"the file system of {out_dir} has no locks: do not start two runs there at once")
    return file


def list_checkpoints(out_dir):
    """Return {step: file}, sorted by step."""
    files = {}
    for file in glob.glob(os.path.join(glob.escape(out_dir), "ckpt_*.pt")):
        numbered = re.fullmatch(r"ckpt_(0|[1-9][0-9]{0,14})\.pt", os.path.basename(file))
        if numbered:
            files[int(numbered.group(1))] = file
    return dict(sorted(files.items()))


def newest_checkpoint(out_dir):
    """Return the newest checkpoint file in a directory, or None if there is none."""
    earlier_version = os.path.join(out_dir, "ckpt.pt")  # what earlier versions called it
    if os.path.exists(earlier_version):
        return earlier_version
    return next(reversed(list_checkpoints(out_dir).values()), None)


# ---- writing and reading checkpoints -------------------------------------------------------------
def save_checkpoint(content, out_dir, stay=()):
    """Write ckpt_STEP.pt, completely or not at all. Then remove older ones not in `stay`."""
    temporary = os.path.join(out_dir, "ckpt.tmp")
    name = f"ckpt_{content['step']}.pt"
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, os.path.join(out_dir, name))
    except (OSError, RuntimeError) as error:
        if os.path.exists(temporary):
            os.remove(temporary)
        # On a full disk, torch raises a RuntimeError that does not mention the disk.
        reason = error if isinstance(error, OSError) else "is the disk full?"
        die(f"could not write {name} in {out_dir}; no other checkpoint is affected ({reason})")
    for step, file in list_checkpoints(out_dir).items():
        if step < content["step"] and step not in stay:
            os.remove(file)


def find_checkpoint(path):
    """Return a checkpoint file, given that file or a run directory."""
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        die(f"no such file or directory: {path}")
    newest = newest_checkpoint(path)
    if not newest:
        die(f"there is no checkpoint in {path}: name a file, or the out_dir of a run")
    return newest


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
    except FileNotFoundError:
        if find_checkpoint(path) == file:  # a link to a file that is gone
            raise
        return load_checkpoint(path)  # a live run has just saved a newer one
    except PermissionError:  # the file itself may be fine
        raise
    except Exception as error:  # zipfile, zlib, struct, pickle and torch raise their own types
        reason = str(error).partition("\n")[0]
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds something other than weights and numbers"
        older = [f for f in list_checkpoints(os.path.dirname(file)).values() if f != file]
        advice = f"; remove it to continue from {older[-1]}" if older else ""
        die(f"{file} is damaged, or not a checkpoint: {reason}{advice}")


# ---- resuming a run, or starting from another ----------------------------------------------------
CHECKPOINT_FORMAT = 3  # must match to resume a run; the weights alone can be read from any format


def check_same_data(checkpoint, s, files):
    """Refuse to resume a run on different data."""
    if checkpoint.get("data") != files:
        die(
            f"cannot resume {s.out_dir}: the data in {s.data_dir} is not what it was trained on "
            f"(in {checkpoint['settings']['data_dir']}); to train on this data, choose another "
            f"--out_dir; to start from that model, add --init_from={s.out_dir}"
        )


def check_resumable(checkpoint, s):
    """Refuse to resume a run whose settings have changed in a way that matters."""
    changed = []
    for name, value in checkpoint["settings"].items():
        new_value = getattr(s, name, "unknown")
        if name not in FREE_ON_RESUME and new_value != value:
            changed.append(f"{name} was {value}, is {new_value}")
    if changed:
        die(
            f"cannot resume {s.out_dir}: settings have changed ({'; '.join(changed)}); change them "
            f"back, or start a new run from this one with --init_from={s.out_dir} and another "
            "--out_dir"
        )


def extends(checkpoint, s, files):
    """Return whether a run continues from a checkpoint's step: same data, in the same batches.

    Otherwise the run takes only the weights and starts at step 0.
    """
    if checkpoint.get("format") != CHECKPOINT_FORMAT or checkpoint["data"] != files:
        return False
    order = ["seed", "seq_len", "batch_size"]
    return all(checkpoint["settings"][name] == getattr(s, name) for name in order)


def adopt_model(checkpoint, s):
    """Give a run's settings the shape of the model that it starts from."""
    model = make_settings(checkpoint["settings"])
    for name in MODEL_SETTINGS:
        setattr(s, name, getattr(model, name))
    check(s)


def check_tokenizer(checkpoint, corpus):
    """Refuse to train a model on data that was made with another tokenizer."""
    vocabularies = []
    for text in (checkpoint["tokenizer"], corpus.tokenizer_json):
        vocabularies.append(parse_tokenizer(text).get_vocab())
    if vocabularies[0] != vocabularies[1]:
        die(
            "the data was made with another tokenizer, not the checkpoint's: prepare it with "
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
        settings = make_settings(checkpoint["settings"])
        with torch.device("meta"):  # draws no weights: the checkpoint's take their place
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


# ---- does a run overfit? -------------------------------------------------------------------------
def overfits(records, objective):
    """Return whether a run overfits in "ar" or "md", by the paper's footnote with a 2% margin.

    It does if, at some point after its minimum, the held-out loss is more than 2% above it while
    the training loss (the mean since the last validation) is below its value at that minimum.
    """
    val_losses, train_losses = [], []
    since = []  # training losses since the last validation
    for record in records:
        if f"train_{objective}" in record:
            since.append(record[f"train_{objective}"])
        if f"val_{objective}" in record and since:  # an untrained objective has none
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
