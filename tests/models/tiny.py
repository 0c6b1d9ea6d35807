"""Random models of a few thousand parameters, written to disk as transformers would, with a real tokenizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<unk>", "<s>", "</s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
BOS, EOS, END = 1, 2, 3
_TEXT = [
    "The quick brown fox jumps over the lazy dog and the cat.",
    "A message queue feeds the worker; the worker feeds the model, token by token.",
    "Grüße aus Köln, 世界 and 한국어 with 🔥 in between.",
]


@cache
def _trained(bos: bool) -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer.to_str()


def tokenizer(bos: bool = True, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text, emoji split over tokens, BOS first if `bos`."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(bos)), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = template
    return made


_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}


@dataclass(frozen=True)
class Case:
    """A config to try. `backend` is what must run it."""

    name: str
    family: str
    config: dict[str, Any] = field(default_factory=dict)
    backend: str = "fused"


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


FUSED: list[Case] = [
    Case("llama", "llama"),
    Case("llama-tied", "llama", {"tie_word_embeddings": True}),
    Case("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama-head-dim", "llama", {"head_dim": 24}),
    Case("llama-one-kv-head", "llama", {"num_key_value_heads": 1}),
    Case("llama-linear", "llama", _rope("linear", factor=4.0)),
    Case("llama-dynamic", "llama", _rope("dynamic", factor=4.0)),
    Case("llama-yarn", "llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    Case(
        "llama-llama3",
        "llama",
        _rope("llama3", factor=8.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    Case("llama-longrope", "llama", {"rope_parameters": _LONGROPE}),
    Case("mistral", "mistral", {"sliding_window": None, "head_dim": 32}),
    Case("mistral-window", "mistral", {"sliding_window": 6}),
    Case("qwen2", "qwen2", {"tie_word_embeddings": True}),
    Case("qwen2-window-off", "qwen2", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1}),
    Case("qwen2-windows", "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    Case("qwen3", "qwen3", {"head_dim": 32}),
    Case(
        "qwen3-windows",
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case("smollm3", "smollm3", {"no_rope_layers": [1, 0, 1]}),
    Case(
        "smollm3-windows",
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6, "tie_word_embeddings": False},
    ),
    Case("phi3", "phi3", {"sliding_window": 6}),
    Case("phi3-longrope", "phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16}),
    Case(
        "phi3-partial-longrope",
        "phi3",
        {
            "rope_parameters": {
                **_LONGROPE,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0] * 6,
                "long_factor": [1.0 + 0.5 * i for i in range(6)],
            },
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
        },
    ),
    Case("gemma2", "gemma2", {"head_dim": 32, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    Case(
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 6,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    Case(
        "granite",
        "granite",
        {
            "embedding_multiplier": 3.3,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    Case("olmo2", "olmo2", {"attention_bias": True}),
    Case(
        "qwen3-moe",
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    Case(
        "qwen3-moe-mixed",
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
]
STOCK: list[Case] = [
    Case("olmo3", "olmo3", {"sliding_window": 6}, "transformers"),
    Case("glm4", "glm4", {"head_dim": 16}, "transformers"),
    Case("cohere2", "cohere2", {"sliding_window": 6}, "transformers"),
    *(
        dataclasses.replace(case, name=f"{case.name}-forced", backend="transformers")
        for case in FUSED
        if case.name in ("llama-biases", "qwen2-windows", "phi3-longrope", "gemma2", "gemma3", "qwen3-moe")
    ),
]


def build(
    path: Path, family: str = "llama", seed: int = 0, shard_size: str = "5GB", bos: bool = True, **config: Any
) -> Path:
    """Write a random model of `family` and a tokenizer to `path`, in fp32 safetensors; equal for equal arguments."""
    made = tokenizer(bos)
    hf = AutoConfig.for_model(family, **{"vocab_size": len(made), **_SMALL, **config})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    scatter(model)
    model.save_pretrained(path, max_shard_size=shard_size)
    made.save_pretrained(path)
    return path


def build_case(path: Path, case: Case, seed: int = 0) -> Path:
    """Write the model of a case."""
    return build(path, case.family, seed, **case.config)


def scatter(model: torch.nn.Module) -> None:
    """Draw every parameter so wide that logits differ: a fresh model's are near-ties, biases zero, norms one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(std=0.2)
