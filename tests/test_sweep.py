"""sweep.py: the Gaussian process finds a known optimum, a grid is trained once, and bad input ends in one line."""
import fcntl
import json
import os
import runpy
import subprocess
import sys
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

import sweep
from conftest import flags, run

GRID = [(R, alpha) for R in (8, 16, 32, 64) for alpha in ("0", "1/8", "1/4", "1/2", "3/4", "7/8", "1")]


def best(R):
    """The optimum of the made-up surfaces falls from 0.91 at R = 8 to 0.25 at R = 64."""
    return 3.2 - 1.6 * np.log2(R / 8)


def write_results(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def surface(noise=0.01, seed=0):
    rng = np.random.default_rng(seed)
    for R, alpha in GRID:
        number = float(Fraction(alpha))
        odds = (number + 1 / 64) / (1 - number + 1 / 64)
        loss = float(4 + 0.05 * (np.log2(odds) - best(R)) ** 2 + noise * rng.normal())
        yield {"repetitions": R, "alpha": alpha, "seed": 1, "val_ar": loss, "score_ar": 50 - 3 * loss,
               "overfit": R * number > 40}


@pytest.fixture
def call(monkeypatch):
    """sweep.py with these arguments, in this process."""
    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["sweep.py", *argv])
        runpy.run_path(sweep.__file__, run_name="__main__")
    return call


@pytest.mark.parametrize("target", ["val_ar", "score_ar"])
def test_the_optimum_of_a_known_surface_is_in_the_interval(tmp_path, target, call, capsys):
    """A loss is minimised, a score maximised; what is found is the optimum that was put in, with an honest interval."""
    results = write_results(tmp_path / "r.jsonl", surface())
    call("fit", "--results", results, "--target", target, "--json", str(tmp_path / "fit.json"))
    report = json.loads((tmp_path / "fit.json").read_text())
    assert report["r2"] > 0.99 and "Matern" in report["kernel"] and "paper's rule" in capsys.readouterr().out
    assert [o["repetitions"] for o in report["optimal"]] == [8, 16, 32, 64]
    for o in report["optimal"]:
        odds = 2 ** best(o["repetitions"])
        true = (odds * 65 / 64 - 1 / 64) / (1 + odds)
        assert o["low"] <= o["alpha"] <= o["high"] and o["high"] - o["low"] < 0.5
        assert o["low"] - 0.02 <= true <= o["high"] + 0.02, (o, true)  # the grid of alphas is 0.2 wide in log-odds


def test_the_interval_is_of_the_surface_not_of_a_run():
    """The noise of single runs widens the interval only as far as it leaves the surface itself uncertain."""
    rows = [r for seed in range(6) for r in surface(noise=0.4, seed=seed)]
    for r in rows:
        r["place"] = np.log2(r["repetitions"]), sweep.height(Fraction(r["alpha"]))
    r2, kernel, heights, mean, chance = sweep.fit(rows, "val_ar", [3, 6])
    assert 0.05 < kernel.k2.noise_level < 1 and r2 < 0.99
    np.testing.assert_allclose(chance.sum(1), 1)
    for R, c, limit in zip((8, 64), chance, (1.3, 1.05)):  # with the noise of a run in the samples: 1.45 and 1.31
        middle = (c * heights).sum()
        assert abs(middle - best(R)) < 0.8 and np.sqrt((c * (heights - middle) ** 2).sum()) < limit


def test_heights_are_the_log_odds_and_finite():
    """Symmetric, increasing, one step for a halving in the middle of the range, finite at the ends."""
    h = sweep.height([0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 1])
    np.testing.assert_allclose(h, -h[::-1], atol=1e-12)
    assert (np.diff(h) > 0).all() and 6 < h[-1] < 6.1
    assert 0.9 < sweep.height(1 / 8) - sweep.height(1 / 16) < 1.2


def test_the_figures_are_drawn(tmp_path, call):
    """A map of each target and the curves, as PNG of less than 150 kB, from results written by hand."""
    rows = [r | {"curve": [[0, 7, 7], [1000, 5, 5], [2000, r["val_ar"], 5]]} for r in surface()]
    results = write_results(tmp_path / "r.jsonl", rows)
    call("plot", "--results", results, "--out", str(tmp_path / "png"), "--target", "val_ar")
    for name in ("map_val_ar.png", "curves.png"):
        data = (tmp_path / "png" / name).read_bytes()
        assert data.startswith(b"\x89PNG") and 5_000 < len(data) < 150_000


def test_a_grid_is_trained_once(corpus, tmp_path):
    """A run is trained, evaluated and written down; the same command, with one more alpha, trains only that one."""
    settings = [f for f in flags(data_dir=corpus / "data/tiny") if not f.startswith(("--alpha", "--repetitions"))]
    (tmp_path / "c.py").write_text("")
    command = ["sweep.py", "run", "--config", "c.py", "--results", "out/r.jsonl", "--repetitions", "2", *settings]
    run(*command, "--alphas", "1/2", "--eval", "--tasks heldout --modes ar,prefix --limit 8", cwd=tmp_path)
    first = (tmp_path / "out/r.jsonl").read_text()
    record = json.loads(first)
    log = [json.loads(line) for line in open(tmp_path / "out/R2_a1_2_s1/log.jsonl")]
    assert all(record[k] == log[-1][k] for k in ("val_ar", "val_md", "overfit"))
    assert (record["repetitions"], record["alpha"], record["seed"]) == (2, 0.5, 1) and record["score_ar"] < 0
    assert record["score_prefix_minus_ar"] == record["score_prefix"] - record["score_ar"]
    assert len(record["curve"]) == 4 and record["curve"][-1][0] == log[-1]["tokens"]
    output = run(*command, "--alphas", "0,1/2", cwd=tmp_path)
    second = (tmp_path / "out/r.jsonl").read_text()
    assert second.startswith(first) and json.loads(second[len(first):])["alpha"] == 0 and "1/1" in output


def test_what_was_interrupted_is_resumed(tmp_path, monkeypatch):
    """Where a checkpoint lies train.py is told to go on from it, elsewhere to start; a failure names run and reason."""
    calls, code = [], 0

    def fake(command, **_):
        calls.append([str(part) for part in command])
        folder = tmp_path / "R4_a1_3_s7"
        folder.mkdir(exist_ok=True)
        (folder / "log.jsonl").write_text(json.dumps(dict(step=1, tokens=9, val_ar=2, val_md=3, overfit=False)) + "\n")
        return SimpleNamespace(returncode=code, stderr="a line\nerror: no such thing\n")
    monkeypatch.setattr(subprocess, "run", fake)
    args = SimpleNamespace(results=tmp_path / "r.jsonl", config="c.py", eval="")
    sweep.train(args, ["--max_steps=3"], 4, Fraction(1, 3), 7)
    (tmp_path / "R4_a1_3_s7/ckpt.pt").touch()
    sweep.train(args, ["--max_steps=3"], 4, Fraction(1, 3), 7)
    for command, resume in zip(calls, (False, True)):
        assert command[2:5] == ["c.py", "--max_steps=3", "--repetitions=4"] and f"--resume={resume}" in command
    assert {"--alpha=1/3", "--seed=7"} <= set(calls[0])
    assert sweep.read(tmp_path / "r.jsonl")[0]["alpha"] == Fraction(1, 3)
    code = 1
    with pytest.raises(OSError, match="R4_a1_3_s7: no such thing"):  # configurator.py turns it into the one line
        sweep.train(args, [], 4, Fraction(1, 3), 7)


def test_no_run_outlives_its_sweep(corpus, tmp_path):
    """Nobody reads what train.py prints any more: it ends at its next line, and the lock of its folder is free."""
    settings = [f for f in flags(data_dir=corpus / "data/tiny", max_steps=10 ** 5, repetitions=10 ** 5, eval_interval=0,
                                 save_interval=0) if not f.startswith(("--alpha", "--repetitions"))]
    (tmp_path / "c.py").write_text("")
    command = ["run", "--config", "c.py", "--results", "r.jsonl", "--repetitions", str(10 ** 5), "--alphas", "1/2", *settings]
    process = subprocess.Popen([sys.executable, sweep.__file__, *command], cwd=tmp_path, stderr=subprocess.DEVNULL)
    log = tmp_path / f"R{10 ** 5}_a1_2_s1/log.jsonl"

    def wait(condition):
        for _ in range(600):
            if condition():
                return
            time.sleep(0.1)
        raise TimeoutError

    def is_free():
        try:
            with open(log.parent / ".lock") as lock:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB) is None
        except BlockingIOError:
            return False
    wait(lambda: log.exists() and log.stat().st_size)
    assert not is_free()
    process.terminate()
    process.wait()
    wait(is_free)


ROW = {"repetitions": 8, "alpha": "1/2", "val_ar": 4.0}
BAD = {
    "not JSON": (["{"], [], "line 1"),
    "not an object": (["3"], [], "line 1"),
    "no alpha": ([json.dumps(ROW), json.dumps({"repetitions": 8, "val_ar": 1.0})], [], "line 2"),
    "alpha of 2": ([json.dumps(ROW | {"alpha": 2})], [], "alpha"),
    "alpha of 1/0": ([json.dumps(ROW | {"alpha": "1/0"})], [], "line 1"),
    "empty": ([], [], "no runs"),
    "too few": ([json.dumps(ROW), json.dumps(ROW | {"alpha": 1})], [], "5 runs"),
    "one alpha": ([json.dumps(ROW | {"repetitions": R}) for R in range(1, 9)], [], "2 alphas"),
    "no target": ([json.dumps(ROW | {"alpha": a / 8}) for a in range(9)], ["--target", "val_arr"], "mean 'val_ar'"),
    "no number": ([json.dumps(ROW | {"alpha": a / 8, "val_ar": "x"}) for a in range(9)], [], "val_ar"),
    "unknown flag": ([json.dumps(ROW)], ["--targets=val_ar"], "--targets"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_results_end_in_one_line(tmp_path, case, call):
    """A fit of these is refused in one line that names what is wrong."""
    lines, more, words = BAD[case]
    (tmp_path / "r.jsonl").write_text("".join(line + "\n" for line in lines))
    with pytest.raises(SystemExit) as error:
        call("fit", "--results", str(tmp_path / "r.jsonl"), "--target", "val_ar", *more)
    assert error.value.code.startswith("error: ") and "\n" not in error.value.code and words in error.value.code


@pytest.mark.parametrize("flag", ["--alphas=1/0", "--seeds=x", "--repetitions=8,"])
def test_a_bad_grid_ends_in_one_line(tmp_path, call, flag):
    """Lists of what is no number are refused before anything is written."""
    with pytest.raises(SystemExit, match="^error: .*commas"):
        call("run", "--results", str(tmp_path / "out/r.jsonl"), flag)
    assert not (tmp_path / "out").exists()


def test_what_train_refuses_is_passed_on(tmp_path):
    """The one line of train.py comes through, with the run it is about; what has not begun is not begun."""
    (tmp_path / "c.py").write_text("nonsense = 3")
    output = run("sweep.py", "run", "--results", "out/r.jsonl", "--config", "c.py", cwd=tmp_path, code=1)
    assert output.strip().split("\n")[-1].startswith("error: out/R8_a0_s1: c.py: no setting named 'nonsense'")
    assert "Traceback" not in output and not os.path.exists(tmp_path / "out/r.jsonl")
