"""Exported models against transformers; imported ones against their own logits."""

import json
import os
import pickle
import resource

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies
from safetensors.torch import load_file, save_file

import export
from checkpoint import load_model
from configurator import Settings
from conftest import BOS, MASK, N_SPECIAL, SPECIAL, flags, prose, read_log, run, tiny_settings
from data import open_corpus, val_batches
from model import ReleasedHead, Transformer, make_mask
from sample import extend
from test_sample import NOT_BOS, call, generate, save_checkpoint, tiny_tokenizer

SIZES = dict(n_layer=3, n_head=4, n_embd=64, n_ff=100, seq_len=64)


def logits_of(model, tokens, prefix=0):
    """Return the logits of our model, causal or with a bidirectional prefix."""
    t = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = make_mask(torch.ones_like(t), t, torch.full((len(t),), prefix))
    return model.head(model.hidden(tokens, mask, t))


# ---- to transformers -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A checkpoint, and the folder that export.py makes from it."""
    folder = tmp_path_factory.mktemp("export")
    ckpt = save_checkpoint(folder, **SIZES)
    run("export.py", "--ckpt", ckpt, "--out", "a/hf", cwd=folder)
    assert os.listdir(folder / "a") == ["hf"]
    return ckpt, str(folder / "a" / "hf")


@pytest.fixture(scope="module")
def trained(exported):
    return load_model(exported[0])


@pytest.fixture(scope="module")
def auto(exported):
    """What transformers makes of it, told nothing but the folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = exported[1]
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def test_transformers_computes_the_same_logits(trained, auto):
    ours = trained.model
    theirs, _ = auto
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert theirs.dtype == torch.float32
    tokens = torch.randint(N_SPECIAL, 300, (2, 64))
    torch.testing.assert_close(theirs(tokens).logits, logits_of(ours, tokens), rtol=1e-4, atol=1e-4)


PIECES = ["<mask>", "<s>", "</s>", "<pad>", "<special_3>", " ", "\n", "ba", "'s", " .", "é", "日本"]
PIECES += ["\x00", "<mask", "<"]


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    text=strategies.text() | strategies.lists(strategies.sampled_from(PIECES)).map("".join),
)
def test_transformers_finds_the_same_tokens_in_any_text(trained, auto, text):
    """<s> is put before it. A special token in it counts as one; in our own scripts it is text."""
    ours, theirs = trained.tokenizer, auto[1]
    ours.encode_special_tokens = False
    ids = ours.encode(text, add_special_tokens=False).ids
    assert theirs(text)["input_ids"] == [BOS] + ids
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert theirs.decode(ids) == text


def test_a_mask_in_a_text_is_the_mask(auto):
    _, tokenizer = auto
    ids = [BOS, *tokenizer("ba", add_special_tokens=False)["input_ids"], MASK, MASK]
    assert tokenizer("ba<mask><mask>")["input_ids"] == ids
    assert tokenizer.decode(ids) == "<s>ba<mask><mask>"


TEXTS = ["ba do", "", "x <mask>"]


@pytest.mark.parametrize("text", TEXTS)
def test_transformers_continues_a_text_in_the_same_way(trained, auto, text):
    model, tokenizer = auto
    inputs = tokenizer(text, return_tensors="pt")
    theirs = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0].tolist()
    rows = inputs["input_ids"].tolist()
    ours = generate(extend, trained.model, rows, 64, length=30, temperature=0)[-1]
    ours = ours[0].tolist()
    assert theirs == ours[: len(theirs)]
    assert set(ours[len(theirs) :]) <= {BOS}


def test_transformers_continues_a_batch_as_it_does_single_texts(auto):
    """Prompts are padded on the left: new tokens follow the last one of each."""
    model, tokenizer = auto
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    together = model.generate(**batch, max_new_tokens=10, do_sample=False)
    for text, row in zip(TEXTS, tokenizer.batch_decode(together, skip_special_tokens=True)):
        inputs = tokenizer(text, return_tensors="pt")
        alone = model.generate(**inputs, max_new_tokens=10, do_sample=False)[0]
        assert row == tokenizer.decode(alone, skip_special_tokens=True)


def test_special_tokens_are_known_to_transformers(auto):
    model, tokenizer = auto
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == BOS
    assert tokenizer.mask_token_id == MASK
    assert tokenizer.pad_token_id == model.config.pad_token_id == 3
    assert model.config.eos_token_id == model.generation_config.eos_token_id == BOS
    assert model.generation_config.suppress_tokens == NOT_BOS


def test_the_model_card_is_true_at_this_step(tmp_path):
    """A third of a run has seen a third of its tokens; the losses are the last measured."""
    save_checkpoint(tmp_path, **SIZES, repetitions=2.4, init_from="out/base")
    content = torch.load(tmp_path / "ckpt_6.pt", weights_only=True)
    content["settings"]["init_from"] = ""
    records = [
        {"step": 0, "val_ar": 11.0, "val_md": 12.0},
        {"step": 1, "val_ar": 9.14286, "val_md": 14.0},
        {"step": 2, "train_ar": 5.0},
    ]
    torch.save(content | {"step": 2, "records": records}, tmp_path / "ckpt_2.pt")
    for name in ("ckpt_2", "ckpt_6"):
        call(export, "--ckpt", tmp_path / f"{name}.pt", "--out", tmp_path / name)
    _, front_matter, text = (tmp_path / "ckpt_2" / "README.md").read_text().split("---\n", 2)
    assert "library_name: transformers\n" in front_matter
    facts = ["145,600 parameters", "steps: 2; share of AR sequences: 1/2", "tokens read: 1,024;"]
    facts += ["training text: 0.8\n", "AR 9.1429, MD 14.0000 (step 1)", "(MD).\n"]
    for fact in facts:  # 2 steps x 8 x 64
        assert fact in text, fact
    text = (tmp_path / "ckpt_6" / "README.md").read_text()
    for fact in ["tokens read: 3,072;", "training text: 2.4\n", "nats per token: not measured\n"]:
        assert fact in text, fact
    assert "(MD). It started from out/base.\n" in text


def test_weights_can_be_bfloat16(exported, tmp_path):
    from transformers import AutoModelForCausalLM

    call(export, "--ckpt", exported[0], "--out", tmp_path / "hf", "--dtype", "bfloat16")
    exact = load_file(os.path.join(exported[1], "model.safetensors"))
    file = tmp_path / "hf" / "model.safetensors"
    assert file.stat().st_mode & 0o777 == 0o644  # others can read it
    for name, weight in load_file(file).items():
        assert torch.equal(weight, exact[name].bfloat16())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16


# ---- refusals and interruptions ------------------------------------------------------------------
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--ckpt", "run", "--out", "run"], "error: run already exists"),
        (["--ckpt", "absent", "--out", "x"], "error: no such file or directory: absent"),
        (["--from_llama", "absent", "--out", "x"], "no config.json in absent"),
        (["--from_llama", "weightless", "--out", "x"], "no model.safetensors in weightless"),
        (["--ckpt", "run"], "required"),
        (["--out", "x"], "required"),
        (["--ckpt", "run", "--from_llama", "y", "--out", "x"], "not allowed with"),
    ],
)
def test_a_mistake_is_named(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("run")
    save_checkpoint("run")
    save_llama(tmp_path / "weightless")
    os.remove("weightless/model.safetensors")
    assert message in call(export, *flags)
    assert sorted(os.listdir()) == ["run", "weightless"]


def test_a_failed_export_leaves_nothing_and_touches_nothing(exported, tmp_path, monkeypatch):
    (tmp_path / "hf.tmp").mkdir()  # the user's own, with a name that looks temporary
    (tmp_path / "hf.tmp" / "mine.txt").write_text("a")
    flags = "--ckpt", exported[0], "--out", tmp_path / "hf"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # no room for the weights
    try:
        message = call(export, *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert message.startswith("error: cannot turn")
    assert os.listdir(tmp_path) == ["hf.tmp"]

    assert call(export, *flags) == f"wrote {tmp_path / 'hf'}\n"
    assert sorted(os.listdir(tmp_path)) == ["hf", "hf.tmp"]
    assert os.listdir(tmp_path / "hf.tmp") == ["mine.txt"]
    assert sorted(os.listdir(tmp_path / "hf")) == sorted(os.listdir(exported[1]))

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "model_card", interrupt)  # the last file to be written
    with pytest.raises(KeyboardInterrupt):
        call(export, "--ckpt", exported[0], "--out", tmp_path / "second")
    assert sorted(os.listdir(tmp_path)) == ["hf", "hf.tmp"]


# ---- from a Llama --------------------------------------------------------------------------------
LLAMA = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=100,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)


def foreign_tokenizer():
    """Return a BPE of 300 tokens with one special token of another name, and no <mask>."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prose(50), trainer)
    return tokenizer


def save_llama(folder, shard="1GB", family="Llama", **changes):
    """Save a random Llama, or a model of another family, with transformers, and return it."""
    import transformers

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    config = getattr(transformers, f"{family}Config")
    config = config(**{**LLAMA, "rope_parameters": rope, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2) if p.ndim == 2 else p.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard)
    foreign_tokenizer().save(str(folder / "tokenizer.json"))
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {},  # grouped-query attention, tied embeddings
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 320},
        {"shard": "50KB", "tie_word_embeddings": False},
        {"family": "Mistral", "sliding_window": None},
    ],
)
def test_a_llama_keeps_its_logits(changes, tmp_path):
    theirs = save_llama(tmp_path / "llama", **changes)
    assert (tmp_path / "llama" / "model.safetensors").exists() == ("shard" not in changes)
    call(export, "--from_llama", tmp_path / "llama", "--out", tmp_path / "base")
    assert os.listdir(tmp_path / "base") == ["ckpt_0.pt"]

    ours, tokenizer, special, s, checkpoint = load_model(str(tmp_path / "base"))
    tokens = torch.randint(300, (2, 50))
    logits = logits_of(ours, tokens)[:, :, :300]
    torch.testing.assert_close(logits, theirs(tokens).logits[:, :, :300], rtol=1e-4, atol=1e-4)
    assert set(checkpoint) == {"model", "settings", "step", "tokenizer"}
    assert checkpoint["step"] == 0
    assert s.seq_len == 2048
    assert special == (0, 300, (0, 1, 300))
    assert s.vocab_size == max(301, changes.get("vocab_size", 0))
    assert tokenizer.get_vocab() == foreign_tokenizer().get_vocab() | {"<mask>": 300}
    n_rows = theirs.config.vocab_size
    mean = theirs.model.embed_tokens.weight.mean(0)
    torch.testing.assert_close(ours.embed.weight[300], mean)
    torch.testing.assert_close(ours.head.weight[300], theirs.lm_head.weight[:n_rows].mean(0))
    assert ours.embed.weight.data_ptr() != ours.head.weight.data_ptr()


@torch.no_grad()
def test_an_older_config_is_read_too(tmp_path):
    """Before version 5 of transformers, rope_theta was an entry of its own."""
    theirs = save_llama(tmp_path / "llama")
    path = tmp_path / "llama" / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"], config["num_key_value_heads"]
    path.write_text(json.dumps(config | {"rope_theta": 100000.0, "rope_scaling": None}))
    call(export, "--from_llama", tmp_path / "llama", "--out", tmp_path / "base")
    ours = load_model(str(tmp_path / "base")).model
    tokens = torch.randint(300, (1, 50))
    logits = logits_of(ours, tokens)[:, :, :300]
    torch.testing.assert_close(logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_an_exported_model_can_be_imported_unchanged(exported, tmp_path):
    call(export, "--from_llama", exported[1], "--out", tmp_path / "base")
    before, after = load_model(exported[0]), load_model(str(tmp_path / "base"))
    assert after.special == before.special
    for name, weight in before.model.state_dict().items():
        assert torch.equal(weight, after.model.state_dict()[name]), name


@torch.no_grad()
def ar_loss_of(llama, corpus, s):
    """Return transformers' loss on the held-out tokens, with one more logit, for <mask>."""
    total = n_targets = 0
    for batch, _ in val_batches(corpus, s):
        positions = torch.arange(s.seq_len).expand_as(batch.inputs)
        mask = make_mask(batch.segments, positions, batch.prefix)
        logits = llama(batch.inputs, attention_mask=mask).logits
        logits = torch.cat((logits, logits.mean(-1, keepdim=True)), dim=-1)
        losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        total += (losses * batch.weights.flatten()).sum().item()
        n_targets += batch.weights.sum().item()
    return total / n_targets


def test_training_starts_at_the_ar_loss_of_a_llama_and_its_md_loss_falls(corpus, tmp_path):
    llama = save_llama(tmp_path / "llama")
    text = corpus / "text.jsonl"
    changes = dict(data_dir="data", init_from="base", out_dir="out", learning_rate=0.002)
    tokenizer = "llama/tokenizer.json"
    run("export.py", "--from_llama", "llama", "--out", "base", cwd=tmp_path)
    run("prepare.py", "--input", text, "--out", "data", "--tokenizer", tokenizer, cwd=tmp_path)
    run("train.py", *flags(**changes, max_steps=20), cwd=tmp_path)
    records = [record for record in read_log(tmp_path / "out")[1] if "val_ar" in record]
    s = tiny_settings(vocab_size=301)
    expected = ar_loss_of(llama, open_corpus(tmp_path / "data"), s)
    assert records[0]["step"] == 0
    assert records[0]["val_ar"] == pytest.approx(expected, abs=1e-4)
    assert records[-1]["val_md"] < 0.9 * records[0]["val_md"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_act": "gelu"}, "hidden_act gelu: only silu"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"head_dim": 32}, "head_dim 32: only 16"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e5}}, "rope_type llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type linear"),
        ({"num_hidden_layers": 2}, "model.layers.2"),
        ({"num_hidden_layers": 4}, "blocks.3"),
        ({"intermediate_size": 99}, "size mismatch"),
        ({"hidden_size": None}, "cannot turn"),
        ({"num_attention_heads": 3}, "head_dim 16: only 21"),
    ],
)
def test_what_the_model_lacks_is_refused_in_one_line(changes, message, tmp_path):
    save_llama(tmp_path / "llama")
    path = tmp_path / "llama" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    error = call(export, "--from_llama", tmp_path / "llama", "--out", tmp_path / "base")
    assert error.startswith("error: ")
    assert message in error
    assert "\n" not in error
    assert os.listdir(tmp_path) == ["llama"]


@pytest.mark.parametrize(
    "family, message",
    [
        ("GPT2", "a gpt2, which has learned positions and biases"),
        ("Qwen2", "a qwen2, which has biases in its attention"),
        ("Gemma", "a gemma, which has scaled embeddings"),
        ("Mistral", "this mistral has sliding_window 4096"),
        ("GPTNeoX", "a gpt_neox, which has other layers"),
    ],
)
def test_another_family_of_models_is_refused_by_what_it_has(family, message, tmp_path):
    import transformers

    getattr(transformers, f"{family}Config")().save_pretrained(tmp_path / "other")
    error = call(export, "--from_llama", tmp_path / "other", "--out", tmp_path / "base")
    assert error.startswith("error: ")
    assert message in error
    assert os.listdir(tmp_path) == ["other"]


# ---- from the paper's released models ------------------------------------------------------------
def official_state(s, seed=0):
    """Return a state dict as the paper's training code saves it, in its order of names."""
    g = torch.Generator().manual_seed(seed)
    D, V = s.n_embd, s.vocab_size

    def matrix(*shape):
        return torch.randn(*shape, generator=g) / shape[-1] ** 0.5

    state = {"embedding.word_embedding.weight": torch.randn(V, D, generator=g)}
    for i in range(s.n_layer):
        attention = f"encoder.layers.{i}.attention."
        mlp = f"encoder.layers.{i}.mlp."
        for j in range(3):
            state[attention + f"qkv_proj.weights.{j}"] = matrix(D, D)
        state[attention + "out_proj.weight"] = matrix(D, D)
        for j in range(2):
            state[mlp + f"up_proj.weights.{j}"] = matrix(s.n_ff, D)
        state[mlp + "down_proj.weight"] = matrix(D, s.n_ff)
        state[attention + "pre_norm.weight"] = 1 + matrix(D)
        state[mlp + "pre_norm.weight"] = 1 + matrix(D)
    state["classifier.pre_norm.weight"] = 1 + matrix(D)
    state["classifier.projection.weight"] = matrix(D, D)
    state["classifier.emb2vocab.weight"] = matrix(V, D)
    state["classifier.emb2vocab.bias"] = torch.randn(V, generator=g)
    return state


def official_logits(w, tokens, s, causal):
    """Compute their model, written from its description: one sequence, double precision."""
    w = {name: weight.double() for name, weight in w.items()}
    T, H, K = len(tokens), s.n_head, s.n_embd // s.n_head

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-7).sqrt() * w[name + ".pre_norm.weight"]

    def turn(x):  # (H, T, K): pairs (i, i + K/2) as complex numbers
        frequency = 160000.0 ** (-torch.arange(K // 2).double() * 2 / K)
        angle = torch.outer(torch.arange(T).double(), frequency)
        z = torch.complex(x[..., : K // 2], x[..., K // 2 :])
        z = z * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    x = w["embedding.word_embedding.weight"][tokens]
    for i in range(s.n_layer):
        attention = f"encoder.layers.{i}.attention"
        mlp = f"encoder.layers.{i}.mlp"
        h = norm(x, attention)
        heads = [h @ w[f"{attention}.qkv_proj.weights.{j}"].T for j in range(3)]
        q, k, v = [y.view(T, H, K).transpose(0, 1) for y in heads]
        scores = turn(q) @ turn(k).transpose(1, 2) / K**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, -1)
        x = x + y @ w[attention + ".out_proj.weight"].T
        h = norm(x, mlp)
        value, gate = [h @ w[f"{mlp}.up_proj.weights.{j}"].T for j in range(2)]
        x = x + (value * gate * torch.sigmoid(gate)) @ w[mlp + ".down_proj.weight"].T
    x = norm(x, "classifier") @ w["classifier.projection.weight"].T
    x = x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return x @ w["classifier.emb2vocab.weight"].T + w["classifier.emb2vocab.bias"]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Pretend that the paper's model has these sizes; put a tokenizer into the folder."""

    def small_settings(**changes):
        return tiny_settings(**{**SIZES, **changes})

    monkeypatch.setattr(export, "Settings", small_settings)
    nfc = tokenizers.normalizers.NFC()
    normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend(" "), nfc])
    tiny_tokenizer(normalizer).save(str(tmp_path / "tokenizer.json"))
    return tiny_settings(**SIZES)


def test_a_released_model_has_its_size():
    with torch.device("meta"):
        model = Transformer(Settings(extra_head=True))
    assert sum(p.numel() for p in model.parameters()) == 468_700_160


@torch.no_grad()
@pytest.mark.parametrize(
    "kind, prefix", [(".bin", ""), (".bin", "_orig_mod.module."), (".safetensors", "model.")]
)
def test_a_released_model_keeps_its_logits(small, tmp_path, kind, prefix):
    state = official_state(small)
    file = tmp_path / f"file{kind}"
    named = {}
    for name, weight in state.items():
        named[prefix + name] = weight.bfloat16() if "layers.1" in name else weight
        state[name] = named[prefix + name].float()
    (save_file if kind == ".safetensors" else torch.save)(named, file)
    call(export, "--from_official", file, "--out", tmp_path / "official")
    assert os.listdir(tmp_path / "official") == ["ckpt_6.pt"]

    model, tokenizer, special, s, _ = load_model(str(tmp_path / "official"))
    assert isinstance(model.head, ReleasedHead)
    assert special == SPECIAL
    assert s.ar_weight == 2
    tokens = torch.randint(300, (1, 20))
    for n_both_ways, causal in ((0, True), (20, False)):
        ours = logits_of(model, tokens, n_both_ways)[0].double()
        theirs = official_logits(state, tokens[0], small, causal)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("ba").ids == theirs.encode("ba").ids
    assert tokenizer.encode("ba").ids != tiny_tokenizer().encode("ba").ids  # it is used unchanged

    # It can generate text, but it cannot be exported as a Llama.
    assert generate(extend, model, [[BOS, 20]], length=5)[-1].shape == (1, 7)
    message = call(export, "--ckpt", tmp_path / "official", "--out", tmp_path / "hf")
    assert "not a Llama's" in message


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


Q = "encoder.layers.2.attention.qkv_proj.weights.0"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"encoder.layers.3.mlp.pre_norm.weight": torch.ones(64)}, "encoder.layers.3"),
        ({"encoder.bias": torch.ones(1)}, "encoder.bias"),
        ({Q: None}, "blocks.2.q.weight"),
        ({Q: torch.ones(64, 32)}, "blocks.2.q.weight"),
        ({"classifier.pre_norm.weight": torch.ones(1, 64)}, "norm.weight"),
        ({"model." + Q: torch.ones(64, 64)}, f"{Q} twice"),
        ({"step": 3}, "cannot turn"),
        ({"x": Bomb()}, "has no weights, or something besides weights"),
    ],
)
def test_another_state_dict_is_refused_in_one_line(
    small,
    tmp_path,
    monkeypatch,
    changes,
    message,
):
    monkeypatch.chdir(tmp_path)
    state = official_state(small) | changes
    state = {name: weight for name, weight in state.items() if weight is not None}
    torch.save(state, "file")
    error = call(export, "--from_official", "file", "--out", "official")
    assert error.startswith("error: ")
    assert message in error
    assert "\n" not in error
    assert sorted(os.listdir()) == ["file", "tokenizer.json"]


def test_a_damaged_file_or_tokenizer_is_refused(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "executable").write_bytes(b"\x7fELF\x02\x01\x01" + b"\0" * 100)
    (tmp_path / "text").write_text("a text")
    with open("hostile", "wb") as file:
        pickle.dump(Bomb(), file, protocol=2)
    (tmp_path / "damaged.safetensors").write_bytes(b"\xff" * 100)
    torch.save([1, 2], "list")
    for folder in ("alone", "broken", "other"):
        os.mkdir(folder)
        torch.save(official_state(small), f"{folder}/good")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save("other/tokenizer.json")

    messages = dict.fromkeys(
        ["executable", "text", "hostile", "damaged.safetensors"], "has no weights"
    )
    messages |= {"absent": "No such file", "list": "list", "alone/good": "alone/tokenizer.json"}
    messages |= {"broken/good": "cannot turn", "other/good": "<mask>"}
    for name, message in messages.items():
        error = call(export, "--from_official", name, "--out", "official")
        assert error.startswith("error: "), name
        assert message in error
        assert "\n" not in error, name
    assert not os.path.exists("exploded")
    assert not os.path.exists("official")
