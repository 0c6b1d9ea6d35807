"""A small reading of the Compose specification, enough to rehearse `docker-compose.yml` without an engine.

Each service runs as local processes, each in a box (sandbox.py) with the file system of its image (dockerfile.py) and
the volumes, environment, command and user that the file gives it. The network is this machine's loopback: where a
service's host name and port (`redis:6379`) stand in a command or a variable there is a free port of 127.0.0.1 instead,
and so for a service's own ports, which it lists under `ports` or `expose`.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.dockerfile import Builder, Image
from tests.deploy.sandbox import Box, Boxed, new_root
from tests.support import eventually, free_port

HEALTHY_WITHIN = 60.0


class ComposeError(ValueError):
    """An error that `docker compose` would report."""


def interpolate(value: Any, environ: Mapping[str, str]) -> Any:
    """Put variables into every string: `$$ $V ${V} ${V:-default} ${V-default} ${V:?message} ${V?message} ${V:+other}`.

    Raises:
        ComposeError: a required variable is missing.
    """
    if isinstance(value, dict):
        return {key: interpolate(one, environ) for key, one in value.items()}
    if isinstance(value, list):
        return [interpolate(one, environ) for one in value]
    if not isinstance(value, str):
        return value

    def found(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name, operator, rest = match["plain"] or match["name"], match["operator"] or "", match["rest"] or ""
        there = bool(environ.get(name)) if operator.startswith(":") else name in environ
        if operator.endswith("?") and not there:
            raise ComposeError(f"required variable {name} is missing a value: {rest}")
        if operator.endswith("+"):
            return rest if there else ""
        return environ[name] if there else rest if operator.endswith("-") else environ.get(name, "")

    shape = r"\$\$|\$(?P<plain>[A-Za-z_]\w*)|\$\{(?P<name>[A-Za-z_]\w*)((?P<operator>:?[-?+])(?P<rest>[^}]*))?\}"
    return re.sub(shape, found, value)


def seconds(duration: str) -> float:
    """Return a duration such as `1m30s` in seconds."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[hms])", duration)
    if "".join(number + unit for number, unit in parts) != duration:
        raise ComposeError(f"{duration}: not a duration")
    return sum(float(number) * units[unit] for number, unit in parts)


def dotenv(text: str) -> dict[str, str]:
    """Return the variables of an `.env` file, without quotes."""
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def load(folder: Path, environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the services of `docker-compose.yml` in `folder` by name, with the variables of `environ` filled in."""
    model = interpolate(yaml.safe_load((folder / "docker-compose.yml").read_text()), environ)
    return dict(model["services"])


@dataclass
class Container:
    """A container of a service: a process in a box."""

    name: str
    process: Boxed
    box: Box
    log: Path
    ports: dict[str, int]
    """Port of the service → port on this machine."""
    health: list[str] = field(default_factory=list)
    status: int | None = None
    killed: bool = False

    def healthy(self) -> bool:
        """Run the health check.

        Raises:
            AssertionError: the process has ended.
        """
        assert self.process.popen.poll() is None, f"{self.name} has ended:\n{self.log.read_text()}"
        return self.box.run(self.health, timeout=20).returncode == 0

    def end(self, grace: float) -> int:
        """Wait `grace` seconds for the end after SIGTERM, then send SIGKILL; return the exit status."""
        try:
            self.status = self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.killed = True
            self.process.popen.kill()  # takes the whole box along
            self.status = self.process.wait(20)
        return self.status


class Stack:
    """The project in `context`, under the variables `environ`; what it writes is in `folder`.

    A file or folder below `folder/binds` takes the place of the one in `context` that a service mounts.
    """

    def __init__(self, context: Path, folder: Path, environ: Mapping[str, str], builder: Builder) -> None:
        self.context, self.folder, self.environ, self.builder = context, folder, dict(environ), builder
        self.services = load(context, environ)
        self.containers: dict[str, list[Container]] = {}
        self.ports: dict[tuple[str, str], int] = {}
        """(service, port of the service) → port on this machine of the container that the service's name leads to."""
        self._made = 0

    # ── the commands of docker compose ────────────────────────────────────────────────────────────────────────────

    def up(self, *names: str) -> None:
        """Start services (default: those without a profile) after the services that they depend on."""
        active = set(self.environ.get("COMPOSE_PROFILES", "").split(","))
        for name in names or [
            n for n, s in self.services.items() if not s.get("profiles") or active & set(s["profiles"])
        ]:
            self._start_all(name)

    def scale(self, name: str, count: int) -> None:
        """Start more containers of a service, as `up --scale name=count`."""
        for _ in range(count - len(self.containers[name])):
            self._start(name)

    def run(self, name: str, *command: str, timeout: float = 60) -> tuple[int, str]:
        """Run a command as `run --rm name command…`; return its exit status and output."""
        self._await_dependencies(self.services[name])
        container = self._start(name, command)
        status = container.process.wait(timeout)
        self.containers[name].remove(container)
        if not self.containers[name]:
            del self.containers[name]
        return status, container.log.read_text()

    def stop(self, *names: str) -> dict[str, list[int]]:
        """Stop services, by default all, dependent services first; return the exit statuses."""
        order = [n for n in self._order() if n in self.containers and (not names or n in names)]
        return {name: self._stop_all(name) for name in reversed(order)}

    def wait_healthy(self, name: str) -> None:
        """Wait until every container of a service passes its health check."""
        for container in self.containers[name]:
            if container.health:
                eventually(container.healthy, HEALTHY_WITHIN, interval=0.5)

    # ── how ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _order(self) -> list[str]:
        """Return the services, each after the services that it depends on."""
        done: list[str] = []

        def visit(name: str, above: tuple[str, ...]) -> None:
            if name in above:
                raise ComposeError(f"{name} depends on itself")
            for other in self.services[name].get("depends_on", {}):
                visit(other, (*above, name))
            if name not in done:
                done.append(name)

        for name in self.services:
            visit(name, ())
        return done

    def _start_all(self, name: str) -> None:
        service = self.services[name]
        if self.containers.get(name):
            return
        self._await_dependencies(service)
        self.containers.setdefault(name, [])
        for _ in range(int(service.get("scale", 1))):
            self._start(name)

    def _await_dependencies(self, service: dict[str, Any]) -> None:
        for other, wanted in service.get("depends_on", {}).items():
            self._start_all(other)
            match wanted["condition"]:
                case "service_healthy":
                    self.wait_healthy(other)
                case "service_completed_successfully":
                    assert all(one.process.wait(60) == 0 for one in self.containers[other]), f"{other} failed"

    def _start(self, name: str, command: tuple[str, ...] = ()) -> Container:
        service, image = self.services[name], self._image(name)
        own = {port: free_port() for port in _ports(service)}
        for port, here in own.items():
            self.ports.setdefault((name, port), here)
        self._made += 1
        label = f"{name}-{self._made}"
        box = self._box(service, image, label, own)
        argv = [self._map(word, own) for word in command or service.get("command") or image.command]
        log = self.folder / f"{label}.log"
        with log.open("wb") as out:
            process = box.start(argv, out)
        health = service.get("healthcheck", {}).get("test", ["CMD", *image.healthcheck] if image.healthcheck else [])
        container = Container(label, process, box, log, own, [self._map(word, own) for word in health[1:]])
        self.containers.setdefault(name, []).append(container)
        return container

    def _image(self, name: str) -> Image:
        """Return the image of the service; a service that is not built runs the programs of this machine."""
        build = self.services[name].get("build")
        if build is not None:
            return self.builder.build(build["target"])
        folder = self.folder / "images" / name
        return Image(folder if folder.exists() else new_root(folder), {"PATH": "/usr/bin:/bin"})

    def _box(self, service: dict[str, Any], image: Image, label: str, own: dict[str, int]) -> Box:
        given = {name: str(value) for name, value in service.get("environment", {}).items()}
        environ = {name: self._map(value, own) for name, value in {**image.environ, **given}.items()}
        user = str(service.get("user", image.user))
        return Box(
            image.root,
            mounts=(*self.builder.mounts, *(self._volume(text) for text in service.get("volumes", ()))),
            tmpfs=tuple(service.get("tmpfs", ())),
            read_only=service.get("read_only", False),
            uid=int(user) if user.isdecimal() else 999,
            hostname=label,
            environ={"OMP_NUM_THREADS": "1", **environ},
            folder=image.folder,
            init=service.get("init", False),
        )

    def _volume(self, text: str) -> tuple[Path, str, bool]:
        source, target, *mode = text.split(":")
        bind = source.startswith(".")
        own = self.folder / ("binds" if bind else "volumes") / source
        place = self.context / source if bind and not own.exists() else own
        if not place.exists():  # as an engine does it
            place = own
            place.mkdir(parents=True, exist_ok=True)
        return place, target, mode != ["ro"]

    def _map(self, text: str, own: Mapping[str, int]) -> str:
        """Return `text` with the addresses of services, and the service's own port, as they are on this machine."""
        if text in own:
            return str(own[text])
        for (service, port), here in self.ports.items():
            text = re.sub(rf"(?<![\w.-]){service}:{port}\b", f"127.0.0.1:{here}", text)
        return text

    def _stop_all(self, name: str) -> list[int]:
        service = self.services[name]
        grace = seconds(service.get("stop_grace_period", "10s"))
        containers = self.containers.pop(name)
        for container in containers:
            container.process.signal(signal.SIGTERM)
        until = time.monotonic() + grace
        statuses = [container.end(max(0.1, until - time.monotonic())) for container in containers]
        assert not any(container.killed for container in containers), f"{name} did not end within {grace} s"
        for port in _ports(service):
            self.ports.pop((name, port), None)
        return statuses


def _ports(service: dict[str, Any]) -> list[str]:
    return [str(text).rpartition(":")[2] for text in (*service.get("ports", ()), *service.get("expose", ()))]


@contextmanager
def stack(context: Path, folder: Path, environ: Mapping[str, str], builder: Builder) -> Iterator[Stack]:
    """Yield a stack that is stopped at the end of the block, however that ends."""
    one = Stack(context, folder, environ, builder)
    try:
        yield one
    finally:
        for containers in one.containers.values():
            for container in containers:
                container.process.popen.kill()
                container.process.popen.wait()
