"""Read a Dockerfile, and build its images as folders: COPY copies, RUN runs, in a box whose root is the stage's folder.

Left out is what prepares the system of the image (`apt-get`, `useradd`): the box has this machine's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from tests.deploy.sandbox import Box, new_root

OF_THE_SYSTEM = re.compile(r"^(apt-get|useradd|install) ")
BASE_BIN = "/base/bin"
"""Stands for /usr/local/bin of the official Python image."""
LINKED = "/linked"
"""Folder in a box with links to the packages that are installed on this machine."""


@dataclass
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    """An instruction and its arguments, on one line."""


def parse(text: str) -> list[Stage]:
    """Return the stages of a Dockerfile; global ARGs are ignored."""
    stages: list[Stage] = []
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(name, base))
        elif stages:
            stages[-1].steps.append((word, rest.strip()))
    return stages


def ignored(path: str, patterns: list[str]) -> bool:
    """Return whether `.dockerignore` excludes a file of the context: the last pattern that matches decides."""
    out = False
    parts = path.split("/")
    for pattern in patterns:
        shape = re.escape(pattern.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(shape, "/".join(parts[:n])) for n in range(1, len(parts) + 1)):
            out = not pattern.startswith("!")
    return out


@dataclass
class Image:
    """A built stage: its folder, and how it is run."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    """The RUN steps of this stage and of the stages below it."""


class Builder:
    """Builds stages of the Dockerfile in `context`, each once, under `folder`.

    `linked`: packages that are installed here are seen by pip as installed in the image, so that nothing is downloaded.
    """

    def __init__(self, context: Path, folder: Path, args: Mapping[str, str], linked: bool) -> None:
        self.context, self.folder, self.given, self.linked = context, folder, args, linked
        self.stages = {stage.name: stage for stage in parse((context / "Dockerfile").read_text())}
        self.patterns = [
            line for line in (context / ".dockerignore").read_text().split("\n") if line and not line.startswith("#")
        ]
        self.built: dict[str, Image] = {}
        link = (_packages(folder / "linked"), LINKED, False)
        self.mounts = (*interpreter(), link) if linked else (*interpreter(), *network_mounts())
        """Folders that each box sees besides its image."""

    def build(self, target: str) -> Image:
        """Return the image of a stage; build it if needed.

        Raises:
            AssertionError: a step failed; the message has its output.
        """
        if target not in self.built:
            stage = self.stages[target]
            image = self._start(stage)
            for word, rest in stage.steps:
                self._step(image, word, rest)
            self.built[target] = image
        return self.built[target]

    def box(self, image: Image) -> Box:
        """Return the box of the RUN steps: its root is writable, and packages that are not linked may be fetched."""
        pip = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"} if self.linked else network_environ()
        return Box(
            image.root,
            mounts=self.mounts,
            read_only=False,
            environ={**image.environ, **image.args, **pip, "HOME": "/root", "LANG": "C.UTF-8"},
            folder=image.folder,
        )

    def _start(self, stage: Stage) -> Image:
        root = self.folder / stage.name
        if stage.base not in self.stages:
            bin_folder = new_root(root) / BASE_BIN.lstrip("/")
            bin_folder.mkdir(parents=True)
            if self.linked:
                _hurry(bin_folder)
            (bin_folder / "python").symlink_to(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
            return Image(root, {"PATH": f"{BASE_BIN}:/usr/bin:/bin"})
        base = self.build(stage.base)
        shutil.copytree(base.root, root, symlinks=True)
        return Image(
            root,
            dict(base.environ),
            dict(base.args),
            base.folder,
            base.user,
            base.command,
            base.healthcheck,
            [*base.ran],
        )

    def _step(self, image: Image, word: str, rest: str) -> None:
        values = {**image.args, **image.environ}
        match word:
            case "ENV":
                for pair in rest.split():
                    name, _, value = pair.partition("=")
                    image.environ[name] = Template(value).substitute(values)
            case "ARG":
                name, _, value = rest.partition("=")
                image.args[name] = self.given.get(name, value)
            case "WORKDIR":
                image.folder = rest
                (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = rest
            case "CMD":
                image.command = json.loads(rest)
            case "HEALTHCHECK":
                image.healthcheck = json.loads(rest[rest.index("CMD ") + 4 :])
            case "COPY":
                self._copy(image, rest.split())
            case "RUN":
                self._run(image, re.sub(r"--mount=\S+ ", "", rest))
            case "EXPOSE" | "STOPSIGNAL":
                pass
            case _:
                raise AssertionError(f"{word}: teach the builder this instruction")

    def _copy(self, image: Image, words: list[str]) -> None:
        sources, target = [word for word in words if not word.startswith("--")], image.root / words[-1].lstrip("/")
        if not words[-1].startswith("/"):
            target = image.root / image.folder.lstrip("/") / words[-1]
        stage = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), None)
        for source in sources[:-1]:
            place = self.context / source if stage is None else self.build(stage).root / source.lstrip("/")
            assert place.exists(), f"COPY {source}: there is no such file"
            if place.is_dir():
                skip = None if stage else self._skip
                shutil.copytree(place, target, symlinks=True, dirs_exist_ok=True, ignore=skip)
            else:
                assert stage or not ignored(source, self.patterns), f"COPY {source}: .dockerignore keeps it out"
                shutil.copy2(place, target)

    def _skip(self, folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(self.context)
        return {name for name in names if ignored(str(inside / name), self.patterns)}

    def _run(self, image: Image, line: str) -> None:
        image.ran.append(line)
        if OF_THE_SYSTEM.match(line):
            return
        if self.linked:
            _link(image.root)
        done = self.box(image).run(["sh", "-ec", line], timeout=900)
        assert done.returncode == 0, f"RUN {line}\nended with {done.returncode}:\n{done.stdout}"


def interpreter() -> tuple[tuple[Path, str, bool], ...]:
    """Return the folders of the interpreter and of the packages that run the tests."""
    site = Path(sysconfig.get_path("purelib"))
    base = Path(sys.base_prefix)
    own = () if base.is_relative_to("/usr") else ((base, str(base), False),)
    return (*own, (site, str(site), False))


def network_mounts() -> tuple[tuple[Path, str, bool], ...]:
    """Return the files that pip needs to fetch packages as on this machine."""
    here = (Path(f"/etc/{name}") for name in ("resolv.conf", "hosts", "ssl", "nsswitch.conf", "pip.conf", "xdg"))
    found = [(path, str(path), False) for path in here if path.exists()]
    own = Path.home() / ".config" / "pip"
    return (*found, *([(own, "/root/.config/pip", False)] if own.exists() else []))


def network_environ() -> dict[str, str]:
    """Return the variables with which pip fetches packages on this machine."""
    kept = re.compile(r"(PIP|SSL|REQUESTS)_|(https?|no)_proxy$", re.IGNORECASE)
    return {name: value for name, value in os.environ.items() if kept.match(name)}


def _hurry(folder: Path) -> None:
    """Return compilers that do not optimise, which would take most of the time of building the kernels."""
    for name in ("gcc", "g++"):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec /usr/bin/{name} "$@" -O0\n')
        script.chmod(0o755)


def _link(root: Path) -> None:
    """Add `LINKED` to the import path of the image's virtual environment."""
    for site in (root / "opt/tokenmill/lib").glob("python*/site-packages"):
        if not (site / "linked.pth").exists():
            for old in [*site.glob("setuptools*"), *site.glob("distutils*"), *site.glob("pkg_resources")]:
                shutil.rmtree(old) if old.is_dir() else old.unlink()  # it would hide the newer one
            (site / "linked.pth").write_text(f"{LINKED}\n")
            for script in Path(sysconfig.get_path("scripts")).iterdir():
                _link_script(script, site.parents[2] / "bin" / script.name)


def _link_script(script: Path, target: Path) -> None:
    """Write a command of an installed package, for the interpreter of the image."""
    first, _, rest = script.read_bytes().partition(b"\n")
    if re.fullmatch(rb"#!.*python3?", first) and script.name != "tokenmill" and not target.exists():
        target.write_bytes(b"#!/opt/tokenmill/bin/python\n" + rest)
        target.chmod(0o755)


def _packages(folder: Path) -> Path:
    """Make a folder with links to the packages that are installed on this machine, without tokenmill and pip."""
    folder.mkdir(parents=True)
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if package.suffix != ".pth" and not re.match(r"_*(editable_*)?tokenmill|pip\b", package.name):
            (folder / package.name).symlink_to(package)
    return folder
