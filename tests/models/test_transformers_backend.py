"""The plug-in into transformers: what it rests on, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kernels
from engine.config import ModelOptions
from engine.models import transformers_backend
from engine.models.config import Unsupported
from engine.models.loading import LoadError, load_model
from kernels.attention import get_backend
from kernels.attention.base import AttentionBatch, CacheSpec
from tests.models.driver import Driver
from tests.models.tiny import STOCK, Case, build, build_case
from tests.support import output_of


def options(path: Path, **more: object) -> ModelOptions:
    return ModelOptions(str(path), device="cpu", dtype="float32", **more)  # type: ignore[arg-type]


def test_our_kernels_package_does_not_stand_in_for_hugging_faces(tmp_path: Path) -> None:
    """transformers looks for a package called `kernels`; ours must not be taken for it, in a fresh process."""
    build(tmp_path)
    root = Path(kernels.__file__).parent.parent
    code = (
        "import sys, kernels, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "assert not is_kernels_available()\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "assert model(torch.tensor([[1, 2, 3]])).logits.shape[:2] == (1, 3)\n"
    )
    output_of([sys.executable, "-c", code, tmp_path], cwd=root)


def test_a_name_of_our_own_gets_no_mask_and_our_arguments(tmp_path: Path) -> None:
    """The canary for the three things that the plug-in rests on."""
    from transformers import AutoModelForCausalLM

    seen = []

    def spy(module, q, k, v, attention_mask, scaling=None, mine=None, **kw):  # type: ignore[no-untyped-def]
        seen.append((module.layer_idx, attention_mask, mine, q.shape))
        return q.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("tokenmill_canary", spy)
    model = AutoModelForCausalLM.from_pretrained(build(tmp_path), attn_implementation="tokenmill_canary")
    rows = torch.tensor([1, 4])
    out = model(torch.tensor([[1, 2, 3, 4, 5]]), use_cache=False, logits_to_keep=rows, mine="here")
    assert seen == [(layer, None, "here", (1, 4, 5, 16)) for layer in range(3)]
    assert out.logits.shape[1] == 2


def test_attention_sinks_are_refused_at_load(tmp_path: Path) -> None:
    build(
        tmp_path,
        "gpt_oss",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    with pytest.raises(LoadError, match="s_aux"):
        load_model(options(tmp_path))


@pytest.mark.parametrize(
    ("family", "message"), [("mamba", "can't"), ("lfm2", "layer type 'conv'"), ("gpt_neo", "can't")]
)
def test_models_that_are_more_than_attention_are_refused(tmp_path: Path, family: str, message: str) -> None:
    extra = {"layer_types": ["conv", "full_attention", "conv"]} if family == "lfm2" else {}
    if family == "gpt_neo":
        extra = {"attention_types": [[["global", "local", "global"], 1]]}
    build(tmp_path, family, **extra)
    with pytest.raises(LoadError, match=message):
        load_model(options(tmp_path))


def call(**more: object) -> object:
    spec = CacheSpec(1, 2, 8, 16, torch.float32, torch.device("cpu"))
    backend = get_backend("reference", spec)
    backend.bind(torch.zeros((1, backend.block_bytes), dtype=torch.uint8))
    rows = torch.arange(3)
    batch = AttentionBatch(rows, rows, (0, 3), (3,), ((0,),))
    module = SimpleNamespace(layer_idx=0, is_causal=True, config=SimpleNamespace(layer_types=["sliding_attention"]))
    arguments = {
        "attention_mask": None,
        "sliding_window": 2,
        "tokenmill": transformers_backend._Call(backend, batch),
        **more,
    }
    x = torch.randn(1, 2, 3, 8)
    return transformers_backend._attention(module, x, x, arguments.pop("value", x), **arguments)  # type: ignore[arg-type]


def test_harmless_arguments_pass() -> None:
    call(position_ids=torch.arange(3), cache_position=None, s_aux=None, is_causal=True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"s_aux": torch.ones(2)}, "s_aux"),
        ({"position_bias": 1}, "position_bias"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "bidirectional"),
        ({"sliding_window": None}, "does not pass it"),
        ({"value": torch.randn(1, 2, 3, 4)}, "another shape"),
        ({"tokenmill": None}, "does not pass keyword"),
    ],
)
def test_a_model_that_needs_other_attention_is_refused(more: dict[str, object], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        call(**more)


def test_length_dependent_rope_is_fixed_at_load(tmp_path: Path) -> None:
    """A short sequence's logits don't change because a long one shares its batch."""
    case = next(c for c in STOCK if c.name == "phi3-longrope-forced")
    driver = Driver(load_model(options(build_case(tmp_path, case), backend="transformers")))
    alone = driver.prefill(driver.add([5, 6, 7, 8]))
    short, long = driver.add([5, 6, 7, 8]), driver.add(list(range(10, 60)))
    together = driver.step([(short, 4), (long, 50)], every_row=True)[0]
    assert torch.allclose(alone, together, atol=1e-4)


def test_dynamic_rope_is_that_of_the_fused_decoder(tmp_path: Path) -> None:
    """Fixed from `max_model_len`, beyond the length that the model was trained for, on both paths."""
    build(tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    both = [load_model(options(tmp_path, max_model_len=700, backend=backend)) for backend in ("fused", "transformers")]
    got = [Driver(loaded) for loaded in both]
    fused, stock = (driver.prefill(driver.add(list(range(40)))) for driver in got)
    assert torch.allclose(fused, stock, atol=1e-3)
    plain = Driver(load_model(options(tmp_path)))
    assert not torch.allclose(fused, plain.prefill(plain.add(list(range(40)))), atol=1e-2)


@pytest.mark.parametrize("case", STOCK, ids=lambda case: case.name)
def test_stock_models_load_in_bf16(tmp_path: Path, case: Case) -> None:
    loaded = load_model(
        ModelOptions(str(build_case(tmp_path, case)), device="cpu", dtype="bfloat16", backend="transformers")
    )
    driver = Driver(loaded)
    assert driver.prefill(driver.add([1, 2, 3])).isfinite().all()


def test_a_model_that_would_come_out_different_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, "olmo2")
    exact = transformers_backend._attention

    def wrong(module, q, *args, **kwargs):  # type: ignore[no-untyped-def]
        return exact(module, q.flip(2), *args, **kwargs)

    monkeypatch.setattr(transformers_backend, "_attention", wrong)
    with pytest.raises(LoadError, match="other logits"):
        load_model(options(tmp_path, backend="transformers"))
