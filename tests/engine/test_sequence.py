"""The state machine of a sequence."""

import pytest

from engine.sampling.text import TextStream
from engine.sequence import TRANSITIONS, IllegalTransition, RequestState, Sequence, SequenceStatus
from tests.engine.stub import request, token_bytes


def make(status: SequenceStatus) -> Sequence:
    seq = Sequence(RequestState(request("r", [1, 2, 3])), 0, TextStream(token_bytes))
    seq.status = status
    return seq


@pytest.mark.parametrize("old", SequenceStatus)
@pytest.mark.parametrize("new", SequenceStatus)
def test_only_the_listed_transitions_are_possible(old: SequenceStatus, new: SequenceStatus) -> None:
    seq = make(old)
    if new in TRANSITIONS[old]:
        seq.move_to(new)
        assert seq.status is new
    else:
        with pytest.raises(IllegalTransition, match=f"{old.name} to {new.name}"):
            seq.move_to(new)
        assert seq.status is old


def test_every_live_status_can_end_and_no_ended_one_can_leave() -> None:
    for status in SequenceStatus:
        endings = {SequenceStatus.FINISHED, SequenceStatus.CANCELLED}
        if status.ended:
            assert not TRANSITIONS[status]
        else:
            assert endings <= TRANSITIONS[status]
