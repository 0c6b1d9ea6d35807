"""Files as publishers ship them are loaded, or refused in one line that names the file and the reason."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import ModelOptions
from engine.models.loading import LoadedModel, LoadError, load_model
from tests.models.driver import Driver
from tests.models.reference import Reference
from tests.models.test_gguf import convert
from tests.models.tiny import build

PROMPT = [5, 90, 17, 200, 33]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
BACKENDS = pytest.mark.parametrize("backend", ["auto", "transformers"])


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(ModelOptions(str(path), **{"device": "cpu", "dtype": "float32", **options}))


def logits(loaded: LoadedModel) -> Tensor:
    driver = Driver(loaded)
    return driver.prefill(driver.add(PROMPT))


def refused(path: Path, *parts: str, **options: Any) -> None:
    with pytest.raises(LoadError) as caught:
        load(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build(tmp_path / "model")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return build(tmp_path / "shards", shard_size="50KB")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@BACKENDS
class TestBesideTheWeights:
    @pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors"])
    def test_other_weights_beside_the_safetensors_are_ignored(self, model: Path, backend: str, name: str) -> None:
        save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, model / name)
        if name.startswith("adapter"):
            (model / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/base"}')
        assert torch.allclose(logits(load(model, backend=backend)), Reference(model).logits(PROMPT), atol=1e-3)

    @pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors", "pytorch_model.bin"])
    def test_other_weights_are_named_if_there_are_no_safetensors(self, model: Path, backend: str, name: str) -> None:
        (model / "model.safetensors").rename(model / name)
        refused(model, str(model), name, backend=backend)

    def test_a_single_file_goes_before_shards_as_in_transformers(self, model: Path, shards: Path, backend: str) -> None:
        want = logits(load(model, backend=backend))
        other = build(shards.parent / "other", seed=1)
        shutil.copy(model / "model.safetensors", shards)
        shutil.copy(other / "model.safetensors", shards / next(shards.glob("model-00001-*")).name)
        assert torch.equal(logits(load(shards, backend=backend)), want)

    def test_two_models_in_one_directory_are_named(self, model: Path, backend: str) -> None:
        (model / "model.safetensors").rename(model / "first.safetensors")
        shutil.copy(model / "first.safetensors", model / "second.safetensors")
        refused(model, "several models: first.safetensors, second.safetensors", backend=backend)


@BACKENDS
class TestShards:
    def test_shards_without_an_index_give_the_same_model(self, model: Path, shards: Path, backend: str) -> None:
        (shards / "model.safetensors.index.json").unlink()
        assert torch.equal(logits(load(shards, backend=backend)), logits(load(model, backend=backend)))
        next(shards.glob("model-00003-*")).unlink()
        refused(shards, "lacks the shards model-00003-of-000", backend=backend)

    def test_an_index_that_names_a_missing_shard_is_refused(self, shards: Path, backend: str) -> None:
        change = {"model.norm.weight": "model-00099-of-00099.safetensors"}
        edit(shards / "model.safetensors.index.json", lambda index: index["weight_map"].update(change))
        refused(shards, "lacks the shards model-00099-of-00099.safetensors", backend=backend)

    def test_an_index_that_names_the_wrong_shard_is_refused(self, shards: Path, backend: str) -> None:
        def move(index: dict[str, Any]) -> None:
            files = sorted(set(index["weight_map"].values()) - {index["weight_map"]["model.norm.weight"]})
            index["weight_map"]["model.norm.weight"] = files[0]

        edit(shards / "model.safetensors.index.json", move)
        refused(shards, ".safetensors lacks tensor 'model.norm.weight'", backend=backend)

    @pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 1}', '{"weight_map": {}}', POINTER])
    def test_an_invalid_index_is_refused(self, shards: Path, backend: str, index: str) -> None:
        (shards / "model.safetensors.index.json").write_text(index)
        refused(shards, "model.safetensors.index.json", backend=backend)

    def test_a_tensor_in_two_shards_is_that_of_the_index(self, model: Path, shards: Path, backend: str) -> None:
        first, second = sorted(shards.glob("*.safetensors"))[:2]
        name, tensor = next(iter(load_file(first).items()))
        save_file(load_file(second) | {name: tensor * 3}, second, metadata={"format": "pt"})
        assert torch.allclose(logits(load(shards, backend=backend)), logits(load(model)), atol=1e-4)

    def test_a_single_safetensors_file_may_have_any_name(self, model: Path, backend: str) -> None:
        want = logits(load(model, backend=backend))
        (model / "model.safetensors").rename(model / "weights.safetensors")
        (model / "._weights.safetensors").write_bytes(b"junk")  # as macOS leaves beside copies
        assert torch.allclose(logits(load(model, backend=backend)), want, atol=1e-4)

    def test_an_index_needs_no_metadata(self, model: Path, shards: Path, backend: str) -> None:
        edit(shards / "model.safetensors.index.json", lambda index: index.pop("metadata"))
        assert torch.allclose(logits(load(shards, backend=backend)), logits(load(model)), atol=1e-4)

    def test_a_truncated_shard_is_named(self, shards: Path, backend: str) -> None:
        shard = next(shards.glob("model-00002-*"))
        shard.write_bytes(shard.read_bytes()[:-100])
        refused(shards, shard.name, backend=backend)


@BACKENDS
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_pointer_of_git_lfs_is_reported_as_such(model: Path, backend: str, name: str) -> None:
    (model / name).write_text(POINTER)
    refused(model, str(model / name), "Git LFS", backend=backend)


@BACKENDS
@pytest.mark.parametrize("content", [b"", b"{}", (1 << 40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little")])
def test_a_broken_header_is_refused(model: Path, backend: str, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    refused(model, "model.safetensors can't be read", backend=backend)


def test_directories_without_a_model_say_what_they_lack(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "it has no files")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    refused(tmp_path / "adapter", "adapter_config.json")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_text("")
    refused(tmp_path / "other", "no config.json")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("rope_scaling", {"rope_type": "linear", "factor": 0}, "rope settings"),
        ("rope_scaling", {"rope_type": "linear", "factor": -2}, "rope settings"),
        ("rope_scaling", {"rope_type": "linear", "factor": "2"}, "rope settings"),
        ("rope_scaling", {"rope_type": "foo"}, "rope type 'foo'"),
        ("rope_theta", "many", "rope settings"),
        ("max_position_embeddings", 0, "max_position_embeddings"),
        ("num_key_value_heads", 0, "KV heads"),
        ("rms_norm_eps", -1.0, "rms_norm_eps"),
    ],
)
def test_a_config_whose_numbers_make_no_sense_is_refused(model: Path, key: str, value: Any, named: str) -> None:
    def change(config: dict[str, Any]) -> None:
        del config["rope_parameters"]
        config[key] = value

    edit(model / "config.json", change)
    refused(model, named)


def test_a_directory_without_a_tokenizer_is_refused(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    refused(model, "has no tokenizer.json")


class TestQuantisation:
    @BACKENDS
    def test_weights_of_integers_without_a_scale_are_refused(self, model: Path, backend: str) -> None:
        tensors = load_file(model / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        save_file(
            tensors | {name: tensors[name].to(torch.int8)}, model / "model.safetensors", metadata={"format": "pt"}
        )
        refused(model, name, "quantisation", backend=backend)

    @BACKENDS
    @pytest.mark.parametrize(
        "stated",
        [
            {"quant_method": "future", "bits": 4},
            {"quant_method": "gpt"},  # only the beginning of a known name
            {"quant_method": "bitsandbytes", "load_in_4bit": False},
            {"bits": 4},
            {},
        ],
    )
    def test_an_unknown_method_is_refused_though_the_weights_are_plain(
        self, model: Path, backend: str, stated: dict[str, Any]
    ) -> None:
        edit(model / "config.json", lambda config: config.update(quantization_config=stated))
        refused(model, "quantization_config", f"quant_method {stated.get('quant_method')!r}", backend=backend)

    def test_an_unknown_method_under_the_older_key_is_refused(self, model: Path) -> None:
        edit(model / "config.json", lambda config: config.update(compression_config={"quant_method": "future"}))
        refused(model, "compression_config")

    def test_the_fused_decoder_names_the_key(self, model: Path) -> None:
        edit(model / "config.json", lambda config: config.update(quantization_config={"quant_method": "gptq"}))
        refused(model, "quantization_config", backend="fused")


class TestTokenizers:
    @pytest.mark.parametrize("part", ["model", "pre_tokenizer", "decoder", "normalizer"])
    def test_a_tokenizer_that_is_newer_than_the_library_is_refused(self, model: Path, part: str) -> None:
        edit(model / "tokenizer.json", lambda state: state.update({part: {"type": "FromTheFuture"}}))
        refused(model, "the tokenizer of model")

    def test_missing_ids_of_a_tokenizer_hide_no_later_id(self, tmp_path: Path) -> None:
        path = build(tmp_path / "model", vocab_size=400)

        def add(state: dict[str, Any]) -> None:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            state["added_tokens"].append({"id": 390, "content": "<|far|>", "special": False, **flags})
            state["model"]["vocab"]["<|far|>"] = 390

        edit(path / "tokenizer.json", add)
        tokenizer = load(path).tokenizer
        assert tokenizer.size == 391
        assert tokenizer.decode([350]) == ""
        assert tokenizer.decode(tokenizer.encode("a<|far|>b")) == "a<|far|>b"


class TestRopeOfGemma3:
    """Three spellings of the same rope: nested by kind of layer, flat, and with the older keys."""

    FULL, LOCAL = {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}, {"rope_type": "default", "rope_theta": 2e4}

    @pytest.mark.parametrize("backend", ["fused", "transformers"])
    @pytest.mark.parametrize("form", ["flat", "old"])
    def test_every_form_of_the_rope_gives_the_same_logits(self, tmp_path: Path, form: str, backend: str) -> None:
        nested = {"full_attention": self.FULL, "sliding_attention": self.LOCAL}
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        path = build(
            tmp_path / "m", "gemma3_text", head_dim=32, sliding_window=6, layer_types=kinds, rope_parameters=nested
        )
        want = Reference(path).logits(PROMPT)
        assert torch.allclose(logits(load(path, backend=backend)), want, atol=1e-3)

        def rewrite(config: dict[str, Any]) -> None:
            del config["rope_parameters"]
            config["rope_local_base_freq"] = self.LOCAL["rope_theta"]
            if form == "flat":
                config["rope_parameters"] = self.FULL
            else:
                config |= {
                    "rope_theta": self.FULL["rope_theta"],
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                }

        edit(path / "config.json", rewrite)
        assert torch.allclose(logits(load(path, backend=backend)), want, atol=1e-3)


# ── GGUF ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def one(model: Path, tmp_path: Path) -> Path:
    return convert(model, tmp_path / "one.gguf", "llama")


def rewrite(source: Path, target: Path, keep: Callable[[str], bool], **more: int | str) -> Path:
    """A copy of a GGUF file with the keys and tensors for whose names `keep` is true."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    writer.kv_data[0].clear()
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and keep(name):
            item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], item)
    for name, value in more.items():
        key = name.replace("__", ".")
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint16(key, value)
    for tensor in reader.tensors:
        if keep(tensor.name):
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def split(source: Path, folder: Path, count: int = 3) -> list[Path]:
    """As llama.cpp's `gguf-split`: all metadata in the first part."""
    folder.mkdir()
    names = [tensor.name for tensor in gguf.GGUFReader(source).tensors]
    parts = []
    for number in range(count):
        kept = set(names[number::count])
        parts.append(
            rewrite(
                source,
                folder / f"big-{number + 1:05d}-of-{count:05d}.gguf",
                lambda name, kept=kept, first=number == 0: name in kept or (first and name not in names),
                split__no=number,
                split__count=count,
                split__tensors__count=len(names),
            )
        )
    return parts


def projector(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_tensor("v.patch_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class TestGgufFiles:
    def test_a_split_file_is_found_by_any_part_and_by_its_folder(self, one: Path, tmp_path: Path) -> None:
        want = logits(load(one))
        parts = split(one, tmp_path / "split")
        for path in (*parts, tmp_path / "split"):
            loaded = load(path)
            assert loaded.name == "big"
            assert torch.equal(logits(loaded), want)
        parts[1].unlink()
        for path in (parts[0], parts[2], tmp_path / "split"):
            refused(path, "missing: big-00002-of-00003.gguf")

    def test_parts_of_different_files_are_refused(self, one: Path, tmp_path: Path) -> None:
        parts = split(one, tmp_path / "split")
        shutil.copy(parts[2], parts[1])
        refused(parts[0], str(parts[1]), "part 3")

    def test_a_lone_part_under_another_name_is_refused(self, one: Path, tmp_path: Path) -> None:
        parts = split(one, tmp_path / "split")
        refused(parts[0].rename(tmp_path / "renamed.gguf"), "one of 3 parts")

    def test_the_suffix_gguf_may_be_in_upper_case(self, one: Path, tmp_path: Path) -> None:
        for part in split(one, tmp_path / "parts"):
            part.rename(part.with_name(part.name.upper()))
        assert load(tmp_path / "parts").name == "BIG"
        assert load(one.rename(tmp_path / "ONE.GGUF")).name == "ONE"

    def test_a_folder_with_one_model_is_that_model(self, one: Path, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        shutil.copy(one, folder / "a.gguf")
        projector(folder / "mmproj-a.gguf")
        rewrite(one, folder / "lora.gguf", lambda name: name == "general.architecture", general__type="adapter")
        rewrite(one, folder / "imatrix.gguf", lambda name: False, general__type="imatrix")
        assert load(folder).name == "a"
        shutil.copy(one, folder / "b.GGUF")
        refused(folder, "several GGUF models", "a.gguf, b.GGUF")

    @pytest.mark.parametrize("name", ["adapter_model.safetensors", "consolidated.safetensors", "._a.gguf"])
    def test_a_gguf_model_is_found_beside_files_that_are_no_model(self, one: Path, tmp_path: Path, name: str) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        shutil.copy(one, folder / "a.gguf")
        (folder / name).write_bytes(b"junk")
        assert load(folder).name == "a"

    def test_a_folder_with_only_a_projector_is_no_model(self, tmp_path: Path) -> None:
        refused(projector(tmp_path / "mmproj.gguf"), "mmproj.gguf", "'clip'")
        refused(tmp_path, "no language model", "mmproj.gguf")

    def test_a_truncated_gguf_file_is_refused_wherever_it_ends(self, one: Path, tmp_path: Path) -> None:
        whole = one.read_bytes()
        for length in (0, 3, 4, 7, 20, 24, 100, 1000, 5000, 15000, 20000, len(whole) // 2, len(whole) - 4):
            path = tmp_path / "short.gguf"
            path.write_bytes(whole[:length])
            refused(path, "short.gguf")

    @pytest.mark.parametrize(
        ("content", "part"),
        [
            (POINTER.encode(), "Git LFS"),
            (b"GGUF" + (3).to_bytes(4, "big") + bytes(100), "big-endian"),
            (b"GGUF" + (9).to_bytes(4, "little") + bytes(100), "version 9"),
            (b"GGUF" + (3).to_bytes(4, "little") + (1 << 62).to_bytes(8, "little") * 2 + bytes(100), "can't be read"),
        ],
    )
    def test_a_file_that_is_no_gguf_is_refused_with_what_is_wrong(
        self, tmp_path: Path, content: bytes, part: str
    ) -> None:
        (tmp_path / "x.gguf").write_bytes(content)
        refused(tmp_path / "x.gguf", "x.gguf", part)

    def test_a_damaged_count_is_refused_before_a_large_file_is_read_for_it(self, tmp_path: Path) -> None:
        array = (9).to_bytes(4, "little") + (0).to_bytes(4, "little") + (30_000_000).to_bytes(8, "little")
        head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
        (tmp_path / "x.gguf").write_bytes(head + (1).to_bytes(8, "little") + b"a" + array + bytes(30_000_000))
        began = time.process_time()
        refused(tmp_path / "x.gguf", "30000000 elements")
        assert time.process_time() - began < 0.5

    @pytest.mark.parametrize(
        "name",
        [
            "token_embd.weight",
            "llama.context_length",
            "llama.embedding_length",
            "llama.attention.head_count",
            "llama.block_count",
            "llama.attention.layer_norm_rms_epsilon",
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.merges",
            "tokenizer.ggml.model",
        ],
    )
    def test_a_missing_key_or_tensor_is_named(self, one: Path, tmp_path: Path, name: str) -> None:
        refused(
            rewrite(one, tmp_path / "less.gguf", lambda n: n != name),
            name.rpartition(".")[2 if "ggml" in name else 0] or name,
        )

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("attention.head_count", 0),
            ("attention.head_count", "four"),
            ("attention.head_count_kv", 3),
            ("block_count", 2.5),
            ("block_count", 4),
            ("context_length", 0),
            ("rope.scaling.factor", -2.0),
            ("rope.scaling.factor", float("inf")),
            ("embedding_length", 65),
            ("feed_forward_length", -1),
        ],
    )
    def test_numbers_that_make_no_sense_are_refused(self, model: Path, tmp_path: Path, key: str, value: Any) -> None:
        path = convert(model, tmp_path / "odd.gguf", "llama", **{key.replace(".", "__"): value})
        with pytest.raises(LoadError, match=re.compile("odd|tensor|layers")):
            load(path)
