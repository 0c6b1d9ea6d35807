"""Checks a GPU's kernels before the worker is ready, and replaces those that are wrong or do not compile.

Each group of kernels runs on random input in the model's sizes and dtype, and is compared with fp64 on the CPU. A group
that fails is replaced for the whole process: an attention backend by the next one, other groups by the same operations
in torch. The replacement is checked as well; if it fails, the worker does not start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import structlog
import torch

from engine.checks.attention import check_attention, check_invariance, check_write
from engine.checks.operations import check_gates, check_norms
from engine.checks.products import check_experts, check_invariant_products, check_quantize
from engine.checks.sampling import check_sampler
from engine.checks.usage import Usage
from engine.models.loading import LoadedModel
from kernels import triton
from kernels.attention import AUTO, backend_class, backend_names, get_backend
from kernels.attention.base import AttentionBackend

log = structlog.get_logger()

Check = Callable[[], str | None]
"""A check: returns what is wrong, or None."""
_MESSAGE = 300
"""Maximum length of a reason, since a compiler's message may fill pages."""
_COSTS = {
    "attention": "steps are slower, most of all with long contexts",
    "write": "each layer launches some thirty kernels more",
    "norm": "each layer launches some twenty kernels more",
    "gate": "each layer launches some ten kernels more",
    "sampler": "sampling takes longer",
    "moe": "small steps compute every expert for every token, larger ones wait for the device in each layer",
    "matmul": "matrix products take longer",
    "quantize": "each matrix product launches some ten kernels more",
    "graphs": "each kernel of a decode step is launched by itself",
    "overlap": "the device is idle while the host schedules a step",
}


class GpuFails(RuntimeError):
    """A part computes wrong results even in plain torch on this GPU, or the GPU was lost during a check."""


class SelfCheck:
    """Runs the checks of one model on one GPU, and records which parts were replaced."""

    def __init__(self, loaded: LoadedModel, block_size: int) -> None:
        """Create it without running a check. `block_size`: tokens of a KV block; 0: the attention backend chooses."""
        self._loaded = loaded
        self._spec = loaded.cache_spec(block_size)
        self._began = time.monotonic()

    @property
    def fallbacks(self) -> dict[str, str]:
        """Replaced part → the reason."""
        return self._loaded.serving.fallbacks

    def replace(self, part: str, reason: str, instead: str) -> None:
        """Record and log that a part is replaced.

        Args:
            part: one of `engine.start.serving.PARTS`.
            reason: why the part is not used.
            instead: what is used in its place.
        """
        self.fallbacks[part] = reason
        log.warning("kernel_fallback", kernel=part, reason=reason, instead=instead, effect=_COSTS[part])

    def attention(self, name: str) -> AttentionBackend:
        """Return the first backend that passes its check: the named one, then the others, the fastest first.

        Raises:
            ValueError: no backend has this name, or it cannot run the model.
            GpuFails: no backend passes its check.
        """
        if name != AUTO and name not in backend_names():
            get_backend(name, self._spec)  # raises
        names = sorted(backend_names(), key=lambda candidate: candidate != name)  # stable: the named one first
        reasons: list[str] = []
        for candidate in names:
            backend_type = backend_class(candidate)
            if not backend_type.runs_on(self._spec.device) and candidate != name:
                continue
            try:
                backend = backend_type(self._spec)
            except ValueError as refusal:
                if candidate == name:
                    raise
                reasons.append(str(refusal))
                continue
            wrong = self._check_attention(backend)
            if wrong is None:
                if reasons:
                    self.replace("attention", "; ".join(reasons), candidate)
                return backend
            reasons.append(f"{candidate}: {wrong}")
            if candidate == "triton":
                triton.disable("attention", wrong)
        raise GpuFails(f"no attention backend passes its check on this GPU: {'; '.join(reasons)}")

    def operations(self, usage: Usage) -> None:
        """Check all groups of kernels that the model uses, except those of attention.

        Raises:
            GpuFails: a group is wrong in torch as well.
        """
        checks = [("norm", check_norms), ("gate", check_gates), ("sampler", check_sampler)]
        if usage.precision.quantize is not None:
            checks.append(("quantize", check_quantize))
        if usage.precision.batch_invariant and usage.hidden_size:
            checks.append(("matmul", check_invariant_products))
        if usage.experts is not None:
            checks.append(("moe", check_experts))
        for group, check in checks:
            self.group(group, partial(check, usage))

    def group(self, name: str, check: Check) -> None:
        """Check a group of kernels, and disable it if it fails.

        Raises:
            GpuFails: the operations in torch fail as well.
        """
        wrong = attempt(name, check)
        if wrong is None:
            return
        if triton.enabled(name):
            triton.disable(name, wrong)
            self.replace(name, wrong, "torch")
            wrong = attempt(name, check)
        if wrong is not None:
            raise GpuFails(f"{name} in torch computes wrong results on this GPU: {wrong}")

    def finish(self) -> None:
        """Log how long the checks took."""
        took = round(time.monotonic() - self._began, 1)
        log.info("kernels_checked", seconds=took, fallbacks=",".join(sorted(self.fallbacks)) or "none")

    def _check_attention(self, backend: AttentionBackend) -> str | None:
        usage = Usage.of(self._loaded, backend.spec)
        small = type(backend)(usage.spec)
        wrong = attempt("attention", partial(check_attention, usage, small))
        if wrong is not None:
            return wrong
        if self._spec.batch_invariant:
            wrong = attempt("attention", partial(check_invariance, usage, small))
            if wrong is not None:
                return wrong
        check = partial(check_write, usage, small)
        if backend.name == "triton":
            self.group("write", check)
            return None
        return attempt("write", check)


def attempt(part: str, check: Check) -> str | None:
    """Run a check; return what is wrong, or the exception that it raised, in one line; None if all is right.

    Raises:
        GpuFails: the device was lost, so that nothing else can run in this process, or the check raised this.
        torch.OutOfMemoryError: the device is full; the kernel may be right.
    """
    try:
        with torch.inference_mode():
            wrong = check()
    except (torch.OutOfMemoryError, GpuFails):
        raise
    except torch.AcceleratorError as error:
        hint = "name another backend with --attention" if part in ("attention", "write") else "update Triton and driver"
        raise GpuFails(f"the check of {part} lost the GPU ({_line(error)}): {hint}") from error
    except Exception as error:
        log.debug("check_failed", kernel=part, exc_info=True)
        wrong = f"{type(error).__name__}: {_line(error)}"
    return None if wrong is None else wrong[:_MESSAGE]


def checked_backend(loaded: LoadedModel, attention: str, block_size: int) -> tuple[AttentionBackend, SelfCheck | None]:
    """Choose the attention backend. On a GPU, check it and all other kernels that the model uses.

    Args:
        loaded: the model; the fallbacks are written to its `serving`.
        attention: name of a backend, or `auto`.
        block_size: tokens of a block; 0: the backend chooses.

    Raises:
        ValueError: the backend cannot run the model.
        GpuFails: a part is wrong on this GPU even in plain torch, or the GPU was lost.
    """
    if loaded.device.type != "cuda":
        backend = get_backend(attention, loaded.cache_spec(block_size))
        loaded.serving.attention = backend.name
        return backend, None
    loaded.serving.gpu = torch.cuda.get_device_name(loaded.device)
    checks = SelfCheck(loaded, block_size)
    checks.operations(Usage.of(loaded, loaded.cache_spec(max(1, block_size))))
    backend = checks.attention(attention)
    loaded.serving.attention = backend.name
    return backend, checks


def _line(error: Exception) -> str:
    """Return an error's message in one line."""
    return " ".join(str(error).split())
