"""How the products of a model are computed; refuses what a device or transformers' code cannot do."""

from __future__ import annotations

import torch

from engine.config import ModelOptions
from engine.models.weights import LoadError
from kernels import triton as gpu
from kernels.attention.base import AttentionBackend
from kernels.linear import Precision
from kernels.linear_cuda import FP8_CAPABILITY, INT8_CAPABILITY
from kernels.quantize import FP8

_DTYPES = {"none": None, "int8": torch.int8, "fp8": FP8}


def precision_of(options: ModelOptions) -> Precision:
    """Return the precision of the fused decoder's products."""
    return Precision(_DTYPES[options.quantize], options.batch_invariant)


def fused_only(options: ModelOptions) -> str:
    """Return the options that are set and that only the fused decoder has, as on the command line; may be empty."""
    quantize = [] if options.quantize == "none" else [f"--quantize {options.quantize}"]
    return " and ".join(quantize + ["--batch-invariant"] * options.batch_invariant)


def check_precision(options: ModelOptions, device: torch.device) -> None:
    """Refuse what the device or transformers' code cannot do.

    Raises:
        LoadError: the message says what would work.
    """
    wanted = fused_only(options)
    if wanted and options.backend == "transformers":
        raise LoadError(f"{wanted} needs the fused decoder: leave out --backend transformers, or {wanted}")
    if options.quantize != "none":
        _check_quantize(options.quantize, device)
    if options.batch_invariant and device.type == "cuda" and gpu.load("matmul") is None:
        reason = gpu.disabled().get("matmul", "it is not installed")
        raise LoadError(f"--batch-invariant on a GPU needs Triton (pip install triton): {reason}")


def _check_quantize(quantize: str, device: torch.device) -> None:
    """Raise `LoadError` if the device has no products of this kind."""
    if device.type != "cuda":
        if quantize == "fp8":
            raise LoadError(
                "--quantize fp8 needs a GPU of compute capability 8.9 or newer; the CPU has --quantize int8"
            )
        return
    has = torch.cuda.get_device_capability(device)
    needed, instead = (FP8_CAPABILITY, "int8") if quantize == "fp8" else (INT8_CAPABILITY, "none")
    if has < needed:
        needs, found = (".".join(map(str, capability)) for capability in (needed, has))
        name = torch.cuda.get_device_name(device)
        raise LoadError(
            f"--quantize {quantize} needs a GPU of compute capability {needs} or newer; {name} has {found}: "
            f"use --quantize {instead}"
        )


def check_backend(options: ModelOptions, backend: AttentionBackend, *, shown: bool, replaced: str = "") -> None:
    """Refuse `--batch-invariant` where the attention or the products give a row other bits in other batches.

    Args:
        options: options of the model.
        backend: the attention backend.
        shown: on a CPU, whether products and attention gave equal bits in a test run.
        replaced: why another backend was replaced by this one; empty: it was chosen.

    Raises:
        LoadError: the message says what would work.
    """
    if not options.batch_invariant:
        return
    if backend.spec.device.type == "cpu":
        if not shown:
            raise LoadError(
                f"--batch-invariant: products or attention ({backend.name}) of this CPU give a row other bits in other "
                "batches; try --attention cpu or --attention reference, and another --dtype"
            )
    elif not backend.batch_invariant_on_gpu:
        if replaced:
            raise LoadError(f"--batch-invariant on a GPU needs the triton attention backend, which failed: {replaced}")
        raise LoadError(f"--batch-invariant on a GPU needs --attention triton, not {backend.name}")
