"""
Generate text with a trained model, in one of four modes.

    python sample.py --ckpt out/demo --prompt "The module"
    python sample.py --ckpt out/demo --mode prefix --prompt "A list"
    python sample.py --ckpt out/demo --mode diffusion --prompt "A list" --steps 32 --watch
    python sample.py --ckpt out/demo --mode infill --prompt "Return the<mask:3> of a list."

ar         continue the prompt, token by token, even past the model's window
prefix     the same, but the prompt is read in both directions
diffusion  put masks after the prompt, and fill them in
infill     fill the gaps in the prompt: <mask> is one token, <mask:12> is twelve
"""

import os
import re
import sys

from errors import die, report

if __name__ == "__main__":
    sys.excepthook = report
    sys.stdout.reconfigure(errors="replace")  # some terminals support few characters

import torch

from checkpoint import load_model
from configurator import make_parser
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
        # Of the top_k likeliest tokens, keep the fewest that make up a share top_p of their total.
        V = probabilities.shape[-1]
        highest, tokens = probabilities.topk(min(args.top_k or V, V))
        sum_before = highest.cumsum(-1) - highest
        enough = args.top_p * highest.sum(-1, keepdim=True)
        highest = highest.masked_fill(sum_before >= enough, 0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, tokens, highest)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0].cpu()


def rate_places(probabilities, order, generator):
    """Rate masked places by their distributions (M, V); the highest-rated is filled first."""
    if order == "random":
        return torch.rand(len(probabilities), generator=generator, device=probabilities.device)
    if order == "confidence":
        return probabilities.amax(-1)
    if order == "margin":
        best, second = probabilities.topk(2).values.unbind(-1)
        return best - second
    return -torch.special.entr(probabilities).sum(-1)  # entropy: the lowest first


# ---- the two ways to generate --------------------------------------------------------------------
def who_sees_whom(n_tokens, prefix, device):
    """Return the mask (1, 1, T, T) and positions (1, T) of a text whose prefix all tokens see."""
    positions = torch.arange(n_tokens, device=device)[None]
    segments = torch.ones_like(positions)
    return make_mask(segments, positions, torch.tensor([prefix], device=device)), positions


@torch.inference_mode()
def extend(model, special, prompt, window, generator, args):
    """Append args.length tokens to each row of a prompt (B, n), or fewer if <s> ends it.

    Yield all tokens after each new one. A cache keeps what was computed: the prompt is read once,
    then only the newest token. A text that outgrows the window loses its older half, and the rest
    is read anew, without <s>: most training windows do not begin with one either.
    """
    device = model.embed.weight.device
    B, n = prompt.shape
    n_prefix = n if args.mode == "prefix" else 0
    forbidden = [token for token in special.all if token != special.bos]
    tokens = torch.full((B, n + args.length), special.bos)
    tokens[:, :n] = prompt
    size = min(window, n + args.length)

    first = None  # where the window begins
    ended = torch.zeros(B, dtype=torch.bool)
    for end in range(n, n + args.length):
        if first is None or end - first > window:
            first = start = 0 if end <= window else end - window // 2
            caches = model.new_caches(B, size)
            mask, positions = who_sees_whom(size, n_prefix - first, device)
        new = slice(start - first, end - first)
        x = tokens[:, start:end].to(device)
        h = model.hidden(x, mask[:, :, new, : end - first], positions[:, new], caches)
        logits = model.head(h[:, -1]).float()
        logits[:, forbidden] = -torch.inf
        tokens[:, end] = draw(logits, generator, args).masked_fill(ended, special.bos)
        yield tokens
        ended = tokens[:, end] == special.bos
        if ended.all():
            return
        start = end


@torch.inference_mode()
def fill(model, special, tokens, generator, args):
    """Replace the masks in tokens (B, T) in args.steps steps, the same number in each.

    Yield the tokens after each step. A step first chooses places, by args.order and the
    distribution at temperature 1, then draws their tokens. One mask a step in random order is
    exactly any-order autoregressive sampling.
    """
    device = model.embed.weight.device
    T = tokens.shape[1]
    mask, positions = who_sees_whom(T, T, device)
    n_masks = tokens[0].tolist().count(special.mask)
    n_steps = min(args.steps or n_masks, n_masks)
    for step in range(n_steps):
        # Steps that are as equal as possible, and add up to n_masks.
        n_now = n_masks * (step + 1) // n_steps - n_masks * step // n_steps
        h = model.hidden(tokens.to(device), mask, positions)
        for b, row in enumerate(tokens):
            places = (row == special.mask).nonzero()[:, 0]
            logits = model.head(h[b, places - 1]).float()  # the token at p is predicted at p - 1
            logits[:, list(special.all)] = -torch.inf
            rating = rate_places(logits.softmax(-1), args.order, generator).cpu()
            chosen = rating.argsort(descending=True)[:n_now]
            row[places[chosen]] = draw(logits[chosen], generator, args)
        yield tokens


# ---- from prompts to rows of tokens --------------------------------------------------------------
def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def encode_after_gap(tokenizer, text):
    """Encode a text that does not begin a document, but follows a gap.

    Many tokenizers put a space before whatever they encode. To avoid it, encode the text after
    another character, one that does not merge with the text, and cut that off.
    """
    for character in "\n.a0":
        before = encode(tokenizer, character)
        both = encode(tokenizer, character + text)
        if before and both[: len(before)] == before:
            return both[len(before) :]
    return encode(tokenizer, text)


def make_row(prompt, tokenizer, special, mode):
    """Return <s> and the tokens of a prompt; in infill mode, with masks for its gaps."""
    if mode != "infill":
        return [special.bos] + encode(tokenizer, prompt)
    first, *rest = GAP.split(prompt)  # text, then the length of a gap and text in turn
    row = [special.bos] + encode(tokenizer, first)
    for length, text in zip(rest[0::2], rest[1::2]):
        row += [special.mask] * int(length or 1)
        row += encode_after_gap(tokenizer, text)
    return row


def read_prompt(args):
    """Return the prompt: from the flag or a pipe; at a terminal, an empty one."""
    if args.prompt is not None:
        return args.prompt
    if os.isatty(0):
        return ""
    with open(sys.stdin.fileno(), encoding="utf-8") as file:
        return file.read().removesuffix("\n")


# ---- the script ----------------------------------------------------------------------------------
def parse_arguments():
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--ckpt", default="out/demo", help="checkpoint, or run directory (out/demo)")
    add("--mode", choices=MODES, default="ar", help="how to generate, see above (ar)")
    add("--prompt", help="the text to begin with (standard input)")
    add("--num_samples", type=int, default=1, help="texts to generate (1)")
    add("--length", type=int, default=0, help="new tokens; 0: 64, or as many as fit (0)")
    add("--temperature", type=float, default=1.0, help="0: always the likeliest token (1)")
    add("--top_k", type=int, default=0, help="draw from this many likeliest tokens; 0: all (0)")
    add("--top_p", type=float, default=1.0, help="draw from the likeliest, up to this share (1)")
    add("--steps", type=int, default=0, help="steps to fill the masks; 0: one for each (0)")
    add("--order", choices=ORDERS, default="random", help="which masks are filled first (random)")
    add("--watch", action="store_true", help="show the text after every step")
    add("--seed", type=int, default=1, help="the same seed gives the same text (1)")
    args = parser.parse_args()

    if min(args.length, args.steps, args.top_k) < 0 or args.length > 10**6:
        die("--length (up to a million), --steps and --top_k must be at least 0")
    if args.num_samples < 1:
        die("--num_samples must be at least 1")
    if not (0 <= args.temperature < 1e6 and 0 < args.top_p <= 1):
        die("--temperature must be at least 0, and --top_p must be above 0 and at most 1")
    if not 0 <= args.seed < 2**63:
        die("--seed must be from 0 to 2^63 - 1")
    return args


def show(tokens, tokenizer, special):
    """Print the texts so far, with masks as _; on a terminal, clear the screen first."""
    if sys.stdout.isatty():
        print("\033[2J\033[H", end="")
    for row in tokens.tolist():
        row = [token for token in row if token != special.bos]
        print(tokenizer.decode(row, skip_special_tokens=False).replace("<mask>", "_"))


def main():
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"  # MPS has no fp64
    model, tokenizer, special, settings, _ = load_model(args.ckpt, device)
    window = settings.seq_len
    try:
        row = make_row(read_prompt(args), tokenizer, special, args.mode)
    except (UnicodeError, TypeError):  # the latter from `tokenizers`
        die("the prompt is not valid UTF-8")
    if args.mode == "diffusion":
        args.length = args.length or max(1, min(64, window - len(row)))
        row += [special.mask] * args.length

    generator = torch.Generator(device).manual_seed(args.seed)
    tokens = torch.tensor([row] * args.num_samples)
    if args.mode in ("ar", "prefix"):
        args.length = args.length or 64
        versions = extend(model, special, tokens, window, generator, args)
    else:
        if len(row) > window:
            die(f"{len(row)} tokens (<s>, prompt, masks) exceed this model's window of {window}")
        if special.mask not in row:
            die("nothing to fill in: write <mask> or <mask:12> in the prompt")
        versions = fill(model, special, tokens, generator, args)
    for tokens in versions:
        if args.watch:
            show(tokens, tokenizer, special)
    print(*tokenizer.decode_batch(tokens.tolist()), sep="\n---------------\n")


if __name__ == "__main__":
    main()
