"""The source distribution and the wheel hold what they should, and work in a virtual environment of their own."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import orjson
import pytest
import yaml

from tests.support import output_of

ROOT = Path(__file__).parents[1]
PACKAGES = {"tokenmill", "producer", "worker", "engine", "kernels"}
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}
"""What a manylinux wheel may expect of any system (PEP 600)."""
NEWEST_SYMBOLS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""Newest versions of symbols that manylinux_2_28, the tag of a release's wheel, allows on x86-64 (PEP 600)."""


def run(*command: str | Path, cwd: Path) -> str:
    return output_of(command, cwd=cwd)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from the files that git tracks or would track, in a copy, so that nothing is left in the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    run(sys.executable, "-c", "from setuptools.build_meta import build_sdist; build_sdist('dist')", cwd=tree)
    (built,) = (tree / "dist").glob("tokenmill-*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from the source distribution alone."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    run(sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('dist')", cwd=tree)
    (built,) = (tree / "dist").glob("tokenmill-*.whl")
    return built


def test_the_wheel_holds_the_packages_their_data_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *sorted(PACKAGES), cwd=ROOT).split()
    wanted = {name for name in tracked if name.endswith((".py", ".lua", "py.typed")) and (ROOT / name).is_file()}
    assert wanted <= names
    assert not any(re.search(r"(^|/)tests?/|__pycache__", name) for name in names)


def test_one_wheel_serves_every_python_from_3_11_on(wheel: Path) -> None:
    assert re.fullmatch(r"tokenmill-[\w.]+-cp311-abi3-linux_\w+\.whl", wheel.name)
    tags = zipfile.ZipFile(wheel).read(f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in tags


def test_the_compiled_kernels_need_only_what_every_system_has(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        natives = [name for name in archive.namelist() if re.fullmatch(r"kernels/_native.*\.so", name)]
        assert natives == ["kernels/_native.abi3.so"]
        library = archive.extract(natives[0], tmp_path)
    symbols = run("readelf", "--dyn-syms", "-W", library, cwd=tmp_path)
    assert not re.findall(r" _?Py\w+", symbols)
    versions = re.findall(r"@+(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", symbols)
    assert versions
    assert {
        (kind, found) for kind, found in versions if tuple(map(int, found.split("."))) > NEWEST_SYMBOLS[kind]
    } == set()
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", library, cwd=tmp_path))
    assert set(needed) <= SYSTEM_LIBRARIES


@pytest.mark.parametrize("index", ["", "https://example.org/torch-alone"])
def test_make_install_takes_from_the_index_of_torch_nothing_but_torch(index: str, tmp_path: Path) -> None:
    steps = run("make", "-n", "install", f"VENV={tmp_path / 'venv'}", f"TORCH_INDEX={index}", cwd=ROOT)
    torch, ours, *_ = [line for line in steps.splitlines() if "pip install" in line]
    assert torch.endswith(f" --no-deps --index-url {index} torch" if index else "constraints.txt  torch")
    assert "--index-url" not in ours
    assert "--no-deps" not in ours  # what torch needs comes with what we need
    assert "[worker" in ours


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("github-workflows", "workflows/ci.yml"),
        ("github-workflows", "workflows/release.yml"),
        ("github-issue-forms", "ISSUE_TEMPLATE/bug.yml"),
        ("github-issue-forms", "ISSUE_TEMPLATE/feature.yml"),
        ("github-issue-config", "ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_the_files_for_github_are_valid_under_their_schemas(kind: str, file: str) -> None:
    check = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{kind}")
    run(*check, str(ROOT / ".github" / file), cwd=ROOT)


@pytest.mark.parametrize("file", ["ci.yml", "release.yml"])
def test_a_workflow_tests_with_the_script_of_ci(file: str) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / file).read_text())
    assert any(step.get("run", "").endswith("bash .ci/run") for step in workflow["jobs"]["test"]["steps"])


def test_the_wheel_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    venv.create(place, symlinks=True)
    packages = next((place / "lib").glob("python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "dependencies.pth").write_text(str(Path(orjson.__file__).parents[1]))  # what pip would install
    service = tmp_path / "service"
    service.mkdir()
    for name in ("producer", "worker", "engine", "kernels"):
        (service / f"{name}.py").write_text(f"raise ImportError('{name}.py belongs to the service')\n")
    python = place / "bin" / "python"
    code = "import tokenmill; from tokenmill import AsyncClient, Client; print(tokenmill.__file__)"
    assert run(python, "-c", code, cwd=service).startswith(str(packages))
    assert run(python, "-m", "tokenmill", "--version", cwd=service).startswith("tokenmill ")
    run(python, "-c", "from tokenmill.protocol.lua import source; source('start')", cwd=tmp_path)
    library = run(python, "-c", "from kernels.native import library; print(library())", cwd=tmp_path)
    assert library.startswith("<CDLL ")
