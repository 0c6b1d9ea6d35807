"""`python -m tests.e2e.stub_cli …`: the `tokenmill` command, whose workers have a fake engine."""

from __future__ import annotations

from worker import service

if __name__ == "__main__":
    from tests.worker.fake_process import load
    from tokenmill.cli.main import main as tokenmill

    serve = service.main
    service.main = lambda settings: serve(settings, load)
    tokenmill()
