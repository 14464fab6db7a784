"""
Exchange models with other tools: Llama folders of transformers, llama.cpp, the paper's weights.

    python export.py --ckpt out/demo --out hf/demo           # for transformers, lm_eval ...
    python export.py --ckpt out/demo --gguf demo.gguf        # for llama.cpp; pip install gguf
    python export.py --from_llama SmolLM2 --out out/base     # then: train.py --init_from=out/base
    python export.py --from_official model.safetensors --out out/official

A folder for --from_llama has config.json, tokenizer.json and model.safetensors, in one file or
several. The released models are read with the tokenizer.json that lies next to them.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from errors import die, report

if __name__ == "__main__":
    sys.excepthook = report

import tokenizers
import torch
from safetensors.torch import load_file, save_file

from checkpoint import load_model
from configurator import Settings, check
from model import Transformer
from tokenizer import find_special_ids, is_ours, parse_tokenizer, with_mask_token


# ---- what a layer is called ----------------------------------------------------------------------
class Names(NamedTuple):
    llama: str
    released: str
    gguf: str


# fmt: off
BLOCKS = Names("model.layers", "encoder.layers", "blk")
LAYERS = {
    "embed":           Names("model.embed_tokens", "embedding.word_embedding", "token_embd"),
    "norm":            Names("model.norm", "classifier.pre_norm", "output_norm"),
    "head":            Names("lm_head", "classifier.emb2vocab", "output"),
    "head.projection": Names("", "classifier.projection", ""),
    "attention_norm":  Names("input_layernorm", "attention.pre_norm", "attn_norm"),
    "q":               Names("self_attn.q_proj", "attention.qkv_proj.weights.0", "attn_q"),
    "k":               Names("self_attn.k_proj", "attention.qkv_proj.weights.1", "attn_k"),
    "v":               Names("self_attn.v_proj", "attention.qkv_proj.weights.2", "attn_v"),
    "o":               Names("self_attn.o_proj", "attention.out_proj", "attn_output"),
    "ff_norm":         Names("post_attention_layernorm", "mlp.pre_norm", "ffn_norm"),
    "up":              Names("mlp.up_proj", "mlp.up_proj.weights.0", "ffn_up"),
    "gate":            Names("mlp.gate_proj", "mlp.up_proj.weights.1", "ffn_gate"),
    "down":            Names("mlp.down_proj", "mlp.down_proj", "ffn_down"),
}
# fmt: on


def rename(name, tool):
    """Return what a tool, a field of Names, calls one of our tensors.

    blocks.7.q.weight is model.layers.7.self_attn.q_proj.weight in a Llama.
    """
    layer, _, kind = name.rpartition(".")
    start = ""
    if layer.startswith("blocks."):
        _, number, layer = layer.split(".")
        start = f"{getattr(BLOCKS, tool)}.{number}."
    theirs = start + getattr(LAYERS[layer], tool)
    if re.search(
        r"weights\.\d$", theirs
    ):  # an entry of a list of parameters, which has no ".weight"
        return theirs
    return f"{theirs}.{kind}"


# ---- out: a Llama for transformers ---------------------------------------------------------------
def write_llama(trained, dtype, folder):
    """Write a LlamaForCausalLM, its tokenizer and a model card.

    The tokenizer puts <s> before every text, as in training. <s> also ends what is generated; no
    other special token is generated.
    """
    model, tokenizer, special, s, _ = trained
    weights = {}
    for name, weight in model.state_dict().items():
        weights[rename(name, "llama")] = weight.to(getattr(torch, dtype))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    bos = tokenizer.id_to_token(special.bos)
    pad = "<pad>" if tokenizer.token_to_id("<pad>") in special.all else bos
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, special.bos)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    ids = {
        "bos_token_id": special.bos,
        "eos_token_id": special.bos,
        "pad_token_id": tokenizer.token_to_id(pad),
    }
    config = ids | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "vocab_size": s.vocab_size,
        "hidden_size": s.n_embd,
        "intermediate_size": s.n_ff,
        "num_hidden_layers": s.n_layer,
        "num_attention_heads": s.n_head,
        "max_position_embeddings": s.seq_len,
        "rope_theta": s.rope_theta,
        "rms_norm_eps": s.norm_eps,
    }
    generation_config = ids | {
        "suppress_tokens": [token for token in special.all if token != special.bos]
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": bos,
        "pad_token": pad,
        "mask_token": "<mask>",
        "padding_side": "left",  # new tokens follow the last one of each prompt
        "split_special_tokens": True,  # a literal <mask> in a text is text
        "clean_up_tokenization_spaces": False,
        "model_max_length": s.seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    (folder / "README.md").write_text(model_card(trained))


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [nanodual, llama, masked-diffusion]
---

# {name}

A Llama trained by nanodual on two objectives at once: autoregression (AR), a share alpha = {alpha}
of all sequences, and masked diffusion (MD), the others. {n_tokens:,} tokens in all, each one seen
{repetitions} times. {losses}

In every mode the state at a token predicts the next one: under a causal attention mask, with a
prefix that is read in both directions, or, where the next token is replaced by `<mask>`, with no
attention mask at all.
"""


def model_card(trained):
    """Return the README.md of an exported model, with its last held-out losses."""
    s, checkpoint = trained.settings, trained.checkpoint
    losses = ""
    for record in checkpoint.get("records", []):
        if "val_ar" in record:
            losses = f"Held-out losses in nats per token: AR {record['val_ar']:.4f}, "
            losses += f"MD {record['val_md']:.4f} (step {record['step']})."
    return CARD.format(
        name=Path(s.out_dir).name,
        alpha=s.alpha,
        n_tokens=checkpoint["step"] * s.batch_size * s.seq_len,
        repetitions=s.repetitions,
        losses=losses,
    )


# ---- out: llama.cpp ------------------------------------------------------------------------------
def write_gguf(trained, dtype, file):
    """Write one file for llama.cpp, whose own converter knows only well-known tokenizers."""
    import gguf

    model, tokenizer, special, s, _ = trained
    if not is_ours(tokenizer):
        die("--gguf is for tokenizers of prepare.py: use llama.cpp's converter on an --out folder")
    merges = json.loads(tokenizer.to_str())["model"]["merges"]

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(s.seq_len)
    writer.add_embedding_length(s.n_embd)
    writer.add_feed_forward_length(s.n_ff)
    writer.add_block_count(s.n_layer)
    writer.add_head_count(s.n_head)
    writer.add_layer_norm_rms_eps(s.norm_eps)
    writer.add_rope_freq_base(s.rope_theta)

    tokens = [tokenizer.id_to_token(i) or f"<unused_{i}>" for i in range(s.vocab_size)]
    types = [gguf.TokenType.NORMAL] * s.vocab_size
    for i in special.all:
        types[i] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre("gpt-2")  # with GPT-2's pattern for words
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(special.bos)
    writer.add_eos_token_id(special.bos)
    writer.add_mask_token_id(special.mask)
    writer.add_add_bos_token(True)

    matrix_type = gguf.GGMLQuantizationType["BF16" if dtype == "bfloat16" else "F32"]
    for name, weight in model.state_dict().items():
        if name.endswith((".q.weight", ".k.weight")):
            # llama.cpp rotates the pairs (2i, 2i + 1) of a head; ours are (i, i + K/2).
            pairs = weight.view(s.n_head, 2, -1, s.n_embd)
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        kind = matrix_type if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        content = gguf.quantize(weight.numpy(), kind)
        writer.add_tensor(rename(name, "gguf"), content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- in: checkpoints made of other models --------------------------------------------------------
def write_checkpoint(theirs, tool, s, step, tokenizer_json, folder):
    """Write ckpt.pt, if these tensors are all that the model needs, and no others."""
    with torch.device("meta"):
        model = Transformer(s)
    ours = {rename(name, tool): name for name in model.state_dict()}
    weights = {ours.get(name, name): weight.float() for name, weight in theirs.items()}
    model.load_state_dict(weights, assign=True)
    find_special_ids(tokenizer_json)  # refuses a tokenizer without <s> or <mask>
    content = {"model": weights, "settings": vars(s), "step": step, "tokenizer": tokenizer_json}
    torch.save(content, folder / "ckpt.pt")


def import_llama(source, folder):
    """Turn a Llama, such as SmolLM2, into a checkpoint from which train.py can start."""
    config = json.loads((source / "config.json").read_text("utf-8"))
    s = settings_of(config)
    original_tokenizer = (source / "tokenizer.json").read_text("utf-8")
    tokenizer_json = with_mask_token(original_tokenizer)
    mask = find_special_ids(tokenizer_json).mask
    largest_id = max(parse_tokenizer(tokenizer_json).get_vocab().values())
    s.vocab_size = max(s.vocab_size, largest_id + 1)

    weights = {}
    for file in find_safetensors(source):
        weights |= load_file(file)
    if config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            # Grouped-query attention: some heads share keys and values. Give each its own.
            shared = weight.view(-1, s.n_embd // s.n_head, s.n_embd)  # (shared heads, K, D)
            each = shared.repeat_interleave(s.n_head // len(shared), dim=0)
            weights[name] = each.reshape(s.n_embd, s.n_embd)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            # An id that is new to the model, as <mask> is, starts as the mean of all others.
            mean = weight.mean(0, keepdim=True)
            weights[name] = torch.cat((weight, mean.expand(s.vocab_size - len(weight), -1)))
            if tokenizer_json != original_tokenizer:  # the id was there, but unused
                weights[name][mask] = mean
    write_checkpoint(weights, "llama", s, 0, tokenizer_json, folder)


def settings_of(config):
    """Return the settings that a Llama's config.json describes; refuse what we do not have."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    needed = {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "rope_type": "default",
        "rope_interleaved": False,
    }
    # Older files say "type"; newer ones keep rope_theta in rope_parameters.
    found = {"rope_type": rope.get("type")} | rope | config
    for name, value in needed.items():
        if found.get(name) not in (None, value):
            die(f"this Llama has {name} {found[name]}: only {value} can be read")

    settings = Settings(
        n_layer=config["num_hidden_layers"],
        n_head=config["num_attention_heads"],
        n_embd=config["hidden_size"],
        n_ff=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        seq_len=min(
            config.get("max_position_embeddings", 2048), 2048
        ),  # a longer window costs memory
        rope_theta=float(found.get("rope_theta", 10000.0)),
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )
    return check(settings)


def find_safetensors(folder):
    """Return the files that hold a model's weights: one, or those that an index names."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    names = json.loads(index.read_text("utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(names))]


def import_released(file, folder):
    """Turn a state dict of the paper's training code into a checkpoint; nothing is executed."""
    if file.suffix == ".safetensors":
        theirs = load_file(file)
    else:
        theirs = torch.load(file, map_location="cpu", weights_only=True)
    tokenizer_json = file.with_name("tokenizer.json").read_text("utf-8")

    s = Settings(extra_head=True, ar_weight=2.0)  # the paper's sizes are the defaults
    plain = {}
    for name, weight in theirs.items():
        name = re.sub(r"^((_orig_mod|module|model)\.)+", "", name)  # left by compile and DDP
        if name in plain:
            die(f"{file} has {name} twice")
        plain[name] = weight
    write_checkpoint(plain, "released", s, s.max_steps, tokenizer_json, folder)


# ---- the script ----------------------------------------------------------------------------------
def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--ckpt", help="our checkpoint, or the directory of a run")
    source.add_argument("--from_llama", metavar="FOLDER", type=Path, help="a Llama to start from")
    source.add_argument("--from_official", metavar="FILE", type=Path, help="a released model")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", metavar="FOLDER", type=Path, help="a new folder to write")
    target.add_argument("--gguf", metavar="FILE", type=Path, help="a new file for llama.cpp")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights that --ckpt writes (float32)",
    )
    args = parser.parse_args()
    if args.gguf and not args.ckpt:
        die("--gguf goes with --ckpt")
    if (args.out or args.gguf).exists():
        die(f"{args.out or args.gguf} exists already: remove it, or choose another name")
    return args


def write(args, temporary):
    """Write what was asked for to this path, a new folder or a file."""
    if args.ckpt:
        trained = load_model(args.ckpt, "cpu", "float32")
        if trained.settings.extra_head:
            die(f"{args.ckpt} has the head of the released models, which is not a Llama's")
    if args.gguf:
        write_gguf(trained, args.dtype, temporary)
        return
    temporary.mkdir()
    if args.ckpt:
        write_llama(trained, args.dtype, temporary)
    elif args.from_llama:
        import_llama(args.from_llama, temporary)
    else:
        import_released(args.from_official, temporary)


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def main():
    args = parse_arguments()
    target = args.out or args.gguf
    temporary = target.with_name(target.name + ".tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    remove(temporary)  # of an export that was killed
    try:
        write(args, temporary)
        temporary.rename(target)
    except ImportError:
        raise
    except Exception as error:  # a damaged file, a full disk: each library has its own kind
        source = args.ckpt or args.from_llama or args.from_official
        die(f"cannot turn {source} into {target}: {type(error).__name__}: {error}"[:500])
    finally:
        remove(temporary)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
