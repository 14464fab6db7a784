"""Generation: against enumeration, against decoding without a cache, alone and in a batch, and as a user calls it."""
import itertools
import os
import runpy
import subprocess
import sys
from argparse import Namespace

import pytest
import tokenizers
import torch

from conftest import ROOT, prose, random_model, tiny_settings
from data import BOS, MASK, N_SPECIAL
from model import make_mask
from sample import ORDERS, draw, extend, fill

CHI2_26 = 54.05  # exceeded by a chi-square with 26 degrees of freedom once in 1,000


def options(**changes):
    return Namespace(**{**dict(mode="ar", length=10, steps=6, block=0, order="random", temperature=1.0, top_k=0, top_p=1.0),
                        **changes})


def generator():
    return torch.Generator().manual_seed(1)


def last(steps):
    return [x.clone() for x in steps][-1]


def states(model, tokens, prefix):
    """Hidden states without a cache, of rows of one length."""
    tokens = torch.as_tensor(tokens)
    t = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model.hidden(tokens, make_mask(torch.ones_like(t), t, torch.full((len(t),), prefix)), t)


def tiny_tokenizer(normalizer=None):
    """Byte-level BPE with our special tokens."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer, bpe.decoder = byte_level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    specials = ["<unk>", "<s>", "</s>", "<pad>", "<mask>"] + [f"<special_{i}>" for i in range(11)]
    bpe.train_from_iterator(prose(50), tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=sorted(byte_level.alphabet()), show_progress=False))
    if normalizer:
        bpe.normalizer = normalizer
    return bpe


def save_checkpoint(folder, **changes):
    s = tiny_settings(**changes)
    torch.save({"model": random_model(s).state_dict(), "settings": vars(s), "step": 6, "tokenizer": tiny_tokenizer().to_str()},
               os.path.join(folder, "ckpt.pt"))
    return str(folder)


def script(monkeypatch, capsys, name, *argv):
    """A script of this project, run in this process; returns its output, or the message it ended with."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, argv)])
    try:
        runpy.run_path(os.path.join(ROOT, name), run_name="__main__")
    except SystemExit as end:
        capsys.readouterr()
        return str(end.code)
    return capsys.readouterr().out


# ---- distributions ---------------------------------------------------------------------------------------------------

@torch.no_grad()
def test_random_order_samples_the_any_order_distribution():
    """One token a step at random places: the frequencies of all 27 texts of 3 tokens, after a prompt, are those of the
    model, averaged over the 6 orders. Left to right, the test fails."""
    model, prompt = random_model(tiny_settings(vocab_size=N_SPECIAL + 3), seed=5), [BOS, N_SPECIAL]
    texts = list(itertools.product(range(N_SPECIAL, N_SPECIAL + 3), repeat=3))
    probability = torch.zeros(27, dtype=torch.double)
    for i, text in enumerate(texts):
        for order in itertools.permutations(range(3)):
            x, p = prompt + [MASK] * 3, 1 / 6
            for place in order:
                logits = model.head(states(model, [x], 5))[0, 2 + place - 1, N_SPECIAL:].double()
                p *= logits.softmax(-1)[text[place] - N_SPECIAL]
                x[2 + place] = text[place]
            probability[i] += p
    assert probability.sum().item() == pytest.approx(1)

    def chi2(n=2000, **changes):
        x = last(fill(model, [prompt + [MASK] * 3] * n, generator(), options(steps=3, **changes)))[:, 2:] - N_SPECIAL
        observed = torch.bincount(x @ torch.tensor([9, 3, 1]), minlength=27)
        return ((observed - n * probability) ** 2 / (n * probability)).sum().item()
    assert chi2() < CHI2_26
    assert chi2(block=1) > 2 * CHI2_26


def test_temperature_top_k_top_p():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().expand(6000, 4)

    def shares(**changes):
        drawn = draw(logits, generator(), options(**changes))
        return (torch.bincount(drawn, minlength=4) / 6000).tolist()
    assert shares() == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.03)
    assert shares(temperature=0.5) == pytest.approx([p / 0.345 for p in (0.25, 0.0625, 0.0225, 0.01)], abs=0.03)
    assert shares(top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.03)
    assert shares(top_p=0.6) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.03)
    assert shares(top_p=0.01) == shares(temperature=0) == shares(top_k=1) == [1, 0, 0, 0]
    assert shares(top_k=100, top_p=0.999) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.03)


def test_drawing_is_in_double_precision(monkeypatch):
    """With noise in fp32 a token 25 nats below the likeliest could never be drawn."""
    seen, multinomial = [], torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda p, n, generator: seen.append(p) or multinomial(p, n, generator=generator))
    draw(torch.tensor([[0.0, -25.0]]), generator(), options())
    assert seen[0].dtype == torch.double and seen[0][0, 1].item() == pytest.approx(1.3888e-11, rel=1e-4)


# ---- the key/value cache, and batches --------------------------------------------------------------------------------

PROMPTS = [[BOS, 20, 21, 22, 23, 24], [BOS], [BOS, 40, 41]]


@torch.no_grad()
@pytest.mark.parametrize("mode", ["ar", "prefix"])
def test_cached_equals_uncached(mode):
    """Three prompts of different lengths in one batch, cached, against each alone, the whole text computed anew per token."""
    model = random_model(tiny_settings(n_layer=3))
    x = last(extend(model, PROMPTS, generator(), options(mode=mode, length=20, temperature=0)))
    for row, prompt in zip(x, PROMPTS):
        text = list(prompt)
        for _ in range(20):
            logits = model.head(states(model, [text], len(prompt) if mode == "prefix" else 0)[0, -1])
            logits[[i for i in range(N_SPECIAL) if i != BOS]] = -torch.inf
            text.append(int(logits.argmax()))
            if text[-1] == BOS:
                break
        assert row[6 - len(prompt):][:len(text)].tolist() == text and (row[6 - len(prompt) + len(text):] == BOS).all()


@torch.no_grad()
def test_hidden_states_with_a_cache():
    """In pieces of any size, with the prefix rule: what one pass over all tokens gives."""
    model, T = random_model(tiny_settings(n_layer=3)), 12
    tokens, t = torch.randint(16, 300, (2, T)), torch.arange(T).expand(2, T)
    mask = make_mask(torch.ones_like(t), t, torch.tensor([0, 4]))
    whole = model.hidden(tokens, mask, t)
    cache = [torch.empty(2, 2, 2, T, 16) for _ in range(3)]
    pieces = [model.hidden(tokens[:, a:b], mask[:, :, a:b, :b], t[:, a:b], cache) for a, b in ((0, 4), (4, 5), (5, 9), (9, 12))]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["ar", "prefix", "confidence", "entropy"])
def test_a_batch_gives_what_single_runs_give(mode, temperature=0):
    model = random_model(tiny_settings())
    if mode in ("ar", "prefix"):
        run, s, rows = extend, options(mode=mode, temperature=temperature), PROMPTS
    else:
        run, s = fill, options(order=mode, temperature=temperature, steps=3)
        rows = [[BOS, MASK, 20, MASK, MASK, 21], [BOS, 30, MASK], [BOS] + [MASK] * 9]
    together = last(run(model, rows, generator(), s))
    for row, alone in zip(together, rows):
        alone = last(run(model, [alone], generator(), s))[0]
        row = row[len(row) - len(alone):]
        assert row.tolist()[:len(alone)] == alone.tolist()[:len(row)]


# ---- special tokens, order of unmasking ------------------------------------------------------------------------------

class Biased(torch.nn.Module):
    """The head of a model that would most like to say one of these tokens."""
    def __init__(self, head, tokens):
        super().__init__()
        self.head, self.tokens = head, tokens

    def forward(self, h):
        logits = self.head(h)
        logits[:, self.tokens] += 100
        return logits


@pytest.mark.parametrize("temperature", [0, 1])
def test_special_tokens(temperature):
    """<s> ends a text in ar and prefix mode; no other special token is drawn in any mode, whatever the model says."""
    model = random_model(tiny_settings())
    head = model.head
    for mode in ("ar", "prefix"):
        model.head = Biased(head, [i for i in range(N_SPECIAL) if i != BOS])
        x = last(extend(model, PROMPTS, generator(), options(mode=mode, temperature=temperature)))
        assert ((x >= N_SPECIAL) | (x == BOS)).all() and (x[:, 6:8] >= N_SPECIAL).any()
        model.head = Biased(head, range(N_SPECIAL))
        steps = [x.clone() for x in extend(model, PROMPTS, generator(), options(mode=mode, temperature=temperature))]
        assert len(steps) == 1 and (steps[0][:, 6:] == BOS).all()
    for order in ORDERS:
        x = last(fill(model, [[BOS] + [MASK] * 6], generator(), options(order=order, temperature=temperature)))
        assert (x[:, 1:] >= N_SPECIAL).all()


def test_steps_and_blocks():
    """Equally many masks fall in every step, no filled place changes again, and a block waits for the one before it."""
    model, text = random_model(tiny_settings()), [BOS] + [MASK] * 5 + [50] + [MASK] * 7
    for order, block in itertools.product(ORDERS, (0, 1, 4)):
        before = torch.tensor([text])
        for step, x in enumerate(fill(model, [text], generator(), options(order=order, block=block, steps=4))):
            assert (x == MASK).sum() == 12 - 3 * (step + 1)
            assert torch.equal(x[before != MASK], before[before != MASK])
            masked = (x[0, [*range(1, 6), *range(7, 14)]] == MASK).nonzero()[:, 0]
            if block and len(masked):
                assert masked.min() // block >= 3 * (step + 1) // block
            before = x.clone()
        assert x[0, 6] == 50 and step == 3


@torch.no_grad()
@pytest.mark.parametrize("order", ["confidence", "margin", "entropy"])
def test_the_surest_place_comes_first(order):
    """By the distribution without temperature: a high one changes what is drawn, not where."""
    model, text = random_model(tiny_settings(), seed=3), [BOS, 30, MASK, MASK, 31, MASK, MASK, 32, MASK, MASK]
    holes = [i for i, token in enumerate(text) if token == MASK]
    p = model.head(states(model, [text], len(text)))[0, [i - 1 for i in holes], N_SPECIAL:].softmax(-1)
    top = p.sort(descending=True).values
    sure = {"confidence": top[:, 0], "margin": top[:, 0] - top[:, 1], "entropy": (p * p.log()).sum(-1)}[order]
    for temperature in (0, 1, 50):
        x = next(fill(model, [text], generator(), options(order=order, temperature=temperature, steps=6)))[0]
        assert [i for i in holes if x[i] != MASK] == [holes[sure.argmax()]]


# ---- the script ------------------------------------------------------------------------------------------------------

def test_as_a_user_calls_it(tmp_path, monkeypatch, capsys):
    ckpt = save_checkpoint(tmp_path, seq_len=32)

    def sample(*argv):
        return script(monkeypatch, capsys, "sample.py", "--ckpt", ckpt, *argv)
    for mode in ("ar", "prefix", "diffusion"):
        flags = "--mode", mode, "--prompt", "ba <mask>", "--length", 8
        text = sample(*flags)
        assert text.startswith("ba <mask>") and text == sample(*flags) != sample(*flags, "--seed", 2)
        two = sample(*flags, "--num_samples", 2).removesuffix("\n").split("\n---------------\n")
        assert len(two) == 2 and two[0] != two[1] and all(x.startswith("ba <mask>") for x in two)
    text = sample("--mode", "infill", "--prompt", "one <mask> two <mask:3>", "x<mask>", "--top_k", 5, "--top_p", 0.9)
    first, second = text.removesuffix("\n").split("\n---------------\n")
    assert first.startswith("one ") and " two " in first and second.startswith("x")
    frames = sample("--mode", "diffusion", "--prompt", "ba", "--length", 6, "--steps", 3, "--watch")
    assert [frame.count("_") for frame in frames.split("ba")[1:]] == [4, 2, 0, 0]

    (tmp_path / "p.txt").write_text("ba do\n")
    assert sample("--prompt_file", tmp_path / "p.txt", "--temperature", 0) == sample("--prompt", "ba do", "--temperature", 0)
    for argv in (["--temperature", 1e-320], ["--mode", "diffusion", "--order", "margin", "--temperature", 1e-320]):  # below what can be divided by
        assert sample("--prompt", "ba", "--length", 4, *argv) == sample("--prompt", "ba", "--length", 4, *argv[:-1], 0)
    for argv, message in (
            (["--prompt", "bababa" * 40], "window of 32"), (["--mode", "diffusion", "--prompt", "a", "--length", 10 ** 10], "1000002"),
            (["--mode", "infill", "--prompt", "a <mask:0>"], "nothing to fill in"), (["--prompt", "a", "--length", 32], "2 tokens"),
            (["--mode", "infill", "--prompt", "a <mask:900000>"], "900003 tokens"),
            (["--mode", "infill", "--prompt", "a"], "nothing to fill in"), (["--prompt", "\udcff"], "UTF-8"),
            (["--temperature", "nan"], "--top_p is a share"), (["--top_p", 0], "--top_p is a share"),
            (["--length", 0], "--length")):
        error = sample(*argv)
        assert error.startswith("error: ") and message in error and "\n" not in error, error
    assert not sample("--prompt", "a", "--length", 31).startswith("error")  # the window to its last token


def test_gaps_anywhere(tmp_path, monkeypatch, capsys):
    """At both ends, side by side and empty ones: the text around them stays, and each prompt is as if it were alone."""
    ckpt = save_checkpoint(tmp_path, seq_len=32)

    def sample(*prompts):
        text = script(monkeypatch, capsys, "sample.py", "--ckpt", ckpt, "--mode", "infill", "--steps", 3,
                      "--temperature", 0, "--order", "confidence", "--prompt", *prompts)
        return text.removesuffix("\n").split("\n---------------\n")
    prompts = ["<mask:3> ba <mask>", "<mask><mask:2>", "one<mask:0> two <mask:2>!", "do<mask:9>"]
    together = sample(*prompts)
    assert together == [sample(prompt)[0] for prompt in prompts]
    assert " ba " in together[0] and together[2].startswith("one two ") and together[2].endswith("!")


def test_standard_input(tmp_path):
    result = subprocess.run([sys.executable, os.path.join(ROOT, "sample.py"), "--ckpt", save_checkpoint(tmp_path), "--length", "3"],
                            input="ba do\n", capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.startswith("ba do"), result.stderr
