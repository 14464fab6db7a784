"""
Generate text with a trained model, in each of the ways it can be read.

    python sample.py --ckpt out/demo --prompt "The module"
    python sample.py --ckpt out/demo --mode prefix --prompt "The module" "A list"
    python sample.py --ckpt out/demo --mode diffusion --prompt "A list" --steps 32 --watch
    python sample.py --ckpt out/demo --mode infill --prompt "Return the<mask:3> of a list."

ar         continue the prompt, token by token
prefix     the same, but the prompt is read in both directions
diffusion  put masks after the prompt, and fill them in
infill     fill the gaps in the prompt: <mask> is one token, <mask:12> are twelve
"""

import argparse
import os
import re
import sys

from errors import die, report

if __name__ == "__main__":
    sys.excepthook = report
    sys.stdout.reconfigure(errors="replace")  # some terminals know few letters

import torch

from checkpoint import load_model
from model import make_mask

MODES = ("ar", "prefix", "diffusion", "infill")
ORDERS = ("random", "confidence", "margin", "entropy")
GAP = re.compile(r"<mask(?::(\d{1,6}))?>")


# ---- from distributions to tokens ----------------------------------------------------------------
def draw(logits, generator, args):
    """Draw a token from each row of logits (N, V); return (N,) tokens on the CPU."""
    if args.temperature == 0:
        return logits.argmax(-1).cpu()
    # In fp64: rounding in fp32 would cut off the tail. The largest logit becomes 0, so that no
    # temperature is too low.
    logits = logits.double()
    logits = (logits - logits.amax(-1, keepdim=True)) / args.temperature
    probabilities = logits.softmax(-1)

    if args.top_k > 0 or args.top_p < 1:
        # Of the top_k likeliest tokens, keep the fewest that make up a share top_p of them.
        V = probabilities.shape[-1]
        highest, tokens = probabilities.topk(min(args.top_k or V, V))
        sum_before = highest.cumsum(-1) - highest
        enough = args.top_p * highest.sum(-1, keepdim=True)
        highest = highest.masked_fill(sum_before >= enough, 0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, tokens, highest)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0].cpu()


def rate_places(probabilities, order, generator):
    """Rate masked places by what the model says of them, (M, V); the highest is filled first."""
    if order == "random":
        return torch.rand(len(probabilities), generator=generator, device=probabilities.device)
    if order == "confidence":
        return probabilities.amax(-1)
    if order == "margin":
        best, second = probabilities.topk(2).values.unbind(-1)
        return best - second
    return -torch.special.entr(probabilities).sum(-1)  # entropy: the lowest first


# ---- the two ways to generate --------------------------------------------------------------------
def pad_rows(rows, n_new, bidirectional, special, device):
    """Return tokens (B, S), mask (B, 1, S, S) and positions (B, S) of rows of any lengths.

    Rows are padded on the left, so that all end together; n_new free places follow. The padding is
    a segment of its own. It and the free places hold <s>, which is never printed.
    """
    lengths = torch.tensor([len(row) for row in rows])
    longest = max(len(row) for row in rows)
    padded = []
    for row in rows:
        padding = [special.bos] * (longest - len(row))
        padded.append(padding + row + [special.bos] * n_new)

    positions = torch.arange(longest + n_new) - (longest - lengths)[:, None]
    segments = torch.where(positions < 0, -1, 1)
    prefix = lengths if bidirectional else torch.zeros_like(lengths)
    mask = make_mask(segments, positions, prefix)
    return torch.tensor(padded), mask.to(device), positions.to(device)


@torch.inference_mode()
def extend(model, special, rows, generator, args):
    """Append up to args.length tokens to every row, fewer if <s> ends it; yield after each.

    A cache keeps what was computed: the prompt is read once, then only the newest token.
    """
    device = model.embed.weight.device
    both_ways = args.mode == "prefix"
    tokens, mask, positions = pad_rows(rows, args.length, both_ways, special, device)
    B, S = tokens.shape
    caches = model.new_caches(B, S)
    forbidden = [token for token in special.all if token != special.bos]

    start = 0
    ended = torch.zeros(B, dtype=torch.bool)
    for end in range(S - args.length, S):
        new = slice(start, end)
        x = tokens[:, new].to(device)
        h = model.hidden(x, mask[:, :, new, :end], positions[:, new], caches)
        logits = model.head(h[:, -1]).float()
        logits[:, forbidden] = -torch.inf
        tokens[:, end] = draw(logits, generator, args).masked_fill(ended, special.bos)
        yield tokens
        ended = tokens[:, end] == special.bos
        if ended.all():
            return
        start = end


@torch.inference_mode()
def fill(model, special, rows, generator, args):
    """Replace all masks in args.steps steps, equally many in each; yield after each step.

    A step first chooses places, by args.order and the distribution without temperature, then draws
    their tokens. One mask a step in random order is exactly any-order autoregressive sampling.
    """
    device = model.embed.weight.device
    tokens, mask, positions = pad_rows(rows, 0, True, special, device)
    masked = tokens == special.mask
    blocks = (masked.cumsum(1) - 1) // (
        args.block or tokens.shape[1]
    )  # which block each mask is in

    for step in range(args.steps):
        h = model.hidden(tokens.to(device), mask, positions)
        for b, n_masks in enumerate(masked.sum(1).tolist()):
            # Steps that are as equal as they can be, and add up to n_masks.
            n_now = n_masks * (step + 1) // args.steps - n_masks * step // args.steps
            if n_now == 0:
                continue
            places = (tokens[b] == special.mask).nonzero()[:, 0]
            logits = model.head(h[b, places - 1]).float()  # the token at p is predicted at p - 1
            logits[:, list(special.all)] = -torch.inf

            # The highest ratings first; then, as this sort is stable, earlier blocks first.
            rating = rate_places(logits.softmax(-1), args.order, generator).cpu()
            ranked = rating.argsort(descending=True)
            ranked = ranked[blocks[b, places[ranked]].argsort(stable=True)]
            chosen = ranked[:n_now]
            tokens[b, places[chosen]] = draw(logits[chosen], generator, args)
        yield tokens


# ---- from prompts to rows of tokens --------------------------------------------------------------
def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def encode_after_gap(tokenizer, text):
    """Encode a text that does not begin a document, but follows a gap.

    Many tokenizers put a space before whatever they encode. To get none, encode the text behind
    another character and cut that off; one will do that does not merge with the text.
    """
    for character in "\n.a0":
        before = encode(tokenizer, character)
        both = encode(tokenizer, character + text)
        if before and both[: len(before)] == before:
            return both[len(before) :]
    return encode(tokenizer, text)


def make_row(prompt, tokenizer, special, args):
    """Return <s>, the tokens of a prompt, and the masks that are to be filled."""
    if args.mode != "infill":
        n_masks = args.length if args.mode == "diffusion" else 0
        return [special.bos] + encode(tokenizer, prompt) + [special.mask] * n_masks

    first, *rest = GAP.split(prompt)  # text, then the length of a gap and text in turn
    row = [special.bos] + encode(tokenizer, first)
    for length, text in zip(rest[0::2], rest[1::2]):
        row += [special.mask] * int(length or 1)
        row += encode_after_gap(tokenizer, text)
    return row


def read_prompts(args):
    """Return the prompts: from flags, a file or a pipe; at a terminal, an empty one."""
    if args.prompt:
        return args.prompt
    if not args.prompt_file and os.isatty(0):
        return [""]
    with open(args.prompt_file or sys.stdin.fileno(), encoding="utf-8") as file:
        return [file.read().removesuffix("\n")]


def check_rows(rows, special, window, args):
    """Refuse what the model's window cannot hold, and a prompt without anything to do."""
    longest = max(len(row) for row in rows)
    n_new = args.length if args.mode in ("ar", "prefix") else 0
    n_inputs = longest + max(n_new - 1, 0)  # the last new token is not read
    if n_inputs > window:
        die(
            f"{longest} tokens (<s>, prompt, masks) and {n_new} new ones do not fit into this "
            f"model's window of {window}"
        )
    if args.mode == "infill" and not any(special.mask in row for row in rows):
        die("nothing to fill in: write <mask> or <mask:12> into the prompt")


# ---- the script ----------------------------------------------------------------------------------
def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ckpt", default="out/demo", help="checkpoint, or directory of a run (out/demo)")
    add("--mode", choices=MODES, default="ar", help="how to generate, see above (ar)")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", nargs="+", help="one or several texts (standard input)")
    prompts.add_argument("--prompt_file", help="file with one text")
    add("--num_samples", type=int, default=1, help="samples of each prompt (1)")
    add("--length", type=int, default=64, help="new tokens: at most, in diffusion exactly (64)")
    add("--temperature", type=float, default=1.0, help="0: always the likeliest token (1)")
    add("--top_k", type=int, default=0, help="draw from this many likeliest tokens; 0: all (0)")
    add("--top_p", type=float, default=1.0, help="draw from the likeliest with this share (1)")
    add("--steps", type=int, default=0, help="steps that fill the masks; 0: one for each (0)")
    add("--order", choices=ORDERS, default="random", help="which masks are filled first (random)")
    add("--block", type=int, default=0, help="masks in a block, left to right; 0: no blocks (0)")
    add("--watch", action="store_true", help="show the text after every step")
    add("--seed", type=int, default=1, help="the same seed gives the same text (1)")
    args = parser.parse_args()

    if not (1 <= args.length <= 10**6 and 1 <= args.num_samples):
        die("--length (up to a million) and --num_samples must be at least 1")
    if min(args.steps, args.block, args.top_k) < 0:
        die("--steps, --block and --top_k must be at least 0")
    if not (0 <= args.temperature < 1e6 and 0 < args.top_p <= 1):
        die("--temperature must be at least 0, and --top_p a share above 0 and up to 1")
    if not 0 <= args.seed < 2**63:
        die("--seed must be from 0 to 2^63 - 1")
    return args


def show(tokens, tokenizer, special):
    """Print the texts so far, masks as _, on a cleared screen if it is one."""
    if sys.stdout.isatty():
        print("\033[2J\033[H", end="")
    for row in tokens.tolist():
        row = [token for token in row if token != special.bos]
        print(tokenizer.decode(row, skip_special_tokens=False).replace("<mask>", "_"))


def main():
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"  # MPS has no fp64
    model, tokenizer, special, settings, _ = load_model(args.ckpt, device)

    try:
        rows = [make_row(p, tokenizer, special, args) for p in read_prompts(args)]
    except (UnicodeError, TypeError):  # the latter from `tokenizers`
        die("the prompt is not valid UTF-8")
    check_rows(rows, special, settings.seq_len, args)

    rows = [row for row in rows for _ in range(args.num_samples)]
    n_masks = max(row.count(special.mask) for row in rows)
    args.steps = min(args.steps or n_masks, n_masks)
    generator = torch.Generator(device).manual_seed(args.seed)
    generate = extend if args.mode in ("ar", "prefix") else fill
    for tokens in generate(model, special, rows, generator, args):
        if args.watch:
            show(tokens, tokenizer, special)
    print(*tokenizer.decode_batch(tokens.tolist()), sep="\n---------------\n")


if __name__ == "__main__":
    main()
