"""
Run the GPU's kernels without a GPU, and compare what they compute with the plain model's results.

    pip install -r tests/requirements-interpret.txt    # Triton, beside the CPU build of torch
    python tests/interpret.py                          # two minutes on one core

Inductor is made to take the CPU for an H100. It generates kernels for the compiled blocks,
FlexAttention forward and backward, its block mask, the fused loss and the padded casts to bf16.
They run in Triton's interpreter; the matrix products between them run on the CPU.

1. The loss and every gradient, for AR, MD and a prefix in fp32, and for a prefix in bf16.
2. Controls: the same comparison must fail if the compiled model has a fault.
3. Three steps of train.py: accumulation, clipping, Muon, AdamW, validation, checkpoint.

Only a GPU can show whether Triton compiles these kernels correctly, whether their threads interfere
with each other, and how fast they are: see tests/gpu.py.
"""

import contextlib
import inspect
import json
import os
import runpy
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

from conftest import ROOT, flags, prose, read_records, run

folder = tempfile.TemporaryDirectory()  # removed at the end
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder.name}/cache"

# ruff: noqa: E402
import numpy as np
import torch
import torch._inductor.kernel.flex.flex_attention as flex_lowering
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
import triton
import triton.language as tl
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic
from triton.backends.compiler import GPUTarget
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

import model as model_py
from checkpoint import load_checkpoint
from configurator import Settings, check
from data import Batch
from model import HeadLoss, Transformer

FP32_LIMIT = 1e-5

# Three steps, each with one AR and one MD slot.
RUN = dict(
    n_layer=1,
    n_head=1,
    n_embd=64,
    seq_len=136,
    batch_size=2,
    micro_batch_size=1,
    max_steps=3,
    grad_clip=0.1,
    eval_interval=0,
    eval_tokens=400,
    device="cpu",
)

# ---- Inductor: take the CPU for an H100 ----------------------------------------------------------
torch._inductor.config.cpu_backend = "triton"
torch._inductor.config.compile_threads = 1
torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than run the plain model
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_properties = lambda device: mock.Mock(multi_processor_count=132)
triton.runtime.driver.set_active(mock.Mock(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
triton_helpers.set_driver_to_cpu = lambda: None
InductorChoices.get_config_heuristics = lambda self, device: CUDAConfigHeuristic()
flex._validate_device = lambda query, key, value: None  # would refuse a backward pass on a CPU
for module, function in (
    (flex, flex._apply_kernel_options),
    (flex_lowering, flex_lowering.flex_attention),
):
    source = inspect.getsource(function).replace('.type == "cpu"', '.type == "not this one"')
    exec(compile(source, module.__file__, "exec"), vars(module))

launches = Counter()  # how often each kernel was run
run_kernel = CachingAutotuner.run


def run_largest(self, *args, **kwargs):
    """Run a kernel with the largest block that a GPU would try: fewer programs to interpret."""
    launches[self.fn.__name__] += 1
    self.configs.sort(key=lambda config: config.kwargs.get("XBLOCK", 0), reverse=True)
    return run_kernel(self, *args, **kwargs)


CachingAutotuner.run = run_largest


# ---- Triton's interpreter: what it lacks, gets wrong or takes hours for --------------------------
def read(x):
    """Return an array of numbers. The interpreter keeps bf16 as bits: they become fp32."""
    if x.dtype.scalar == tl.bfloat16:
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    return x.data


def cast(self, x, dtype, rounding=None):
    """Round to the nearest bf16, as a GPU does. Triton's own function truncates."""
    if dtype.scalar == tl.bfloat16:
        rounded = torch.tensor(read(x).astype(np.float32)).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
    return TensorHandle(read(x).astype(interpreter._get_np_dtype(dtype)), dtype.scalar)


def dot(self, a, b, c, *precision):
    return TensorHandle(read(a) @ read(b) + c.data, c.dtype)


def reduce(self, tensors):
    """Combine two halves until one element is left. Triton's own loop takes hours."""
    tensors, axis = self.unravel(tensors, self.axis)
    while tensors[0].shape[axis] > 1:  # a power of 2
        halves = [[], []]
        for x in tensors:
            for half, numbers in zip(halves, np.split(x.handle.data, 2, axis)):
                half.append(self.to_tensor(numbers, x.dtype))
        result = self.combine_fn.fn(*halves[0], *halves[1])
        tensors = result if isinstance(result, tuple) else (result,)
    return [self.to_tensor(np.squeeze(x.handle.data, axis), x.dtype) for x in tensors]


def elementwise(function):
    """Make a Triton function from a numpy function."""
    return lambda x: tl.tensor(TensorHandle(function(x.handle.data), x.dtype), x.type)


interpreter.InterpreterBuilder.cast_impl = cast
interpreter.InterpreterBuilder.create_fp_to_fp = cast
interpreter.InterpreterBuilder.create_dot = dot
interpreter.ReduceOps.generic_reduce = reduce
for name in ("exp", "exp2", "log", "log2", "sqrt"):
    setattr(libdevice, name, elementwise(getattr(np, name)))
libdevice.rsqrt = elementwise(lambda x: 1 / np.sqrt(x))
# Turn off two things that would double the time: integer checks, and patching at every call.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
interpreter._patch_lang(mock.Mock(__globals__={"tl": tl, "core": tl.core}))
nothing_to_restore = interpreter._LangPatchScope()
interpreter._patch_lang = lambda function: nothing_to_restore


@contextlib.contextmanager
def cuda_path():
    """Do what train.py does on CUDA, except for compiling the blocks."""
    launches.clear()
    always = property(lambda self: True, lambda self, value: None)
    compiled_loss = torch.compile(HeadLoss.sequence_loss, dynamic=False)
    with (
        mock.patch.object(Transformer, "sparse", always, create=True),
        mock.patch.object(HeadLoss, "sequence_loss", compiled_loss),
    ):
        yield
    flex_kernels = [name for name in launches if name.startswith("triton_tem")]  # from a template
    n_backward = sum("backward" in name for name in flex_kernels)
    assert 0 < n_backward < len(flex_kernels), "FlexAttention has not run forward and backward"


# ---- the report ----------------------------------------------------------------------------------
n_failed = 0


def largest_difference(found, expected):
    """Return the largest distance between two tensors, relative to the norm of the expected one."""
    differences = [(x - y).norm() / y.norm() for x, y in zip(found, expected, strict=True)]
    return max(differences).item()


def judge(what, found, expected, limit, is_control=False):
    """Compare two lists of tensors. A control must exceed the limit, everything else must not."""
    global n_failed
    difference = largest_difference(found, expected)
    passed = (difference <= limit) != is_control
    n_failed += not passed
    verdict = "ok" if passed else "FAILED"
    relation = "> " if is_control else "<="
    print(f"{what:<42} {difference:.1e} {relation} {limit:.1e}   {verdict}", flush=True)


# ---- 1: the loss and every gradient --------------------------------------------------------------
def make_batch(B, T, prefix, vocab_size):
    """Return random tokens in documents of different lengths, with random weights."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(16, vocab_size, (B, T + 1))
    weights = generator.random((B, T), np.float32) / T
    borders = generator.random((B, T)) < 2 / T
    borders[:, T - 30] = True
    borders[0, min(T - 1, 128)] = True  # where a block of the mask begins
    segments = 1 + np.cumsum(borders, axis=1)
    arrays = tokens[:, :-1], tokens[:, 1:], weights, segments, np.full(B, prefix)
    return Batch(*(torch.from_numpy(array) for array in arrays), "any")


def loss_and_gradients(s, batch, dtype=torch.float32, compiled=False):
    torch.manual_seed(0)
    model = Transformer(s, dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=p.shape[-1] ** -0.5)  # also those that begin as 0 or 1
    if compiled:
        for block in model.blocks:
            block.compile(dynamic=False)
    with cuda_path() if compiled else contextlib.nullcontext():
        loss, ce = model.loss(batch, s.z_loss)
        loss.backward()
    return [loss, ce, *(p.grad for p in model.parameters())]


def compare(B, T):
    """Compare the compiled and the plain model in one shape; return what the controls need."""
    # Heads are as wide as the paper's. n_ff is not a multiple of 64: bf16 pads it with zeros.
    s = check(Settings(n_layer=1, n_head=2, n_embd=128, n_ff=100, vocab_size=270, seq_len=T))
    torch.compiler.reset()
    for mode, prefix in {"AR": 0, "MD": T, "prefix": T // 2}.items():
        batch = make_batch(B, T, prefix, s.vocab_size)
        exact = loss_and_gradients(s, batch)
        found = loss_and_gradients(s, batch, compiled=True)
        judge(f"{B} x {T}, {mode}, fp32", found, exact, FP32_LIMIT)
    # In bf16 the plain model has an error of its own: twice that is the limit.
    rounded = loss_and_gradients(s, batch, torch.bfloat16)
    limit = 2 * largest_difference(rounded, exact)
    found = loss_and_gradients(s, batch, torch.bfloat16, compiled=True)
    judge(f"{B} x {T}, {mode}, bf16", found, exact, limit)
    return s, batch, exact, limit


# ---- 2: controls ---------------------------------------------------------------------------------
def check_controls(s, batch, exact, bf16_limit):
    """Break the compiled model in small ways: the comparison must notice each of them."""

    def control(fault, batch, dtype=torch.float32, limit=FP32_LIMIT):
        found = loss_and_gradients(s, batch, dtype, compiled=True)
        judge(f"control: {fault}", found, exact, limit, is_control=True)

    control("the prefix is one too long", batch._replace(prefix=batch.prefix + 1))
    merged = batch.segments.clamp(max=batch.segments.max() - 1)
    control("a document border is missing", batch._replace(segments=merged))
    torch.compiler.reset()
    scale = 1.01 * (s.n_embd / s.n_head) ** -0.5
    with mock.patch.object(model_py, "flex_attention", partial(flex.flex_attention, scale=scale)):
        control("the scale is 1% too large", batch)
    torch.compiler.reset()
    with mock.patch.object(F, "pad", partial(F.pad, value=0.1)):
        control("the padding is 0.1, bf16", batch, torch.bfloat16, bf16_limit)


# ---- 3: train.py ---------------------------------------------------------------------------------
def compare_runs(folder):
    """Train for three steps, plainly and with the kernels; compare all losses and all weights."""
    lines = [json.dumps({"text": text}) + "\n" for text in prose(400)]
    Path(folder, "text.jsonl").write_text("".join(lines))
    arguments = ["--input", "text.jsonl", "--out", "data", "--vocab_size", "300"]
    run("prepare.py", *arguments, cwd=folder)
    settings = RUN | dict(data_dir=f"{folder}/data")
    run("train.py", *flags(**settings, out_dir=f"{folder}/plain"), cwd=folder)
    torch.compiler.reset()
    sys.argv = ["train.py", *flags(**settings, out_dir=f"{folder}/kernels", compile=True)]
    with cuda_path(), contextlib.redirect_stdout(None):
        runpy.run_path(os.path.join(ROOT, "train.py"), run_name="__main__")

    losses, weights = [], []
    for out_dir in (f"{folder}/kernels", f"{folder}/plain"):
        values = []
        for record in read_records(out_dir):
            values += [v for name, v in record.items() if name.startswith(("train_", "val_"))]
        losses.append([torch.tensor(value) for value in values])
        tensors = load_checkpoint(out_dir)["model"].values()
        weights.append([torch.cat([tensor.flatten() for tensor in tensors])])
    judge("train.py, three steps: losses", *losses, FP32_LIMIT)
    judge("train.py, three steps: weights", *weights, FP32_LIMIT)


if __name__ == "__main__":
    compare(2, 256)
    compare(1, 100)  # below 128, FlexAttention has another kernel for the forward pass
    check_controls(*compare(1, 200))
    compare_runs(folder.name)
    sys.exit(f"error: {n_failed} of these failed" if n_failed else 0)
