"""The import rules of docs/structure.md: which package may import which, and no circles of files."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import output_of

ROOT = Path(__file__).parents[1]
MAY_IMPORT: dict[str, set[str]] = {
    "tokenmill": set(),
    "producer": {"tokenmill"},
    "kernels": set(),
    "engine": {"kernels"},
    "worker": {"tokenmill", "engine", "kernels"},
}
"""Package → packages of this repository that it may import, beside itself."""
IN_TOKENMILL: dict[str, set[str]] = {
    "protocol": set(),
    "queue": {"protocol"},
    "client": {"protocol"},
    "openai": {"client", "protocol"},
    "batch": {"openai", "client", "protocol"},
    "cli": {"batch", "client", "queue", "protocol"},
}
"""The same for the folders of `tokenmill`."""
HEAVY = {"torch", "transformers", "numpy", "rq"}
"""Packages that importing `tokenmill` must not need."""


@cache
def modules() -> dict[str, Path]:
    """Name → file of every module of the packages."""
    found = {}
    for package in MAY_IMPORT:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def folder_in_tokenmill(module: str) -> str | None:
    """The folder of `tokenmill` that a module belongs to; None for any other module."""
    parts = module.split(".")
    return parts[1] if parts[0] == "tokenmill" and parts[1:2] and parts[1] in IN_TOKENMILL else None


def imports(path: Path, *, at_import: bool = False) -> Iterator[str]:
    """Modules that a file imports; with `at_import`, only those that run when the file itself is imported."""
    for node in _statements(ast.parse(path.read_text()), at_import):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules() else str(node.module)


def _statements(node: ast.AST, at_import: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if at_import and (isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(child)):
            continue
        yield child
        yield from _statements(child, at_import)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_module_imports_only_the_packages_that_its_own_may(name: str) -> None:
    package = name.partition(".")[0]
    used = {found.partition(".")[0] for found in imports(modules()[name])} & set(MAY_IMPORT)
    assert used <= MAY_IMPORT[package] | {package}


@pytest.mark.parametrize("name", sorted(name for name in modules() if folder_in_tokenmill(name)))
def test_a_module_of_tokenmill_imports_only_the_folders_that_its_own_may(name: str) -> None:
    folder = folder_in_tokenmill(name)
    assert folder is not None
    used = {folder_in_tokenmill(found) for found in imports(modules()[name])} - {None}
    assert used <= IN_TOKENMILL[folder] | {folder}


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {name: {i for i in imports(path, at_import=True) if i in modules()} for name, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for imported in sorted(graph[name] - {name}):
                visit(imported, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_the_library_is_imported_without_the_other_packages_or_anything_heavy(tmp_path: Path) -> None:
    names = ("producer", "worker", "engine", "kernels")
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}.py belongs to the service')\n")
    code = "import sys, tokenmill, tokenmill.cli, tokenmill.batch; print(*sys.modules)"
    loaded = {module.partition(".")[0] for module in output_of([sys.executable, "-c", code], cwd=tmp_path).split()}
    assert not loaded & ({*names} | HEAVY)


def test_the_page_on_structure_draws_the_same_rules() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    drawn = {
        name: {other for other in re.findall(r"\w+", right) if other in MAY_IMPORT}
        for name, right in re.findall(r"^\| `(\w+)/` \| ([^|]*) \|", page, re.M)
        if name in MAY_IMPORT
    }
    assert drawn == MAY_IMPORT


def test_the_page_on_structure_names_every_folder_of_tokenmill() -> None:
    drawing = (
        (ROOT / "docs" / "structure.md").read_text().partition("```text\ntokenmill/\n")[2].partition("\nproducer/")[0]
    )
    assert set(re.findall(r"^  (\w+)/ ", drawing, re.M)) == set(IN_TOKENMILL)


def test_the_names_from_before_the_library_had_its_own_stay_importable() -> None:
    code = (
        "from producer import AsyncClient, Client, batch; import producer.jobs as j; j.generate, j.run_batch, batch.run"
    )
    output_of([sys.executable, "-c", code])
