"""
The machine that a script runs on: its device, and the processes that share the work.
"""

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist

# Import this before a process group exists. Its functions take the group as a default argument:
# imported later (as by any torch optimizer), they would keep it alive. gloo's threads would then
# outlive destroy_process_group and sometimes abort a process that has finished its work.
import torch.distributed.nn  # noqa: F401
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from errors import die

TIMEOUT = timedelta(minutes=10)  # a rank that has waited this long for another one gives up


def choose_device(device="auto", dtype="auto"):
    """Choose a device and set it up; return its name and the dtype of the forward pass.

    bfloat16 is for CUDA devices that have it in hardware. Elsewhere float32 is used: a CPU
    without bfloat16 instructions emulates it, hundreds of times slower.
    """
    available = [name for name in ("cuda", "mps") if getattr(torch, name).is_available()]
    available.append("cpu")
    if device == "auto":
        device = available[0]
    if device not in available:
        die(f"this machine has no '{device}', only: {', '.join(available)}")

    has_bf16 = False
    if device == "cuda":
        # The modulo is for launchers that show each process only its own device, as number 0.
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        n_devices = torch.cuda.device_count()
        if local_rank >= n_devices > 1:
            die(f"this host has {n_devices} GPUs: start no more processes than that")
        torch.cuda.set_device(local_rank % n_devices)
        # cuDNN's attention would make a plan for every new shape, and evaluation has many.
        torch.backends.cuda.enable_cudnn_sdp(False)
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if dtype == "auto" and not has_bf16 and local_rank == 0:
            print(f"{torch.cuda.get_device_name()} has no bfloat16: computing in float32")

    if dtype == "auto":
        dtype = "bfloat16" if has_bf16 else "float32"
    return device, getattr(torch, dtype)


def join_ranks(device):
    """Return this process's rank and the number of processes, as torchrun started them."""
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
        atexit.register(dist.destroy_process_group)
    return rank, world


def sum_over_ranks(tensor):
    """Return the sum of a small tensor over all ranks."""
    if not dist.is_initialized():
        return tensor
    on_gpu = dist.get_backend() == "nccl"
    total = tensor.to("cuda" if on_gpu else "cpu", copy=True)
    dist.all_reduce(total)
    return total.to(tensor.device)


def any_rank(flag):
    """Return, on every rank, whether the flag is set on any of them."""
    return sum_over_ranks(torch.tensor(float(flag))).item() > 0


def all_reduce_gradients(params):
    """Sum these parameters' gradients over all ranks, in one message."""
    if dist.is_initialized():
        gradients = [p.grad for p in params]
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat)
        vector_to_parameters(flat, gradients)
