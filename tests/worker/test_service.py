"""A whole worker over a Redis, the engine faked: what a producer sees in every ending."""

from __future__ import annotations

from tests.worker.fakes import text_of
from tests.worker.harness import Queue, inside


def test_a_job_streams_its_text_and_ends_with_the_same_text(queue: Queue) -> None:
    with inside(queue) as worker:
        job = queue.add({"prompt": "Hello", "max_tokens": 5})
        result = queue.check_ending(job)
        assert result["status"] == "succeeded"
        assert result["choices"] == [
            {"index": 0, "text": text_of(b"Hello", 0, 5), "finish_reason": "length", "stop": None}
        ]
        assert result["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "cached_tokens": 0}
        assert (result["model"], result["attempt"], result["worker"]) == ("fake", 1, worker.worker.name)
        timings = result["timings"]
        assert 0 <= timings["queued_ms"] <= timings["first_token_ms"] <= timings["total_ms"]
        assert (queue.depth(), queue.pending()) == (0, 0)
        worker.at_rest()
