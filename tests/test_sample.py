"""Generation: against enumeration, and against decoding without a cache, past the window too."""

import io
import itertools
import os
import pty
import subprocess
import sys
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import pytest
import tokenizers
import torch
from tokenizers import decoders, normalizers, pre_tokenizers

import sample
from conftest import BOS, MASK, N_SPECIAL, ROOT, SPECIAL, prose, random_model, tiny_settings
from model import make_mask
from sample import ORDERS, draw, encode, encode_after_gap, extend, fill
from tokenizer import SPECIAL_TOKENS

CHI2_26 = 54.05  # exceeded by a chi-square with 26 degrees of freedom once in 1,000
PROMPTS = [[BOS, 20, 21, 22, 23, 24], [BOS, 20, 21, 22, 40, 41]]
NOT_BOS = [token for token in SPECIAL.all if token != BOS]


def options(**changes):
    """Return what sample.py's command line would give, with these changes."""
    args = dict(mode="ar", length=10, steps=0, order="random")
    args |= dict(temperature=1.0, top_k=0, top_p=1.0)
    return Namespace(**{**args, **changes})


def generator():
    return torch.Generator().manual_seed(1)


def generate(function, model, rows, window=32, **changes):
    """Return the tokens after every step."""
    more = [window] if function is extend else []
    args = options(**changes)
    steps = function(model, SPECIAL, torch.tensor(rows), *more, generator(), args)
    return [tokens.clone() for tokens in steps]


def states(model, tokens, prefix):
    """Return the hidden states of rows of one length, without a cache."""
    tokens = torch.as_tensor(tokens)
    t = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = make_mask(torch.ones_like(t), t, torch.full((len(t),), prefix))
    return model.hidden(tokens, mask, t)


def tiny_tokenizer(normalizer=None):
    """Return a byte-level BPE with our special tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prose(50), trainer)
    if normalizer:
        tokenizer.normalizer = normalizer
    return tokenizer


def spaced_tokenizer(kind):
    """Return a tokenizer that puts a space before every text, in one of the usual ways."""
    if kind == "normalizer":  # the released models'
        tokenizer = tiny_tokenizer(normalizers.Prepend(" "))
        strip = decoders.Strip(" ", 1, 0)
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), strip])
        return tokenizer
    if kind == "byte level":
        tokenizer = tiny_tokenizer()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        return tokenizer
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    alphabet = [chr(i) for i in range(32, 127)] + ["\n", "é", "\u0301"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    blank_lines = ["\n\n"] * 100  # so that they become one token
    tokenizer.train_from_iterator(prose(50) + blank_lines, trainer)
    return tokenizer


def save_checkpoint(folder, tokenizer=None, **changes):
    """Write a checkpoint of a random tiny model, and return its folder."""
    s = tiny_settings(**changes)
    content = {
        "model": random_model(s).state_dict(),
        "settings": vars(s),
        "step": 6,
        "tokenizer": (tokenizer or tiny_tokenizer()).to_str(),
    }
    torch.save(content, os.path.join(folder, "ckpt_6.pt"))
    return str(folder)


def call(script, *argv):
    """Run a script's main in this process; return its output, or the message it ended with."""
    output = io.StringIO()
    argv = [script.__name__, *map(str, argv)]
    with mock.patch.object(sys, "argv", argv), redirect_stdout(output), redirect_stderr(output):
        try:
            script.main()
        except SystemExit as end:
            if isinstance(end.code, str):
                return end.code
    return output.getvalue()


def split_samples(output):
    return output.removesuffix("\n").split("\n---------------\n")


# ---- distributions -------------------------------------------------------------------------------
@torch.no_grad()
def test_random_order_samples_the_any_order_distribution():
    """Fill one random place a step: all 27 texts of 3 tokens occur as often as they should.

    Their probability is the model's, averaged over the 6 orders. In another order, they do not.
    """
    model = random_model(tiny_settings(vocab_size=N_SPECIAL + 3), seed=5)
    prompt = [BOS, N_SPECIAL]
    probability = torch.zeros(27, dtype=torch.double)
    for i, text in enumerate(itertools.product(range(3), repeat=3)):
        for order in itertools.permutations(range(3)):
            x = prompt + [MASK] * 3
            p = 1 / 6
            for place in order:
                logits = model.head(states(model, [x], 5))[0, 2 + place - 1, N_SPECIAL:]
                p *= logits.double().softmax(-1)[text[place]]
                x[2 + place] = N_SPECIAL + text[place]
            probability[i] += p
    assert probability.sum().item() == pytest.approx(1)

    def chi2(n=2000, **changes):
        x = generate(fill, model, [prompt + [MASK] * 3] * n, **changes)[-1]
        number = (x[:, 2:] - N_SPECIAL) @ torch.tensor([9, 3, 1])
        observed = torch.bincount(number, minlength=27)
        return ((observed - n * probability) ** 2 / (n * probability)).sum().item()

    assert chi2() < CHI2_26
    assert chi2(order="confidence") > 2 * CHI2_26


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 3, "top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),  # 0.6 of the first three's 0.9
        ({"top_k": 100, "top_p": 0.999}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"temperature": 1e-320}, [1, 0, 0, 0]),  # too small to divide by
    ],
)
def test_temperature_top_k_and_top_p_change_the_shares(changes, expected):
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().expand(6000, 4)
    drawn = draw(logits, generator(), options(**changes))
    shares = (torch.bincount(drawn, minlength=4) / 6000).tolist()
    assert shares == pytest.approx(expected, abs=0.03)


def test_drawing_is_in_double_precision(monkeypatch):
    """With noise in fp32 a token 25 nats below the likeliest could never be drawn."""
    seen = []
    multinomial = torch.multinomial

    def spy(p, n, generator):
        seen.append(p)
        return multinomial(p, n, generator=generator)

    monkeypatch.setattr(torch, "multinomial", spy)
    draw(torch.tensor([[0.0, -25.0]]), generator(), options())
    assert seen[0].dtype == torch.double
    assert seen[0][0, 1].item() == pytest.approx(1.3888e-11, rel=1e-4)


# ---- the cache, the window, and batches ----------------------------------------------------------
@torch.no_grad()
@pytest.mark.parametrize("window", [2, 8, 9, 32])
@pytest.mark.parametrize("mode", ["ar", "prefix"])
def test_decoding_with_a_cache_equals_decoding_without(mode, window):
    """Two prompts in one batch with a cache give what each gives alone, all computed anew.

    A text that outgrows the window goes on from its newer half, which may hold some of the prompt.
    """
    model = random_model(tiny_settings(n_layer=3))
    x = generate(extend, model, PROMPTS, window, mode=mode, length=20, temperature=0)[-1]
    for row, prompt in zip(x, PROMPTS):
        text = list(prompt)
        first = 0
        for _ in range(20):
            if len(text) - first > window:
                first = len(text) - window // 2
            prefix = len(prompt) - first if mode == "prefix" else 0
            logits = model.head(states(model, [text[first:]], prefix)[0, -1])
            logits[NOT_BOS] = -torch.inf
            text.append(int(logits.argmax()))
            if text[-1] == BOS:
                break
        assert row[: len(text)].tolist() == text
        assert (row[len(text) :] == BOS).all()


@pytest.mark.parametrize("window", [2, 8, 9, 32])
def test_the_model_reads_no_more_than_a_window_and_rarely_all_of_it(window, monkeypatch):
    """Half a window is read anew whenever it is full; otherwise only the newest token is read."""
    model = random_model(tiny_settings())
    hidden = model.hidden
    reads = []

    def spy(x, mask, positions, caches):
        assert mask.shape[-1] == positions.max() + 1 <= window
        reads.append(x.shape[1])
        return hidden(x, mask, positions, caches)

    monkeypatch.setattr(model, "hidden", spy)
    model.head = Biased(model.head, range(20, 300))  # never generates <s>
    steps = generate(extend, model, PROMPTS, window, length=100)
    assert len(steps) == len(reads) == 100
    n_kept = window // 2
    if n_kept > 1:
        assert set(reads[1:]) == {1, n_kept}
        assert reads.count(n_kept) <= 1 + 100 / (window - n_kept)


@torch.no_grad()
def test_a_cache_can_be_filled_in_pieces():
    model = random_model(tiny_settings(n_layer=3))
    T = 12
    tokens = torch.randint(16, 300, (2, T))
    t = torch.arange(T).expand(2, T)
    mask = make_mask(torch.ones_like(t), t, torch.tensor([0, 4]))
    caches = model.new_caches(2, T)
    pieces = []
    for a, b in ((0, 4), (4, 5), (5, 9), (9, 12)):
        pieces.append(model.hidden(tokens[:, a:b], mask[:, :, a:b, :b], t[:, a:b], caches))
    whole = model.hidden(tokens, mask, t)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)


GAPPED = [[BOS, MASK, 20, MASK, MASK, 21, 22], [BOS, 30, MASK, 31, MASK, 32, MASK]]


@pytest.mark.parametrize("order", ["confidence", "entropy"])
def test_a_batch_gives_what_single_rows_give(order):
    model = random_model(tiny_settings())
    together = generate(fill, model, GAPPED, temperature=0, order=order, steps=2)[-1]
    for row, single in zip(together, GAPPED):
        alone = generate(fill, model, [single], temperature=0, order=order, steps=2)[-1][0]
        assert torch.equal(row, alone)


# ---- special tokens, order of filling ------------------------------------------------------------
class Biased(torch.nn.Module):
    """The head of a model that strongly prefers these tokens."""

    def __init__(self, head, tokens):
        super().__init__()
        self.head = head
        self.tokens = list(tokens)

    def forward(self, h):
        logits = self.head(h)
        logits[:, self.tokens] += 100
        return logits


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("mode", ["ar", "prefix"])
def test_bos_ends_a_text_and_no_other_special_token_is_drawn(mode, temperature):
    model = random_model(tiny_settings())
    head = model.head
    model.head = Biased(head, NOT_BOS)
    x = generate(extend, model, PROMPTS, mode=mode, temperature=temperature)[-1]
    assert ((x >= N_SPECIAL) | (x == BOS)).all()
    assert (x[:, 6:8] >= N_SPECIAL).any()

    model.head = Biased(head, SPECIAL.all)
    steps = generate(extend, model, PROMPTS, mode=mode, temperature=temperature)
    assert len(steps) == 1
    assert (steps[0][:, 6:] == BOS).all()


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_no_special_token_fills_a_gap(order, temperature):
    model = random_model(tiny_settings())
    model.head = Biased(model.head, SPECIAL.all)
    x = generate(fill, model, [[BOS] + [MASK] * 6], order=order, temperature=temperature)[-1]
    assert (x[:, 1:] >= N_SPECIAL).all()


@pytest.mark.parametrize("order", ORDERS)
def test_every_step_fills_as_many_masks(order):
    model = random_model(tiny_settings())
    text = [BOS] + [MASK] * 5 + [50] + [MASK] * 7
    before = torch.tensor([text])
    steps = generate(fill, model, [text], order=order, steps=4)
    assert len(steps) == 4
    for step, x in enumerate(steps):
        assert (x == MASK).sum() == 12 - 3 * (step + 1)
        assert torch.equal(x[before != MASK], before[before != MASK])  # what is filled stays
        before = x


@pytest.mark.parametrize("n_steps", [0, 5, 6, 100])
def test_no_step_is_empty(n_steps):
    """By default, and if more are asked for, there are as many steps as masks."""
    model = random_model(tiny_settings())
    steps = generate(fill, model, [[BOS] + [MASK] * 6], steps=n_steps)
    assert len(steps) == (5 if n_steps == 5 else 6)


@torch.no_grad()
@pytest.mark.parametrize("order", ["confidence", "margin", "entropy"])
def test_the_surest_place_comes_first_at_any_temperature(order):
    """A temperature changes what is drawn, not where."""
    model = random_model(tiny_settings(), seed=3)
    text = [BOS, 30, MASK, MASK, 31, MASK, MASK, 32, MASK, MASK]
    gaps = [i for i, token in enumerate(text) if token == MASK]
    h = states(model, [text], len(text))[0, [i - 1 for i in gaps]]
    p = model.head(h)[:, N_SPECIAL:].softmax(-1)
    top = p.sort(descending=True).values
    sureness = {
        "confidence": top[:, 0],
        "margin": top[:, 0] - top[:, 1],
        "entropy": (p * p.log()).sum(-1),
    }
    surest = gaps[sureness[order].argmax()]
    for temperature in (0, 1, 50):
        x = generate(fill, model, [text], order=order, temperature=temperature)[0][0]
        assert [i for i in gaps if x[i] != MASK] == [surest]


# ---- text around gaps ----------------------------------------------------------------------------
TEXTS = [
    " of a list",
    "of",
    "s",
    "  two",
    "\n\nnext",
    ".",
    ". Da",
    "0",
    "é",
    "\u0301a",
    "<mask>",
    "",
]


@pytest.mark.parametrize("kind", ["normalizer", "byte level", "metaspace"])
def test_text_after_a_gap_is_the_given_text_with_any_tokenizer(kind):
    """A tokenizer that puts a space before every text puts none after a gap."""
    tokenizer = spaced_tokenizer(kind)
    tokenizer.encode_special_tokens = True
    start = encode(tokenizer, "ba")
    opening = tokenizer.decode(start)
    assert tokenizer.decode(start + encode(tokenizer, "of")) == opening + " of"
    for text in TEXTS:
        assert tokenizer.decode(start + encode_after_gap(tokenizer, text)) == opening + text


@pytest.mark.parametrize("text", TEXTS)
def test_text_after_a_gap_has_the_usual_tokens(text):
    """Where no space is put before a text, it is encoded as it would be alone."""
    tokenizer = tiny_tokenizer()
    tokenizer.encode_special_tokens = True
    assert encode_after_gap(tokenizer, text) == encode(tokenizer, text)


@pytest.mark.parametrize("kind", ["ours", "normalizer", "byte level", "metaspace"])
def test_infill_keeps_the_text_around_the_gaps(kind, tmp_path):
    tokenizer = tiny_tokenizer() if kind == "ours" else spaced_tokenizer(kind)
    ckpt = save_checkpoint(tmp_path, tokenizer, vocab_size=tokenizer.get_vocab_size())

    def infill(prompt):
        flags = "--steps", 3, "--temperature", 0, "--order", "confidence", "--prompt", prompt
        return call(sample, "--ckpt", ckpt, "--mode", "infill", *flags).removesuffix("\n")

    assert " ba " in infill("<mask:3> ba <mask>")
    assert infill("<mask><mask:2>")
    assert infill("one<mask:0>two <mask:2>!").strip().startswith("onetwo ")
    assert infill("one<mask:0>two <mask:2>!").endswith("!")
    assert infill("do<mask:9>").strip().startswith("do")


# ---- the script ----------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["ar", "prefix", "diffusion"])
def test_a_seed_decides_the_text_and_samples_differ(mode, tmp_path):
    prompt = "ba <mask>"  # text, except in infill
    flags = ["--mode", mode, "--prompt", prompt, "--length", 8]
    flags += ["--ckpt", save_checkpoint(tmp_path)]
    text = call(sample, *flags)
    assert text.startswith(prompt)
    assert text == call(sample, *flags)
    assert text != call(sample, *flags, "--seed", 2)
    first, second = split_samples(call(sample, *flags, "--num_samples", 2))
    assert first != second
    assert first.startswith(prompt) and second.startswith(prompt)


def test_watch_shows_the_masks_of_every_step(tmp_path):
    flags = ["--ckpt", save_checkpoint(tmp_path), "--mode", "diffusion", "--prompt", "ba"]
    frames = call(sample, *flags, "--length", 6, "--steps", 3, "--watch")
    assert [frame.count("_") for frame in frames.split("ba")[1:]] == [4, 2, 0, 0]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--mode", "diffusion", "--prompt", "bababa" * 40], "window of 32"),
        (["--mode", "diffusion", "--prompt", "a", "--length", 31], "33 tokens"),
        (["--mode", "diffusion", "--prompt", "a", "--length", 10**10], "up to a million"),
        (["--mode", "diffusion", "--prompt", "a", "--length", 10**6], "1000002 tokens"),
        (["--mode", "infill", "--prompt", "a <mask:900000>"], "900003 tokens"),
        (["--mode", "infill", "--prompt", "a <mask:0>"], "nothing to fill in"),
        (["--mode", "infill", "--prompt", "a"], "nothing to fill in"),
        (["--prompt", "\udcff"], "UTF-8"),
        (["--temperature", "nan"], "--temperature"),
        (["--top_p", 0], "--top_p"),
        (["--length", -1], "--length"),
        (["--num_samples", 0], "--num_samples"),
        (["--steps", -1], "--steps"),
        (["--seed", 2**63], "--seed"),
        (["--prompt", "a", "b"], "unrecognized arguments: b"),
        (["--prompts", "a"], "--prompts"),
    ],
)
def test_a_mistake_gets_one_line(flags, message, tmp_path):
    error = call(sample, "--ckpt", save_checkpoint(tmp_path, seq_len=32), *flags)
    assert error.startswith("error: ")
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize("mode", ["ar", "prefix", "diffusion"])
@pytest.mark.parametrize("seq_len", [2, 8, 100])
def test_the_default_length_fits_every_model(seq_len, mode, tmp_path):
    """64 tokens, even past the window; what is filled in must fit into the window."""
    ckpt = save_checkpoint(tmp_path, seq_len=seq_len)
    with mock.patch.object(sample, "draw", lambda logits, *_: torch.full((len(logits),), 84)):
        text = call(sample, "--ckpt", ckpt, "--mode", mode, "--prompt", "")
    n_tokens = min(64, seq_len - 1) if mode == "diffusion" else 64
    assert len(text) == n_tokens + len("\n")


def test_the_window_can_be_used_to_its_last_token(tmp_path):
    ckpt = save_checkpoint(tmp_path, seq_len=32)
    flags = ["--ckpt", ckpt, "--mode", "diffusion", "--prompt", "a"]
    assert call(sample, *flags, "--length", 30) == call(sample, *flags)
    assert call(sample, *flags).startswith("a")


def sample_in_a_process(ckpt, stdin, **more):
    command = [sys.executable, os.path.join(ROOT, "sample.py"), "--ckpt", ckpt, "--length", "3"]
    command += ["--temperature", "0"]
    return subprocess.run(
        command, stdin=stdin, capture_output=True, text=True, timeout=120, check=True, **more
    ).stdout


def test_the_prompt_comes_from_a_flag_or_a_pipe(tmp_path):
    ckpt = save_checkpoint(tmp_path)
    (tmp_path / "prompt.txt").write_text("ba do\n")
    flags = ["--ckpt", ckpt, "--length", 3, "--temperature", 0]
    text = call(sample, *flags, "--prompt", "ba do")
    assert text.startswith("ba do")
    with open(tmp_path / "prompt.txt") as pipe:
        assert text == sample_in_a_process(ckpt, pipe)


def test_at_a_terminal_no_prompt_is_an_empty_one(tmp_path):
    """Otherwise it would silently wait for input from the terminal."""
    ckpt = save_checkpoint(tmp_path)
    ours, theirs = pty.openpty()
    try:
        text = sample_in_a_process(ckpt, theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    assert text == call(sample, "--ckpt", ckpt, "--length", 3, "--temperature", 0, "--prompt", "")
