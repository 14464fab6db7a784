"""
The settings of a run: defaults, changed by config files, then by the command line. Also the parser
that every script uses.

A config file is plain Python that assigns settings. It is executed: run only files you trust.
"""

import argparse
import dataclasses
import glob
import inspect
import os
import re
import runpy
from fractions import Fraction
from functools import partial

from errors import die, suggest


# fmt: off
@dataclasses.dataclass
class Settings:
    # the model: a plain Llama; these defaults are the paper's 467.6M parameters
    n_layer: int = 24             # transformer blocks
    n_head: int = 16              # attention heads
    n_embd: int = 1024            # width
    n_ff: int = 3554              # inner width of the SwiGLU
    vocab_size: int = 51200       # rows of the embedding and the head; 0: as many as the data needs
    seq_len: int = 2048           # T: inputs in a training window
    rope_theta: float = 160000.0  # base of the rotary frequencies
    norm_eps: float = 1e-7        # RMSNorm epsilon
    extra_head: bool = False      # the head of the released models; not for training
    # the run and its two objectives
    data_dir: str = "data/hplt"   # what prepare.py wrote
    out_dir: str = "out/run"      # checkpoints and log.jsonl go here
    init_from: str = ""           # start from this model, or extend its run (same data and batches)
    seed: int = 1                 # weights, data order and masks
    alpha: str = "auto"           # share of AR sequences: 63/64, 0.5; auto: min(63/64, 16/R)
    repetitions: float = 1.0      # R: how often each token is read; 0: as often as max_steps allows
    ar_weight: float = 1.0        # weight of AR in Eq. 5; the paper's runs used 2 (see its erratum)
    # optimization
    batch_size: int = 2048        # sequences in a step, over all devices
    micro_batch_size: int = 8     # sequences in a slot: one forward pass, one objective
    max_steps: int = 8192         # optimizer steps; 0: all of the text, `repetitions` times
    decay: float = 0.25           # final share of the steps, in which the learning rate falls to 0
    learning_rate: float = 0.007  # for both Muon and AdamW
    weight_decay: float = 0.1     # decoupled, on every parameter
    momentum: float = 0.95        # for Muon
    z_loss: float = 1e-4          # weight of logsumexp^2, which is added to the cross-entropy
    grad_clip: float = 0.0        # largest gradient norm; 0 = off, as in the paper
    # evaluation, logging, checkpoints, machine; an interval of 0 means only at the end
    eval_interval: int = 256      # steps between validations
    eval_tokens: int = 4194304    # held-out tokens that each validation reads
    save_interval: int = 256      # steps between checkpoints
    log_interval: int = 8         # steps between log lines
    milestones: str = ""          # steps whose checkpoints are kept, such as 1000,2000
    resume: bool = False          # continue the run in out_dir, or begin it if there is none
    device: str = "auto"          # cuda, mps or cpu
    dtype: str = "auto"           # of the forward pass: bfloat16 on CUDA, float32 elsewhere
    compile: bool = True          # torch.compile the transformer; never on MPS
    wandb: bool = False           # also log to Weights & Biases
# fmt: on


NAMES = [field.name for field in dataclasses.fields(Settings)]

# What an --init_from checkpoint decides: the model, but not seq_len.
MODEL_SETTINGS = ["n_layer", "n_head", "n_embd", "n_ff", "vocab_size", "rope_theta", "norm_eps"]
MODEL_SETTINGS += ["extra_head"]

# A resumed run may change these; all others define the run (device and dtype only affect rounding).
FREE_ON_RESUME = ["data_dir", "out_dir", "init_from", "eval_interval", "save_interval"]
FREE_ON_RESUME += ["log_interval", "milestones", "resume", "device", "dtype", "compile", "wandb"]

# What other projects, or earlier versions, call a setting.
HINTS = {
    "lr": "did you mean 'learning_rate'?",
    "max_iters": "did you mean 'max_steps'?",
    "epochs": "did you mean 'repetitions'?",
    "block_size": "did you mean 'seq_len'?",
    "context_length": "did you mean 'seq_len'?",
    "decay_steps": "set 'decay', a share of the steps such as 0.25",
    "keep": "set 'milestones', the steps whose checkpoints are kept, such as 1000,2000",
    "config": "a config file needs no flag: python train.py config/demo.py",
}


# ---- the command line of every script ------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """Python's parser, except that a mistake is reported in one line."""

    def error(self, message):
        die(f"{message}; {self.prog} -h lists the flags")


def make_parser(doc):
    """Return a parser for a script, with the script's docstring as its help."""
    return Parser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


# ---- reading settings ----------------------------------------------------------------------------
def read_settings(argv, doc):
    """Return what a command line sets, {name: value}: config files in order, then its flags."""
    table = "".join(inspect.getsource(Settings).splitlines(keepends=True)[2:])
    parser = make_parser(f"{doc}\nsettings (--key=value):\n{table}")
    parser.usage = "train.py [CONFIG ...] [--key=value ...]"
    parser.add_argument("configs", nargs="*", help=argparse.SUPPRESS)
    for name in NAMES:
        action = parser.add_argument(f"--{name}", type=partial(convert, name))
        action.default = action.help = argparse.SUPPRESS
    switches = [f"--{name}" for name in NAMES if isinstance(getattr(Settings, name), bool)]
    argv = [f"{argument}=True" if argument in switches else argument for argument in argv]
    flags, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        die(f"command line: {describe_unknown(unknown[0].lstrip('-').partition('=')[0])}")

    named = {}
    for path in vars(flags).pop("configs"):
        named |= read_config(path)
    return named | vars(flags)


def read_config(path):
    """Run a config file and return what it sets: its public numbers, strings and booleans."""
    if os.path.isdir(path):
        die(f"'{path}' is not a config file; to continue the run in it: --resume --out_dir={path}")
    if not os.path.isfile(path):
        die(f"no config file '{path}'{suggest(path, sorted(glob.glob('config/*.py')))}")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:
        die(f"{path}: {type(error).__name__}: {error}")
    named = {}
    for name, value in names.items():
        is_plain = isinstance(value, (int, float, str)) and not name.startswith("_")
        if name in NAMES:
            try:
                named[name] = convert(name, value)
            except argparse.ArgumentTypeError as error:
                die(f"{path}: '{name}': {error}")
        elif is_plain:
            die(f"{path}: {describe_unknown(name)}")
    return named


def describe_unknown(name):
    """Return what to say about a name that is not a setting."""
    if name in NAMES:
        return f"write --{name}, with two dashes"
    hint = f"; {HINTS[name]}" if name in HINTS else suggest(name, NAMES)
    return f"no setting named '{name}'{hint}"


def convert(name, value):
    """Convert a value, which may be text, to the type of a setting's default."""
    default = getattr(Settings, name)
    kind = type(default)
    is_text = isinstance(value, str)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if kind is str and (is_text or (is_number and name == "alpha")) and value != "":
            return str(value)
        if kind in (int, float) and (is_text or is_number):
            number = float(value)
            if kind is float or number.is_integer():  # 1e5 is whole; infinity and NaN are not
                return kind(number)
    except (ValueError, KeyError, OverflowError):
        pass
    if value == default == "":
        return ""
    raise argparse.ArgumentTypeError(f"expected {kind.__name__}, got {value!r}")


def make_settings(values):
    """Return checked settings. Names that only an earlier version knew are left out."""
    known = {name: value for name, value in values.items() if name in NAMES}
    return check(Settings(**known))


# ---- checking settings, and filling in what follows from the data --------------------------------
def check(s):
    """Refuse settings that cannot work. Write alpha as a fraction in lowest terms."""

    def ensure(holds, name, rule):
        if not holds:
            die(f"'{name}' must be {rule}; got {getattr(s, name)}")

    may_be_zero = ["seed", "vocab_size", "max_steps"]
    for name, value in vars(s).items():
        if type(value) is float or name.endswith("_interval") or name in may_be_zero:
            ensure(0 <= value <= 1e15, name, "from 0 to 1e15")
        elif type(value) is int:
            ensure(1 <= value <= 1e15, name, "from 1 to 1e15")

    if s.alpha != "auto":
        alpha = parse_alpha(str(s.alpha))
        ensure(0 <= alpha <= 1, "alpha", "a share from 0 to 1, such as 63/64 or 0.5, or auto")
        s.alpha = str(alpha)
    both_open = s.max_steps == 0 and s.repetitions == 0
    ensure(not both_open, "repetitions", "above 0 if max_steps is 0: one follows from the other")
    even_heads = s.n_embd % (2 * s.n_head) == 0
    ensure(even_heads, "n_embd", f"a multiple of {2 * s.n_head}, twice n_head (rotary pairs)")
    ensure(s.n_layer <= 1000, "n_layer", "at most 1000")
    lower = max(s.batch_size // s.micro_batch_size, 1) * s.micro_batch_size
    upper = lower + s.micro_batch_size
    whole_slots = s.batch_size == lower
    ensure(whole_slots, "batch_size", f"a multiple of micro_batch_size: {lower} or {upper}")
    ensure(2 <= s.seq_len <= s.eval_tokens, "seq_len", f"from 2 to eval_tokens, {s.eval_tokens}")
    ensure(s.decay <= 1, "decay", "a share of the steps, from 0 to 1")
    ensure(s.dtype in ("auto", "float32", "bfloat16"), "dtype", "auto, float32 or bfloat16")
    are_steps = re.fullmatch(r"(\d{1,15}(,\d{1,15})*)?", s.milestones)
    ensure(are_steps, "milestones", "comma-separated steps, such as 1000,2000")
    return s


def parse_alpha(text):
    """Parse alpha as an exact fraction; return -1 if the text is not one."""
    number = r"\d{1,18}"  # bounded: Fraction("1e999999999") would never finish
    decimal = r"\d{0,18}\.?\d{1,18}(e-?\d{1,2})?"
    if re.fullmatch(f"{number}/{number}|{decimal}", text):
        try:
            return Fraction(text)
        except ZeroDivisionError:
            pass
    return Fraction(-1)


def recommend_alpha(repetitions, run_slots):
    """Return the alpha of the paper's Remarks 1 and 2, as a fraction that a run can schedule.

    63/64 up to 16 repetitions, then 16 repetitions of AR. (The paper leaves 16 < R <= 32 open. At
    R = 32 this gives 1/2, where its best was 3/4.) If a run has fewer than 64 slots, one is MD.
    """
    finest = min(64, run_slots)
    alpha = Fraction(16 / repetitions).limit_denominator(finest)
    return min(max(alpha, Fraction(1, finest)), Fraction(finest - 1, finest))


def fill_in(s, n_ids, n_tokens):
    """Fill in what follows from the data, which has n_ids token ids and n_tokens to train on."""
    if s.vocab_size == 0:
        s.vocab_size = n_ids
    if s.vocab_size < n_ids:
        die(f"vocab_size {s.vocab_size} is too small: {s.data_dir} has {n_ids} ids (0 means all)")
    n_windows = n_tokens // s.seq_len
    if n_windows == 0:
        die(
            f"{s.data_dir} has {n_tokens:,} training tokens, less than one window of "
            f"{s.seq_len:,}: lower seq_len, or prepare more text"
        )

    # max_steps = 0: all of the text, `repetitions` times. repetitions = 0: all of it, as often as
    # max_steps allows. If that is less than once, a part of it is read once.
    if s.max_steps == 0:
        s.max_steps = max(1, int(n_windows * s.repetitions) // s.batch_size)
        s.repetitions = max(s.repetitions, s.max_steps * s.batch_size / n_windows)
    elif s.repetitions == 0:
        s.repetitions = s.max_steps * s.batch_size / n_windows
    s.repetitions = max(1.0, s.repetitions)

    run_slots = s.max_steps * s.batch_size // s.micro_batch_size
    if s.alpha == "auto":
        s.alpha = str(recommend_alpha(s.repetitions, run_slots))
    alpha = Fraction(s.alpha)
    if alpha.denominator > run_slots:
        die(
            f"alpha {s.alpha} cannot be scheduled: it needs {alpha.denominator:,} slots, but this "
            f"run has {run_slots:,} (max_steps * batch_size / micro_batch_size); the nearest "
            f"possible alpha is {alpha.limit_denominator(run_slots)}"
        )
