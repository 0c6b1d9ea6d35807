"""`python -m tests.worker.fake_process`: a real worker process with a fake engine; settings come from the environment.

`FAKE_STEP`: seconds a step takes; `FAKE_LENGTH`: maximum number of tokens of a sequence; `FAKE_HANG`: the step at which
the engine hangs; `FAKE_KILL`: a prompt whose tenth token kills the process; `FAKE_KILL_READER`: a prompt that kills the
process when it is tokenised; `FAKE_SHIFT`: a number that is added to each token, so that the text differs from that of
other processes; `FAKE_DRAW`: a temperature above 0 makes the text depend on the seed, as a real engine's does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from engine.outputs import StepOutput
from tests.worker.fakes import FakeEngine, FakeModel, FakeTokenizer
from tests.worker.harness import Refusal
from worker.cli import settings_from
from worker.jobs.translate import Translator
from worker.loading import Loaded
from worker.service import main


class Faulty(FakeEngine):
    def step(self) -> StepOutput:
        prompt = list(os.environ.get("FAKE_KILL", "").encode())
        far = [list(one.request.prompt) for one in self._live.values() if len(one.tokens[0]) >= 10]
        if prompt and prompt in far:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == int(os.environ.get("FAKE_HANG", "-1")):
            threading.Event().wait()
        return super().step()


class DeadlyTokenizer(FakeTokenizer):
    def encode(self, text: str) -> list[int]:
        if text == os.environ.get("FAKE_KILL_READER"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)


def load(settings: Any) -> Loaded:
    slots, length = settings.max_num_seqs, int(os.environ.get("FAKE_LENGTH", "256"))
    step = float(os.environ.get("FAKE_STEP", "0"))
    engine = Faulty(max_num_seqs=slots, capacity=length, step_seconds=step)
    engine.shift = int(os.environ.get("FAKE_SHIFT", "0"))
    engine.draws = "FAKE_DRAW" in os.environ
    model = FakeModel(tokenizer=DeadlyTokenizer(), max_model_len=length)
    return Loaded(engine, model, Translator(settings, engine, model, Refusal))


if __name__ == "__main__":
    sys.exit(main(settings_from({"model": "fake"}), load))
