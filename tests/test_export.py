"""Exported models against transformers, imported ones against a forward pass of their own."""
import json
import os
import pickle
import resource

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies

import configurator
from configurator import Settings
from conftest import tiny_settings
from data import BOS, MASK, N_SPECIAL
from model import Transformer, load_model, make_mask
from sample import extend
from test_sample import generator, last, options, save_checkpoint, script, tiny_tokenizer

SIZES = dict(n_layer=3, n_head=4, n_embd=64, n_ff=100, seq_len=64)


# ---- to transformers -------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A checkpoint, and the folder that export.py makes of it."""
    import subprocess
    import sys

    from conftest import ROOT
    folder = tmp_path_factory.mktemp("export")
    ckpt = save_checkpoint(folder, **SIZES)
    content = torch.load(folder / "ckpt.pt", weights_only=True)
    records = [{"step": step, "val_ar": 10 - step / 7, "val_md": 20 - step} for step in (2, 6)] + [{"step": 6, "train_ar": 5.0}]
    torch.save(content | {"records": records}, folder / "ckpt.pt")
    command = [sys.executable, os.path.join(ROOT, "export.py"), "--ckpt", ckpt, "--out", str(folder / "a" / "hf")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert os.listdir(folder / "a") == ["hf"]
    return ckpt, str(folder / "a" / "hf")


@pytest.fixture(scope="module")
def auto(exported):
    """What transformers makes of it, told nothing but the folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    return AutoModelForCausalLM.from_pretrained(exported[1]).eval(), AutoTokenizer.from_pretrained(exported[1])


@torch.no_grad()
def test_logits(exported, auto):
    model, _, _ = load_model(exported[0])
    assert type(auto[0]).__name__ == "LlamaForCausalLM" and auto[0].dtype == torch.float32
    tokens, t = torch.randint(N_SPECIAL, 300, (2, 64)), torch.arange(64).expand(2, 64)
    mask = make_mask(torch.ones_like(t), t, torch.zeros(2, dtype=torch.long))
    torch.testing.assert_close(auto[0](tokens).logits, model.head(model.hidden(tokens, mask, t)), rtol=1e-4, atol=1e-4)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=strategies.text() | strategies.lists(strategies.sampled_from(
    ["<mask>", "<s>", "</s>", "<pad>", "<special_3>", " ", "\n", "ba", "'s", " .", "é", "日本", "\x00"])).map("".join))
def test_token_ids(exported, auto, text):
    """The same ids for any text, literal special tokens included, after the <s> that opens it; and back."""
    ids = load_model(exported[0])[1].encode(text, add_special_tokens=False).ids
    assert auto[1](text)["input_ids"] == [BOS] + ids and auto[1](text, add_special_tokens=False)["input_ids"] == ids
    assert auto[1].decode(ids) == text and min(ids, default=N_SPECIAL) >= N_SPECIAL


def test_the_same_greedy_continuation(exported, auto):
    model, tokenizer, _ = load_model(exported[0])
    for text in ("ba do", "", "x <mask>"):
        inputs = auto[1](text, return_tensors="pt")
        theirs = auto[0].generate(**inputs, max_new_tokens=30, do_sample=False)[0].tolist()
        ours = last(extend(model, [inputs["input_ids"][0].tolist()], generator(), options(length=30, temperature=0)))[0].tolist()
        assert theirs == ours[:len(theirs)] and set(ours[len(theirs):]) <= {BOS}


def test_special_tokens_and_card(exported, auto):
    assert auto[1].bos_token_id == auto[1].eos_token_id == auto[0].config.eos_token_id == BOS
    assert auto[0].generation_config.eos_token_id == BOS and auto[1].mask_token_id == MASK
    assert auto[0].generation_config.suppress_tokens == [0, *range(2, N_SPECIAL)]
    with open(os.path.join(exported[1], "README.md")) as f:
        card = f.read()
    for fact in ("alpha = 1/2", "R = 2 ", "3,072 tokens", "step 6", "AR 9.1429", "MD 14.0000"):  # 6 steps x 8 x 64; not of step 8
        assert fact in card, fact


def test_refusals(exported, tmp_path, monkeypatch, capsys):
    def export(*argv):
        return script(monkeypatch, capsys, "export.py", *argv)
    for argv, message in ((["--ckpt", exported[0], "--out", exported[1]], "does not exist yet"), (["--ckpt", exported[0]], "--out"),
                          (["--out", tmp_path / "x"], "--ckpt"), (["--ckpt", tmp_path / "no", "--out", tmp_path / "x"], "no such")):
        assert export(*argv).startswith("error: ") and message in export(*argv)
    assert os.listdir(tmp_path) == []


def test_a_failed_export_leaves_nothing(exported, tmp_path, monkeypatch, capsys):
    """Nor does what a killed one left get into the next."""
    def export():
        return script(monkeypatch, capsys, "export.py", "--ckpt", exported[0], "--out", tmp_path / "hf")
    os.mkdir(tmp_path / "hf.tmp")
    (tmp_path / "hf.tmp" / "model.bin").write_text("stale")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # no room for the weights
    try:
        message = export()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert message.startswith("error: cannot export") and os.listdir(tmp_path) == []
    os.mkdir(tmp_path / "hf.tmp")
    (tmp_path / "hf.tmp" / "model.bin").write_text("stale")
    export()
    assert os.listdir(tmp_path) == ["hf"] and sorted(os.listdir(tmp_path / "hf")) == sorted(os.listdir(exported[1]))


# ---- from the paper's released models --------------------------------------------------------------------------------

def official_state(s, seed=0):
    """A state dict as the paper's training code saves it, in its order of names."""
    g = torch.Generator().manual_seed(seed)
    D, V = s.n_embd, s.vocab_size

    def matrix(*shape):
        return torch.randn(*shape, generator=g) / shape[-1] ** 0.5
    state = {"embedding.word_embedding.weight": torch.randn(V, D, generator=g)}
    for i in range(s.n_layer):
        a, m = f"encoder.layers.{i}.attention.", f"encoder.layers.{i}.mlp."
        state |= {a + f"qkv_proj.weights.{j}": matrix(D, D) for j in range(3)} | {a + "out_proj.weight": matrix(D, D)}
        state |= {m + f"up_proj.weights.{j}": matrix(s.n_ff, D) for j in range(2)} | {m + "down_proj.weight": matrix(D, s.n_ff)}
        state |= {a + "pre_norm.weight": 1 + matrix(D), m + "pre_norm.weight": 1 + matrix(D)}
    return state | {"classifier.pre_norm.weight": 1 + matrix(D), "classifier.projection.weight": matrix(D, D),
                    "classifier.emb2vocab.weight": matrix(V, D), "classifier.emb2vocab.bias": torch.randn(V, generator=g)}


def official_logits(w, tokens, s, causal):
    """Their model, written down from its description, for one sequence and in double precision."""
    w = {k: v.double() for k, v in w.items()}
    T, H, K = len(tokens), s.n_head, s.n_embd // s.n_head

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-7).sqrt() * w[name + ".pre_norm.weight"]

    def turn(x):  # (H, T, K): pairs (i, i + K/2) as complex numbers
        angle = torch.outer(torch.arange(T).double(), 160000.0 ** (-torch.arange(K // 2).double() * 2 / K))
        z = torch.complex(x[..., :K // 2], x[..., K // 2:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)
    x = w["embedding.word_embedding.weight"][tokens]
    for i in range(s.n_layer):
        a, m = f"encoder.layers.{i}.attention", f"encoder.layers.{i}.mlp"
        q, k, v = ((norm(x, a) @ w[f"{a}.qkv_proj.weights.{j}"].T).view(T, H, K).transpose(0, 1) for j in range(3))
        scores = turn(q) @ turn(k).transpose(1, 2) / K ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, -1) @ w[a + ".out_proj.weight"].T
        value, gate = (norm(x, m) @ w[f"{m}.up_proj.weights.{j}"].T for j in range(2))
        x = x + (value * gate * torch.sigmoid(gate)) @ w[m + ".down_proj.weight"].T
    x = norm(x, "classifier") @ w["classifier.projection.weight"].T
    x = x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x ** 3)))
    return x @ w["classifier.emb2vocab.weight"].T + w["classifier.emb2vocab.bias"]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Pretends that the paper's model has these sizes; a tokenizer with a normaliser lies in the folder."""
    monkeypatch.setattr(configurator, "Settings", lambda **kw: tiny_settings(**{**SIZES, **kw}))
    normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend(" "), tokenizers.normalizers.NFC()])
    tiny_tokenizer(normalizer).save(str(tmp_path / "tokenizer.json"))
    return tiny_settings(**SIZES)


def test_a_released_model_has_its_size():
    with torch.device("meta"):
        model = Transformer(Settings(extra_head=True))
    assert sum(p.numel() for p in model.parameters()) == 468_700_160


@torch.no_grad()
@pytest.mark.parametrize("kind, prefix", [(".bin", ""), (".bin", "_orig_mod.module."), (".safetensors", "model.")])
def test_released_weights(small, tmp_path, monkeypatch, capsys, kind, prefix):
    state, file = official_state(small), str(tmp_path / ("file" + kind))
    named = {prefix + k: v.bfloat16() if "layers.1" in k else v for k, v in state.items()}
    state = {k.removeprefix(prefix): v.float() for k, v in named.items()}
    if kind == ".bin":
        torch.save(named, file)
    else:
        from safetensors.torch import save_file
        save_file(named, file)
    script(monkeypatch, capsys, "export.py", "--from_official", file, "--out", tmp_path / "official")
    assert os.listdir(tmp_path / "official") == ["ckpt.pt"]
    model, tokenizer, checkpoint = load_model(str(tmp_path / "official"))
    tokens, t = torch.randint(300, (1, 20)), torch.arange(20)[None]
    for prefix, causal in ((0, True), (20, False)):
        ours = model.head(model.hidden(tokens, make_mask(torch.ones_like(t), t, torch.tensor([prefix])), t))[0]
        torch.testing.assert_close(ours.double(), official_logits(state, tokens[0], small, causal), rtol=1e-4, atol=1e-4)
    assert checkpoint["settings"].ar_weight == 2
    with open(tmp_path / "tokenizer.json", encoding="utf-8") as f:
        theirs = tokenizers.Tokenizer.from_str(f.read())
    assert tokenizer.encode("ba").ids == theirs.encode("ba").ids != tiny_tokenizer().encode("ba").ids  # as it is
    # it samples, and it neither trains nor becomes a Llama
    assert last(extend(model, [[BOS, 20]], generator(), options(length=5))).shape == (1, 7)
    with pytest.raises(SystemExit, match="cannot be trained"):
        model.loss(tokens, tokens, torch.ones(1, 20), torch.tensor([0]))
    assert "a Llama has not" in script(monkeypatch, capsys, "export.py", "--ckpt", tmp_path / "official", "--out", tmp_path / "hf")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_other_files_are_refused(small, tmp_path, monkeypatch, capsys):
    """Too many tensors, too few, of another shape, twice the same, no tensors, code in a pickle, another tokenizer."""
    good, q = official_state(small), "encoder.layers.2.attention.qkv_proj.weights.0"
    bad = {"extra": {**good, "encoder.layers.3.mlp.pre_norm.weight": torch.ones(64)}, "bias": {**good, "encoder.bias": torch.ones(1)},
           "few": {k: v for k, v in good.items() if k != q}, "shape": {**good, q: torch.ones(64, 32)},
           "flat": {**good, "classifier.pre_norm.weight": torch.ones(1, 64)}, "twice": {**good, "model." + q: good[q]},
           "nested": {"model": good, "step": 3}, "list": [1, 2], "bomb": {**good, "x": Bomb()}}
    monkeypatch.chdir(tmp_path)

    def load(name, *argv):
        return script(monkeypatch, capsys, "export.py", "--from_official", name, "--out", "official", *argv)
    for name, content in bad.items():
        torch.save(content, name)
        assert load(name).startswith("error: ") and "\n" not in load(name), name
    assert all("blocks.2.q.weight" in load(name) for name in ("few", "shape")) and "encoder.bias" in load("bias")
    with open("raw", "wb") as f:
        pickle.dump(Bomb(), f)
    torch.save(good, "good")
    for folder in ("alone", "broken", "other"):
        os.mkdir(folder)
        torch.save(good, folder + "/good")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save("other/tokenizer.json")
    with open("damaged.safetensors", "wb") as f:
        f.write(b"\xff" * 100)
    for argv in (["raw"], ["absent"], ["damaged.safetensors"], ["alone/good"], ["broken/good"], ["other/good"]):
        assert load(*argv).startswith("error: "), argv
    assert "<mask>" in load("other/good")
    assert not os.path.exists("exploded") and not os.path.exists("official")
    assert not load("good").startswith("error")
