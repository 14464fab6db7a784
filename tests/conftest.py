"""Shared by all tests: a tiny prepared corpus, a tiny model, and a way to run the scripts as a user does."""
import json
import os
import random
import subprocess
import sys

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

torch.set_num_threads(1)

from configurator import Settings, check  # noqa: E402
from model import Transformer  # noqa: E402

# a run of seconds: 4 slots of 2 sequences x 32 tokens
TINY = dict(n_layer=2, n_head=2, n_embd=32, n_ff=48, vocab_size=300, seq_len=32, alpha="1/2", repetitions=2, batch_size=8,
            micro_batch_size=2, max_steps=6, decay_steps=2, eval_interval=2, eval_tokens=640, save_interval=2, log_interval=1,
            compile=False)


def tiny_settings(**changes):
    return check(Settings(**{**TINY, **changes}))


def random_model(settings, seed=0):
    """Weights with something to say: the zero output projections of the real initialisation are filled as well."""
    torch.manual_seed(seed)
    model = Transformer(settings)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(std=0.5 / settings.n_embd ** 0.5)
        model.embed.weight.normal_()
        model.head.weight.normal_(std=2 / settings.n_embd ** 0.5)
    return model


def prose(n_documents, seed=0):
    """Text with structure, from a fixed vocabulary of made-up words; every document is another."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("aeioubdgklmnprstv") for _ in range(rng.randint(2, 8))) for _ in range(400)]
    return [" ".join(rng.choices(words, k=rng.randint(5, 80))).capitalize() + f". ({i})" for i in range(n_documents)]


def run(*command, cwd, code=0, **environment):
    """A script of this project in a process of its own; returns its output, standard error included."""
    if command[0].endswith(".py"):
        command = (sys.executable, os.path.join(ROOT, command[0]), *command[1:])
    env = {**os.environ, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in environment.items()}}
    result = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
                            stdin=subprocess.DEVNULL)
    assert code is None or result.returncode == code, f"{command} ended with {result.returncode}:\n{result.stdout}"
    return result.stdout


def torchrun(n, *command, cwd, code=0, **environment):
    launcher = (sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n}", "--standalone")
    return run(*launcher, os.path.join(ROOT, command[0]), *command[1:], cwd=cwd, code=code, **environment)


def flags(**changes):
    return [f"--{k}={v}" for k, v in {**TINY, **changes}.items()]


def read_log(folder):
    with open(os.path.join(folder, "log.jsonl")) as f:
        return [json.loads(line) for line in f]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with data/tiny, prepared by prepare.py from 400 made-up documents."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in prose(400)))
    run("prepare.py", "--input", "text.jsonl", "--out", "data/tiny", "--vocab_size", "300", cwd=folder)
    return folder
