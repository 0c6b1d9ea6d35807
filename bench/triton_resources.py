"""Compile every shipped variant of the Triton kernels ahead of time, and report the resources of a GPU that it takes.

No GPU is needed: Triton brings its compilers. A variant must have no spilled registers, and use no more shared memory
than a program may on each GPU from compute capability 8.6 on. `kernels/triton/resources.json` has the resources of all
variants, with a fingerprint of what was compiled, so that a change of a kernel shows without compiling.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench import triton_variants

TABLE = Path(__file__).parents[1] / "kernels" / "triton" / "resources.json"
CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0)}
MAX_SHARED = 99 << 10
MAX_GROWTH = 1.1
"""By what factor registers or shared memory may exceed the table."""
_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
"""Dtype of a tensor → Triton's name of its elements."""

Entry = list[Any]
"""Registers of a thread, bytes of a thread's stack (spilled registers), bytes of a program's shared memory, and the
fingerprint of the source."""
Table = dict[str, dict[str, Entry]]
"""Target → name of a variant → its entry."""


@dataclass
class Source:
    """What Triton compiles for a launch."""

    name: str
    kernel: Any
    types: dict[str, str] = field(default_factory=dict)
    """Argument → Triton's type of it."""
    constants: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """Index of an argument → its value."""
    attributes: dict[tuple[int, ...], list[list[Any]]] = field(default_factory=dict)
    """Index of an argument → what is known of its value."""
    options: dict[str, Any] = field(default_factory=dict)

    def fingerprint(self) -> str:
        """Return a hash of all that determines the compiled kernel, except the version of Triton."""
        parts = [*_texts(self.kernel, {}), *map(repr, (self.types, self.constants, self.attributes, self.options))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def sources(target: str) -> list[Source]:
    """Return the sources of all variants for a target, without duplicates."""
    found: dict[str, Source] = {}
    for module, name, call in _calls(CAPABILITIES[target]):
        for source in _launched(module, name, call):
            found.setdefault(source.fingerprint(), source)
    return list(found.values())


def entry(target: str, source: Source) -> Entry:
    """Compile a variant for a target."""
    capability = CAPABILITIES[target]
    return [*_compile(source, capability[0] * 10 + capability[1]), source.fingerprint()]


def outdated(target: str, table: Table) -> Iterator[str]:
    """List the variants of a target whose entry is not of their source."""
    found = {source.name: source.fingerprint() for source in sources(target)}
    listed = {name: of[3] for name, of in table.get(target, {}).items()}
    for name in sorted(found.keys() | listed.keys()):
        if found.get(name) != listed.get(name):
            yield f"{target} {name}: the table is not of this source; run python -m bench triton --write"


def faults(target: str, name: str, found: Entry, was: Entry | None) -> Iterator[str]:
    """List what is wrong with a compiled variant, compared with its entry in the table."""
    registers, stack, shared, _ = found
    if stack:
        yield f"{target} {name}: {stack} bytes of spilled registers"
    if shared > MAX_SHARED:
        yield f"{target} {name}: {shared} bytes of shared memory, more than {MAX_SHARED}"
    if was is not None and registers > was[0] * MAX_GROWTH:
        yield f"{target} {name}: registers grew from {was[0]} to {registers}"
    if was is not None and shared > was[2] * MAX_GROWTH:
        yield f"{target} {name}: shared memory grew from {was[2]} to {shared} bytes"


def read() -> Table:
    """Return the table; without entries if it was made by another version of Triton."""
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table["targets"] if table["triton"] == _version() else {}


def write(table: Table) -> None:
    """Replace the table, one variant to a line."""
    parts = []
    for target, variants in table.items():
        lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(of)}" for name, of in sorted(variants.items()))
        parts.append(f"  {json.dumps(target)}: {{\n{lines}\n  }}")
    text = ",\n".join(parts)
    TABLE.write_text(f'{{\n "triton": {json.dumps(_version())},\n "targets": {{\n{text}\n }}\n}}\n')


def report(targets: list[str], part: int, parts: int, replace: bool) -> list[str]:
    """Compile every `parts`-th variant of the targets from `part` on, print what it takes, and return what is wrong.

    Args:
        replace: write the table; needs all targets and variants. Entries that are of their source are kept.
    """
    table = read()
    wrong: list[str] = [] if replace or not table else [line for target in targets for line in outdated(target, table)]
    made: Table = {}
    for target in targets:
        for source in sources(target)[part::parts]:
            was = table.get(target, {}).get(source.name)
            kept = replace and was is not None and was[3] == source.fingerprint()
            made.setdefault(target, {})[source.name] = found = was if kept and was else entry(target, source)
            print(
                f"{target:6} {source.name:50} {found[0]:3} registers {found[1]:3} stack {found[2]:6} shared", flush=True
            )
            wrong += faults(target, source.name, found, None if replace else was)
    if replace and not wrong:
        write(made)
    return wrong


def _calls(capability: tuple[int, int]) -> Iterator[tuple[str, str, Any]]:
    for info in pkgutil.iter_modules(triton_variants.__path__):
        module = importlib.import_module(f"{triton_variants.__name__}.{info.name}")
        for name, call in module.calls(capability):
            yield info.name, name, call


def _launched(module: str, name: str, call: Any) -> list[Source]:
    """Run a call; return what it launches."""
    found: list[Source] = []

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        found.append(_source(f"{module}.{kernel.fn.__name__.lstrip('_')} {name}", kernel, args, options))

    with mock.patch(f"kernels.triton.{module}.launch", record):
        call()
    assert found, f"the call launches nothing by the name `launch` of kernels.triton.{module}"
    return found


def _source(name: str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Source:
    """Specialise a launch as Triton's `jit` does."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | options
    source = Source(name, kernel, options={key: value for key, value in options.items() if key not in kernel.arg_names})
    for index, parameter in enumerate(kernel.params):
        value, special = values[parameter.name], not parameter.do_not_specialize
        kind = "constexpr" if parameter.is_constexpr else _type(value, special)
        source.types[parameter.name] = kind
        if kind == "constexpr":
            source.constants[(index,)] = value
        elif not parameter.do_not_specialize_on_alignment if kind[0] == "*" else special and _is_aligned(value):
            source.attributes[(index,)] = [["tt.divisibility", 16]]
    return source


def _type(value: Any, special: bool) -> str:
    if value is None or (special and not isinstance(value, (bool, float, torch.Tensor)) and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0


def _texts(function: Any, done: dict[str, str]) -> list[str]:
    """Return the source of a kernel, of the functions that it calls, and the constants that it names."""
    done[function.fn.__qualname__] = function.src
    for name in sorted({node.id for node in ast.walk(ast.parse(function.src)) if isinstance(node, ast.Name)}):
        value = function.fn.__globals__.get(name)
        if isinstance(value, triton.JITFunction) and value.fn.__qualname__ not in done:
            _texts(value, done)
        elif isinstance(value, triton.language.constexpr):
            done[name] = repr(value.value)
    return [*done.values()]


def _version() -> str:
    return str(triton.__version__)


def _compile(source: Source, number: int) -> tuple[int, int, int]:
    code = ASTSource(source.kernel, source.types, constexprs=source.constants, attrs=source.attributes)
    kernel = triton.compile(code, target=GPUTarget("cuda", number, 32), options=source.options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]), kernel.metadata.shared
