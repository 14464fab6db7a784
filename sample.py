"""
Text from a trained model, in each of the ways it can be read.

    python sample.py --ckpt out/demo --prompt "The module"                          # ar: from left to right
    python sample.py --ckpt out/demo --mode prefix --prompt "The module" "A list"   # each prompt is read both ways
    python sample.py --ckpt out/demo --mode diffusion --prompt "A list" --steps 32 --order confidence --watch
    python sample.py --ckpt out/demo --mode infill --prompt "Return the<mask:3> of a list." --num_samples 4

Without --prompt the text is --prompt_file or standard input. --length: of new tokens; --temperature 0: the likeliest;
--top_k, --top_p: cut the tail. --steps of unmasking (one per mask), in --order random, confidence, margin or entropy,
--block masks at a time from left to right; --watch shows them. The same --seed gives the same text.
"""

import re, sys

import torch
from configurator import die, flags
from data import BOS, MASK, N_SPECIAL
from model import load_model, make_mask

ORDERS = {
    "random": lambda p, g: torch.rand(
        len(p), generator=g, device=p.device
    ),  # (M, V) probabilities -> (M,)
    "confidence": lambda p, g: p.amax(-1),
    "margin": lambda p, g: -p.topk(2).values.diff()[:, 0],  # in [0, 1],
    "entropy": lambda p, g: (-torch.special.entr(p).sum(-1)).exp(),
}  # the highest is unmasked first


def draw(logits, g, s):
    """(N, V) logits -> (N,) tokens, in fp64, because noise in fp32 cuts off the tail."""
    if s.temperature == 0:
        return logits.argmax(-1).cpu()
    p = ((logits.double() - logits.amax(-1, keepdim=True)) / s.temperature).softmax(-1)
    if (
        s.top_k or s.top_p < 1
    ):  # of the top_k likeliest tokens the fewest that make up a share top_p of them
        high, order = p.topk(min(s.top_k or p.shape[-1], p.shape[-1]))
        high = high.masked_fill(high.cumsum(-1) - high >= s.top_p * high.sum(-1, keepdim=True), 0)
        p = torch.zeros_like(p).scatter(-1, order, high)
    return torch.multinomial(p, 1, generator=g)[:, 0].cpu()


def lay_out(rows, n_free, both_ways, device):
    """Rows -> tokens (B, S), mask (B, 1, S, S), positions (B, S): padding on the left, which is a segment of its own,
    and n_free places for new tokens on the right. Both hold <s>, which no text contains."""
    lengths = torch.tensor([len(row) for row in rows])
    P = max(lengths).item()
    x = torch.tensor([[BOS] * (P - len(row)) + row + [BOS] * n_free for row in rows])
    positions = torch.arange(P + n_free) - (P - lengths)[:, None]
    mask = make_mask(
        torch.where(positions < 0, -1, 1), positions, lengths * both_ways
    )  # on the CPU, so a dense one
    return x, mask.to(device), positions.to(device)


@torch.inference_mode()
def extend(model, rows, g, s):
    """Token after token until <s>, with a cache; the prompt is read once, in mode prefix in both directions."""
    x, mask, positions = lay_out(rows, s.length, s.mode == "prefix", model.embed.weight.device)
    (B, S), H, start, ended = (
        x.shape,
        model.blocks[0].n_head,
        0,
        torch.zeros(len(rows), dtype=torch.bool),
    )
    cache = torch.empty(
        len(model.blocks), 2, B, H, S, model.head_width, dtype=model.dtype, device=mask.device
    )
    for end in range(S - s.length, S):
        new = slice(start, end)
        h = model.hidden(
            x[:, new].to(mask.device), mask[:, :, new, :end], positions[:, new], list(cache)
        )
        logits = model.head(h[:, -1]).float()
        logits[:, :BOS] = logits[:, BOS + 1 : N_SPECIAL] = -torch.inf
        x[:, end] = draw(logits, g, s).masked_fill(ended, BOS)
        start, ended = end, x[:, end] == BOS
        yield x
        if ended.all():
            return


@torch.inference_mode()
def fill(model, rows, g, s):
    """Replace all masks in s.steps steps, equally many in each, s.block at a time from left to right. Where comes
    before what, from the distribution without temperature and noise; one at a time at random is any-order sampling."""
    x, mask, positions = lay_out(rows, 0, True, model.embed.weight.device)
    holes, block = [row.nonzero()[:, 0] for row in x == MASK], s.block or x.shape[1]
    for step in range(s.steps):
        h = model.hidden(x.to(mask.device), mask, positions)
        for row, state, hole in zip(x, h, holes):
            done, goal = len(hole) * step // s.steps, len(hole) * (step + 1) // s.steps
            if goal > done:
                left = (row[hole[: -(-goal // block) * block]] == MASK).nonzero()[
                    :, 0
                ]  # in the blocks reached
                logits = model.head(
                    state[hole[left] - 1]
                ).float()  # the token at p is predicted at p - 1
                logits[:, :N_SPECIAL] = -torch.inf
                sure = ORDERS[s.order](logits.softmax(-1), g).cpu() - 2 * (left // block)
                best = sure.topk(goal - done).indices
                row[hole[left[best]]] = draw(logits[best], g, s)
        yield x


if __name__ == "__main__":
    s = flags(
        __doc__,
        ckpt="out/demo",
        mode=("ar", "prefix", "diffusion", "infill"),
        prompt=[],
        prompt_file="",
        seed=1,
        num_samples=1,
        length=64,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        steps=0,
        order=tuple(ORDERS),
        block=0,
        watch=False,
    )
    least = min(s.length - 1, s.num_samples - 1, s.steps, s.block, s.top_k, s.seed)
    if least < 0 or s.seed >= 2**63 or not (0 <= s.temperature < 1e6 and 0 < s.top_p <= 1):
        die(
            "--length and --num_samples are at least 1, --top_p is a share up to 1, other numbers are at least 0"
        )
    model, tokenizer, checkpoint = load_model(
        s.ckpt, "cuda" if torch.cuda.is_available() else "cpu"
    )  # MPS has no fp64
    rows, T, causal = [], checkpoint["settings"].seq_len, s.mode in ("ar", "prefix")
    try:
        for prompt in s.prompt or [
            open(s.prompt_file or 0, encoding="utf-8").read().removesuffix("\n")
        ]:
            pieces = (
                re.split(r"<mask:?(\d{,9})>", prompt)
                if s.mode == "infill"
                else [prompt, s.length][: 2 - causal]
            )
            rows.append([BOS])
            for i, piece in enumerate(pieces):  # text and the number of masks after it alternate
                rows[-1] += (
                    [MASK] * min(int(piece or 1), 10**6)
                    if i % 2
                    else tokenizer.encode(piece, add_special_tokens=False).ids
                )
    except (UnicodeError, TypeError):
        die("the prompt is not valid UTF-8")
    P, masks = max(map(len, rows)), max(row.count(MASK) for row in rows)
    if P + s.length * causal > T + causal:  # the last token of ar and prefix is no input
        die(
            f"{P} tokens (<s>, prompt, masks) and {s.length * causal} more do not fit into this model's window of {T}"
        )
    if not causal and not masks:
        die("nothing to fill in: write <mask> or <mask:12> into the prompt")
    s.steps = min(s.steps or masks, masks)
    g = torch.Generator(model.embed.weight.device).manual_seed(s.seed)
    for x in (extend if causal else fill)(
        model, [row for row in rows for _ in range(s.num_samples)], g, s
    ):
        if s.watch:
            frame = tokenizer.decode_batch(
                x.masked_fill(x == MASK, tokenizer.token_to_id("_")).tolist()
            )
            print("\033[2J\033[H" * sys.stdout.isatty(), *frame, sep="\n")
    print(*tokenizer.decode_batch(x.tolist()), sep="\n---------------\n")
