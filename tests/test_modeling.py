"""The classes that an exported folder has for transformers, against eval.py and sample.py."""

import json
import logging
import os
from unittest import mock

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaModel,
)
from transformers.utils.logging import enable_propagation

import export
from checkpoint import load_model
from conftest import BOS, MASK
from eval import Item, make_modes, score
from sample import extend
from test_sample import call, generate, save_checkpoint

PAD = 3
SENTENCES = ["Da mor bedi lo.", "ba", "Gol nem ba do tir, das lo ba do mor 3's", "ba do mor"]


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """Make transformers copy modeling_dual.py to a temporary folder, not the home directory."""
    name = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    with mock.patch(name, str(tmp_path_factory.mktemp("modules"))):
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint, and the folder that export.py makes from it."""
    folder = tmp_path_factory.mktemp("modeling")
    ckpt = save_checkpoint(folder, n_layer=3, n_head=4, n_embd=64, n_ff=100, seq_len=64)
    call(export, "--ckpt", ckpt, "--out", folder / "hf")
    return ckpt, str(folder / "hf")


def load(auto, folder, **more):
    return auto.from_pretrained(folder, trust_remote_code=True, **more).eval()


@pytest.fixture(scope="module")
def masked(folders):
    return load(AutoModelForMaskedLM, folders[1])


@pytest.fixture(scope="module")
def tokenizer(folders):
    return AutoTokenizer.from_pretrained(folders[1])


def scores_of(ckpt, items):
    """Return {mode: [log-likelihoods]}, as eval.py computes them."""
    trained = load_model(ckpt)
    items = [Item(tuple(context), tuple(completion)) for context, completion in items]
    modes = make_modes(["ar", "prefix", "pll", "chain"], [1], 0, trained.special.mask)
    return score(trained.model, items, modes)


def sentence_items(tokenizer):
    """Return (<s>, the rest) of every sentence, and one item with a longer context."""
    items = []
    for sentence in SENTENCES:
        ids = tokenizer(sentence).input_ids
        items.append((ids[:1], ids[1:]))
    return items + [(ids[:3], ids[3:])]


def pad(rows, side):
    """Pad rows of several lengths; return them, and which of their tokens are not padding."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), PAD)
    real = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[i, place] = torch.tensor(row)
        real[i, place] = 1
    return ids, real


# ---- the same numbers ----------------------------------------------------------------------------
@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", ["pll1", "chain"])
def test_a_masked_lm_scores_as_eval_does(folders, tokenizer, mode, side, attention):
    """All masked rows of all texts in one batch, whatever the side of the padding."""
    items = sentence_items(tokenizer)
    rows, places = [], []
    for n, (context, completion) in enumerate(items):
        text = context + completion
        for i in range(len(context), len(text)):
            n_masks = 1 if mode == "pll1" else len(text) - i
            rows.append(text[:i] + [MASK] * n_masks + text[i + n_masks :])
            places.append((n, i, text[i]))
    ids, real = pad(rows, side)
    model = load(AutoModelForMaskedLM, folders[1], attn_implementation=attention)
    log_probabilities = model(ids, attention_mask=real).logits.log_softmax(-1)

    found = [0.0] * len(items)
    for row, (n, i, token) in enumerate(places):
        first = real[row].argmax().item()
        found[n] += log_probabilities[row, first + i - 1, token].item()
    assert found == pytest.approx(list(scores_of(folders[0], items)[mode]), abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["3D", "4D boolean", "4D additive"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_of_who_sees_whom_gives_the_prefix_scores(folders, tokenizer, attention, kind):
    items = []
    for context, completion in sentence_items(tokenizer):
        items.append((context + completion[:1], completion[1:]))
    texts = [context + completion for context, completion in items]
    ids, _ = pad(texts, "right")
    B, T = ids.shape
    mask = torch.ones(B, T, T).tril()
    for row, (context, _) in zip(mask, items):
        row[:, : len(context)] = 1
    if kind == "4D boolean":
        mask = mask[:, None].bool()
    if kind == "4D additive":
        mask = torch.where(mask == 0, -torch.inf, 0.0)[:, None]
    model = load(AutoModelForMaskedLM, folders[1], attn_implementation=attention)
    log_probabilities = model(ids, attention_mask=mask).logits.log_softmax(-1)
    expected = scores_of(folders[0], items)
    for n, (context, completion) in enumerate(items):
        at = range(len(context) - 1, len(texts[n]) - 1)
        found = sum(log_probabilities[n, i, token].item() for i, token in zip(at, completion))
        assert found == pytest.approx(expected["prefix"][n], abs=1e-4)
        assert abs(found - expected["ar"][n]) > 1e-3


@torch.no_grad()
def test_in_bfloat16_it_is_as_exact_as_bfloat16(folders, masked, tokenizer):
    ids, real = pad([tokenizer(sentence).input_ids for sentence in SENTENCES], "left")
    exact = masked(ids, attention_mask=real).logits.log_softmax(-1)
    rounded = load(AutoModelForMaskedLM, folders[1], dtype=torch.bfloat16)
    found = rounded(ids, attention_mask=real).logits.float().log_softmax(-1)
    difference = (found - exact)[real > 0].abs()
    assert difference.max() < 0.15
    assert difference.mean() < 0.02


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_token_that_sees_nothing_is_not_a_nan(folders, attention):
    """As with a causal mask and padding on the left, in half precision."""
    more = dict(attn_implementation=attention, dtype=torch.float16)
    model = load(AutoModelForMaskedLM, folders[1], **more)
    ids, real = pad([[BOS, 20, 21, 22], [BOS, 20]], "left")
    mask = (real[:, None] * torch.ones(4, 4)).tril()
    assert model(ids, attention_mask=mask).logits.isfinite().all()


# ---- generation, loss ----------------------------------------------------------------------------
def test_generate_reads_the_prompt_in_both_directions(folders, masked, tokenizer):
    """It gives what sample.py gives in prefix mode, in a batch too."""
    ours = load_model(folders[0]).model
    batch = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    together = masked.generate(**batch, max_new_tokens=12, do_sample=False)
    differ = 0
    for sentence, row in zip(SENTENCES, together.tolist()):
        inputs = tokenizer(sentence, return_tensors="pt")
        alone = masked.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist()
        rows = inputs["input_ids"].tolist()
        texts = {}
        for mode in ("ar", "prefix"):
            tokens = generate(extend, ours, rows, 64, length=12, temperature=0, mode=mode)
            texts[mode] = tokens[-1][0].tolist()
        assert alone == texts["prefix"][: len(alone)]
        assert [token for token in row if token != PAD][: len(alone)] == alone
        differ += texts["ar"] != texts["prefix"]
    assert differ


def test_the_mask_covers_what_is_in_the_cache(masked):
    """Some GPU kernels would not broadcast it."""
    sizes = []
    forward = LlamaModel.forward

    def spy(self, **kwargs):
        sizes.append(tuple(kwargs["attention_mask"].shape))
        return forward(self, **kwargs)

    tokens = torch.randint(16, 300, (2, 5))
    with mock.patch.object(LlamaModel, "forward", spy):
        masked.generate(tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert sizes == [(2, 1, 5, 5), (2, 1, 1, 6), (2, 1, 1, 7)]


@torch.no_grad()
def test_the_loss_of_labels_is_that_of_the_masked_tokens(masked, tokenizer):
    """transformers' collator gives the labels; the token at i is predicted at i - 1."""
    torch.manual_seed(0)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    batch = collator([tokenizer(sentence) for sentence in SENTENCES])
    output = masked(**batch)
    targets = batch["labels"][:, 1:]
    losses = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].transpose(1, 2), targets, reduction="none"
    )
    assert (targets >= 0).sum() > 10
    torch.testing.assert_close(output.loss, losses[targets >= 0].mean())


# ---- loading and saving --------------------------------------------------------------------------
def test_a_causal_model_is_a_plain_llama_with_or_without_trust(folders, masked):
    tokens = torch.randint(16, 300, (2, 20))
    for more in ({}, {"trust_remote_code": True}, {"trust_remote_code": False}):
        model = AutoModelForCausalLM.from_pretrained(folders[1], **more)
        assert type(model).__name__ == "LlamaForCausalLM"
        assert type(model.model).__name__ == "LlamaModel"
        assert model.config.model_type == "llama"
        causal = masked(tokens, attention_mask=torch.ones(2, 20, 20).tril()).logits
        torch.testing.assert_close(model(tokens).logits, causal, rtol=1e-5, atol=1e-5)
        assert (model(tokens).logits - masked(tokens).logits).abs().max() > 0.1


AUTO = [AutoModelForMaskedLM, AutoModel, AutoModelForSequenceClassification]


@pytest.mark.parametrize("auto", AUTO)
def test_no_weight_is_missing_but_a_new_head(folders, auto, caplog):
    enable_propagation()
    with caplog.at_level(logging.WARNING):
        load(auto, folders[1])
    said = " ".join(record.message for record in caplog.records)
    assert ("score.weight" in said) == (auto is AutoModelForSequenceClassification)
    assert "lm_head" not in said
    if auto is not AutoModelForSequenceClassification:
        assert said == ""


@torch.no_grad()
@pytest.mark.parametrize("auto", AUTO)
def test_what_is_saved_can_be_loaded_again_in_every_way(folders, tmp_path, auto):
    """save_pretrained() copies modeling_dual.py too, and keeps all of auto_map."""
    model = load(auto, folders[1])
    model.save_pretrained(tmp_path / "saved")
    again = load(auto, tmp_path / "saved")
    assert type(again).__name__ == type(model).__name__
    tokens = torch.randint(16, 300, (2, 20))
    assert torch.equal(again(tokens)[0], model(tokens)[0])
    with open(os.path.join(folders[1], "config.json")) as file:
        auto_map = json.load(file)["auto_map"]
    assert again.config.auto_map == auto_map
    if auto is AutoModelForMaskedLM:
        causal = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert type(causal).__name__ == "LlamaForCausalLM"
        assert torch.equal(causal.lm_head.weight, model.lm_head.weight)


# ---- fine-tuning ---------------------------------------------------------------------------------
def toy_texts(n, seed, tokenizer, side):
    """Return n texts of several lengths, and whether a question mark is somewhere in them."""
    torch.manual_seed(seed)
    labels = torch.arange(n) % 2
    rows = []
    for label in labels.tolist():
        length = int(torch.randint(4, 12, ()))
        row = torch.randint(40, 300, (length,))
        row[torch.randint(1, length, ())] = tokenizer.convert_tokens_to_ids("?" if label else ".")
        rows.append([BOS, *row.tolist()])
    return *pad(rows, side), labels


def accuracy_after_training(parameters, compute_logits, tokenizer, side):
    """Fine-tune for 60 steps; return the share of new texts that are classified correctly."""
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    for step in range(60):
        ids, real, labels = toy_texts(32, step, tokenizer, side)
        loss = torch.nn.functional.cross_entropy(compute_logits(ids, real), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids, real, labels = toy_texts(500, 1000, tokenizer, side)
    with torch.no_grad():
        return (compute_logits(ids, real).argmax(-1) == labels).float().mean().item()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sequence_classifier_learns_a_toy_task(folders, tokenizer, side):
    model = load(AutoModelForSequenceClassification, folders[1], num_labels=2)

    def compute_logits(ids, real):
        return model(ids, attention_mask=real).logits

    assert accuracy_after_training(model.parameters(), compute_logits, tokenizer, side) > 0.95


@pytest.mark.parametrize("trust", [True, False])
def test_the_first_token_of_an_encoder_has_seen_the_text(folders, tokenizer, trust):
    """BabyLM fine-tunes the state of the first token, which in a causal model has seen nothing."""
    model = AutoModel.from_pretrained(folders[1], trust_remote_code=trust)
    head = torch.nn.Linear(64, 2)

    def compute_logits(ids, real):
        return head(model(input_ids=ids, attention_mask=real).last_hidden_state[:, 0])

    parameters = [*model.parameters(), *head.parameters()]
    accuracy = accuracy_after_training(parameters, compute_logits, tokenizer, "right")
    assert accuracy > 0.95 if trust else accuracy == 0.5


# ---- as the scripts of the BabyLM challenge score ------------------------------------------------
def challenge_scores(folder, backend):
    """Return the log-likelihoods of all sentences, as its causal and mntp backends compute them.

    In each sentence, the tokens that end after position 0 are predicted: all but <s>.
    """
    auto = AutoModelForCausalLM if backend == "causal" else AutoModelForMaskedLM
    model = load(auto, folder)
    processor = AutoProcessor.from_pretrained(folder, padding_side="right", trust_remote_code=True)
    scores = []
    for sentence in SENTENCES:
        encoded = processor(text=sentence, return_offsets_mapping=True)
        tokens = torch.tensor(encoded["input_ids"])
        places = [i for i, (_, end) in enumerate(encoded["offset_mapping"]) if end > 0]
        rows = [tokens]
        if backend == "mntp":
            rows = [tokens.clone() for _ in places]
            for row, place in zip(rows, places):
                row[place] = processor.mask_token_id
        rows.append(torch.cat((tokens, tokens)))  # a longer one, so that the others are padded
        inputs = pad_sequence(rows, batch_first=True, padding_value=processor.pad_token_id)
        ones = [torch.ones(len(row), dtype=torch.long) for row in rows]
        mask = pad_sequence(ones, batch_first=True, padding_value=0)
        logits = model(input_ids=inputs, attention_mask=mask)["logits"].log_softmax(-1)
        rows = range(len(places)) if backend == "mntp" else [0] * len(places)
        found = [logits[row, place - 1, tokens[place]] for row, place in zip(rows, places)]
        scores.append(sum(found).item())
    return scores


@torch.no_grad()
@pytest.mark.parametrize("backend, mode", [("causal", "ar"), ("mntp", "pll1")])
def test_the_challenge_scores_as_eval_does(folders, tokenizer, backend, mode):
    items = sentence_items(tokenizer)[: len(SENTENCES)]
    expected = list(scores_of(folders[0], items)[mode])
    assert challenge_scores(folders[1], backend) == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def test_the_challenge_predicts_a_word_before_masks(folders, masked, tokenizer):
    """Its reading task puts <mask>s after a text, and reads the row before the first of them."""
    inputs = tokenizer("Da mor" + 3 * tokenizer.mask_token, return_tensors="pt")
    assert inputs.input_ids[0, -3:].tolist() == [MASK] * 3
    p = masked(**inputs).logits[0, -4].log_softmax(-1)
    context = tokenizer("Da mor").input_ids
    word = tokenizer(" bedi", add_special_tokens=False).input_ids
    item = context, [word[0], 20, 20]  # the chain rule's first factor is what is read
    first_factor = scores_of(folders[0], [item])["chain"][0]
    later = scores_of(folders[0], [(context + word[:1], [20, 20])])["chain"][0]
    assert p[word[0]].item() == pytest.approx(first_factor - later, abs=1e-4)
