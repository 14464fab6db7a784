"""Shared by all tests: a tiny prepared corpus, a tiny model, and ways to run the scripts."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

torch.set_num_threads(1)

import data  # noqa: E402
from configurator import Settings, check  # noqa: E402
from model import Transformer  # noqa: E402
from tokenizer import SpecialIds  # noqa: E402

# A run that takes seconds: 4 slots of 2 sequences x 32 tokens.
TINY = dict(
    n_layer=2,
    n_head=2,
    n_embd=32,
    n_ff=48,
    vocab_size=300,
    seq_len=32,
    alpha="1/2",
    repetitions=2,
    batch_size=8,
    micro_batch_size=2,
    max_steps=6,
    decay=1 / 3,
    eval_interval=2,
    eval_tokens=640,
    save_interval=2,
    log_interval=1,
    compile=False,
)

# The special ids of a tokenizer that prepare.py trains.
SPECIAL = SpecialIds(bos=1, mask=4, all=tuple(range(16)))
BOS, MASK, N_SPECIAL = 1, 4, 16


def tiny_settings(**changes):
    return check(Settings(**{**TINY, **changes}))


def random_model(settings, seed=0):
    """Return a model with random weights in all matrices, output projections included."""
    torch.manual_seed(seed)
    model = Transformer(settings)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(std=0.5 / settings.n_embd**0.5)
        model.embed.weight.normal_()
        model.head.weight.normal_(std=2 / settings.n_embd**0.5)
    return model


def make_corpus(documents, special=SPECIAL):
    """Return a Corpus that trains and validates on these lists of tokens."""
    starts = np.cumsum([0] + [len(document) for document in documents]).astype(np.uint64)
    tokens = np.concatenate(documents).astype(np.uint16)
    split = data.Split(tokens, starts)
    return data.Corpus(split, split, "", N_SPECIAL, special, {})


def random_stream(s, n_documents=60, seed=0):
    """Return a Stream over random documents."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(n_documents):
        text = rng.integers(N_SPECIAL, s.vocab_size, rng.integers(3, 60))
        documents.append(np.append(BOS, text))
    return data.Stream(make_corpus(documents), s)


def prose(n_documents, seed=0):
    """Return distinct texts with structure, made from a fixed vocabulary of made-up words."""
    rng = random.Random(seed)
    letters = "aeioubdgklmnprstv"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(400)]
    texts = []
    for i in range(n_documents):
        sentence = " ".join(rng.choices(words, k=rng.randint(5, 80))).capitalize()
        texts.append(f"{sentence}. ({i})")
    return texts


def run(*command, cwd, code=0, **environment):
    """Run a script in a process of its own; return its output, standard error included."""
    if command[0].endswith(".py"):
        command = (sys.executable, os.path.join(ROOT, command[0]), *command[1:])
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.update({k: str(v) for k, v in environment.items()})
    result = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,  # a loaded machine takes its time
    )
    failed = f"{command} ended with {result.returncode}:\n{result.stdout}"
    assert code is None or result.returncode == code, failed
    return result.stdout


def torchrun(n, *command, cwd, code=0, **environment):
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n}"]
    script = os.path.join(ROOT, command[0])
    return run(*launcher, "--standalone", script, *command[1:], cwd=cwd, code=code, **environment)


def flags(**changes):
    return [f"--{k}={v}" for k, v in {**TINY, **changes}.items()]


def read_log(folder):
    """Return the settings that a log opens with, and its records."""
    with open(os.path.join(folder, "log.jsonl")) as file:
        first, *records = [json.loads(line) for line in file]
    return first["settings"], records


def read_records(folder):
    return read_log(folder)[1]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with data/tiny, prepared by prepare.py from 400 made-up documents."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": text}) + "\n" for text in prose(400)]
    (folder / "text.jsonl").write_text("".join(lines))
    arguments = ["--input", "text.jsonl", "--out", "data/tiny", "--vocab_size", "300"]
    run("prepare.py", *arguments, cwd=folder)
    return folder
