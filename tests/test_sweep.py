"""sweep.py: what was measured is shown, known optima are found, figures show what they say."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import sweep
from conftest import ROOT, flags, read_records, run

ALPHAS = ["0", "1/8", "1/4", "1/2", "3/4", "7/8", "1"]


def best_log_odds(R):
    """Return the optimum of the made-up surface: it falls from 0.91 at R = 8 to 0.25 at R = 64."""
    return 3.2 - 1.6 * np.log2(R / 8)


def made_up_records(noise=0.01, seeds=(1,)):
    """Return lines of results whose val_ar is a parabola around the best log-odds."""
    rng = np.random.default_rng(0)
    records = []
    for seed in seeds:
        for R in (8, 16, 32, 64):
            for alpha in ALPHAS:
                share = float(Fraction(alpha))
                distance = np.log2((share + 1 / 64) / (1 - share + 1 / 64)) - best_log_odds(R)
                loss = float(4 + 0.05 * distance**2 + noise * rng.normal())
                record = {"repetitions": R, "alpha": alpha, "seed": seed}
                record |= {"val_ar": loss, "val_md": 5.0, "acc_ar": 50 - 3 * loss}
                record["overfit"] = R * share > 40
                record["curve"] = [[0, 7, 7], [1_000_000, 5, 6], [2_000_000, loss, 5]]
                records.append(record)
    return records


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def results(tmp_path):
    return write_lines(tmp_path / "results.jsonl", made_up_records())


def log_of(**settings):
    """Return the records of a finished run that overfits."""
    settings = {"repetitions": 4.0, "alpha": "1/3", "seed": 7, "out_dir": "out/x"} | settings
    first = {"step": 0, "tokens": 0, "val_ar": 5.7, "val_md": 5.8}
    middle = {"step": 1, "tokens": 10**6, "train_ar": 2.0, "val_ar": 2.0, "val_md": 3.5}
    last = {"step": 2, "tokens": 2 * 10**6, "train_ar": 1.0, "val_ar": 2.5, "val_md": 3.0}
    return [{"settings": settings}, first, middle, last | {"done": True, "overfit": True}]


def write_run(folder, records, scores=None):
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "log.jsonl", records)
    if scores:
        (folder / "eval.json").write_text(json.dumps(scores))


def eval_report(modes, tasks=("heldout",), error=0.02):
    """Return what eval.py --json writes."""
    report = {"tasks": {}, "average": {}}
    for task in tasks:
        report["tasks"][task] = {}
        for mode in modes:
            result = {"accuracy": 0.5, "stderr": error, "normalized": 1 / 3, "n": 100}
            result |= {"nats_per_token": -1.5, "nats_per_token_stderr": error}
            if mode != "ar" and "ar" in modes:
                result["minus_ar"] = {"accuracy": 0.01, "stderr": error and error / 4}
                result["minus_ar"] |= {"nats_per_token": 0.002, "nats_per_token_stderr": error}
            report["tasks"][task][mode] = result
            if task != "heldout":
                report["average"][mode] = {"ar": 0.25, "prefix": 0.26}.get(mode, 0.2)
    return report


@pytest.fixture
def call(monkeypatch):
    """Return a function that calls sweep.py with these arguments, in this process."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["sweep.py", *map(str, arguments)])
        sweep.main()

    return call


def message_of(call, *arguments):
    """Return the one line with which a call ends."""
    with pytest.raises(SystemExit) as error:
        call(*arguments)
    message = error.value.code
    assert message.startswith("error: ") and "\n" not in message
    return message


# ---- results files -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "written, alpha",
    [
        ("63/64", Fraction(63, 64)),
        ("8191/8192", Fraction(8191, 8192)),
        (0.875, Fraction(7, 8)),
        ("0.9999", Fraction(9999, 10000)),
        (1, Fraction(1)),
    ],
)
def test_fractions_are_exact_and_numbers_are_read(tmp_path, written, alpha):
    path = write_lines(tmp_path / "r.jsonl", [{"repetitions": 8, "alpha": written}])
    assert sweep.read_runs(path)[0].alpha == alpha


def test_a_run_that_was_measured_again_has_its_last_line(tmp_path):
    first = {"repetitions": 8, "alpha": "1/2", "seed": 1, "val_ar": 4.0}
    other_seed = first | {"seed": 2}
    other_settings = first | {"settings": "c.py --weight_decay=1.0"}
    again = first | {"val_ar": 4.0, "acc_ar": 30.0}
    path = write_lines(tmp_path / "r.jsonl", [first, other_seed, other_settings, again])
    runs = sweep.read_runs(path)
    assert len(runs) == 3
    assert runs[0].columns == {"val_ar": 4.0, "acc_ar": 30.0}


def test_lines_without_seeds_are_different_runs(tmp_path):
    record = {"repetitions": 8, "alpha": 0.5, "val_ar": 4.0}
    assert len(sweep.read_runs(write_lines(tmp_path / "r.jsonl", [record, record]))) == 2


@pytest.mark.parametrize("written, shown", [(16.0, "16"), (16, "16"), (2.4, "2.4"), (0.5, "0.5")])
def test_repetitions_may_be_fractions(tmp_path, call, capsys, written, shown):
    record = {"repetitions": written, "alpha": "1/2", "val_ar": 4.0}
    call("table", "--results", write_lines(tmp_path / "r.jsonl", [record]))
    assert f"| {shown} | 1/2 | 1 | 4.000 |" in capsys.readouterr().out


RECORD = {"repetitions": 8, "alpha": "1/2", "val_ar": 4.0}
BAD_RESULTS = {
    "not JSON": (["{"], "line 1"),
    "not text": (["\xff"], "line 1"),
    "not an object": (["3"], "line 1"),
    "no alpha": ([json.dumps(RECORD), '{"repetitions": 8}'], "line 2"),
    "no repetitions": ([json.dumps(RECORD | {"repetitions": 0})], "repetitions"),
    "alpha of 2": ([json.dumps(RECORD | {"alpha": 2})], "alpha"),
    "half a curve": ([json.dumps(RECORD | {"curve": [[0, 7.0]]})], "line 1"),
    "a seed of x": ([json.dumps(RECORD | {"seed": "x"})], "line 1"),
    "alpha of 1/0": ([json.dumps(RECORD | {"alpha": "1/0"})], "line 1"),
    "NaN": ([json.dumps(RECORD), json.dumps(RECORD | {"val_ar": np.nan})], "line 2"),
    "infinity": ([json.dumps(RECORD | {"val_md": -np.inf})], "line 1"),
    "1e999": (['{"repetitions": 8, "alpha": 1, "val_ar": 1e999}'], "line 1"),
    "NaN in a curve": ([json.dumps(RECORD | {"curve": [[0, 7, 7], [1, 5, np.nan]]})], "line 1"),
    "a huge integer": ([json.dumps(RECORD | {"val_ar": 10**400})], "line 1"),
    "empty": ([], "no such runs"),
    "too few": ([json.dumps(RECORD), json.dumps(RECORD | {"alpha": 1})], "5 runs"),
    "one alpha": ([json.dumps(RECORD | {"repetitions": R}) for R in range(1, 9)], "2 alphas"),
    "text": ([json.dumps(RECORD | {"alpha": a / 8, "val_ar": "x"}) for a in range(9)], "val_ar"),
    "a typo": ([json.dumps(RECORD | {"val_arr": 1.0, "val_ar": "x"})], "mean 'val_arr'"),
}


@pytest.mark.parametrize("case", BAD_RESULTS)
def test_bad_results_end_in_one_line(tmp_path, call, case):
    lines, words = BAD_RESULTS[case]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="latin1")
    assert words in message_of(call, "fit", "--results", path, "--target", "val_ar")


@pytest.mark.parametrize("command", ["table", "fit", "plot", "collect"])
def test_without_results_a_line_says_what_results_are(tmp_path, call, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    message = message_of(call, command)
    assert "out/sweep does not exist" in message and "folder of runs" in message


def test_a_number_that_is_not_finite_is_refused_for_a_figure_too(tmp_path, call):
    records = made_up_records()
    records[4]["val_ar"] = np.nan
    path = write_lines(tmp_path / "r.jsonl", records)
    assert "line 5" in message_of(call, "plot", "--results", path)
    log = log_of()
    log[3]["val_md"] = np.inf
    write_run(tmp_path / "run", log)
    assert "log.jsonl, line 4" in message_of(call, "plot", "--results", tmp_path / "run")


# ---- runs in folders -----------------------------------------------------------------------------
def test_a_line_holds_what_was_measured(tmp_path, call, capsys):
    settings = {"n_embd": 48, "seq_len": 2048, "weight_decay": 0.3, "device": "cpu"}
    write_run(tmp_path / "R4_a1_3_s7", log_of(**settings), eval_report(["ar"]))
    call("collect", "--results", tmp_path)
    line = json.loads(capsys.readouterr().out)
    assert line.pop("curve") == [[0, 5.7, 5.8], [10**6, 2.0, 3.5], [2 * 10**6, 2.5, 3.0]]
    assert line == {
        "repetitions": 4,
        "alpha": "1/3",
        "seed": 7,
        "settings": "--n_embd=48 --weight_decay=0.3",  # neither defaults nor the machine's
        "overfit": True,
        "val_ar": 2.5,
        "val_ar_best": 2.0,
        "val_md": 3.0,
        "val_md_best": 3.0,
        "acc_ar": 50.0,
        "acc_ar_se": 2.0,
        "logp_ar": -1.5,
        "logp_ar_se": 0.02,
    }


def test_collected_runs_are_those_of_the_folders(tmp_path, call, capsys):
    """At any depth, evaluated or not; a file of collected runs can be collected again."""
    write_run(tmp_path / "out/a/R4_a1_3_s7", log_of(), eval_report(["ar", "prefix"]))
    write_run(tmp_path / "out/b/R4_a1_3_s7", log_of(weight_decay=0.3))
    call("collect", "--results", tmp_path / "out")
    lines = capsys.readouterr().out
    file = tmp_path / "runs.jsonl"
    file.write_text(lines)
    call("collect", "--results", file)
    assert capsys.readouterr().out == lines
    for ours, theirs in zip(sweep.read_runs(tmp_path / "out"), sweep.read_runs(file), strict=True):
        assert ours._replace(curve=0) == theirs._replace(curve=0)
        np.testing.assert_array_equal(ours.curve, theirs.curve)
    assert len(lines.splitlines()) == 2


def test_unfinished_runs_are_left_out(tmp_path, call):
    write_run(tmp_path / "a", log_of(alpha="1"))
    write_run(tmp_path / "b", log_of()[:-1])
    write_run(tmp_path / "c", log_of()[:1])
    write_run(tmp_path / "d", [])
    assert [run.alpha for run in sweep.read_runs(tmp_path)] == [1]
    assert "not finished" in message_of(call, "table", "--results", tmp_path / "b")


def test_a_single_run_has_a_table_but_no_fit(tmp_path, call, capsys):
    write_run(tmp_path / "run", log_of())
    for path in (tmp_path / "run", tmp_path / "run/log.jsonl"):
        call("table", "--results", path)
        output = capsys.readouterr().out
        assert "| 4 | 1/3 | 1 | 2.500 | 3.000 |" in output
        assert "Difference" not in output  # from alpha = 1, which is not there
        assert "needs 5 runs" in message_of(call, "fit", "--results", path)


def test_a_log_without_settings_is_refused_by_name(tmp_path, call):
    write_run(tmp_path / "old", log_of()[1:])
    message = message_of(call, "table", "--results", tmp_path)
    assert f"{tmp_path}/old" in message and "settings" in message


@pytest.mark.parametrize("command", ["fit", "plot"])
def test_runs_of_other_settings_are_not_mixed(tmp_path, call, command):
    """They get separate tables, but no common surface or figure; selecting some of them helps."""
    records = made_up_records()
    for record in records:
        record["settings"] = "--n_embd=48"
        if record["repetitions"] == 64:
            record["settings"] += " --weight_decay=0.3"
    path = write_lines(tmp_path / "r.jsonl", records)
    message = message_of(call, command, "--results", path)
    assert "with and without --weight_decay=0.3" in message
    call(command, "--results", path, "--repetitions", "8,16,32", "--target", "val_ar")


def test_steps_that_follow_from_repetitions_are_not_other_settings(tmp_path, call):
    """With max_steps = 0 all of the text is read R times. Two lengths at one R are two settings."""
    records = made_up_records()
    for record in records:
        record["settings"] = f"--max_steps={10 * record['repetitions']} --n_embd=48"
    path = write_lines(tmp_path / "r.jsonl", records)
    call("fit", "--results", path, "--target", "val_ar")
    records[0]["settings"] = "--max_steps=7 --n_embd=48"
    write_lines(path, records)
    assert "with and without --max_steps=160" in message_of(call, "fit", "--results", path)


@pytest.mark.parametrize(
    "modes, tasks, present, absent",
    [
        ("ar", "heldout", "acc_ar logp_ar_se", "acc_prefix acc_prefix_minus_ar average_ar"),
        ("prefix", "heldout", "acc_prefix logp_prefix", "acc_ar acc_prefix_minus_ar"),
        ("pll1", "heldout", "acc_pll1 logp_pll1", "acc_pll acc_pll1_minus_ar"),
        ("ar pll1 pll6 pll", "heldout", "acc_pll1 acc_pll6 acc_pll logp_pll6", "acc_prefix"),
        ("ar pll6", "heldout", "acc_pll6_minus_ar logp_pll6_minus_ar_se", "average_pll6"),
        ("ar prefix", "piqa", "acc_piqa_ar_se logp_piqa_prefix_minus_ar", "acc_ar logp_ar"),
        ("ar prefix", "piqa", "average_ar average_prefix_minus_ar", "average_pll"),
        ("prefix", "piqa heldout", "average_prefix acc_prefix", "average_prefix_minus_ar"),
    ],
)
def test_columns_are_what_was_measured(tmp_path, modes, tasks, present, absent):
    report = eval_report(modes.split(), tasks.split())
    (tmp_path / "eval.json").write_text(json.dumps(report))
    columns = sweep.read_scores(tmp_path / "eval.json")
    assert set(present.split()) <= set(columns)
    assert not set(absent.split()) & set(columns)


def test_scores_are_percentages_and_nats(tmp_path):
    path = tmp_path / "eval.json"
    path.write_text(json.dumps(eval_report(["ar", "prefix"], ["heldout", "piqa"])))
    columns = sweep.read_scores(path)
    for name, value in {
        "acc_prefix": 50,
        "acc_prefix_minus_ar": 1,
        "acc_prefix_minus_ar_se": 0.5,
        "logp_prefix_minus_ar": 0.002,
        "average_prefix_minus_ar": 1,
    }.items():
        assert columns[name] == pytest.approx(value), name


def test_a_single_question_has_no_error(tmp_path):
    path = tmp_path / "eval.json"
    path.write_text(json.dumps(eval_report(["ar", "prefix"], error=None)))
    assert not [name for name in sweep.read_scores(path) if name.endswith("_se")]


# ---- run -----------------------------------------------------------------------------------------
GRID = ["run", "--config", "c.py", "--repetitions", 4, "--alphas", "1/3", "--seeds", 7]


@pytest.fixture
def calls(monkeypatch):
    """Replace the scripts; return the list of calls."""
    calls = []
    monkeypatch.setattr(sweep, "call", lambda folder, *command: calls.append([*command]))
    return calls


def test_scripts_are_told_what_to_do(tmp_path, call, calls):
    folder = tmp_path / "out/R4_a1_3_s7"
    arguments = ["--results", tmp_path / "out", "--eval", "--limit 8", "--", "--max_steps=2"]
    call(*GRID, *arguments)
    train, evaluate = calls
    assert train[:3] == ["train.py", "c.py", "--max_steps=2"]
    own = {"--repetitions=4", "--alpha=1/3", "--seed=7", f"--out_dir={folder}", "--resume"}
    assert set(train[3:]) == own
    assert evaluate == ["eval.py", "--limit", "8", f"--ckpt={folder}", f"--json={folder}/eval.json"]


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_every_cell_is_trained_once(tmp_path, call, calls, jobs):
    call(*GRID, "--alphas", "0,1/2,0.5,1", "--seeds", "1,2", "--jobs", jobs)
    folders = sorted(flag for command in calls for flag in command if "out_dir" in flag)
    names = [f"R4_a{alpha}_s{seed}" for alpha in ("0", "1_2", "1") for seed in (1, 2)]
    assert folders == [f"--out_dir=out/sweep/{name}" for name in names]


@pytest.mark.parametrize("jobs", [1, 2])
def test_after_a_failure_no_other_run_begins(call, monkeypatch, jobs):
    """Those under way are finished."""
    begun, ended = [], []
    all_begun = threading.Barrier(jobs)

    def pretend(folder, *command):
        begun.append(folder.name)
        if len(begun) <= jobs:
            all_begun.wait()
        if folder.name == "R4_a1_3_s1":
            raise ChildProcessError("no")
        time.sleep(0.5)  # until the other has failed
        ended.append(folder.name)

    monkeypatch.setattr(sweep, "call", pretend)
    with pytest.raises(ChildProcessError, match="no"):
        call(*GRID, "--seeds", "1,2,3,4", "--jobs", jobs)
    assert sorted(begun) == ["R4_a1_3_s1", "R4_a1_3_s2"][:jobs]
    assert ended == ["R4_a1_3_s2"][: jobs - 1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--", "--alpha=1/2"],
        ["--", "--max_steps=2", "--seed", "3"],
        ["--", "--repetitions=8"],
        ["--", "--out_dir=out/x"],
        ["--", "--resume"],
        ["--eval", "--limit 8 --json=x"],
        ["--eval", "--ckpt out/x"],
    ],
)
def test_what_the_sweep_chooses_cannot_be_given_twice(call, calls, arguments):
    assert "the sweep chooses --" in message_of(call, *GRID, *arguments)
    assert not calls


@pytest.mark.parametrize("flag", ["--alphas=1/0", "--seeds=x", "--repetitions=8,", "--alphas="])
def test_a_bad_grid_ends_in_one_line(call, calls, flag):
    assert "comma-separated numbers" in message_of(call, *GRID, flag)


def test_what_train_refuses_is_passed_on(tmp_path):
    """train.py's one line is printed, with the run that it is about."""
    (tmp_path / "c.py").write_text("nonsense = 3")
    command = ["run", "--config", "c.py", "--repetitions", "8", "--alphas", "0,1", "--jobs", "1"]
    output = run("sweep.py", *command, "--results", "out", cwd=tmp_path, code=1)
    last = output.strip().split("\n")[-1]
    assert last.startswith("error: out/R8_a0_s1: c.py: no setting named 'nonsense'")
    assert "Traceback" not in output


def tiny_grid(corpus, folder, repetitions=20, **settings):
    """Return the command of a sweep with one small run, and the settings after its --."""
    (folder / "c.py").write_text("")
    arguments = flags(data_dir=corpus / "data/tiny", **settings)
    own = ("--alpha", "--repetitions")
    arguments = [argument for argument in arguments if not argument.startswith(own)]
    command = ["run", "--config", "c.py", "--repetitions", str(repetitions), "--alphas", "1/2"]
    return ["sweep.py", *command, "--results", "out"], ["--", *arguments]


def test_a_grid_is_trained_and_evaluated(corpus, tmp_path):
    """What the scripts have measured is read; a run with different settings is refused."""
    command, settings = tiny_grid(corpus, tmp_path)
    evaluation = ["--eval", "--tasks heldout --modes ar,prefix --limit 8"]
    run(*command, *evaluation, *settings, cwd=tmp_path)
    last = read_records(tmp_path / "out/R20_a1_2_s1")[-1]
    (measured,) = sweep.read_runs(tmp_path / "out")
    assert (measured.repetitions, measured.alpha, measured.seed) == (20, Fraction(1, 2), 1)
    assert "--n_embd=32" in measured.settings and measured.overfit == last["overfit"]
    columns = measured.columns
    for name in ("val_ar", "val_md"):
        assert columns[name] == last[name]
    for kind in ("acc", "logp"):
        difference = columns[f"{kind}_prefix"] - columns[f"{kind}_ar"]
        assert columns[f"{kind}_prefix_minus_ar"] == pytest.approx(difference)
    assert columns["logp_ar"] < 0 < columns["logp_ar_se"]

    output = run(*command, *settings, "--weight_decay=0.3", cwd=tmp_path, code=1)
    last = output.strip().split("\n")[-1]
    assert last.startswith("error: out/R20_a1_2_s1: ") and "weight_decay" in last


def test_a_stopped_sweep_saves_and_continues(corpus, tmp_path):
    """Ctrl-C reaches train.py as well, which saves; the same command continues to the end."""
    changes = {"max_steps": 100, "save_interval": 0, "eval_interval": 50}
    command, settings = tiny_grid(corpus, tmp_path, **changes)
    command += settings
    folder = tmp_path / "out/R20_a1_2_s1"
    log = folder / "log.jsonl"
    script = [sys.executable, f"{ROOT}/sweep.py", *command[1:]]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    options["start_new_session"] = True
    with subprocess.Popen(script, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options) as sweeping:
        while not (log.exists() and '"step": 2,' in log.read_text()):
            assert sweeping.poll() is None
            time.sleep(0.1)
        os.killpg(sweeping.pid, signal.SIGINT)  # as a terminal does
        output = sweeping.communicate()[0]
    assert sweeping.returncode == 128 + signal.SIGINT
    assert b"the same command continues" in output and b"Traceback" not in output
    assert any(folder.glob("ckpt_*.pt"))  # the sweep has waited for train.py to end
    before = read_records(folder)
    assert 2 <= before[-1]["step"] < 100 and "done" not in before[-1]

    run(*command, cwd=tmp_path)
    after = read_records(folder)
    assert after[: len(before)] == before  # speeds included: continued, not restarted
    assert after[-1]["done"] and len(sweep.read_runs(tmp_path / "out")) == 1


# ---- table ---------------------------------------------------------------------------------------
def test_tables_pair_alphas_by_seed(tmp_path, call, capsys):
    """The seeds differ by 1, the alphas by 0.2 and 0.4 within a seed: only pairing shows this."""
    records = []
    for alpha, seed, loss in [("1", 1, 2.0), ("1", 2, 3.0), ("1/2", 1, 1.8), ("1/2", 2, 2.6)]:
        records.append({"repetitions": 8, "alpha": alpha, "seed": seed, "val_ar": loss})
    records.append({"repetitions": 8, "alpha": "1/4", "seed": 1, "val_ar": 1.5, "acc_ar": 40})
    path = write_lines(tmp_path / "r.jsonl", records)
    call("table", "--results", path, "--against", "1,1/4")
    means, differences, others = capsys.readouterr().out.split("Difference")
    assert "| R | alpha | seeds | acc_ar | val_ar |\n|---|---|---|---|---|\n" in means
    assert "| 8 | 1/4 | 1 | 40.0 | 1.500 |" in means  # one seed has no deviation
    assert "| 8 | 1/2 | 2 |  | 2.200 ± 0.566 |" in means
    assert "| 8 | 1/2 | 2 |  | -0.300 ± 0.100 |" in differences
    assert "| 8 | 1/4 | 1 |  | -0.500 |" in differences
    assert "| 8 | 1 |" not in differences and "| 8 | 1 | 1 |  | 0.500 |" in others


def test_tables_keep_settings_apart(tmp_path, call, capsys):
    record = {"repetitions": 8, "alpha": "1", "seed": 1, "val_ar": 2.0, "settings": "c.py"}
    other = record | {"settings": "c.py --weight_decay=1.0", "val_ar": 4.0}
    call("table", "--results", write_lines(tmp_path / "r.jsonl", [record, other]))
    output = capsys.readouterr().out
    assert "| 2.000 |" in output and "| 4.000 |" in output and "weight_decay" in output


# ---- fit -----------------------------------------------------------------------------------------
def test_log_odds_are_symmetric_and_finite():
    odds = sweep.log_odds([0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 1])
    np.testing.assert_allclose(odds, -odds[::-1], atol=1e-12)
    assert (np.diff(odds) > 0).all() and 6 < odds[-1] < 6.1
    assert 0.9 < sweep.log_odds(1 / 8) - sweep.log_odds(1 / 16) < 1.2  # one step per halving
    np.testing.assert_allclose(sweep.alpha_at(odds), [0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 1])


def printed_fit(text):
    """Return {R: (alpha, low, high)} as printed by `fit`."""
    optima = {}
    for line in text.splitlines():
        words = line.replace("-", " ").split()
        if len(words) == 6 and words[0].isdigit():
            optima[int(words[0])] = tuple(map(float, words[1:4]))
    return optima


@pytest.mark.parametrize("column", ["val_ar", "acc_ar"])
def test_a_fit_finds_the_known_optimum(results, call, capsys, column):
    """A loss is minimized and a score maximized, with honest intervals."""
    call("fit", "--results", results, "--target", column)
    output = capsys.readouterr().out
    assert f"{column}: R^2 1.0" in output and "removed" not in output
    optima = printed_fit(output)
    assert list(optima) == [8, 16, 32, 64]
    for R, (alpha, low, high) in optima.items():
        assert low <= alpha <= high and high - low < 0.5
        truth = sweep.alpha_at(best_log_odds(R))
        assert low - 0.02 <= truth <= high + 0.02  # alphas are 0.2 apart in log-odds


def test_what_seeds_differ_by_is_taken_out(tmp_path, call, capsys):
    """Seeds 2 and 3 lie far off and have few alphas, which would otherwise look better or worse."""
    alphas = {1: ALPHAS, 2: ["0", "1/8"], 3: ["7/8", "1"]}
    distance = {1: 0, 2: -2, 3: 2}
    records = []
    for record in made_up_records(seeds=(1, 2, 3)):
        seed = record["seed"]
        if record["alpha"] in alphas[seed]:
            record["val_ar"] += distance[seed]
            records.append(record)
    path = write_lines(tmp_path / "r.jsonl", records)
    call("fit", "--results", path, "--target", "val_ar")
    output = capsys.readouterr().out
    assert "removed: seed 1 +0.000, seed 2 -1.99" in output and "seed 3 +1.99" in output
    for R, (_, low, high) in printed_fit(output).items():
        assert low - 0.02 <= sweep.alpha_at(best_log_odds(R)) <= high + 0.02

    records[-1]["val_ar"] += 5  # a single run that went wrong moves no seed
    runs = sweep.read_runs(write_lines(path, records))
    assert sweep.seed_shifts(runs, "val_ar") == pytest.approx({1: 0, 2: -2, 3: 2}, abs=0.02)


def test_seeds_are_left_alone_where_nothing_says_how_they_differ(tmp_path):
    """A seed that shares no cell with the reference, lines without seeds, paired differences."""
    records = [record | {"acc_prefix_minus_ar": 1.0} for record in made_up_records()]
    records += [{"repetitions": 9, "alpha": "1/2", "seed": 2, "val_ar": 9.0}]
    records += [{"repetitions": 8, "alpha": "1/2", "val_ar": 9.0, "acc_prefix_minus_ar": 5.0}]
    records += [{"repetitions": 8, "alpha": "1", "seed": 3, "acc_prefix_minus_ar": 5.0}]
    runs = sweep.read_runs(write_lines(tmp_path / "r.jsonl", records))
    with_loss = [run for run in runs if "val_ar" in run.columns]
    assert sweep.seed_shifts(with_loss, "val_ar") == {1: 0}
    with_difference = [run for run in runs if "acc_prefix_minus_ar" in run.columns]
    assert sweep.seed_shifts(with_difference, "acc_prefix_minus_ar") == {}
    assert sweep.seed_shifts(with_loss[-1:], "val_ar") == {}


def test_the_runs_in_assets_have_the_optima_that_are_claimed(call, capsys):
    """By AR loss, AR sees each text 25 to 29 times if the text is repeated often."""
    call("fit", "--results", f"{ROOT}/assets/parity.jsonl", "--target", "val_ar")
    optima = printed_fit(capsys.readouterr().out)
    for R, exposures in ((32, 25), (64, 29), (128, 29)):
        assert R * optima[R][0] == pytest.approx(exposures, abs=2)


def test_a_fit_is_of_the_surface_not_of_single_runs(tmp_path):
    """The noise of runs widens an interval only as far as it hides the surface."""
    records = made_up_records(noise=0.4, seeds=range(6))
    runs = sweep.read_runs(write_lines(tmp_path / "r.jsonl", records))
    surface = sweep.fit_surface(runs, "acc_ar", np.log2([8, 64]))
    assert surface.r2 < 0.99
    np.testing.assert_allclose(surface.best.sum(axis=1), 1)
    # with the noise of a run in the samples, the deviations would be 1.45 and 1.31
    for R, chance, limit in zip((8, 64), surface.best, (1.35, 1.1)):
        middle = (chance * surface.log_odds).sum()
        deviation = np.sqrt((chance * (surface.log_odds - middle) ** 2).sum())
        assert abs(middle - best_log_odds(R)) < 0.9 and deviation < limit


@pytest.mark.parametrize(
    "column, shown",
    [
        ("val_md", [0, 7 / 8]),
        ("logp_pll6", [0, 7 / 8]),
        ("logp_piqa_chain", [0, 7 / 8]),
        ("acc_pll6", [0, 1]),
        ("val_ar", [0, 1]),
    ],
)
def test_the_md_loss_of_ar_alone_bends_no_surface(tmp_path, column, shown):
    """In nats it is off the scale, since AR alone has never seen a mask. Its accuracy counts."""
    records = made_up_records()
    for record in records:
        record |= {"logp_pll6": -4.0, "logp_piqa_chain": -4.0, "acc_pll6": 40.0}
        if record["alpha"] == "1":
            record |= {"val_md": 1e6, "logp_pll6": -1e6, "logp_piqa_chain": -1e6}
    runs = sweep.read_runs(write_lines(tmp_path / "r.jsonl", records))
    surface = sweep.fit_surface(runs, column, [4.0])
    assert abs(surface.mean).max() < 50
    np.testing.assert_allclose(sweep.alpha_at(surface.log_odds[[0, -1]]), shown, atol=1e-9)


# ---- plot ----------------------------------------------------------------------------------------
def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_figures_lie_beside_the_results(results, call, tmp_path, capsys):
    call("plot", "--results", results, "--target", "val_ar,acc_ar")
    names = ["curves_R8.png", "curves_R16.png", "curves_R32.png", "curves_R64.png", "map.png"]
    assert [Path(line).name for line in capsys.readouterr().out.split()] == names
    assert all(is_png(tmp_path / name) for name in names)
    assert sorted(tmp_path.iterdir()) == sorted([results, *(tmp_path / name for name in names)])


def test_one_r_and_some_alphas_give_one_figure(results, call, tmp_path):
    chosen = ["--repetitions", "64", "--alphas", "0,1/2,1"]
    call("plot", "--results", results, *chosen, "--out", tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["curves_R64.png"]


def labels_of(ax):
    """Return {label: (height, color)} for the line labels beside a panel."""
    labels = {}
    for text in ax.texts:
        height = text.xyann[1] if hasattr(text, "xyann") else text.get_position()[1]
        labels[text.get_text()] = (height, text.get_color())
    return labels


def test_every_line_has_a_label_of_its_color(tmp_path):
    """AR alone is blue, MD alone red, and labels of lines that end together do not overlap."""
    runs = sweep.read_runs(write_lines(tmp_path / "r.jsonl", made_up_records(0, seeds=(1, 2, 3))))
    lines = sweep.lines_of_runs([run for run in runs if run.repetitions == 64])
    ar, md = sweep.draw_lines("R = 64", lines, "byte").axes
    for ax in (ar, md):
        both = {f"α = {alpha}" for alpha in ALPHAS[1:-1]}
        assert set(labels_of(ax)) == both | {"AR alone", "MD alone"}
        heights = sorted(height for height, _ in labels_of(ax).values())
        assert min(np.diff(heights)) > 0.06
        assert len(ax.lines) == 7 * (1 + 3)  # a mean and three seeds
        assert "nats per byte" in ax.get_title() and ax.get_xlabel() == "million bytes"
    np.testing.assert_allclose(md.lines[0].get_xydata(), [(1, 6), (2, 5)])
    assert ar.lines[4].get_xydata()[0].tolist() == [1, 5]
    red, _, blue, _ = labels_of(ar)["AR alone"][1]
    assert blue > 2 * red
    red, _, blue, _ = labels_of(md)["MD alone"][1]
    assert red > 2 * blue
    red, green, blue, _ = labels_of(ar)["α = 1/2"][1]
    assert min(red, blue) > 1.5 * green


def test_a_line_off_the_panel_is_named_with_its_end(tmp_path):
    """MD alone has never trained AR: its AR loss is off the panel, but stated in its label."""
    records = []
    for alpha, ar, md in (("0", 9.0, 2.0), ("1/2", 3.0, 2.5), ("1", 4.0, 7.25)):
        curve = [[0, 6, 6], [10**6, 3.5, 3.5], [2 * 10**6, ar, md]]
        records.append({"repetitions": 64, "alpha": alpha, "val_ar": ar, "curve": curve})
    runs = sweep.read_runs(write_lines(tmp_path / "r.jsonl", records))
    ar, md = sweep.draw_lines("R = 64", sweep.lines_of_runs(runs), "token").axes
    assert set(labels_of(ar)) == {"↑ MD alone: 9.0", "α = 1/2", "AR alone"}
    assert set(labels_of(md)) == {"MD alone", "α = 1/2", "↑ AR alone: 7.2"}
    assert 4 < ar.get_ylim()[1] < 4.2 and 3.5 < md.get_ylim()[1] < 3.7


@pytest.mark.parametrize("name", ["run", "run/log.jsonl"])
@pytest.mark.parametrize("old", [False, True])
def test_one_run_has_its_curves(tmp_path, call, name, old):
    """Finished or not; logs of older versions have no settings."""
    records = log_of()[old:-1]
    write_run(tmp_path / "run", records)
    ar, md = sweep.draw_lines("demo", sweep.lines_of_log(log_of()), "token").axes
    assert set(labels_of(ar)) == {"training", "held-out"}
    assert set(labels_of(md)) == {"held-out"}
    np.testing.assert_allclose(ar.lines[1].get_xydata(), [(1, 2), (2, 2.5)])
    call("plot", "--results", tmp_path / name)
    assert is_png(tmp_path / "run/curves.png")


def test_reports_of_evaluations_are_no_log(tmp_path, call):
    path = write_lines(tmp_path / "evaluations.jsonl", [{"step": 240, "tasks": {}}])
    assert "evaluations.jsonl, line 1" in message_of(call, "plot", "--results", path)


@pytest.mark.parametrize("vocab_size, unit", [(272, "byte"), (2720, "token"), (1024, "token")])
def test_the_unit_of_a_loss_is_that_of_the_tokens(tmp_path, vocab_size, unit):
    write_run(tmp_path, log_of(vocab_size=vocab_size))
    assert sweep.unit_of(sweep.read_runs(tmp_path)[0].settings) == unit


def map_of(tmp_path, columns, change=lambda record: None):
    """Return the panels of a map of made-up records, and its legend."""
    records = made_up_records(seeds=(1, 2))
    for record in records:
        change(record)
    runs = sweep.read_runs(write_lines(tmp_path / "r.jsonl", records))
    page = sweep.draw_maps(runs, columns, "byte")
    panels = [ax for ax in page.axes if ax.get_label() != "<colorbar>"]
    return panels, page.legends[0]


def test_maps_show_overfitted_runs_the_best_alpha_and_the_papers_rule(tmp_path):
    def change(record):
        record["acc_pll6"] = record.pop("acc_ar")

    panels, legend = map_of(tmp_path, ["acc_pll6", "val_ar"], change)
    titles = ["PLL accuracy, %", "held-out AR loss, nats per byte"] + 2 * ["where the best α lies"]
    assert [ax.get_title() for ax in panels] == titles
    names = [text.get_text() for text in legend.get_texts()]
    assert sorted(names) == ["best α of the fit", "overfitted", "runs", "α = min(63/64, 16/R)"]
    for ax in panels:
        lines = {line.get_label(): line.get_xydata() for line in ax.lines}
        places = {
            (2 ** round(x), round(float(sweep.alpha_at(y)), 3)) for x, y in lines["overfitted"]
        }
        assert places == {(64, 0.75), (64, 0.875), (64, 1)}
        assert len(lines["runs"]) == 4 * 7 - 3
    for ax in panels[2:]:
        lines = {line.get_label(): line.get_xydata() for line in ax.lines}
        rule = lines["α = min(63/64, 16/R)"]
        np.testing.assert_allclose(sweep.alpha_at(rule[[0, -1], 1]), [63 / 64, 16 / 64])
        best = [best_log_odds(2**x) for x in lines["best α of the fit"][:, 0]]
        np.testing.assert_allclose(lines["best α of the fit"][:, 1], best, atol=0.4)


def test_a_difference_that_is_noise_is_pale(tmp_path):
    """Its colors reach as far as the noise; and a difference has no best alpha."""
    rng = np.random.default_rng(0)

    def change(record):
        record["acc_prefix_minus_ar"] = rng.normal()
        record["acc_mc_minus_ar"] = 1.0 if record["alpha"] == "1/2" else -1.0

    panels, _ = map_of(tmp_path, ["acc_prefix_minus_ar", "acc_mc_minus_ar"], change)
    noise, effect = (ax.collections[0] for ax in panels[:2])
    assert noise.norm.vmin == -noise.norm.vmax and effect.norm.vmin == -effect.norm.vmax
    assert noise.zmax / noise.norm.vmax < 0.5 < 0.8 < effect.zmax / effect.norm.vmax
    assert not panels[2].axison and not panels[3].axison
