"""
Every setting of a run, with the paper's 470M model as the default, and the few lines that override them:

    python train.py config/demo.py --learning_rate=0.01 --alpha=1/2

A config file is plain Python (it is executed: run only files you trust); its public int, float, bool and str names
must be settings. Values on the command line come last. The type of a default is the type of its setting.
"""
import ast
import dataclasses
import difflib
import inspect
import os
import runpy
import sys
from fractions import Fraction


@dataclasses.dataclass
class Settings:
    # model: a plain Llama; these defaults are the paper's 467.6M parameters
    n_layer: int = 24             # transformer blocks
    n_head: int = 16              # attention heads
    n_embd: int = 1024            # width
    n_ff: int = 3554              # inner width of the SwiGLU
    vocab_size: int = 51200       # rows of the embedding and of the head
    seq_len: int = 2048           # tokens in a training window
    rope_theta: float = 160000.0  # base of the rotary frequencies
    norm_eps: float = 1e-7        # RMSNorm epsilon
    # the run
    data_dir: str = "data/hplt"   # what prepare.py wrote
    out_dir: str = "out/run"      # checkpoints and log.jsonl go here
    seed: int = 1                 # weights, data order and masks
    # the two objectives
    alpha: str = "auto"           # share of AR sequences: "63/64", 0.5, or "auto" = min(63/64, 16/repetitions)
    repetitions: int = 1          # R: how often each token of the unique subset is seen
    ar_weight: float = 1.0        # the paper's runs had 2 here (see its erratum)
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
    # evaluation, logging, checkpoints; an interval of 0 means only at the end
    eval_interval: int = 256      # steps between validations
    eval_tokens: int = 4194304    # held-out tokens that each validation reads
    save_interval: int = 256      # steps between checkpoints
    log_interval: int = 8         # steps between log lines
    keep: int = 1                 # checkpoints kept beside ckpt_decay.pt
    # machine
    resume: bool = False          # go on from the newest checkpoint in out_dir
    device: str = "auto"          # "cuda", "mps", "cpu"
    dtype: str = "auto"           # of the forward pass: "bfloat16" on CUDA, "float32" elsewhere
    compile: bool = True          # torch.compile the transformer (needs a C++ compiler on CPU)
    wandb: bool = False           # also log to Weights & Biases


# a run may be resumed with other values of these; all others define what it computes
FREE_ON_RESUME = {"data_dir", "out_dir", "eval_interval", "save_interval", "log_interval", "keep", "resume", "device", "dtype",
                  "compile", "wandb"}


def die(message):
    """A user's mistake: one line (from one rank), exit status 1."""
    sys.exit(f"error: {message}" if int(os.environ.get("RANK", 0)) == 0 else 1)


def one_line_errors(kind, error, trace):
    """An uncaught error of the machine (disk full, no permission) is one line too; a bug keeps its traceback."""
    if issubclass(kind, OSError):
        print(f"error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = one_line_errors


def suggest(name, names):
    close = difflib.get_close_matches(name, names, n=1)
    return f", did you mean '{close[0]}'?" if close else f"; there are: {', '.join(names)}"


def override(settings, name, value, where):
    """Set one field, converting only what loses nothing: 1 -> 1.0, 1e5 -> 100000, and for alpha any number -> str."""
    if name not in vars(settings):
        die(f"{where}: no setting named '{name}'{suggest(name, list(vars(settings)))}")
    kind = type(vars(settings)[name])
    number = type(value) in (int, float)
    if kind is float and number:
        value = float(value)
    elif kind is int and type(value) is float and value.is_integer():
        value = int(value)
    elif name == "alpha" and number:
        value = str(value)
    if type(value) is not kind:
        die(f"{where}: '{name}' is {kind.__name__}, got {value!r}")
    setattr(settings, name, value)


def parse(text, kind):
    """The value of --key=text: strings stay as they are, everything else is a Python literal."""
    try:
        return text if kind is str else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # override() names the mistake


def load_settings(argv, usage):
    """Settings from the defaults, then the config files, then --key=value, in this order of strength; checked."""
    if {"-h", "--help"} & set(argv):
        print(f"{inspect.cleandoc(usage)}\n\nsettings (--key=value):\n" + inspect.getsource(Settings).split("\n", 2)[2])
        sys.exit()
    settings = Settings()
    for arg in sorted(argv, key=lambda arg: arg.startswith("--")):  # stable: files first
        if arg.startswith("--"):
            name, equals, text = arg[2:].partition("=")
            if not equals:
                die(f"command line: expected --key=value, got '{arg}'")
            override(settings, name, parse(text, type(getattr(settings, name, None))), "command line")
            continue
        if not os.path.isfile(arg):
            here = [os.path.join("config", f) for f in os.listdir("config")] if os.path.isdir("config") else []
            die(f"no config file '{arg}'{suggest(arg, sorted(f for f in here if f.endswith('.py')))}")
        try:
            values = runpy.run_path(arg)
        except Exception as error:
            die(f"{arg}: {type(error).__name__}: {error}")
        for name, value in values.items():
            if not name.startswith("_") and isinstance(value, (int, float, bool, str)):
                override(settings, name, value, arg)
    return check(settings)


def check(s):
    """Refuse settings that cannot work; write alpha as a fraction in lowest terms."""
    for name, value in vars(s).items():
        low = 0 if type(value) is float or name.endswith("_interval") or name in ("seed", "decay_steps") else 1
        if type(value) in (int, float) and not low <= value < float("inf"):
            die(f"'{name}' must be at least {low} and finite, got {value}")
    # the paper's two recommendations: alpha = 63/64 up to 16 repetitions, then about 16 repetitions for AR
    try:
        alpha = min(Fraction(63, 64), Fraction(16, s.repetitions)) if s.alpha == "auto" else Fraction(s.alpha)
    except (ValueError, ZeroDivisionError):
        die(f"alpha is a share such as 63/64 or 0.5, or auto; got '{s.alpha}'")
    if not 0 <= alpha <= 1:
        die(f"alpha is the share of AR sequences, between 0 and 1; got {s.alpha}")
    s.alpha = str(alpha.limit_denominator(4096))
    if s.n_embd % s.n_head or s.n_embd // s.n_head % 2:
        die(f"n_embd {s.n_embd} must be n_head {s.n_head} times an even number (rotary pairs)")
    if s.batch_size % s.micro_batch_size:
        below = s.batch_size // s.micro_batch_size * s.micro_batch_size
        near = " and ".join(str(n) for n in (below, below + s.micro_batch_size) if n)
        die(f"batch_size {s.batch_size} is not a multiple of micro_batch_size {s.micro_batch_size}; near are {near}")
    if s.decay_steps > s.max_steps:
        die(f"decay_steps {s.decay_steps} is more than max_steps {s.max_steps}")
    if s.seq_len < 2:
        die(f"seq_len must be at least 2, got {s.seq_len}")
    for name, values in (("device", ("auto", "cpu", "cuda", "mps")), ("dtype", ("auto", "float32", "bfloat16"))):
        if getattr(s, name) not in values:
            die(f"{name} '{getattr(s, name)}' is none of {', '.join(values)}")
    return s
