"""sweep.py: what was measured is written, known optima are found, figures show what they say."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import sweep
from conftest import ROOT, flags, read_log, run

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


@pytest.fixture
def call(monkeypatch):
    """Return a function that calls sweep.py with these arguments, in this process."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["sweep.py", *map(str, arguments)])
        sweep.main()

    return call


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


RECORD = {"repetitions": 8, "alpha": "1/2", "val_ar": 4.0}
BAD_RESULTS = {
    "not JSON": (["{"], "line 1"),
    "not an object": (["3"], "line 1"),
    "no alpha": ([json.dumps(RECORD), '{"repetitions": 8}'], "line 2"),
    "half a repetition": ([json.dumps(RECORD | {"repetitions": 0.5})], "line 1"),
    "no repetitions": ([json.dumps(RECORD | {"repetitions": 0})], "repetitions"),
    "alpha of 2": ([json.dumps(RECORD | {"alpha": 2})], "alpha"),
    "half a curve": ([json.dumps(RECORD | {"curve": [[0, 7.0]]})], "line 1"),
    "a seed of x": ([json.dumps(RECORD | {"seed": "x"})], "line 1"),
    "alpha of 1/0": ([json.dumps(RECORD | {"alpha": "1/0"})], "line 1"),
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
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(SystemExit) as error:
        call("fit", "--results", path, "--target", "val_ar")
    message = error.value.code
    assert message.startswith("error: ") and "\n" not in message and words in message


# ---- run -----------------------------------------------------------------------------------------
@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Replace the scripts: train.py writes a log, eval.py a result; return the list of calls."""
    calls = []

    async def fake_call(folder, script, *arguments):
        calls.append([script, *map(str, arguments)])
        await asyncio.sleep(0)
        folder.mkdir(parents=True, exist_ok=True)
        if script == "train.py":
            first = {"step": 0, "tokens": 0, "val_ar": 5.7, "val_md": 5.8}
            middle = {"step": 1, "tokens": 9, "val_ar": 2.0, "val_md": 3.5}
            last = {"step": 2, "tokens": 18, "val_ar": 2.5, "val_md": 3.0}
            last |= {"done": True, "overfit": True}
            write_lines(folder / "log.jsonl", [first, middle, last])
        else:
            (folder / "eval.json").write_text(json.dumps(eval_report(["ar"])))

    monkeypatch.setattr(sweep, "call", fake_call)
    return calls


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


GRID = ["run", "--config", "c.py", "--repetitions", 4, "--alphas", "1/3", "--seeds", 7]


def test_a_line_holds_what_was_measured(tmp_path, call, trained):
    path = tmp_path / "out/r.jsonl"
    call(*GRID, "--results", path, "--eval", "--tasks heldout", "--", "--max_steps=2")
    line = json.loads(path.read_text())
    curve = line.pop("curve")
    assert curve == [[0, 5.7, 5.8], [9, 2.0, 3.5], [18, 2.5, 3.0]]
    assert line == {
        "repetitions": 4,
        "alpha": "1/3",
        "seed": 7,
        "settings": "c.py --max_steps=2",
        "eval": "--tasks heldout",
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


def test_scripts_are_told_what_to_do(tmp_path, call, trained):
    folder = tmp_path / "R4_a1_3_s7"
    call(*GRID, "--results", tmp_path / "r.jsonl", "--eval", "--limit 8", "--", "--max_steps=2")
    train, evaluate = trained
    assert train[:3] == ["train.py", "c.py", "--max_steps=2"]
    assert {"--repetitions=4", "--alpha=1/3", "--seed=7", f"--out_dir={folder}"} < set(train)
    assert "--resume=False" in train
    assert evaluate == ["eval.py", "--limit", "8", f"--ckpt={folder}", f"--json={folder}/eval.json"]


def test_a_checkpoint_is_resumed(tmp_path, call, trained):
    folder = tmp_path / "R4_a1_3_s7"
    folder.mkdir()
    (folder / "ckpt.pt").touch()
    write_lines(folder / "log.jsonl", [{"step": 0, "tokens": 0, "val_ar": 5.7, "val_md": 5.8}])
    call(*GRID, "--results", tmp_path / "r.jsonl")
    assert "--resume=True" in trained[0]


def test_finished_runs_are_written_again_only_for_a_new_evaluation(tmp_path, call, trained):
    """train.py is asked too: it ends at once, unless the settings have changed."""
    path = tmp_path / "r.jsonl"
    call(*GRID, "--results", path)
    call(*GRID, "--results", path)
    assert [script for script, *_ in trained] == ["train.py"]
    for _ in range(2):
        call(*GRID, "--results", path, "--eval", "--limit 8")
    assert [script for script, *_ in trained] == ["train.py", "train.py", "eval.py"]
    assert sweep.read_runs(path)[0].columns["acc_ar"] == 50.0


def test_only_what_is_missing_is_trained(tmp_path, call, trained):
    path = tmp_path / "r.jsonl"
    call(*GRID, "--results", path)
    call(*GRID, "--results", path, "--alphas", "0,1/3,1", "--jobs", 2)
    assert len(trained) == 3
    alphas = {run.alpha for run in sweep.read_runs(path)}
    assert alphas == {0, Fraction(1, 3), 1}


def test_runs_of_other_settings_are_not_taken_for_these(tmp_path, call, trained):
    call(*GRID, "--results", tmp_path / "r.jsonl")
    with pytest.raises(SystemExit, match="^error: .*runs of 'c.py'.*another folder"):
        call(*GRID, "--results", tmp_path / "r.jsonl", "--", "--weight_decay=1.0")


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


@pytest.mark.parametrize("flag", ["--alphas=1/0", "--seeds=x", "--repetitions=8,", "--alphas="])
def test_a_bad_grid_ends_in_one_line(tmp_path, call, flag):
    with pytest.raises(SystemExit, match="^error: .*commas"):
        call(*GRID, "--results", tmp_path / "out/r.jsonl", flag)
    assert not (tmp_path / "out").exists()


def test_what_train_refuses_is_passed_on(tmp_path):
    """train.py's one line comes through, with the run that it is about; no other run starts."""
    (tmp_path / "c.py").write_text("nonsense = 3")
    command = ["run", "--config", "c.py", "--repetitions", "8", "--alphas", "0,1", "--jobs", "1"]
    output = run("sweep.py", *command, "--results", "out/r.jsonl", cwd=tmp_path, code=1)
    last = output.strip().split("\n")[-1]
    assert last.startswith("error: out/R8_a0_s1: c.py: no setting named 'nonsense'")
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


def tiny_grid(corpus, folder, repetitions=20, **settings):
    """Return the command of a sweep with one small run, and the settings behind its --."""
    (folder / "c.py").write_text("")
    arguments = flags(data_dir=corpus / "data/tiny", **settings)
    own = ("--alpha", "--repetitions")
    arguments = [argument for argument in arguments if not argument.startswith(own)]
    command = ["run", "--config", "c.py", "--repetitions", str(repetitions), "--alphas", "1/2"]
    return ["sweep.py", *command, "--results", "out/r.jsonl"], ["--", *arguments]


def test_a_grid_is_trained_and_evaluated(corpus, tmp_path):
    command, settings = tiny_grid(corpus, tmp_path)
    evaluation = ["--eval", "--tasks heldout --modes ar,prefix --limit 8"]
    run(*command, *evaluation, *settings, cwd=tmp_path)
    line = json.loads((tmp_path / "out/r.jsonl").read_text())
    last = read_log(tmp_path / "out/R20_a1_2_s1")[-1]
    for name in ("val_ar", "val_md", "overfit"):
        assert line[name] == last[name]
    assert line["acc_prefix_minus_ar"] == pytest.approx(line["acc_prefix"] - line["acc_ar"])
    assert line["logp_prefix_minus_ar"] == pytest.approx(line["logp_prefix"] - line["logp_ar"])
    assert line["logp_ar"] < 0 < line["logp_ar_se"]


def start(command, folder):
    arguments = [sys.executable, str(Path(sweep.__file__)), *command[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(arguments, cwd=folder, stderr=subprocess.PIPE, env=environment)


def wait_for(condition):
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.1)
    raise TimeoutError


def test_a_stopped_sweep_saves_and_continues(corpus, tmp_path):
    """SIGTERM ends train.py as well, which saves; the same command resumes it to the end."""
    command, settings = tiny_grid(
        corpus, tmp_path, max_steps=100, save_interval=0, eval_interval=50
    )
    command += settings
    folder = tmp_path / "out/R20_a1_2_s1"
    log = folder / "log.jsonl"
    sweeping = start(command, tmp_path)
    wait_for(lambda: log.exists() and '"step": 2,' in log.read_text())
    sweeping.send_signal(signal.SIGTERM)
    _, errors = sweeping.communicate(timeout=60)
    assert sweeping.returncode == 128 + signal.SIGTERM
    assert b"the same command continues" in errors and b"Traceback" not in errors
    assert (folder / "ckpt.pt").exists()  # at the end of the sweep train.py has ended, too
    before = read_log(folder)
    assert 2 <= before[-1]["step"] < 100

    run(*command, cwd=tmp_path)
    after = read_log(folder)
    assert after[: len(before)] == before  # speeds included: resumed, not begun anew
    assert after[-1]["done"] and len(sweep.read_runs(tmp_path / "out/r.jsonl")) == 1


def test_a_full_disk_leaves_no_half_line(tmp_path):
    pytest.importorskip("resource")
    code = f"import sys; sys.path.insert(0, {ROOT!r}); import resource, pathlib, sweep"
    code += "; resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30))"
    code += "; [sweep.append_line(pathlib.Path('r'), 'x' * 19) for _ in range(2)]"
    output = run(sys.executable, "-c", code, cwd=tmp_path, code=1)
    assert "is the disk full?" in output
    assert (tmp_path / "r").read_text() == "x" * 19 + "\n"


def test_no_run_outlives_a_sweep_that_was_killed(corpus, tmp_path):
    """Nobody reads what train.py prints any more: it ends at its next line."""
    fcntl = pytest.importorskip("fcntl")
    settings = {"max_steps": 10**5, "save_interval": 0, "eval_interval": 0}
    command, settings = tiny_grid(corpus, tmp_path, repetitions=10**5, **settings)
    folder = tmp_path / "out/R100000_a1_2_s1"
    log = folder / "log.jsonl"

    def is_locked():
        with open(folder / ".lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    sweeping = start([*command, *settings], tmp_path)
    wait_for(lambda: log.exists() and log.stat().st_size > 0)
    assert is_locked()
    sweeping.kill()
    sweeping.wait()
    wait_for(lambda: not is_locked())


# ---- table ---------------------------------------------------------------------------------------
def test_tables_pair_alphas_by_seed(tmp_path, call, capsys):
    """The seeds differ by 1, the alphas by 0.2 and 0.4 within a seed: only pairing shows it."""
    records = []
    for alpha, seed, loss in [("1", 1, 2.0), ("1", 2, 3.0), ("1/2", 1, 1.8), ("1/2", 2, 2.6)]:
        records.append({"repetitions": 8, "alpha": alpha, "seed": seed, "val_ar": loss})
    records.append({"repetitions": 8, "alpha": "1/4", "seed": 1, "val_ar": 1.5, "acc_ar": 40})
    call("table", "--results", write_lines(tmp_path / "r.jsonl", records))
    means, differences = capsys.readouterr().out.split("Difference")
    assert "| R | alpha | seeds | acc_ar | val_ar |\n|---|---|---|---|---|\n" in means
    assert "| 8 | 1/4 | 1 | 40.0 | 1.500 |" in means  # one seed has no deviation
    assert "| 8 | 1/2 | 2 |  | 2.200 ± 0.566 |" in means
    assert "| 8 | 1/2 | 2 |  | -0.300 ± 0.100 |" in differences
    assert "| 8 | 1/4 | 1 |  | -0.500 |" in differences
    assert "| 8 | 1 |" not in differences


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
    assert 0.9 < sweep.log_odds(1 / 8) - sweep.log_odds(1 / 16) < 1.2  # a step for a halving
    np.testing.assert_allclose(sweep.alpha_at(odds), [0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 1])


def test_a_fit_finds_the_known_optimum(results, tmp_path, call, capsys):
    """A loss is minimised and a score maximised; both are in the file, with honest intervals."""
    file = tmp_path / "fit.json"
    call("fit", "--results", results, "--target", "val_ar,acc_ar", "--json", file)
    fits = json.loads(file.read_text())
    assert list(fits) == ["val_ar", "acc_ar"]
    assert "paper's rule" in capsys.readouterr().out
    for fit in fits.values():
        assert fit["r2"] > 0.99 and "Matern" in fit["kernel"]
        assert [optimum["repetitions"] for optimum in fit["optimal"]] == [8, 16, 32, 64]
        for optimum in fit["optimal"]:
            truth = sweep.alpha_at(best_log_odds(optimum["repetitions"]))
            low, high = optimum["low"], optimum["high"]
            assert low <= optimum["alpha"] <= high and high - low < 0.5
            assert low - 0.02 <= truth <= high + 0.02  # alphas are 0.2 apart in log-odds


def test_a_fit_is_of_the_surface_not_of_single_runs(tmp_path):
    """The noise of runs widens an interval only as far as it hides the surface."""
    records = made_up_records(noise=0.4, seeds=range(6))
    runs = sweep.read_runs(write_lines(tmp_path / "r.jsonl", records))
    surface = sweep.fit_surface(runs, "acc_ar", np.log2([8, 64]))
    assert surface.r2 < 0.99
    np.testing.assert_allclose(surface.best.sum(axis=1), 1)
    # with the noise of a run in the samples the deviations would be 1.45 and 1.31
    for R, chance, limit in zip((8, 64), surface.best, (1.35, 1.1)):
        middle = (chance * surface.log_odds).sum()
        deviation = np.sqrt((chance * (surface.log_odds - middle) ** 2).sum())
        assert abs(middle - best_log_odds(R)) < 0.9 and deviation < limit


@pytest.mark.parametrize("column, shown", [("val_md", [0, 7 / 8]), ("val_ar", [0, 1])])
def test_the_md_loss_of_ar_alone_bends_no_surface(tmp_path, column, shown):
    """It is off the scale, since such a run has never seen a mask. Its AR loss counts."""
    records = made_up_records()
    for record in records:
        if record["alpha"] == "1":
            record["val_md"] = 1e6
    runs = sweep.read_runs(write_lines(tmp_path / "r.jsonl", records))
    surface = sweep.fit_surface(runs, column, [4.0])
    assert surface.mean.max() < 8
    np.testing.assert_allclose(sweep.alpha_at(surface.log_odds[[0, -1]]), shown, atol=1e-9)


def test_a_gain_is_likely_where_the_difference_is_positive(tmp_path):
    records = made_up_records()
    for record in records:
        record["acc_prefix_minus_ar"] = 1.0 if record["alpha"] == "1/2" else -1.0
    runs = sweep.read_runs(write_lines(tmp_path / "r.jsonl", records))
    surface = sweep.fit_surface(runs, "acc_prefix_minus_ar", [4.0])
    middle = np.abs(surface.log_odds).argmin()
    assert surface.positive[0, middle] > 0.9 and surface.positive[0, [0, -1]].max() < 0.1


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
    """Return {label: (height, color)} of the lines' names beside a panel."""
    return {text.get_text(): (text.xyann[1], text.get_color()) for text in ax.texts}


def test_every_line_has_a_label_of_its_color(tmp_path):
    """AR alone is blue, MD alone red, and labels of lines that end together do not overlap."""
    runs = sweep.read_runs(write_lines(tmp_path / "r.jsonl", made_up_records(0, seeds=(1, 2, 3))))
    lines = sweep.lines_of_runs([run for run in runs if run.repetitions == 64])
    ar, md = sweep.draw_lines("R = 64", lines).axes
    both = {f"α = {alpha}" for alpha in ALPHAS[1:-1]}
    assert set(labels_of(ar)) == both | {"AR alone"}
    assert set(labels_of(md)) == both | {"MD alone"}
    for ax in (ar, md):
        heights = sorted(height for height, _ in labels_of(ax).values())
        assert min(np.diff(heights)) > 0.06
        assert len(ax.lines) == 6 * (1 + 3)  # a mean and three seeds
    np.testing.assert_allclose(md.lines[0].get_xydata(), [(1, 6), (2, 5)])
    assert ar.lines[0].get_xydata()[0].tolist() == [1, 5]
    red, _, blue, _ = labels_of(ar)["AR alone"][1]
    assert blue > 2 * red
    red, _, blue, _ = labels_of(md)["MD alone"][1]
    assert red > 2 * blue
    red, green, blue, _ = labels_of(ar)["α = 1/2"][1]
    assert min(red, blue) > 1.5 * green


def test_one_runs_log_has_its_curves(tmp_path, call):
    records = [{"step": 0, "tokens": 0, "val_ar": 5.7, "val_md": 5.8}]
    records.append({"step": 1, "tokens": 10**6, "train_ar": 4.0, "val_ar": 4.1, "val_md": 4.2})
    records.append({"step": 2, "tokens": 2 * 10**6, "train_ar": 3.0, "val_ar": 3.1, "val_md": 3.2})
    path = write_lines(tmp_path / "log.jsonl", records)
    ar, md = sweep.draw_lines("demo", sweep.lines_of_log(records)).axes
    assert set(labels_of(ar)) == {"training", "held-out"}
    assert set(labels_of(md)) == {"held-out"}
    np.testing.assert_allclose(ar.lines[1].get_xydata(), [(1, 4.1), (2, 3.1)])
    call("plot", "--results", path)
    assert is_png(tmp_path / "curves.png")


def test_maps_show_overfitted_runs_and_the_papers_rule(tmp_path):
    records = made_up_records(seeds=(1, 2))
    for record in records:
        record["acc_prefix_minus_ar"] = 0.1 * record["val_ar"] - 0.42
        record["acc_pll6"] = record.pop("acc_ar")
    runs = sweep.read_runs(write_lines(tmp_path / "r.jsonl", records))
    columns = ["acc_pll6", "val_ar", "acc_prefix_minus_ar"]
    axes = sweep.draw_maps(runs, columns).axes
    assert [ax.get_title().split("  ")[0] for ax in axes[:3]] == [
        "PLL accuracy, %",
        "held-out AR loss",
        "prefix − AR, points",
    ]
    for ax in axes:
        crosses = [line.get_xydata()[0] for line in ax.lines if line.get_marker() == "x"]
        places = {(2 ** round(x), round(float(sweep.alpha_at(y)), 3)) for x, y in crosses}
        assert places == {(64, 0.75), (64, 0.875), (64, 1)}
    for ax, has_rule in zip(axes[3:], (True, True, False)):
        rules = [line.get_xydata() for line in ax.lines if line.get_linestyle() == "--"]
        assert len(rules) == (1 if has_rule else 0)
        for rule in rules:
            alphas = sweep.alpha_at(rule[:, 1])
            np.testing.assert_allclose(alphas[[0, -1]], [63 / 64, 16 / 64])
