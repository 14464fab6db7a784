"""
The settings of a run: defaults, changed by config files, then by the command line.

A config file is plain Python that assigns settings. It is executed: run only files you trust.
"""

import argparse
import ast
import dataclasses
import glob
import inspect
import os
import re
import runpy
import sys
from fractions import Fraction

from errors import die, suggest


# fmt: off
@dataclasses.dataclass
class Settings:
    # the model: a plain Llama; these defaults are the paper's 467.6M parameters
    n_layer: int = 24             # transformer blocks
    n_head: int = 16              # attention heads
    n_embd: int = 1024            # width
    n_ff: int = 3554              # inner width of the SwiGLU
    vocab_size: int = 51200       # rows of the embedding and of the head
    seq_len: int = 2048           # T: inputs in a training window
    rope_theta: float = 160000.0  # base of the rotary frequencies
    norm_eps: float = 1e-7        # RMSNorm epsilon
    extra_head: bool = False      # the head of the released models; not for training
    # the run and its two objectives
    data_dir: str = "data/hplt"   # what prepare.py wrote
    out_dir: str = "out/run"      # checkpoints and log.jsonl go here
    init_from: str = ""           # start from this checkpoint: its model and, if saved, optimizer
    seed: int = 1                 # weights, data order and masks
    alpha: str = "auto"           # share of AR sequences: 63/64, 0.5; auto: min(63/64, 16/R)
    repetitions: int = 1          # R: how often each token of the unique subset is seen
    ar_weight: float = 1.0        # weight of AR in Eq. 5; the paper's runs had 2 (see its erratum)
    # optimization
    batch_size: int = 2048        # sequences in a step, over all devices
    micro_batch_size: int = 8     # sequences in a slot: one forward pass, one objective
    max_steps: int = 8192         # optimizer steps
    decay_steps: int = 2048       # the last of them decay the learning rate to 0
    learning_rate: float = 0.007  # of Muon and of AdamW
    weight_decay: float = 0.1     # decoupled, on every parameter
    momentum: float = 0.95        # of Muon
    z_loss: float = 1e-4          # weight of logsumexp^2 beside the cross-entropy
    grad_clip: float = 0.0        # largest gradient norm; 0 = off, as in the paper
    # evaluation, logging, checkpoints, machine; an interval of 0 means only at the end
    eval_interval: int = 256      # steps between validations
    eval_tokens: int = 4194304    # held-out tokens that each validation reads
    save_interval: int = 256      # steps between checkpoints
    log_interval: int = 8         # steps between log lines
    keep: int = 1                 # checkpoints kept beside ckpt_decay.pt
    resume: bool = False          # continue from the newest checkpoint in out_dir
    device: str = "auto"          # cuda, mps or cpu
    dtype: str = "auto"           # of the forward pass: bfloat16 on CUDA, float32 elsewhere
    compile: bool = True          # torch.compile the transformer; never on MPS
    wandb: bool = False           # also log to Weights & Biases
# fmt: on


NAMES = [field.name for field in dataclasses.fields(Settings)]

# What an --init_from checkpoint decides: the model, but not seq_len.
MODEL_SETTINGS = ["n_layer", "n_head", "n_embd", "n_ff", "vocab_size", "rope_theta", "norm_eps"]
MODEL_SETTINGS += ["extra_head"]

# A resumed run may change these; all others define the run (device and dtype only its rounding).
FREE_ON_RESUME = ["data_dir", "out_dir", "init_from", "eval_interval", "save_interval"]
FREE_ON_RESUME += ["log_interval", "keep", "resume", "device", "dtype", "compile", "wandb"]

# What other projects call a setting.
ALIASES = {
    "lr": "learning_rate",
    "max_iters": "max_steps",
    "epochs": "repetitions",
    "block_size": "seq_len",
    "context_length": "seq_len",
}


# ---- the command line of every script ------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """Python's, except that a mistake is one line."""

    def error(self, message):
        die(f"{message}; {self.prog} -h lists the flags")


def make_parser(doc):
    """Return the parser of a script, whose docstring is its help."""
    return Parser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


# ---- reading them --------------------------------------------------------------------------------
def load_settings(argv, usage):
    """Return the settings that a command line asks for: config files in order, then its flags."""
    if "-h" in argv or "--help" in argv:
        print(usage.strip() + "\n\nsettings (--key=value):")
        print(*inspect.getsource(Settings).splitlines()[2:], sep="\n")
        sys.exit()
    s = Settings()
    paths, flags = split_arguments(argv)
    for path in paths:
        for name, value in read_config(path).items():
            change(s, name, value, path)
    for name, value in flags:
        change(s, name, value, "command line")
    check(s)
    check_schedule(s)
    return s


def split_arguments(argv):
    """Return the config files and the (name, value) pairs: --name=value, --name value, --flag."""
    paths, flags = [], []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("--"):
            paths.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        is_switch = name in NAMES and isinstance(getattr(Settings, name), bool)
        if not equals and is_switch:
            follows = arguments[0].lower() if arguments else ""
            value = arguments.pop(0) if follows in ("true", "false") else "True"
        elif not equals and arguments and not arguments[0].startswith("--"):
            value = arguments.pop(0)
        flags.append((name, value))
    return paths, flags


def read_config(path):
    """Run a config file and return what it sets: its public numbers, strings and booleans."""
    if not os.path.isfile(path):
        die(f"no config file '{path}'{suggest(path, sorted(glob.glob('config/*.py')))}")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:
        die(f"{path}: {type(error).__name__}: {error}")
    values = {}
    for name, value in names.items():
        plain = isinstance(value, (int, float, str)) and not name.startswith("_")
        if plain or name in NAMES:
            values[name] = value
    return values


def change(s, name, value, where):
    """Set one setting, of the type of its default; refuse an unknown name or another type."""
    if name not in NAMES:
        hint = f", did you mean '{ALIASES[name]}'?" if name in ALIASES else suggest(name, NAMES)
        die(f"{where}: no setting named '{name}'{hint}")
    kind = type(getattr(s, name))
    if where == "command line" and kind is not str:
        value = parse_literal(value)
    if type(value) in (int, float):
        whole = value == value // 1  # 1e5 is a whole number; infinity and NaN are not
        if kind is float or name == "alpha" or (kind is int and whole):
            value = kind(value)  # 1 -> 1.0, 1e5 -> 100000, alpha 0.5 -> "0.5"
    if type(value) is not kind or (value == "" and name != "init_from"):
        die(f"{where}: '{name}' is {kind.__name__}, got {value!r}")
    setattr(s, name, value)


def parse_literal(text):
    """Return the number or truth value that a text spells, or else the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        # A longer text may be nested too deeply for Python's parser.
        return ast.literal_eval(text) if len(text) < 100 else text
    except (ValueError, TypeError, SyntaxError):
        return text


# ---- checking them -------------------------------------------------------------------------------
def check(s):
    """Refuse settings that cannot work. Write alpha as a fraction in lowest terms."""

    def ensure(holds, name, rule):
        if not holds:
            die(f"'{name}' must be {rule}; got {getattr(s, name)}")

    may_be_zero = ["seed", "decay_steps"]
    for name, value in vars(s).items():
        if type(value) is float or name.endswith("_interval") or name in may_be_zero:
            ensure(0 <= value <= 1e15, name, "from 0 to 1e15")
        elif type(value) is int:
            ensure(1 <= value <= 1e15, name, "from 1 to 1e15")

    alpha = parse_alpha(s.alpha, s.repetitions)
    ensure(0 <= alpha <= 1, "alpha", "a share from 0 to 1, such as 63/64 or 0.5, or auto")
    s.alpha = str(alpha)

    even_heads = s.n_embd % (2 * s.n_head) == 0
    ensure(even_heads, "n_embd", f"n_head {s.n_head} times an even number (rotary pairs)")
    ensure(s.n_layer <= 1000, "n_layer", "at most 1000")
    lower = max(s.batch_size // s.micro_batch_size, 1) * s.micro_batch_size
    upper = lower + s.micro_batch_size
    whole_slots = s.batch_size == lower
    ensure(whole_slots, "batch_size", f"a multiple of micro_batch_size: {lower} or {upper}")
    ensure(2 <= s.seq_len <= s.eval_tokens, "seq_len", f"from 2 to eval_tokens {s.eval_tokens}")
    ensure(s.decay_steps <= s.max_steps, "decay_steps", f"at most max_steps {s.max_steps}")
    ensure(s.dtype in ("auto", "float32", "bfloat16"), "dtype", "auto, float32 or bfloat16")
    return s


def parse_alpha(text, repetitions):
    """Return alpha as the exact fraction that a text spells, or -1 if it spells none."""
    if text == "auto":
        # Remarks 1 and 2 in one line: 63/64 up to 16 repetitions, then 16 repetitions of AR. (The
        # paper leaves 16 < R <= 32 open. At R = 32 this gives 1/2, where its best was 3/4.)
        return min(Fraction(63, 64), Fraction(16, repetitions))
    number = r"\d{1,18}"  # with a bound: Fraction("1e999999999") would never end
    decimal = r"\d{0,18}\.?\d{1,18}(e-?\d{1,2})?"
    if re.fullmatch(f"{number}/{number}|{decimal}", str(text)):
        try:
            return Fraction(str(text))
        except ZeroDivisionError:
            pass
    return Fraction(-1)


def check_schedule(s):
    """Refuse an alpha that is too fine for a run; check() also serves models that only are used."""
    alpha = Fraction(s.alpha)
    run_slots = s.max_steps * s.batch_size // s.micro_batch_size
    if alpha.denominator > run_slots:
        die(
            f"alpha {s.alpha} cannot be scheduled: it needs {alpha.denominator:,} slots, this run "
            f"has {run_slots:,} (max_steps * batch_size / micro_batch_size); the nearest that can "
            f"is {alpha.limit_denominator(run_slots)}"
        )
