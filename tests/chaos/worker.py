"""`python -m tests.chaos.worker`: a real worker process over the exact-hash stub; settings from the environment.

`CHAOS_STEP`: seconds that a step takes at least, so that there is something to disturb.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from engine.scheduling.plan import Plan
from tests.chaos.jobs import LIMITS
from tests.engine.stub import Flight, make_engine
from tests.worker.fakes import FakeModel
from tests.worker.harness import Refusal
from worker.cli import settings_from
from worker.jobs.translate import Translator
from worker.loading import Loaded
from worker.service import main


def load(settings: Any) -> Loaded:
    engine, runner = make_engine(garbage=os.getpid(), overlap=settings.overlap == "on", **LIMITS)
    launch, pause = runner.launch, float(os.environ.get("CHAOS_STEP", "0"))

    def slow(plan: Plan) -> Flight:
        time.sleep(pause)
        runner.plans.clear()
        runner.events.clear()
        return launch(plan)

    runner.launch = slow  # type: ignore[method-assign]
    model = FakeModel()
    return Loaded(engine, model, Translator(settings, engine, model, Refusal))


if __name__ == "__main__":
    sys.exit(main(settings_from({"model": "stub"}), load))
