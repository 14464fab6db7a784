"""
Exchange models with other tools: Llama folders for transformers, the paper's released weights.

    python export.py --ckpt out/demo --out hf/demo           # for transformers, lm_eval ...
    python export.py --from_llama SmolLM2 --out out/base     # then: train.py --init_from=out/base
    python export.py --from_official model.safetensors --out out/official

A folder for --from_llama has config.json, tokenizer.json and model.safetensors, in one file or
several. The released models are read with the tokenizer.json next to them.
"""

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from errors import die, report

if __name__ == "__main__":
    sys.excepthook = report

import tokenizers
import torch
from safetensors.torch import load_file, save_file

from checkpoint import load_model
from configurator import Settings, check, make_parser
from model import Transformer
from tokenizer import find_special_ids, parse_tokenizer, with_mask_token


# ---- what a layer is called ----------------------------------------------------------------------
class Names(NamedTuple):
    llama: str
    released: str


# fmt: off
BLOCKS = Names("model.layers", "encoder.layers")
LAYERS = {
    "embed":           Names("model.embed_tokens", "embedding.word_embedding"),
    "norm":            Names("model.norm", "classifier.pre_norm"),
    "head":            Names("lm_head", "classifier.emb2vocab"),
    "head.projection": Names("", "classifier.projection"),
    "attention_norm":  Names("input_layernorm", "attention.pre_norm"),
    "q":               Names("self_attn.q_proj", "attention.qkv_proj.weights.0"),
    "k":               Names("self_attn.k_proj", "attention.qkv_proj.weights.1"),
    "v":               Names("self_attn.v_proj", "attention.qkv_proj.weights.2"),
    "o":               Names("self_attn.o_proj", "attention.out_proj"),
    "ff_norm":         Names("post_attention_layernorm", "mlp.pre_norm"),
    "up":              Names("mlp.up_proj", "mlp.up_proj.weights.0"),
    "gate":            Names("mlp.gate_proj", "mlp.up_proj.weights.1"),
    "down":            Names("mlp.down_proj", "mlp.down_proj"),
}
# fmt: on


def rename(name, tool):
    """Return the name that a tool (a field of Names) gives one of our tensors.

    blocks.7.q.weight is model.layers.7.self_attn.q_proj.weight in a Llama.
    """
    layer, _, kind = name.rpartition(".")
    start = ""
    if layer.startswith("blocks."):
        _, number, layer = layer.split(".")
        start = f"{getattr(BLOCKS, tool)}.{number}."
    theirs = start + getattr(LAYERS[layer], tool)
    if re.search(r"weights\.\d$", theirs):
        return theirs  # an entry of a list of parameters, which has no ".weight"
    return f"{theirs}.{kind}"


# ---- out: a Llama for transformers ---------------------------------------------------------------
def write_llama(trained, dtype, folder):
    """Write a plain Llama, the classes that read it in both directions, and a model card."""
    model, tokenizer, special, s, _ = trained
    weights = {}
    for name, weight in model.state_dict().items():
        weights[rename(name, "llama")] = weight.to(getattr(torch, dtype))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors lets only the owner read it
    pad = write_tokenizer(tokenizer, special, s.seq_len, folder)

    ids = {"bos_token_id": special.bos, "eos_token_id": special.bos, "pad_token_id": pad}
    config = ids | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "auto_map": {
            "AutoModel": "modeling_dual.DualModel",
            "AutoModelForMaskedLM": "modeling_dual.DualForMaskedLM",
            "AutoModelForSequenceClassification": "modeling_dual.DualForSequenceClassification",
        },
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
    # <s> ends what is generated; no other special token is generated.
    never = [token for token in special.all if token != special.bos]
    write_json(config, folder / "config.json")
    write_json(ids | {"suppress_tokens": never}, folder / "generation_config.json")
    shutil.copy(Path(__file__).with_name("modeling_dual.py"), folder)
    (folder / "README.md").write_text(model_card(trained), "utf-8")


def write_tokenizer(tokenizer, special, seq_len, folder):
    """Write a tokenizer that puts <s> before every text; return the id that it pads with.

    Unlike in our own scripts, a <mask> in a text is a mask.
    """
    bos = tokenizer.id_to_token(special.bos)
    pad = "<pad>" if tokenizer.token_to_id("<pad>") in special.all else bos
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, special.bos)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": bos,
        "pad_token": pad,
        "mask_token": "<mask>",
        "padding_side": "left",  # new tokens follow the last one of each prompt
        "clean_up_tokenization_spaces": False,
        "model_max_length": seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_json(config, folder / "tokenizer_config.json")
    return tokenizer.token_to_id(pad)


def write_json(content, path):
    path.write_text(json.dumps(content, indent=1))


CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A Llama with {n_parameters:,} parameters, trained by nanodual on two objectives at once:
autoregression (AR) and masked diffusion (MD).{origin}

- steps: {step:,}; share of AR sequences: {alpha}
- tokens read: {n_tokens:,}; repetitions of the training text: {repetitions:.3g}
- held-out losses in nats per token: {losses}

    AutoModelForCausalLM.from_pretrained("{name}")                          # left to right
    AutoModelForMaskedLM.from_pretrained("{name}", trust_remote_code=True)  # in both directions
    AutoModel.from_pretrained("{name}", trust_remote_code=True)             # the same, no head

In each of them, the state at a token predicts the next token, even if that is a `<mask>`.
"""


def model_card(trained):
    """Return the README.md of an exported model, with the facts as of this step."""
    s, checkpoint = trained.settings, trained.checkpoint
    step = checkpoint["step"]
    losses = "not measured"
    for record in checkpoint.get("records", []):
        if "val_ar" in record:
            losses = f"AR {record['val_ar']:.4f}, MD {record['val_md']:.4f} (step {record['step']})"
    return CARD.format(
        name=Path(s.out_dir).name,
        n_parameters=sum(p.numel() for p in trained.model.parameters()),
        origin=f" It started from {s.init_from}." if s.init_from else "",
        step=step,
        alpha=s.alpha,
        n_tokens=step * s.batch_size * s.seq_len,
        repetitions=s.repetitions * step / s.max_steps,
        losses=losses,
    )


# ---- in: checkpoints made from other models ------------------------------------------------------
def write_checkpoint(theirs, tool, s, step, tokenizer_json, folder):
    """Write a checkpoint, if these are exactly the tensors that the model needs."""
    with torch.device("meta"):
        model = Transformer(s)
    ours = {rename(name, tool): name for name in model.state_dict()}
    weights = {ours.get(name, name): weight.float() for name, weight in theirs.items()}
    model.load_state_dict(weights, assign=True)
    find_special_ids(tokenizer_json)  # refuses a tokenizer without <s> or <mask>
    content = {"model": weights, "settings": vars(s), "step": step, "tokenizer": tokenizer_json}
    torch.save(content, folder / f"ckpt_{step}.pt")


def import_llama(source, folder):
    """Turn a Llama, such as SmolLM2, into a checkpoint from which train.py can start."""
    if not (source / "config.json").is_file():
        die(f"there is no config.json in {source}: name the folder of a Llama")
    config = json.loads((source / "config.json").read_text("utf-8"))
    s = settings_of(config)
    original_tokenizer = (source / "tokenizer.json").read_text("utf-8")
    tokenizer_json = with_mask_token(original_tokenizer)
    mask = find_special_ids(tokenizer_json).mask
    largest_id = max(parse_tokenizer(tokenizer_json).get_vocab().values())
    s.vocab_size = max(s.vocab_size, largest_id + 1)

    weights = {}
    for file in sorted(source.glob("model*.safetensors")):  # one file, or its parts
        weights |= load_file(file)
    if not weights:
        die(f"there is no model.safetensors in {source}")
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
            if tokenizer_json != original_tokenizer:  # <mask> is new, but its row may be there
                weights[name][mask] = mean
    write_checkpoint(weights, "llama", s, 0, tokenizer_json, folder)


# What some families of models have that a Llama does not.
DIFFERENCES = {
    "gpt2": "learned positions and biases",
    "qwen2": "biases in its attention",
    "gemma": "scaled embeddings and a GELU",
}


def settings_of(config):
    """Return the settings that a Llama's config.json describes; refuse what we do not support."""
    family = config.get("model_type")
    if family not in ("llama", "mistral"):
        difference = DIFFERENCES.get(family, "other layers")
        die(f"this model is a {family}, which has {difference}: only a Llama can be read")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    needed = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,  # Mistral's; without it, a Mistral is a Llama
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "rope_type": "default",
        "rope_interleaved": False,
    }
    # Older files say "type"; newer ones keep rope_theta in rope_parameters.
    found = {"rope_type": rope.get("type")} | rope | config
    for name, value in needed.items():
        if found.get(name) not in (None, value):
            die(f"this {family} has {name} {found[name]}: only {value} is supported")

    settings = Settings(
        n_layer=config["num_hidden_layers"],
        n_head=config["num_attention_heads"],
        n_embd=config["hidden_size"],
        n_ff=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        # A longer window would cost memory.
        seq_len=min(config.get("max_position_embeddings", 2048), 2048),
        rope_theta=float(found.get("rope_theta", 10000.0)),
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )
    return check(settings)


def import_released(file, folder):
    """Turn a state dict from the paper's training code into a checkpoint; nothing is executed."""
    theirs = read_state_dict(file)
    tokenizer_json = file.with_name("tokenizer.json").read_text("utf-8")
    s = Settings(extra_head=True, ar_weight=2.0)  # the paper's sizes are the defaults
    weights = {}
    for name, weight in theirs.items():
        name = re.sub(r"^((_orig_mod|module|model)\.)+", "", name)  # left by compile and DDP
        if name in weights:
            die(f"{file} has {name} twice")
        weights[name] = weight
    write_checkpoint(weights, "released", s, s.max_steps, tokenizer_json, folder)


def read_state_dict(file):
    """Return {name: tensor} from a .safetensors file, or from a file that torch.save wrote."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # safetensors, pickle, zipfile and torch raise their own types
        die(f"{file} has no weights, or something besides weights: choose a released model's file")


# ---- the script ----------------------------------------------------------------------------------
def parse_arguments():
    parser = make_parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--ckpt", help="a nanodual checkpoint, or a run directory")
    source.add_argument("--from_llama", metavar="FOLDER", type=Path, help="a Llama to start from")
    source.add_argument("--from_official", metavar="FILE", type=Path, help="a released model")
    add = parser.add_argument
    add("--out", metavar="FOLDER", type=Path, required=True, help="a new folder to write")
    dtypes = ("float32", "bfloat16")
    add("--dtype", choices=dtypes, default=dtypes[0], help="type of the weights (float32)")
    args = parser.parse_args()
    if args.out.exists():
        die(f"{args.out} already exists: remove it, or choose another name")
    return args


def main():
    args = parse_arguments()
    source = args.ckpt or args.from_llama or args.from_official
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=args.out.parent) as parent:
        folder = Path(parent, "model")
        folder.mkdir()
        try:
            if args.ckpt:
                trained = load_model(args.ckpt, "cpu", "float32")
                if trained.settings.extra_head:
                    die(f"{args.ckpt} has the head of the released models, which is not a Llama's")
                write_llama(trained, args.dtype, folder)
            elif args.from_llama:
                import_llama(args.from_llama, folder)
            else:
                import_released(args.from_official, folder)
            folder.rename(args.out)
        except Exception as error:  # a damaged file, a full disk: each library raises its own type
            die(f"cannot turn {source} into {args.out}: {type(error).__name__}: {error}"[:500])
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
