"""Settings: every one is used, every config file is what its name says, every mistake is named."""

import ast
import dataclasses
import glob
import os
import re
import shlex
import sys
from fractions import Fraction

import pytest

import errors
from configurator import (
    FREE_ON_RESUME,
    HINTS,
    MODEL_SETTINGS,
    Settings,
    check,
    fill_in,
    make_settings,
    read_settings,
)
from conftest import ROOT, run

FIELDS = [field.name for field in dataclasses.fields(Settings)]
PAPER = [
    "rep1_a63_64",
    "rep16_a63_64",
    "rep32_a3_4",
    "rep128_a1_8",
    "rep1_a1",
    "rep32_a1",
    "rep32_a0",
    "rep128_a1",
    "rep128_a0",
]


def load(*argv):
    return make_settings(read_settings(list(argv), "usage"))


def fill(s, n_tokens=10**15):
    """Return the settings, with what follows from the data filled in."""
    fill_in(s, 300, n_tokens)
    return s


def refused(capsys, *argv):
    """Return the one line that refuses these arguments."""
    with pytest.raises(SystemExit) as error:
        fill(load(*argv))
    line = error.value.code
    assert line.startswith("error: ") and "\n" not in line and capsys.readouterr() == ("", "")
    return line


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A function that writes a config file, in a folder of its own, and returns its path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()

    def write(text, name="config/mine.py"):
        (tmp_path / name).write_text(text)
        return name

    return write


# ---- the settings --------------------------------------------------------------------------------


def settings_read():
    """Return what the scripts read as s.name; other objects may have attributes of that name."""
    read = set()
    for path in glob.glob(os.path.join(ROOT, "*.py")):
        if os.path.basename(path) == "configurator.py":
            continue
        with open(path) as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                if isinstance(node.value, ast.Name) and node.value.id == "s":
                    read.add(node.attr)
    return read


def test_every_setting_is_read_somewhere():
    assert set(FIELDS) - settings_read() == set()


def test_defaults_are_the_papers():
    """They pass the check, and amount to 8,192 steps of 2,048 x 2,048 tokens."""
    s = check(Settings())
    assert (s.n_layer, s.n_embd, s.n_head, s.n_ff, s.vocab_size, s.seq_len) == (
        24,
        1024,
        16,
        3554,
        51200,
        2048,
    )
    assert (s.max_steps, s.decay, s.batch_size, s.learning_rate, s.weight_decay) == (
        8192,
        0.25,
        2048,
        0.007,
        0.1,
    )
    assert (s.alpha, s.ar_weight, s.z_loss, s.grad_clip) == ("auto", 1, 1e-4, 0)
    assert {*FREE_ON_RESUME, *MODEL_SETTINGS} < set(FIELDS)
    for hint in HINTS.values():
        assert all(name in FIELDS for name in re.findall(r"'(\w+)'", hint))


def test_help_lists_every_setting_with_default_and_meaning(capsys):
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as end:
            load("no_such_file.py", flag)
        assert not end.value.code
        text = capsys.readouterr().out
        assert text.startswith("usage: train.py") and "\nusage\n" in text
        for field in dataclasses.fields(Settings):
            line = re.search(
                rf"^ +{field.name}: (\w+) = (.+?) +# \w.{{3,}}$",
                text.replace('# "', "# "),
                re.MULTILINE,
            )
            assert line, field.name
            assert line[1] == field.type.__name__ and ast.literal_eval(line[2]) == field.default


# ---- config files --------------------------------------------------------------------------------


def test_the_papers_settings_and_a_demo_are_there():
    names = [
        os.path.basename(path)[:-3] for path in glob.glob(os.path.join(ROOT, "config", "*.py"))
    ]
    assert set(PAPER) | {"demo"} <= set(names)


@pytest.mark.parametrize(
    "path", sorted(glob.glob(os.path.join(ROOT, "config", "*.py"))), ids=os.path.basename
)
def test_a_config_file_is_what_its_name_says(path):
    s, name = load(path), os.path.basename(path)[:-3]
    assert s.out_dir == f"out/{name}"
    with open(path) as f:
        text = f.read()
    assert text.startswith("# ") and len(text.splitlines()) <= 40
    if match := re.fullmatch(r"rep(\d+)_a(\d+)(?:_(\d+))?", name):
        R, alpha = int(match[1]), Fraction(int(match[2]), int(match[3] or 1))
        assert (s.repetitions, Fraction(s.alpha)) == (R, alpha)
        assert s == check(
            Settings(out_dir=s.out_dir, repetitions=R, alpha=str(alpha))
        )  # and nothing else
        # the arithmetic in its comment
        slots, unique = (
            s.batch_size // s.micro_batch_size,
            s.max_steps * s.batch_size * s.seq_len / R,
        )
        n_tokens = s.batch_size * s.seq_len
        assert f"{s.batch_size:,} sequences x {s.seq_len:,} tokens = {n_tokens:,} tokens" in text
        assert (
            f"= {slots} slots of {s.micro_batch_size} sequences" in text
            and f"{s.max_steps:,} steps = 34.4B" in text
        )
        mix = re.search(r"(\d+) AR and (\d+) MD", text)
        assert (
            [int(mix[1]), int(mix[2])] == [slots * alpha, slots * (1 - alpha)]
            if mix
            else ("all AR" if alpha == 1 else "all MD") in text and alpha in (0, 1)
        )
        stated = re.search(rf"34\.4B / {R} = ([\d.]+)([BM]) are unique", text)
        assert float(stated[1]) * {"B": 1e9, "M": 1e6}[stated[2]] == pytest.approx(
            unique, rel=0.005
        )
        assert "AR weight 2" in text and "not run by us" in text


def test_later_files_win_and_the_command_line_wins_over_all(config):
    a, b = (
        config("n_layer = 2\nn_ff = 7\nseed = 2", "config/a.py"),
        config("n_layer = 3\nn_ff = 8", "config/b.py"),
    )
    s = load("--n_ff=9", a, b)
    assert (s.seed, s.n_layer, s.n_ff) == (2, 3, 9)


def test_a_file_may_import_compute_and_define(config):
    s = load(
        config(
            "import math, os\nfrom fractions import Fraction\n"
            "def double(x):\n    return 2 * x\n"
            "class Thing: pass\n"
            "_width = 64\nwidths = [64, 128]\nthing = Thing()\n"
            "n_embd = double(_width)\nn_head = int(math.sqrt(16))\nalpha = 3 / 4\n"
        )
    )
    assert (s.n_embd, s.n_head, s.alpha) == (128, 4, "3/4")


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, phrase",
    [
        (
            "learing_rate = 0.1",
            "config/mine.py: no setting named 'learing_rate', did you mean 'learning_rate'?",
        ),
        ("for i in range(3): pass", "config/mine.py: no setting named 'i'; available: n_layer, "),
        ("compile = 0", "config/mine.py: 'compile': expected bool, got 0"),
        ("n_layer = True", "config/mine.py: 'n_layer': expected int, got True"),
        ("n_layer = 4.5", "config/mine.py: 'n_layer': expected int, got 4.5"),
        ("n_layer = float('inf')", "config/mine.py: 'n_layer': expected int, got inf"),
        ("learning_rate = 'low'", "config/mine.py: 'learning_rate': expected float, got 'low'"),
        ("learning_rate = None", "config/mine.py: 'learning_rate': expected float, got None"),
        ("alpha = [1, 2]", "config/mine.py: 'alpha': expected str, got [1, 2]"),
        ("data_dir = 5", "config/mine.py: 'data_dir': expected str, got 5"),
        ("learning_rate = float('nan')", "'learning_rate' must be from 0 to 1e15; got nan"),
        ("n_layer = ", "config/mine.py: SyntaxError: "),
        ("n_layer = 1 / 0", "config/mine.py: ZeroDivisionError: division by zero"),
        ("raise ValueError('two\\nlines')", "config/mine.py: ValueError: two lines"),
        ("open('nowhere')", "config/mine.py: FileNotFoundError: "),
        ("exit(0)", "config/mine.py: SystemExit: 0"),
    ],
)
def test_mistakes_in_a_file(config, capsys, text, phrase):
    assert phrase in refused(capsys, config(text))


@pytest.mark.parametrize(
    "arg, phrase",
    [
        (
            "--learing_rate=0.1",
            "command line: no setting named 'learing_rate', did you mean 'learning_rate'?",
        ),
        ("--outdir=x", "command line: no setting named 'outdir', did you mean 'out_dir'?"),
        ("--__class__=1", "command line: no setting named '__class__'"),
        ("--compile=0", "argument --compile: expected bool, got '0'"),
        ("--compile=yes", "argument --compile: expected bool, got 'yes'"),
        ("--lr=0.1", "command line: no setting named 'lr'; did you mean 'learning_rate'?"),
        ("--decay_steps=5", "no setting named 'decay_steps'; set 'decay', a share of the steps"),
        ("--keep=5", "no setting named 'keep'; set 'milestones'"),
        ("--config=x.py", "a config file needs no flag: python train.py config/demo.py"),
        ("-alpha=1", "command line: write --alpha, with two dashes"),
        ("--max_steps", "argument --max_steps: expected one argument"),
        ("--out_dir=", "argument --out_dir: expected str, got ''"),
        ("--n_layer=two", "argument --n_layer: expected int, got 'two'"),
        ("--n_layer=1e-1", "argument --n_layer: expected int, got '1e-1'"),
        ("--decay=1.5", "'decay' must be a share of the steps, from 0 to 1; got 1.5"),
        ("--milestones=1,x", "'milestones' must be comma-separated steps"),
        ("--n_embd=100", "'n_embd' must be a multiple of 32, twice n_head"),
        ("--n_embd=48", "'n_embd' must be a multiple of 32, twice n_head"),
        (
            "--batch_size=2001",
            "'batch_size' must be a multiple of micro_batch_size: 2000 or 2008; got 2001",
        ),
        ("--batch_size=5", "'batch_size' must be a multiple of micro_batch_size: 8 or 16; got 5"),
        ("--seq_len=1", "'seq_len' must be from 2 to eval_tokens, 4194304; got 1"),
        ("--eval_tokens=2047", "'seq_len' must be from 2 to eval_tokens, 2047; got 2048"),
        ("--dtype=float16", "'dtype' must be auto, float32 or bfloat16; got float16"),
        ("config/dmo.py", "no config file 'config/dmo.py', did you mean 'config/demo.py'?"),
        ("config", "'config' is not a config file; to continue the run in it: --resume"),
        ("demo", "no config file 'demo'; available: config/"),
    ],
)
def test_mistakes_on_the_command_line(monkeypatch, capsys, arg, phrase):
    monkeypatch.chdir(ROOT)
    assert phrase in refused(capsys, arg)


def test_a_missing_file_where_there_is_no_config_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "x.py") == "error: no config file 'x.py'; available: none"


@pytest.mark.parametrize(
    "name", [name for name in FIELDS if type(getattr(Settings(), name)) in (int, float)]
)
def test_values_that_are_not_numbers_are_refused_by_name(name, capsys):
    for value in ("-1", "1e999", "-1e999", "1e16"):
        assert name in refused(capsys, f"--{name}={value}")
    for value in (float("nan"), float("inf"), -0.5):
        with pytest.raises(SystemExit, match=f"error: '{name}' must be "):
            check(Settings(**{name: value}))


def test_what_may_be_zero():
    may = {"seed", "vocab_size", "max_steps", "eval_interval", "save_interval", "log_interval"}
    for name in (name for name in FIELDS if type(getattr(Settings(), name)) is int):
        if name in may:
            assert getattr(load(f"--{name}=0"), name) == 0
        else:
            with pytest.raises(SystemExit, match=f"'{name}' must be from 1"):
                check(Settings(**{name: 0}))


# ---- what is understood --------------------------------------------------------------------------


def test_numbers_may_change_their_type_but_not_their_value():
    s = load(
        "--learning_rate=1",
        "--max_steps=1e5",
        "--eval_tokens=2_000_000",
        "--grad_clip=.5",
        "--resume=True",
    )
    values = s.learning_rate, s.max_steps, s.eval_tokens, s.grad_clip, s.resume
    assert values == (1.0, 100000, 2000000, 0.5, True)
    assert [type(value) for value in values] == [float, int, int, float, bool]


def test_text_settings_are_not_read_as_numbers():
    s = load("--out_dir=007", "--data_dir=a=b c")
    assert (s.out_dir, s.data_dir) == ("007", "a=b c")


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--max_steps", "9000"], {"max_steps": 9000}),
        (["--resume"], {"resume": True}),
        (["--resume", "--n_layer", "3"], {"resume": True, "n_layer": 3}),
        (["--resume=true", "--compile=False"], {"resume": True, "compile": False}),
        (["--compile=false", "--seed", "5"], {"compile": False, "seed": 5}),
        (["--resume", "config/demo.py"], {"resume": True, "n_layer": 4}),
        (["--alpha", "3/4", "config/demo.py"], {"alpha": "3/4", "n_layer": 4}),
    ],
)
def test_flags_are_written_as_elsewhere(monkeypatch, argv, expected):
    monkeypatch.chdir(ROOT)
    s = load(*argv)
    assert {name: getattr(s, name) for name in expected} == expected


@pytest.mark.parametrize(
    "given, alpha",
    [
        ("63/64", "63/64"),
        ("126/128", "63/64"),
        ("0.984375", "63/64"),
        ("1/3", "1/3"),
        ("0.1", "1/10"),
        ("1e-1", "1/10"),
        ("0", "0"),
        ("1", "1"),
        ("1.0", "1"),
        (".5", "1/2"),
        ("1/4096", "1/4096"),
        ("0.9999", "9999/10000"),
        ("8191/8192", "8191/8192"),
        ("0.3333", "3333/10000"),
    ],
)
def test_alpha_is_exactly_the_fraction_that_was_given(config, given, alpha):
    """On the command line, as a string in a file and as an argument; decimals are decimals."""
    loaded = [
        load(f"--alpha={given}"),
        load(config(f"alpha = {given!r}")),
        check(Settings(alpha=given)),
    ]
    if "/" not in given:
        loaded += [load(config(f"alpha = {given}")), check(Settings(alpha=float(given)))]
    assert [s.alpha for s in loaded] == [alpha] * len(loaded)


@pytest.mark.parametrize(
    "given, steps, nearest",
    [
        ("8191/8192", 240, "1"),
        ("1/3000", 240, "0"),
        ("0.3333333333", 8192, "1/3"),
        ("63/64", 15, "59/60"),
    ],
)
def test_an_alpha_too_fine_for_the_run_is_refused_with_the_nearest(capsys, given, steps, nearest):
    run = ["--batch_size=32", f"--max_steps={steps}"]
    line = refused(capsys, *run, f"--alpha={given}")
    assert "cannot be scheduled" in line
    assert line.endswith(f"is {nearest}")
    fill(load(*run, f"--alpha={nearest}"))


@pytest.mark.parametrize(
    "R, alpha",
    [(1, "63/64"), (16, "63/64"), (17, "16/17"), (32, "1/2"), (128, "1/8"), (2.4, "63/64")]
    + [(295.4, "2/37"), (10**5, "1/64"), (0.5, "63/64")],
)
def test_alpha_auto_is_the_papers_advice(R, alpha):
    """16 repetitions of AR and at most 63/64, as a fraction that a run can schedule."""
    assert fill(load(f"--repetitions={R}")).alpha == alpha
    assert fill(load("--alpha=auto", f"--repetitions={R}")).alpha == alpha


def test_alpha_auto_knows_the_repetitions_that_follow_from_the_data():
    """2 steps of 3,200 windows read 100 windows 64 times."""
    s = load("--repetitions=0", "--max_steps=2", "--batch_size=3200")
    assert fill(s, n_tokens=100 * 2048 + 5).repetitions == 64
    assert s.alpha == "1/4"


@pytest.mark.parametrize("slots, alpha", [(1, "0"), (2, "1/2"), (24, "23/24"), (65, "63/64")])
def test_alpha_auto_suits_a_short_run(slots, alpha):
    """A run on 20 KB of text has few slots; the user need not choose a number."""
    s = load("--max_steps=0", "--batch_size=1", "--micro_batch_size=1")
    assert fill(s, n_tokens=slots * 2048).alpha == alpha


def test_what_follows_from_the_data_is_refused_where_it_cannot(capsys):
    assert "one follows from the other" in refused(capsys, "--repetitions=0", "--max_steps=0")
    assert "vocab_size 299 is too small" in refused(capsys, "--vocab_size=299")
    with pytest.raises(SystemExit, match="less than one window of 2,048"):
        fill(load(), n_tokens=2047)


@pytest.mark.parametrize(
    "alpha",
    [
        "-0.1",
        "1.01",
        "65/64",
        "2",
        "nan",
        "inf",
        "1/0",
        "half",
        "1/2/3",
        "Auto",
        "True",
        "1e999999999",
        "-1e999999999",
    ],
)
def test_alpha_outside_0_to_1_is_refused(alpha, capsys):
    assert "'alpha' must be a share from 0 to 1" in refused(capsys, f"--alpha={alpha}")


# ---- one line ------------------------------------------------------------------------------------


def test_all_ranks_but_the_first_of_a_host_wait_before_they_speak(monkeypatch):
    waited = []
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    monkeypatch.setattr(errors.signal, "signal", lambda *arguments: None)
    for local_rank, waits in (("0", []), ("1", [5])):
        waited.clear()
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit) as end:
            errors.die("a\nb")
        assert end.value.code == "error: a b"
        assert waited == waits


@pytest.mark.parametrize(
    "error, line",
    [
        (
            ModuleNotFoundError("No module named 'sklearn.x'", name="sklearn.x"),
            "error: No module named 'sklearn.x': pip install scikit-learn",
        ),
        (FileNotFoundError(2, "No such file", "x.txt"), "error: [Errno 2] No such file: 'x.txt'"),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_the_machine_lacks_is_one_line(error, line):
    with pytest.raises(SystemExit) as end:
        errors.report(type(error), error, None)
    assert end.value.code == line


def test_a_closed_pipe_prints_no_message(tmp_path):
    """As in `sweep.py table | head`."""
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r}); import errors; sys.excepthook = errors.report"
    )
    code += "; print('a line\\n' * 99999)"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} | head -n 1"
    assert run("bash", "-c", command, cwd=tmp_path) == "a line\n"


def test_a_bug_keeps_its_traceback(capsys):
    error = ValueError("a bug")
    errors.report(ValueError, error, None)
    assert "ValueError: a bug" in capsys.readouterr().err


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new/file.txt"
    errors.write_atomically(path, "first")
    with pytest.raises(UnicodeEncodeError):
        errors.write_atomically(path, "\udc80")
    assert path.read_text() == "first"
    assert [file.name for file in path.parent.iterdir()] == ["file.txt"]
