"""When requests expire, without a look at those that don't."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from engine.sequence import RequestState


class Deadlines:
    """A heap by deadline. An entry outlives its request until it surfaces, or until `clear`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []

    def add(self, state: RequestState) -> None:
        """Watch the request's deadline, if it has one."""
        request = state.request
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, state.arrival, request.id))

    def due(self, now: float, live: Mapping[str, RequestState]) -> Iterator[str]:
        """The live requests whose deadline has passed, each once; a later request of the same id is another."""
        while self._heap and self._heap[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._heap)
            if request_id in live and live[request_id].arrival == arrival:
                yield request_id

    def clear(self) -> None:
        self._heap.clear()
