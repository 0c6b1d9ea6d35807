"""Merging outputs that wait for the publisher neither loses nor reorders any."""

from __future__ import annotations

import random

from engine.outputs import Delta, Finished, Logprob, Outcome, StepOutput, TokenLogprobs
from tokenmill.protocol.result import Status
from worker.jobs.results import Answer
from worker.queue.outbox import BACKLOG, Outbox, merge


def delta(request: str, index: int, token: int) -> Delta:
    return Delta(request, index, f"{token} ", (token,), (TokenLogprobs(Logprob(token, -1.0)),))


def test_merged_steps_hold_the_same_text_ids_and_endings_in_order() -> None:
    rng, outbox = random.Random(1), Outbox()
    sent: dict[tuple[str, int], list[int]] = {}
    taken: dict[tuple[str, int], list[int]] = {}
    ended: list[str] = []
    answered = 0
    for step in range(5 * BACKLOG):
        one = delta(f"r{rng.randrange(3)}", rng.randrange(2), step)
        sent.setdefault((one.request_id, one.index), []).append(step)
        over = (Finished(f"over{step}", Outcome.SUCCEEDED, (), 1, 1, 0),) if step % 100 == 0 else ()
        outbox.put((float(step), StepOutput((one,), over)))
        if step % 200 == 0:
            outbox.put((float(step), Answer(f"answered{step}", Status.FAILED)))
        assert outbox.qsize() <= BACKLOG + 10
    while not outbox.empty():
        _, output = outbox.get()
        if isinstance(output, Answer):
            answered += 1
            continue
        ended += [last.request_id for last in output.finished]
        for one in output.deltas:
            assert one.text == "".join(f"{token} " for token in one.token_ids)
            assert [p.chosen.token_id for p in one.logprobs or ()] == list(one.token_ids)
            taken.setdefault((one.request_id, one.index), []).extend(one.token_ids)
    assert taken == sent
    assert ended == [f"over{step}" for step in range(0, 5 * BACKLOG, 100)]
    assert answered == len(range(0, 5 * BACKLOG, 200))


def test_a_merged_step_has_the_time_of_its_first() -> None:
    ((at, output),) = merge([(3.0, StepOutput((delta("a", 0, 1),))), (4.0, StepOutput((delta("a", 0, 2),)))])
    assert at == 3.0
    assert isinstance(output, StepOutput)
    assert output.deltas[0].token_ids == (1, 2)
