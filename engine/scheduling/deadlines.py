"""Finds the requests whose deadline has passed, without scanning all requests."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from engine.sequence import RequestState


class Deadlines:
    """A heap of requests by deadline. The item of an ended request stays until its deadline, or until `clear`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []

    def add(self, state: RequestState) -> None:
        """Add a request; a request without a deadline is ignored."""
        request = state.request
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, state.arrival, request.id))

    def due(self, now: float, live: Mapping[str, RequestState]) -> Iterator[str]:
        """Yield the id of each live request whose deadline has passed, once.

        Args:
            now: seconds on the clock of `Request.deadline`.
            live: requests by id. An item with another arrival number belongs to an earlier request of the same id.
        """
        while self._heap and self._heap[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._heap)
            if request_id in live and live[request_id].arrival == arrival:
                yield request_id

    def clear(self) -> None:
        """Remove all items; call it when no request is live."""
        self._heap.clear()
