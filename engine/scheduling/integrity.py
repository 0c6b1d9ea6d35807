"""Self-checks of a scheduler: a full one for tests, and one in constant time for a scheduler without sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.scheduling.block_pool import IntegrityError
from engine.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from engine.scheduling.scheduler import Scheduler


def check_idle(scheduler: Scheduler) -> str | None:
    """Check that nothing is left of any request, while no sequence is live. Takes constant time.

    Returns:
        A message with the number of leaked blocks; None if no block leaked.

    Raises:
        IntegrityError: a sequence outlived its request, a block is findable under a hash that is not its own, or so
            many blocks leaked that a sequence of the greatest length no longer fits.
    """
    blocks, capacity = scheduler.blocks, scheduler.config.capacity
    if scheduler.num_waiting or scheduler.running or scheduler.swapped:
        raise IntegrityError("a sequence outlived its request")
    leak = blocks.check_idle()
    if leak is not None and blocks.num_free < blocks.blocks_for(capacity):
        raise IntegrityError(f"{leak}; a sequence of {capacity} tokens no longer fits")
    return leak


def check_scheduler(scheduler: Scheduler, live: Iterable[Sequence]) -> None:
    """Compare the scheduler's queues, counters and blocks with all live sequences, between two steps.

    Raises:
        IntegrityError: a sequence is in two queues or in none, a block leaked, a sequence outlived its request, or a
            sequence has a pending id and does not run.
    """
    sequences = list(live)
    scheduler.blocks.check_integrity(sequences)
    unforked = [child for children in scheduler.children.values() for child in children]
    queues = {
        SequenceStatus.WAITING: [*scheduler.waiting, *unforked],
        SequenceStatus.RUNNING: scheduler.running,
        SequenceStatus.SWAPPED: scheduler.swapped,
    }
    found = [seq.uid for queue in queues.values() for seq in queue]
    if sorted(found) != sorted(seq.uid for seq in sequences):
        raise IntegrityError("a sequence is in two queues, in none, or outlived its request")
    for status, queue in queues.items():
        for seq in queue:
            _check_sequence(seq, status)
    scheduler.waiting.check_integrity()
    if +scheduler.running_by_lane != Counter(seq.request.priority for seq in scheduler.running):
        raise IntegrityError("the running sequences of each lane are counted wrongly")
    for queue in (scheduler.running, scheduler.swapped):
        if [seq.rank for seq in queue] != sorted(seq.rank for seq in queue):
            raise IntegrityError("running or swapped sequences are not in the order of rank")
    if any(first.status.ended for first in scheduler.children):
        raise IntegrityError("a choice waits to be forked from a sequence that has ended")


def _check_sequence(seq: Sequence, status: SequenceStatus) -> None:
    if seq.status is not status:
        raise IntegrityError(f"{seq!r} is in the queue of {status.name} sequences")
    on_device, in_host = bool(seq.block_table), bool(seq.host_table)
    if (on_device and status is not SequenceStatus.RUNNING) or (in_host and status is not SequenceStatus.SWAPPED):
        raise IntegrityError(f"{seq!r} holds blocks in a tier that its status does not allow")
    if seq.num_pending not in ((0, 1) if status is SequenceStatus.RUNNING else (0,)):
        raise IntegrityError(f"{seq!r} is {status.name} and has {seq.num_pending} pending ids")
    if seq.num_computed_tokens > len(seq.tokens):
        raise IntegrityError(f"{seq!r} has computed a token whose id is not known")
