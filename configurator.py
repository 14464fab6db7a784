"""
Every setting of a run: defaults (the paper's 470M model), changed by config files, then by --key=value. A config file
is plain Python (it is executed: run only files you trust) whose public int, float, bool and str names are settings.
"""
import argparse, ast, contextlib, dataclasses, difflib, glob, inspect, os, runpy, sys, time
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
    extra_head: bool = False      # the released models' head: linear, tanh-GELU, linear with bias; not for training
    # the run and its two objectives
    data_dir: str = "data/hplt"   # what prepare.py wrote
    out_dir: str = "out/run"      # checkpoints and log.jsonl go here
    seed: int = 1                 # weights, data order and masks
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
    # evaluation, logging, checkpoints, machine; an interval of 0 means only at the end
    eval_interval: int = 256      # steps between validations
    eval_tokens: int = 4194304    # held-out tokens that each validation reads
    save_interval: int = 256      # steps between checkpoints
    log_interval: int = 8         # steps between log lines
    keep: int = 1                 # checkpoints kept beside ckpt_decay.pt
    resume: bool = False          # go on from the newest checkpoint in out_dir
    device: str = "auto"          # "cuda", "mps", "cpu"
    dtype: str = "auto"           # of the forward pass: "bfloat16" on CUDA, "float32" elsewhere
    compile: bool = True          # torch.compile the transformer (needs a C++ compiler on CPU)
    wandb: bool = False           # also log to Weights & Biases

FREE_ON_RESUME = {"data_dir", "out_dir", "eval_interval", "save_interval", "log_interval", "keep", "resume", "device",
                  "dtype", "compile", "wandb"}  # all other settings define what a run computes

def die(message):
    """A user's mistake, or the machine's refusal (disk full): one line, from one process of a host; exit status 1."""
    first = message and not int(os.environ.get("LOCAL_RANK", 0))
    time.sleep(0 if first else 5)  # torchrun ends all processes with the first: let that be the one that speaks
    sys.exit(f"error: {message}".replace("\n", " ") if first or isinstance(message, OSError) else 1)

def excepthook(kind, error, trace):
    """What the machine refuses or lacks is one line too; any other exception is a bug and shows where it is."""
    if issubclass(kind, KeyboardInterrupt):
        sys.exit(128 + 2)  # Ctrl-C needs no explanation
    if issubclass(kind, ImportError) and error.name:
        die(f"{error}: pip install {error.name.partition('.')[0].replace('sklearn', 'scikit-learn')}")
    die(error) if issubclass(kind, OSError) else sys.__excepthook__(kind, error, trace)
sys.excepthook = excepthook

def suggest(name, names):
    close = difflib.get_close_matches(name, names, n=1)
    return f", did you mean '{close[0]}'?" if close else f"; there are: {', '.join(names) or 'none'}"

def flags(doc, others=False, **defaults):
    """The command line of a script: a flag is of the type of its default, or one of a tuple; others: also the rest."""
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in defaults.items():
        kinds = {bool: {"action": "store_true"}, list: {"nargs": "+"}, tuple: {"choices": value}}
        kind, value = kinds.get(type(value), {"type": type(value)}), value[0] if type(value) is tuple else value
        parser.add_argument("--" + name, default=value, help=f"({value})", **kind)
    return parser.parse_known_args() if others else parser.parse_args()

def load_settings(argv, usage):
    if {"-h", "--help"} & set(argv):
        print(usage.strip(), "\nsettings (--key=value):", *inspect.getsource(Settings).split("\n")[2:], sep="\n")
        sys.exit()
    s, changes = Settings(), []
    for path in (arg for arg in argv if not arg.startswith("--")):
        try:
            changes += [(path, k, v) for k, v in runpy.run_path(path).items()
                        if k in vars(s) or isinstance(v, (int, float, str)) and not k.startswith("_")]
        except (Exception, SystemExit) as error:
            missing = f"no config file '{path}'{suggest(path, sorted(glob.glob('config/*.py')))}"
            die(f"{path}: {type(error).__name__}: {error}" if os.path.isfile(path) else missing)
    changes += [("command line", *arg[2:].partition("=")[::2]) for arg in argv if arg.startswith("--")]
    for where, name, value in changes:
        if name not in vars(s):
            die(f"{where}: no setting named '{name}'{suggest(name, list(vars(s)))}")
        kind = type(getattr(s, name))  # the type of a default is the type of its setting
        if where == "command line" and kind is not str and len(value) < 100:
            with contextlib.suppress(Exception):  # what is no Python literal stays a string, and is refused
                value = ast.literal_eval(value)
        if type(value) in (int, float) and (kind is float or name == "alpha" or kind is int and value % 1 == 0):
            value = kind(value)  # 1 for 1.0, 1e5 for 100000, 0.5 for "0.5"
        if type(value) is not kind or value == "":
            die(f"{where}: '{name}' is {kind.__name__}, got {value!r}")
        setattr(s, name, value)
    return check(s)

def check(s):
    """Refuse settings that cannot work; write alpha as a fraction in lowest terms."""
    def ensure(holds, name, rule):
        if not holds:
            die(f"'{name}' must be {rule}; got {getattr(s, name)}")
    for name, value in vars(s).items():
        low = 0 if type(value) is float or name.endswith("_interval") or name in ("seed", "decay_steps") else 1
        ensure(type(value) not in (int, float) or low <= value <= 1e15, name, f"from {low} to 1e15")
    auto = min(Fraction(63, 64), Fraction(16, s.repetitions))  # 63/64 up to 16 repetitions, then 16 repetitions for AR
    alpha, fit = Fraction(-1), max(s.batch_size // s.micro_batch_size, 1) * s.micro_batch_size
    with contextlib.suppress(ValueError, ArithmeticError):  # no Fraction("1e999999999"), which takes forever
        alpha = auto if s.alpha == "auto" else Fraction(s.alpha if "/" in str(s.alpha) else float(s.alpha))
    ensure(0 <= alpha <= 1, "alpha", "a share from 0 to 1, such as 63/64 or 0.5, or auto")
    ensure(s.n_embd % (2 * s.n_head) == 0, "n_embd", f"n_head {s.n_head} times an even number (rotary pairs)")
    ensure(s.n_layer <= 1000, "n_layer", "at most 1000")
    ensure(s.batch_size == fit, "batch_size", f"a multiple of micro_batch_size: {fit} or {fit + s.micro_batch_size}")
    ensure(2 <= s.seq_len <= s.eval_tokens, "seq_len", f"from 2 to eval_tokens {s.eval_tokens}")
    ensure(s.decay_steps <= s.max_steps, "decay_steps", f"at most max_steps {s.max_steps}")
    ensure(s.dtype in ("auto", "float32", "bfloat16"), "dtype", "auto, float32 or bfloat16")
    s.alpha = str(alpha.limit_denominator(4096))
    return s
