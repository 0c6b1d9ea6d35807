"""Runs batch files in OpenAI's format: a file of requests in, a file of responses out, resumable at any point.

    with Client("redis://localhost:6379/0") as client:
        report = batch.run("in.jsonl", "out.jsonl", "errors.jsonl", client=client)
    print(report.total, report.succeeded, report.failed)

After a kill, the same call with the same files continues the run: no line is written twice, none is missing.
"""

from tokenmill.batch.closing import cancel, close
from tokenmill.batch.report import BatchError, BatchInvalid, BatchNotFound, BatchReport, BatchStopped, Fault, Progress
from tokenmill.batch.runner import WINDOW, run

__all__ = [
    "WINDOW",
    "BatchError",
    "BatchInvalid",
    "BatchNotFound",
    "BatchReport",
    "BatchStopped",
    "Fault",
    "Progress",
    "cancel",
    "close",
    "run",
]
