"""
Our models for other tools, and the paper's released models for ours.

    python export.py --ckpt out/demo --out hf/demo                          # a Llama for transformers, lm_eval, ...
    python export.py --from_official model.safetensors --out out/official   # with the tokenizer.json next to that file
"""

import json, os, pathlib, re, shutil

import tokenizers
import torch
from configurator import Settings, die, flags
from data import BOS, MASK, N_SPECIAL
from model import Transformer, load_model

NAMES = {  # of a layer: here, in a Llama of transformers, in a released model
    "embed": ("model.embed_tokens", "embedding.word_embedding"),
    "norm": ("model.norm", "classifier.pre_norm"),
    "projection": ("", "classifier.projection"),
    "head": ("lm_head", "classifier.emb2vocab"),
    "attention_norm": ("input_layernorm", "attention.pre_norm"),
    "o": ("self_attn.o_proj", "attention.out_proj"),
    "ff_norm": ("post_attention_layernorm", "mlp.pre_norm"),
    "down": ("mlp.down_proj", "mlp.down_proj"),
    "gate": ("mlp.gate_proj", "mlp.up_proj.weights.1"),
    "up": ("mlp.up_proj", "mlp.up_proj.weights.0"),
    **{x: (f"self_attn.{x}_proj", f"attention.qkv_proj.weights.{i}") for i, x in enumerate("qkv")},
}


def rename(name, official):
    """blocks.7.q.weight -> model.layers.7.self_attn.q_proj.weight, encoder.layers.7.attention.qkv_proj.weights.0"""
    *block, layer, kind = name.split(".")
    start = f"{'encoder' if official else 'model'}.layers.{block[1]}." if block else ""
    return re.sub(r"(weights\.\d)\.weight", r"\1", f"{start}{NAMES[layer][official]}.{kind}")


def to_llama(ckpt, out):
    """A LlamaForCausalLM and its tokenizer, which puts <s> before a text; <s> also ends what is generated."""
    model, tokenizer, checkpoint = load_model(ckpt, "cpu", "float32")
    s, step = checkpoint["settings"], checkpoint["step"]
    if s.extra_head:
        die(f"{ckpt} has the head of the released models, which a Llama has not")
    save_file(
        {rename(k, 0): p for k, p in checkpoint["model"].items()},
        out / "model.safetensors",
        {"format": "pt"},
    )
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", "<s> $A <s> $B", [("<s>", BOS)]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    ids = dict(bos_token_id=BOS, eos_token_id=BOS, pad_token_id=tokenizer.token_to_id("<pad>"))
    llama = dict(
        ids,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=s.vocab_size,
        hidden_size=s.n_embd,
        intermediate_size=s.n_ff,
        num_hidden_layers=s.n_layer,
        rope_theta=s.rope_theta,
        num_attention_heads=s.n_head,
        max_position_embeddings=s.seq_len,
        rms_norm_eps=s.norm_eps,
    )
    generation = dict(ids, suppress_tokens=[i for i in range(N_SPECIAL) if i != BOS])
    text = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="<s>",
        pad_token="<pad>",
        mask_token="<mask>",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=s.seq_len,
        model_input_names=["input_ids", "attention_mask"],
    )
    for name, content in (
        ("config", llama),
        ("generation_config", generation),
        ("tokenizer_config", text),
    ):
        (out / f"{name}.json").write_text(json.dumps(content, indent=1))
    losses = [
        "Held-out losses at step {step}: AR {val_ar:.4f}, MD {val_md:.4f} nats per token.\n".format(
            **record
        )
        for record in checkpoint.get("records", [])
        if "val_ar" in record
    ]
    (out / "README.md").write_text(
        f"A Llama trained by nanodual on autoregression (AR, a share alpha = {s.alpha}) and masked diffusion (MD): R = "
        f"{s.repetitions} repetitions, {step * s.batch_size * s.seq_len:,} tokens.\n"
        + "".join(losses[-1:])
    )


def from_official(file, out):
    """A checkpoint from a state dict of the paper's training code; neither of its readers executes what is in it."""
    state = (
        load_file(file)
        if file.endswith(".safetensors")
        else torch.load(file, "cpu", weights_only=True)
    )
    bpe = tokenizers.Tokenizer.from_str(
        pathlib.Path(file).with_name("tokenizer.json").read_text("utf-8")
    )
    s = Settings(extra_head=True, ar_weight=2.0)
    with torch.device("meta"):
        model = Transformer(s)
    ours = {rename(name, 1): name for name in model.state_dict()}
    weights = {
        ours.get(re.sub(r"^((_orig_mod|module|model)\.)+", "", k), k): p.float()
        for k, p in state.items()
    }
    model.load_state_dict(
        weights, assign=True
    )  # refuses what is missing, unknown or of another shape
    if len(weights) < len(state) or [bpe.token_to_id(token) for token in ("<s>", "<mask>")] != [
        BOS,
        MASK,
    ]:
        die(
            f"{file} has a tensor twice, or the tokenizer.json next to it has not <s> as {BOS} and <mask> as {MASK}"
        )
    torch.save(
        {"model": weights, "settings": vars(s), "step": s.max_steps, "tokenizer": bpe.to_str()},
        out / "ckpt.pt",
    )


if __name__ == "__main__":
    args = flags(__doc__, ckpt="", from_official="", out="")
    if bool(args.ckpt) == bool(args.from_official) or not args.out or os.path.exists(args.out):
        die("give --ckpt or --from_official, and an --out that does not exist yet")
    from safetensors.torch import (
        load_file,
        save_file,
    )  # optional: missing, it is named by configurator's excepthook

    temporary = pathlib.Path(args.out.rstrip("/") + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
    try:
        temporary.mkdir(parents=True)
        to_llama(args.ckpt, temporary) if args.ckpt else from_official(
            args.from_official, temporary
        )
        temporary.rename(args.out)
    except Exception as error:  # a damaged file, a full disk: each library has its own
        die(
            f"cannot export {args.ckpt or args.from_official} to {args.out}: {type(error).__name__}: {error}"[
                :500
            ]
        )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"wrote {args.out}")
