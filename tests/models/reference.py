"""Logits and greedy ids that transformers computes for a model, and a comparison with ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

GAP = 1e-4
"""Below this distance of the two highest logits of the reference, either may win."""


class Reference:
    """A transformers model in fp32 with its eager attention."""

    weights: dict[str, Tensor]

    def __init__(self, path: Path) -> None:
        self._generated: dict[tuple[tuple[int, ...], int], tuple[list[int], Tensor]] = {}
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self.model.generation_config.eos_token_id = None
        self.model.config.eos_token_id = None

    @classmethod
    def of_gguf(cls, path: Path) -> Reference:
        """With the weights that transformers itself reads from a GGUF file; they are kept as `weights`."""
        from transformers import AutoConfig
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        config._attn_implementation = "eager"
        made = object.__new__(cls)
        made._generated = {}
        made.model = AutoModelForCausalLM.from_config(config).float().eval()
        made.weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=made.model)["tensors"]
        missing, unexpected = made.model.load_state_dict(made.weights, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], [])
        made.model.generation_config.eos_token_id = made.model.config.eos_token_id = None
        return made

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """fp32 `[tokens, vocab]`."""
        return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()

    def generate(self, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
        """`count` greedy ids (no EOS), and the logits `[count, vocab]` that each was taken from; kept for a repeat."""
        asked = tuple(prompt), count
        if asked not in self._generated:
            self._generated[asked] = self._generate(prompt, count)
        return self._generated[asked]

    @torch.inference_mode()
    def _generate(self, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float()


def near_ties(ids: Sequence[int], want: Sequence[int], logits: Tensor, least: float = GAP) -> int:
    """0 if the ids are equal, 1 if they part where the reference's two highest logits are closer than `least`.

    Raises:
        AssertionError: they part elsewhere.
    """
    for i, (ours, theirs) in enumerate(zip(ids, want, strict=True)):
        if ours != theirs:
            top = logits[i].topk(2).values
            gap = float(top[0] - top[1])
            assert gap < least, f"token {i}: {ours} instead of {theirs}, with a gap of {gap:.2g}"
            print(f"near-tie at token {i}: gap {gap:.2g}")
            return 1
    return 0
