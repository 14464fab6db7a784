"""
Our models for other tools, and the paper's released models for ours.

    python export.py --ckpt out/demo --out hf/demo                          # a Llama for transformers, lm_eval, ...
    python export.py --from_official model.safetensors --out out/official   # then: python eval.py --ckpt out/official
"""
import argparse
import json
import os
import re

import tokenizers
import torch

from configurator import Settings, die
from data import BOS, MASK, N_SPECIAL
from model import Transformer, load_model

NAMES = {  # of a layer: here, in a Llama of transformers, in a released model
    "embed": ("model.embed_tokens", "embedding.word_embedding"), "norm": ("model.norm", "classifier.pre_norm"),
    "projection": ("", "classifier.projection"), "head": ("lm_head", "classifier.emb2vocab"),
    "attention_norm": ("input_layernorm", "attention.pre_norm"), "q": ("self_attn.q_proj", "attention.qkv_proj.weights.0"),
    "k": ("self_attn.k_proj", "attention.qkv_proj.weights.1"), "v": ("self_attn.v_proj", "attention.qkv_proj.weights.2"),
    "o": ("self_attn.o_proj", "attention.out_proj"), "ff_norm": ("post_attention_layernorm", "mlp.pre_norm"),
    "gate": ("mlp.gate_proj", "mlp.up_proj.weights.1"), "up": ("mlp.up_proj", "mlp.up_proj.weights.0"),
    "down": ("mlp.down_proj", "mlp.down_proj")}


def rename(name, official):
    """blocks.7.q.weight -> model.layers.7.self_attn.q_proj.weight, encoder.layers.7.attention.qkv_proj.weights.0"""
    *block, layer, kind = name.split(".")
    start = f"{'encoder' if official else 'model'}.layers.{block[1]}." if block else ""
    return re.sub(r"(weights\.\d)\.weight", r"\1", f"{start}{NAMES[layer][official]}.{kind}")


def to_llama(ckpt, folder):
    """A LlamaForCausalLM and its tokenizer, which puts <s> before a text; <s> also ends what is generated."""
    model, tokenizer, checkpoint = load_model(ckpt, "cpu", "float32")
    s, step, ids = checkpoint["settings"], checkpoint["step"], dict(bos_token_id=BOS, eos_token_id=BOS, pad_token_id=3)
    if s.extra_head:
        die(f"{ckpt} has the head of the released models, which a Llama has not")
    os.makedirs(folder, exist_ok=True)
    save_file({rename(k, 0): p for k, p in model.state_dict().items()}, f"{folder}/model.safetensors", {"format": "pt"})
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", BOS)])
    tokenizer.save(f"{folder}/tokenizer.json")
    for name, content in (
            ("config", dict(
                architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=s.vocab_size, hidden_size=s.n_embd,
                intermediate_size=s.n_ff, num_hidden_layers=s.n_layer, num_attention_heads=s.n_head, rope_theta=s.rope_theta,
                rms_norm_eps=s.norm_eps, max_position_embeddings=s.seq_len, tie_word_embeddings=False, torch_dtype="float32", **ids)),
            ("generation_config", dict(suppress_tokens=[i for i in range(N_SPECIAL) if i != BOS], **ids)),
            ("tokenizer_config", dict(
                tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="<s>", pad_token="<pad>", mask_token="<mask>",
                split_special_tokens=True, clean_up_tokenization_spaces=False, model_max_length=s.seq_len,
                model_input_names=["input_ids", "attention_mask"]))):
        with open(f"{folder}/{name}.json", "w") as f:
            json.dump(content, f, indent=1)
    log, losses = os.path.join(ckpt if os.path.isdir(ckpt) else os.path.dirname(ckpt), "log.jsonl"), ""
    for line in open(log) if os.path.exists(log) else ():
        if '"val_ar"' in line and line.endswith("}\n") and (r := json.loads(line))["step"] <= step:
            losses = f"Held-out losses at step {r['step']}: AR {r['val_ar']:.4f}, MD {r['val_md']:.4f} nats per token.\n"
    with open(f"{folder}/README.md", "w") as f:
        f.write("---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\nA plain Llama, trained by nanodual on "
                f"autoregression (AR) and masked diffusion (MD) at once: share of AR alpha = {s.alpha}, R = {s.repetitions} "
                f"repetitions, {step * s.batch_size * s.seq_len:,} tokens in {step} of {s.max_steps} steps.\n{losses}"
                "A text begins with `<s>`, which the tokenizer adds, and ends with it.\n")


def from_official(file, tokenizer_file, folder):
    """A checkpoint from a state dict of the paper's own training code: every tensor must be known and have its shape."""
    try:  # neither reader executes what is in the file
        state = load_file(file) if file.endswith(".safetensors") else torch.load(file, map_location="cpu", weights_only=True)
        found = {re.sub(r"^((_orig_mod|module|model)\.)+", "", name): (name, p, p.shape) for name, p in state.items()}
        tokenizer = tokenizers.Tokenizer.from_file(tokenizer_file)
    except Exception as error:  # each library has its own
        die(f"cannot read {file} with {tokenizer_file}: {str(error).splitlines()[0]}")
    s = Settings(extra_head=True, ar_weight=2.0)
    with torch.device("meta"):
        expected = {rename(name, 1): (name, p.shape) for name, p in Transformer(s).state_dict().items()}
    used = [found[k][0] for k in expected if k in found and found[k][2] == expected[k][1]]
    wrong = [k for k in expected if k not in found] + [k for k in state if k not in used]
    wrong += [token for token, i in (("<s>", BOS), ("<mask>", MASK)) if tokenizer.token_to_id(token) != i]
    if wrong:
        die(f"{file} with {tokenizer_file} is no released model; missing, unknown or different: {', '.join(wrong[:4])}")
    os.makedirs(folder, exist_ok=True)
    weights = {name: found[k][1].float() for k, (name, _) in expected.items()}
    torch.save({"model": weights, "settings": vars(s), "step": s.max_steps, "tokenizer": tokenizer.to_str()}, f"{folder}/ckpt.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", default="", help="checkpoint file or run directory")
    parser.add_argument("--from_official", default="", help="state dict of a released model: .safetensors, or of torch.save")
    parser.add_argument("--tokenizer", default="", help="its tokenizer (default: tokenizer.json next to it)")
    parser.add_argument("--out", default="", help="folder to make")
    args = parser.parse_args()
    if bool(args.ckpt) == bool(args.from_official) or not args.out or os.path.exists(args.out):
        die("give --ckpt or --from_official, and an --out that does not exist yet")
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        die("export.py needs a package: pip install safetensors")
    folder = args.out.rstrip("/") + ".tmp"
    if args.ckpt:
        to_llama(args.ckpt, folder)
    else:
        tokenizer = args.tokenizer or os.path.join(os.path.dirname(args.from_official), "tokenizer.json")
        from_official(args.from_official, tokenizer, folder)
    os.rename(folder, args.out)
    print(f"wrote {args.out}")
