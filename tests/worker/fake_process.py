"""`python -m tests.worker.fake_process`: a real worker process whose engine is faked; settings from the environment.

`FAKE_STEP`: seconds a step takes; `FAKE_HANG`: the step at which the engine hangs.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from engine.outputs import StepOutput
from tests.worker.fakes import FakeEngine, FakeModel
from tests.worker.harness import Refusal
from worker.cli import settings_from_environment
from worker.loading import Loaded
from worker.service import main
from worker.translate import Translator


class Hanging(FakeEngine):
    def step(self) -> StepOutput:
        if self.steps == int(os.environ.get("FAKE_HANG", "-1")):
            threading.Event().wait()
        return super().step()


def load(settings: Any) -> Loaded:
    engine = Hanging(step_seconds=float(os.environ.get("FAKE_STEP", "0")))
    model = FakeModel()
    return Loaded(engine, model, Translator(settings, engine, model, Refusal))


if __name__ == "__main__":
    sys.exit(main(settings_from_environment(model="fake"), load))
