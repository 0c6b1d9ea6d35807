"""The source distribution and the wheel hold what they should, and work in a virtual environment of their own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import orjson
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"tokenmill", "producer", "worker", "engine", "kernels"}
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}
"""What a manylinux wheel may expect of any system (PEP 600)."""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def test_the_compiled_kernels_need_only_what_every_system_has(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        natives = [name for name in archive.namelist() if re.fullmatch(r"kernels/_native.*\.so", name)]
        assert len(natives) == 1
        library = archive.extract(natives[0], tmp_path)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", library, cwd=tmp_path))
    assert set(needed) <= SYSTEM_LIBRARIES


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
