"""assets/ladder.py and rivals.py: a run is compared with its rival of the same seed, size and R."""

import json
import sys

import numpy as np
import pytest

from conftest import ROOT, random_model, tiny_settings

sys.path.append(f"{ROOT}/assets")
import ladder  # noqa: E402
import rivals  # noqa: E402

SETTINGS = {24: "--n_embd=24 --n_ff=66", 48: "--n_embd=48", 96: "--n_embd=96 --n_ff=264"}
NARROW, WIDE = "--n_embd=48 --max_steps=1280", "--n_embd=96 --max_steps=2560"


def made_up_runs():
    """Return runs whose columns grow with alpha, with slope width + R, and vary with the seed."""
    shares = {"0": 0, "1/4": 0.25, "1/2": 0.5, "15/16": 15 / 16, "1": 1}
    noise = np.random.default_rng(0)
    for width, settings in SETTINGS.items():
        for R in (16, 64, 128):
            for seed in (1, 2, 3):
                base = 100 * noise.random()  # a seed may be good or bad as a whole
                for alpha, share in shares.items():
                    run = {"repetitions": R, "alpha": alpha, "seed": seed, "settings": settings}
                    for column, _, _ in ladder.PANELS:
                        run[column] = base + share * (width + R)
                    yield run


@pytest.fixture
def runs(tmp_path):
    for name, settings in zip(ladder.RESULTS, SETTINGS.values()):
        lines = [json.dumps(run) for run in made_up_runs() if run["settings"] == settings]
        (tmp_path / name).write_text("\n".join(lines))
    return ladder.read_runs(tmp_path)


@pytest.mark.parametrize("R, width", [(16, 24), (64, 48)])
def test_seeds_are_compared_in_pairs(runs, R, width):
    mean, error, n_seeds = ladder.compare(runs[R, width, "1/2"], runs[R, width, "1"], "acc_ar")
    assert mean == pytest.approx(-0.5 * (width + R))
    assert error == pytest.approx(0, abs=1e-9)
    assert n_seeds == 3
    assert ladder.describe(mean, error, n_seeds).endswith(" ± 0.000 (3 seeds)")


def test_one_seed_has_no_error(runs):
    one = {2: runs[16, 24, "1/2"][2]}
    mean, error, n_seeds = ladder.compare(one, runs[16, 24, "0"], "val_md")
    assert mean == pytest.approx(20) and np.isnan(error) and n_seeds == 1
    assert ladder.describe(mean, error, n_seeds) == "+20.000 (1 seed)"
    for rivals_of_none in ({}, {2: {"val_ar": 1.0}}):
        mean, error, n_seeds = ladder.compare(one, rivals_of_none, "val_md")
        assert np.isnan(mean) and np.isnan(error) and n_seeds == 0


@pytest.mark.parametrize("width, n_ff", [(24, 66), (48, 132), (96, 264)])
def test_sizes_are_those_of_the_matrices_of_the_model(width, n_ff):
    model = random_model(tiny_settings(n_layer=2, n_head=2, n_embd=width, n_ff=n_ff))
    matrices = [p for p in model.blocks.parameters() if p.dim() > 1]
    assert ladder.count_parameters(width) == sum(p.numel() for p in matrices)


def test_a_figure_is_drawn(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "ASSETS", tmp_path)
    ladder.main()
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    line = "acc_pll6, R = 64, 56,448 parameters: alpha = 1/2 minus 0 +56.000 ± 0.000 (3 seeds)"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    "R, alpha, settings, narrow, wide",
    [
        (64, "1/2", NARROW, "alpha = 1/2, weight decay 0.1", None),
        (64, "1", f"{NARROW} --weight_decay=0.3", "alpha = 1, weight decay 0.3", None),
        (
            16.0,
            "1",
            "--n_embd=48 --max_steps=320",
            "alpha = 1, weight decay 0.1, stopped after 16",
            None,
        ),
        (64.0, "0", NARROW, "alpha = 0, weight decay 0.1", None),
        (16, "1", NARROW, None, None),
        (128, "1/4", NARROW, None, None),
        (128, "1/4", WIDE, None, "alpha = 1/4, weight decay 0.1"),
        (64, "1/2", WIDE, None, None),
        (16, "1", WIDE, None, None),
        (
            16,
            "1",
            "--n_embd=96 --max_steps=320 --weight_decay=0.3",
            None,
            "alpha = 1, weight decay 0.3, stopped after 16",
        ),
    ],
)
def test_rivals_are_runs_of_the_same_size_on_the_same_text(R, alpha, settings, narrow, wide):
    run = {"repetitions": R, "alpha": alpha, "settings": settings}
    assert rivals.name_of(run, width=48, n_steps=1280, R=64) == narrow
    assert rivals.name_of(run, width=96, n_steps=2560, R=128) == wide


def test_the_mix_is_compared_with_every_rival(tmp_path, monkeypatch, capsys):
    mix = {"repetitions": 64, "alpha": "1/2", "settings": NARROW}
    stopped = {"repetitions": 16, "alpha": "1", "settings": "--n_embd=48 --max_steps=320"}
    other = {"repetitions": 16, "alpha": "1", "settings": NARROW, "seed": 1}
    parity, rival, large = [other], [], []
    for seed, gain in ((1, 0.1), (2, 0.2), (3, 0.3)):
        parity.append(mix | {"seed": seed, "val_ar": seed - gain})
        decayed = mix["settings"] + " --weight_decay=0.3"
        rival.append(mix | {"seed": seed, "val_ar": seed - 2 * gain, "settings": decayed})
        rival.append(stopped | {"seed": seed, "val_ar": seed})
        for alpha, val_ar in (("1/4", seed - 5 * gain), ("1", seed)):
            run = {"repetitions": 128, "alpha": alpha, "settings": WIDE}
            large.append(run | {"seed": seed, "val_ar": val_ar})
    for name, runs in zip((*ladder.RESULTS, "rivals.jsonl"), ([], parity, large, rival)):
        (tmp_path / name).write_text("\n".join(json.dumps(run) for run in runs))
    monkeypatch.setattr(rivals, "ASSETS", tmp_path)
    rivals.main()
    out = capsys.readouterr().out
    assert (
        "0.1, minus alpha = 1, weight decay 0.1, stopped after 16\n  val_ar       -0.200 ± 0.058"
    ) in out
    assert (
        "R = 128, width 96: alpha = 1/4, weight decay 0.1, minus alpha = 1, weight decay 0.1\n"
        "  val_ar       -1.000 ± 0.289"
    ) in out
