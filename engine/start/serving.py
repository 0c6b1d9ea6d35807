"""How a model runs on its device, as `tokenmill info` and the metrics show it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernels.triton import NAMES

PARTS = (*NAMES, "graphs", "overlap")
"""Parts that may be replaced on a GPU: groups of kernels, CUDA graphs, overlapped steps."""


@dataclass(slots=True)
class Serving:
    """The backend, graphs, overlap and fallbacks that `build_engine` found; it fills the fields."""

    attention: str = ""
    """Name of the attention backend."""
    gpu: str = ""
    """Name of the GPU; empty on a CPU."""
    overlap: bool = False
    """Whether a step is scheduled while the device computes the step before it."""
    graphs: int = 0
    """Number of CUDA graphs in use."""
    graphs_reason: str = ""
    """Why no graphs are in use; empty if some are."""
    fallbacks: dict[str, str] = field(default_factory=dict)
    """One of `PARTS` → why it was replaced."""

    def facts(self) -> dict[str, str | int]:
        """Return the fields of `worker_ready` and of `worker:<name>`."""
        found: dict[str, str | int] = {"attention": self.attention, "overlap": "on" if self.overlap else "off"}
        if not self.gpu:
            return found
        found |= {
            "gpu": self.gpu,
            "cuda_graphs": self.graphs or f"off: {self.graphs_reason or 'not captured'}",
        }
        if self.fallbacks:
            found["fallbacks"] = "; ".join(f"{part}: {reason}" for part, reason in self.fallbacks.items())
        return found
