"""The clerk's class with short pauses, for `rq worker --worker-class tests.producer.gateway.hasty.HastyClerk`."""

from __future__ import annotations

from producer import clerk, jobs


class HastyClerk(clerk.ClerkWorker):
    """A clerk that looks for lost batches each second, and whose batches soon make way for other jobs."""


vars(clerk)["CHORES"] = tuple(
    one._replace(pause_s=1) if one.function == "tend_batches" else one for one in clerk.CHORES
)
vars(jobs)["TURN_S"] = 2.0
