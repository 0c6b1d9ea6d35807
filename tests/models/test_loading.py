"""No key or tensor of a model's files is ignored: the model runs in transformers, or is refused with the name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from engine.config import ModelOptions
from engine.models.config import Unsupported
from engine.models.families import fused_config
from engine.models.loading import LoadedModel, LoadError, load_model
from tests.models.driver import Driver
from tests.models.reference import Reference
from tests.models.tiny import BOS, END, EOS, build

PROMPT = [5, 90, 17, 200, 33]


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(ModelOptions(str(path), **{"device": "cpu", "dtype": "float32", **options}))


def logits(loaded: LoadedModel) -> Tensor:
    driver = Driver(loaded)
    return driver.prefill(driver.add(PROMPT))


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


class TestTiedHeads:
    """The four checkpoints: tied or not, with a head or without."""

    def test_tied_without_head(self, tmp_path: Path) -> None:
        build(tmp_path, tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
        assert torch.allclose(logits(load(tmp_path)), Reference(tmp_path).logits(PROMPT), atol=1e-3)

    @pytest.mark.parametrize("equal", [True, False])
    def test_tied_with_head(self, tmp_path: Path, equal: bool) -> None:
        build(tmp_path, tie_word_embeddings=True)

        def add(tensors: dict[str, Tensor]) -> None:
            embedding = tensors["model.embed_tokens.weight"]
            tensors["lm_head.weight"] = embedding.clone() if equal else embedding.flip(0).contiguous()

        edit_weights(tmp_path, add)
        assert torch.allclose(logits(load(tmp_path)), Reference(tmp_path).logits(PROMPT), atol=1e-3)

    def test_untied_with_head(self, tmp_path: Path) -> None:
        build(tmp_path, tie_word_embeddings=False)
        assert torch.allclose(logits(load(tmp_path)), Reference(tmp_path).logits(PROMPT), atol=1e-3)

    @pytest.mark.parametrize("backend", ["fused", "transformers"])
    def test_untied_without_head_is_refused(self, tmp_path: Path, backend: str) -> None:
        build(tmp_path, tie_word_embeddings=False)
        edit_weights(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
        with pytest.raises(LoadError, match=r"lm_head\.weight"):
            load(tmp_path, backend=backend)


@pytest.mark.parametrize("backend", ["fused", "transformers"])
class TestAccountOfTensors:
    def test_a_missing_tensor_is_named(self, tmp_path: Path, backend: str) -> None:
        build(tmp_path)
        edit_weights(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
        with pytest.raises(LoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            load(tmp_path, backend=backend)

    def test_a_left_over_tensor_is_named(self, tmp_path: Path, backend: str) -> None:
        build(tmp_path)
        edit_weights(tmp_path, lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}))
        with pytest.raises(LoadError, match=r"no place for.*model\.layers\.1\.self_attn\.q_proj\.bias"):
            load(tmp_path, backend=backend)

    def test_a_wrong_shape_is_named(self, tmp_path: Path, backend: str) -> None:
        build(tmp_path)
        edit_weights(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
        with pytest.raises(LoadError, match=r"model\.norm\.weight"):
            load(tmp_path, backend=backend)

    def test_rotary_buffers_are_passed_over(self, tmp_path: Path, backend: str) -> None:
        build(tmp_path)
        edit_weights(
            tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
        )
        load(tmp_path, backend=backend)


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    one, many = build(tmp_path / "one"), build(tmp_path / "many", shard_size="50KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(one)), logits(load(many)))
    next(iter(many.glob("model-00002*"))).unlink()
    with pytest.raises(LoadError, match="lacks the shards model-00002"):
        load(many)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match="config"):
        load(tmp_path)


@pytest.mark.parametrize("change", [{"hidden_size": "wide"}, {"num_attention_heads": 5}, {"model_type": "unheard-of"}])
def test_a_config_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    build(tmp_path)
    edit_json(tmp_path / "config.json", **change)
    with pytest.raises(LoadError, match="the config in"):
        load(tmp_path)


@pytest.mark.parametrize("broken", ["{", None])
def test_a_tokenizer_that_is_broken_or_not_there_is_refused(tmp_path: Path, broken: str | None) -> None:
    build(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    if broken:
        (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(LoadError, match="tokenizer"):
        load(tmp_path)


class TestWhatTheFusedDecoderDoesNotKnow:
    def test_an_unknown_key_goes_to_transformers(self, tmp_path: Path) -> None:
        build(tmp_path)
        edit_json(tmp_path / "config.json", logit_scale=0.5)
        assert load(tmp_path).implementation == "transformers"
        with pytest.raises(LoadError, match="logit_scale"):
            load(tmp_path, backend="fused")

    @pytest.mark.parametrize(
        "change",
        [
            {"hidden_act": "gelu"},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]}},
            {"model_type": "olmo3"},
        ],
    )
    def test_a_config_with_an_unknown_value_is_refused(self, tmp_path: Path, change: dict[str, Any]) -> None:
        build(tmp_path)
        edit_json(tmp_path / "config.json", **change)
        with pytest.raises(LoadError, match="the fused decoder can't run"):
            load(tmp_path, backend="fused")

    @pytest.mark.parametrize(
        ("family", "change"),
        [
            ("gemma2", {"hidden_activation": "gelu"}),
            ("gemma2", {"use_bidirectional_attention": True}),
            ("gemma2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}),
            ("gemma3_text", {"attn_logit_softcapping": 50.0}),
            ("phi3", {"attention_bias": True}),
            ("phi3", {"hidden_act": "gelu"}),
            ("granite", {"position_embedding_type": "nope"}),
            ("olmo2", {"clip_qkv": 8.0}),
            ("qwen3_moe", {"shared_expert_intermediate_size": 32}),
        ],
    )
    def test_families_with_options_are_read_to_the_last_key(self, family: str, change: dict[str, Any]) -> None:
        fused_config(AutoConfig.for_model(family))
        config = AutoConfig.for_model(family)
        for key, value in change.items():
            setattr(config, key, value)
        with pytest.raises(Unsupported, match="|".join(["activation", "layer type", *change])):
            fused_config(config)

    def test_keys_of_published_configs_that_change_nothing_are_passed_over(self) -> None:
        phi = {"attention_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1}
        gemma = {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}
        moe = {"max_window_layers": 48, "output_router_logits": False, "router_aux_loss_coef": 0.001}
        for family, keys in (("phi3", phi), ("gemma2", gemma), ("gemma3_text", gemma), ("qwen3_moe", moe)):
            fused_config(AutoConfig.for_model(family, **keys))

    def test_another_activation_still_matches_the_reference(self, tmp_path: Path) -> None:
        build(tmp_path, hidden_act="gelu")
        loaded = load(tmp_path)
        assert loaded.implementation == "transformers"
        assert torch.allclose(logits(loaded), Reference(tmp_path).logits(PROMPT), atol=1e-3)


class TestEndsOfText:
    def test_end_ids_come_from_config_generation_config_and_tokenizer(self, tmp_path: Path) -> None:
        build(tmp_path, eos_token_id=5)
        (tmp_path / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [5, 9], "temperature": 0.3, "top_k": 7})
        )
        generation = load(tmp_path).generation
        assert generation.eos_token_ids == {5, 9, EOS}
        assert (generation.temperature, generation.top_k, generation.top_p) == (0.3, 7, None)

    @pytest.mark.parametrize(("eos", "ends"), [(0, {0, EOS}), ([0, END], {0, END, EOS}), (None, {EOS})])
    def test_an_end_id_may_be_zero_a_list_or_missing(self, tmp_path: Path, eos: Any, ends: set[int]) -> None:
        build(tmp_path)
        edit_json(tmp_path / "config.json", eos_token_id=eos)
        (tmp_path / "generation_config.json").unlink()
        assert load(tmp_path).generation.eos_token_ids == ends

    @pytest.mark.parametrize("eos", ["2", [2, "3"], 2.0, {"id": 2}, True])
    def test_an_end_that_is_no_id_is_refused_by_file_and_key(self, tmp_path: Path, eos: Any) -> None:
        build(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        with pytest.raises(LoadError, match=r"generation_config\.json: eos_token_id must be"):
            load(tmp_path)

    def test_a_negative_id_is_none(self, tmp_path: Path) -> None:
        build(tmp_path, eos_token_id=5)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 9]}))
        assert load(tmp_path).generation.eos_token_ids == {5, 9, EOS}


class TestSuggestedSampling:
    @pytest.mark.parametrize("text", ["{", "[]", "5"])
    def test_a_file_that_is_no_object_is_refused(self, tmp_path: Path, text: str) -> None:
        build(tmp_path)
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(LoadError, match=r"generation_config\.json can't be read"):
            load(tmp_path)

    def test_generation_defaults_are_read_as_written_and_unknown_keys_are_named(self, tmp_path: Path) -> None:
        build(tmp_path)
        suggested = {
            "min_p": 2,
            "temperature": "0.6",
            "suppress_tokens": [5],
            "bad_words_ids": [[6, 7]],
            "no_repeat_ngram_size": 3,
            "encoder_repetition_penalty": 1.5,
            "sequence_bias": [[[5], 1.0]],
            "forced_eos_token_id": 2,
            "num_beams": 4,
            "typical_p": 0.9,
            "a_new_key": 1,
        }
        off = {"num_beam_groups": 1, "encoder_no_repeat_ngram_size": 0, "guidance_scale": None, "max_new_tokens": 5}
        (tmp_path / "generation_config.json").write_text(json.dumps({**suggested, **off, "do_sample": True}))
        generation = load(tmp_path).generation
        assert (generation.min_p, generation.temperature) == (2, "0.6")
        assert (generation.suppress_tokens, generation.bad_words_ids) == ([5], [[6, 7]])
        assert set(generation.not_applied) == suggested.keys() - {
            *("min_p", "temperature", "suppress_tokens", "bad_words_ids")
        }


class TestOptions:
    def test_the_length_limit(self, tmp_path: Path) -> None:
        build(tmp_path)
        assert load(tmp_path).max_model_len == 256
        assert load(tmp_path, max_model_len=64).max_model_len == 64
        for asked in (257, 0, -1):
            with pytest.raises(LoadError, match=f"max_model_len = {asked} is out of range"):
                load(tmp_path, max_model_len=asked)

    def test_scaled_rope_reaches_further(self, tmp_path: Path) -> None:
        build(tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        assert load(tmp_path).max_model_len == 256
        assert load(tmp_path, max_model_len=512).max_model_len == 512

    def test_dtype_device_and_backend_names_are_checked(self, tmp_path: Path) -> None:
        build(tmp_path)
        for wrong in ({"dtype": "int3"}, {"device": "tpu"}, {"backend": "fast"}, {"quantize": "int2"}):
            with pytest.raises(LoadError, match=next(iter(wrong.values()))):
                load(tmp_path, **wrong)
        assert load(tmp_path, dtype="auto").dtype in (torch.bfloat16, torch.float32)

    def test_missing_paths_are_refused(self, tmp_path: Path) -> None:
        for missing in (tmp_path / "nothing", tmp_path / "nothing.gguf"):
            with pytest.raises(LoadError, match="nothing"):
                load(missing)
        build(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(LoadError, match="safetensors"):
            load(tmp_path)

    def test_hub_names_go_through_the_ordinary_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []
        build(tmp_path)
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **kw: asked.append(name) or str(tmp_path))
        loaded = load_model(ModelOptions("some/model", device="cpu"))
        assert (asked, loaded.name) == (["some/model"], "some/model")

    def test_the_name_is_the_directory(self, tmp_path: Path) -> None:
        assert load(build(tmp_path / "my-model")).name == "my-model"


class TestExperts:
    """Both forms of a checkpoint: the experts one by one, or stacked."""

    CONFIG: ClassVar = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

    def stack(self, tensors: dict[str, Tensor]) -> None:
        for layer in range(3):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}.{i}.{name}_proj.weight") for i in range(4)])
                for name in ("gate", "up", "down")
            )
            tensors[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
            tensors[f"{prefix}.down_proj"] = down

    def test_stacked_experts_give_the_same_bits(self, tmp_path: Path) -> None:
        build(tmp_path, "qwen3_moe", **self.CONFIG)
        apart = load(tmp_path)
        want = logits(apart)
        edit_weights(tmp_path, self.stack)
        stacked = load(tmp_path)
        assert (stacked.implementation, stacked.num_parameters) == ("fused", apart.num_parameters)
        assert torch.equal(logits(stacked), want)
        assert torch.allclose(want, Reference(tmp_path).logits(PROMPT), atol=1e-3)

    def test_a_missing_expert_is_named(self, tmp_path: Path) -> None:
        build(tmp_path, "qwen3_moe", **self.CONFIG)
        name = "model.layers.2.mlp.experts.3.up_proj.weight"
        edit_weights(tmp_path, lambda tensors: tensors.pop(name))
        with pytest.raises(LoadError, match=re.escape(name)):
            load(tmp_path)

    def test_an_expert_of_another_shape_than_in_the_config_is_named(self, tmp_path: Path) -> None:
        build(tmp_path, "qwen3_moe", **self.CONFIG)
        edit_weights(tmp_path, self.stack)
        edit_json(tmp_path / "config.json", num_local_experts=5)
        with pytest.raises(LoadError, match=r"mlp\.gate\.weight"):
            load(tmp_path)


def test_a_loaded_model_has_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = load(build(tmp_path)).tokenizer
    assert tokenizer.encode("fox")[0] == BOS
