"""The choice of a device and a dtype; one line for what a GPU cannot do or has no memory for."""

import os
import runpy
import sys

import pytest
import torch

from conftest import ROOT, flags, run
from device import choose_device


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that this machine has GPUs; return a function that sets how many, and of what kind.

    That function returns the list of calls that choose_device makes to set them up.
    """

    def pretend(count, has_bf16):
        calls = []
        replacements = {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "set_device": lambda number: calls.append(("set_device", number)),
            "get_device_name": lambda: "Tesla T4",
            "is_bf16_supported": lambda including_emulation: has_bf16 or including_emulation,
        }
        for name, function in replacements.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(
            torch.backends.cuda, "enable_cudnn_sdp", lambda on: calls.append(("cudnn", on))
        )
        return calls

    return pretend


@pytest.mark.parametrize(
    "has_bf16, asked, dtype, said",
    [
        (True, "auto", torch.bfloat16, ""),
        (False, "auto", torch.float32, "Tesla T4 has no bfloat16: computing in float32\n"),
        (False, "bfloat16", torch.bfloat16, ""),
        (True, "float32", torch.float32, ""),
    ],
)
def test_bf16_is_used_where_the_hardware_has_it(gpus, capsys, has_bf16, asked, dtype, said):
    """Emulated bf16 does not count. If `auto` falls back to float32, one line says so."""
    gpus(1, has_bf16)
    assert choose_device("auto", asked) == ("cuda", dtype)
    assert capsys.readouterr().out == said


def test_the_line_about_the_type_is_said_once_on_a_host(gpus, capsys, monkeypatch):
    gpus(8, False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device() == ("cuda", torch.float32)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("count, local_rank, chosen", [(8, 3, 3), (1, 3, 0), (1, 0, 0)])
def test_each_process_takes_its_device_or_the_only_one(
    gpus, monkeypatch, count, local_rank, chosen
):
    calls = gpus(count, True)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    choose_device()
    assert ("set_device", chosen) in calls


def test_more_processes_than_gpus_are_one_line(gpus, monkeypatch):
    gpus(8, True)
    monkeypatch.setenv("LOCAL_RANK", "8")
    monkeypatch.setattr("errors.let_the_first_rank_speak", lambda: None)
    with pytest.raises(SystemExit, match="this host has 8 GPUs"):
        choose_device()


def test_attention_does_not_go_through_cudnn(gpus):
    calls = gpus(1, True)
    choose_device()
    assert ("cudnn", False) in calls


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(n_head=4), "heads are 8 wide, but compiled attention on a GPU needs at least 16"),
        (dict(n_head=2), "nowhere is not a prepared folder"),  # the next thing that is wrong
        (dict(n_head=4, compile=False), "nowhere is not a prepared folder"),
    ],
)
def test_heads_that_are_too_narrow_for_a_gpu_are_one_line(
    gpus, tmp_path, monkeypatch, changes, message
):
    gpus(1, True)
    settings = dict(n_embd=32, compile=True, data_dir="nowhere", out_dir=str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["train.py", *flags(**(settings | changes))])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # train.py sets its own
    with pytest.raises(SystemExit, match=message):
        runpy.run_path(os.path.join(ROOT, "train.py"), run_name="__main__")


@pytest.mark.parametrize(
    "error, message, setting",
    [
        (
            "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate\\nmuch')",
            "error: the GPU is out of memory",
            "micro_batch_size",
        ),
        (
            "RuntimeError('OutOfMemoryError: out of resource: triton_tem\\nRequired: 114688')",
            "error: heads are too wide for this GPU",
            "n_head",
        ),
        (
            "type('InductorError', (Exception,), {})('C++ failed\\n\\nfatal error: no omp.h')",
            "error: torch.compile failed: use --compile=False",
            "(fatal error: no omp.h)",
        ),
    ],
)
def test_an_error_of_torch_is_one_line_that_helps(tmp_path, error, message, setting):
    """The second is Inductor's, for heads 256 wide on a consumer GPU."""
    script = tmp_path / "script.py"
    lines = [
        "import sys",
        f"sys.path.insert(0, {ROOT!r})",
        "from errors import report",
        "sys.excepthook = report",
        "import torch",
        f"raise {error}",
    ]
    script.write_text("\n".join(lines))
    output = run(sys.executable, str(script), cwd=tmp_path, code=1)
    assert output.startswith(message)
    assert setting in output and output.count("\n") == 1


def test_a_compiler_that_does_not_work_is_one_line_that_says_how_to_do_without(corpus, tmp_path):
    settings = flags(data_dir=corpus / "data/tiny", out_dir="out/new", compile=True, device="cpu")
    output = run("train.py", *settings, cwd=tmp_path, code=1, CXX=sys.executable + "-missing")
    assert "Traceback" not in output
    assert output.splitlines()[-1].startswith("error: torch.compile failed: use --compile=False (")
