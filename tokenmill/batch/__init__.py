"""Batch files in OpenAI's format: a file of requests in, a file of responses out, resumable at any point.

    with Client("redis://localhost:6379/0") as client:
        report = batch.run("in.jsonl", "out.jsonl", "errors.jsonl", client=client)
    print(report.total, report.succeeded, report.failed)

Run it again with the same files after a kill, and it goes on where it was: no line twice, none missing.
"""

from tokenmill.batch.report import BatchError, BatchInvalid, BatchReport, BatchStopped, Fault, Progress
from tokenmill.batch.runner import WINDOW, cancel, run

__all__ = ["WINDOW", "BatchError", "BatchInvalid", "BatchReport", "BatchStopped", "Fault", "Progress", "cancel", "run"]
