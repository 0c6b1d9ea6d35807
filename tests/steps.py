"""`Steps`: the scripts of a queue with one method for each step, also those that only clients or several calls make."""

from __future__ import annotations

from typing import Unpack

from tokenmill.protocol.calls import Call, cancel_call, cancel_reply, enqueue_call, enqueue_reply
from tokenmill.protocol.job import Identity, JobEntry
from tokenmill.protocol.replies import CancelReply, DeadLetter, Ending, Ref
from tokenmill.protocol.result import Result
from tokenmill.protocol.scripts import EndOptions, Scripts


class Steps(Scripts):
    def enqueue(self, entry: JobEntry, priority: str = "normal", delay: float | None = None) -> str:
        """Add a job as a client does; returns its entry ID, which is empty for a job with a delay."""
        return enqueue_reply(self._call(enqueue_call(self.keys, entry, priority, delay)), entry)

    def cancel(self, job_id: str, reason: str = "user", ttl_s: int = 86_400) -> CancelReply:
        """Cancel a job as a client does."""
        return cancel_reply(self._call(cancel_call(self.keys, job_id, reason, ttl_s)))

    def finalise(self, ref: Ref, job: Identity, result: Result, **options: Unpack[EndOptions]) -> Ending:
        """End one job that was started."""
        return self.end_all([(ref, job, result, options)])[0]

    def answer(
        self,
        ref: Ref,
        job: Identity,
        result: Result,
        prompt_tokens: int = 0,
        callback: str | None = None,
        dead: DeadLetter | None = None,
    ) -> Ending:
        """End one job without START; `result` has no choices."""
        options: EndOptions = {"fence": None, "prompt_tokens": prompt_tokens, "callback": callback, "dead": dead}
        return self.finalise(ref, job, result, **options)

    def _call(self, call: Call) -> object:
        return self._runner.run(call.script, call.keys, call.args)
