"""What callers see while a real Redis fails over, restarts or hangs, or if the URL leads to the wrong server."""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from rq.job import Job as RqJob
from rq.timeouts import JobTimeoutException

from producer import AsyncClient, CancelReply, Client, FinalEvent, QueueFull, batch, jobs, rqjob
from tests.chaos.proxy import Proxy
from tests.support import RedisServer, eventually, free_port, running_redis
from tests.tokenmill.batch.files import request, write
from tests.tokenmill.mini import MiniWorker, Queue
from tokenmill.batch.report import BatchReport
from tokenmill.client.patience import BRIEF_S, Deadline, Line, Tries
from tokenmill.protocol.connection import command_client
from tokenmill.protocol.faults import WrongProtocol, misdirected, transient
from tokenmill.protocol.job import Identity, JobEntry
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Choice, Result, Status
from tokenmill.protocol.scripts import Ref

Call = Callable[[Client], Any]


class Later:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._call())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self._outcome.append(error)

    def outcome(self, seconds: float = 20.0) -> Any:
        """Return the value or the exception of the call."""
        self._thread.join(seconds)
        assert self._outcome, f"not back within {seconds} s"
        return self._outcome[0]


@pytest.fixture
def server(own_redis: RedisServer) -> Iterator[redis.Redis]:
    with own_redis.client() as client:
        yield client


@pytest.fixture
def queue(own_redis: RedisServer, server: redis.Redis) -> Queue:
    return Queue(own_redis.url, server, Keys("default"))


@pytest.fixture
def client(own_redis: RedisServer) -> Iterator[Client]:
    with Client(own_redis.url) as made:
        yield made


@contextmanager
def worker(queue: Queue) -> Iterator[None]:
    made = MiniWorker(queue)
    made.start()
    yield
    made.stop()


def in_async(client: Client, scene: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    """Run a scene with an asyncio client of the same queue."""
    arguments = client.redis.connection_pool.connection_kwargs
    url = f"redis://{arguments['host']}:{arguments['port']}/0"

    async def main() -> Any:
        async with AsyncClient(url) as made:
            return await scene(made)

    return asyncio.run(main())


async def gathered(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


def first_end(client: Client) -> str:
    """The id of the first job of group `g` that ends."""
    while not (ended := client.finished("g", block_ms=5000)):
        pass
    return ended[0][1]


WAITS: dict[str, tuple[Call, Any]] = {
    "result": (lambda c: c.job("a").result(timeout=60).text, "one two "),
    "result without a time-out": (lambda c: c.job("a").result().text, "one two "),
    "stream": (lambda c: [type(event).__name__ for event in c.job("a").stream(timeout=60)][-1], FinalEvent.__name__),
    "text": (lambda c: "".join(c.job("a").text(timeout=60)), "one two "),
    "group": (first_end, "a"),
    "async result": (lambda c: in_async(c, lambda a: a.job("a").result(timeout=60)).text, "one two "),
    "async text": (lambda c: "".join(in_async(c, lambda a: gathered(a.job("a").text(timeout=60)))), "one two "),
}


def blocked(server: redis.Redis) -> int:
    return int(server.info("clients")["blocked_clients"])


def refusals(server: redis.Redis, word: str) -> int:
    return int(server.info("errorstats").get(f"errorstat_{word}", {"count": 0})["count"])


@pytest.mark.redis_server
@pytest.mark.parametrize("name", WAITS)
def test_a_wait_outlives_a_failover(name: str, queue: Queue, client: Client, server: redis.Redis) -> None:
    call, expected = WAITS[name]
    client.submit("one two", id="a", group="g")
    waiting = Later(lambda: call(client))
    eventually(lambda: blocked(server) == 1)
    server.replicaof("127.0.0.1", "1")
    eventually(lambda: refusals(server, "UNBLOCKED"))
    eventually(lambda: blocked(server) == 1)  # it asks on, of the replica
    server.replicaof("NO", "ONE")
    with worker(queue):
        assert waiting.outcome() == expected


def mapped(client: Client) -> list[str]:
    return [result.text for result in client.map(["a", "b", "c"], window=2, timeout=60)]


async def mapped_async(client: AsyncClient) -> list[str]:
    return [result.text async for result in client.map(["a", "b", "c"], window=2, timeout=60)]


async def submitted_async(client: AsyncClient) -> str:
    return (await (await client.submit("a", wait=True)).result(timeout=60)).text


WRITES: dict[str, tuple[Call, Any]] = {
    "submit": (lambda c: c.submit("a", wait=True).result(timeout=60).text, "a "),
    "submit with a time-out": (lambda c: c.submit("a", timeout=60).result(timeout=60).text, "a "),
    "submit later": (lambda c: c.submit("a", wait=True, delay=0.1).result(timeout=60).text, "a "),
    "cancel": (lambda c: c.job("unknown").cancel(), CancelReply.ASKED),
    "map": (mapped, ["a ", "b ", "c "]),
    "async submit": (lambda c: in_async(c, submitted_async), "a "),
    "async cancel": (lambda c: in_async(c, lambda a: a.job("unknown").cancel()), CancelReply.ASKED),
    "async map": (lambda c: in_async(c, mapped_async), ["a ", "b ", "c "]),
}


@contextmanager
def demoted(server: redis.Redis) -> Iterator[str]:
    server.replicaof("127.0.0.1", "1")
    yield "READONLY"
    server.replicaof("NO", "ONE")


@contextmanager
def without_replicas(server: redis.Redis) -> Iterator[str]:
    server.config_set("min-replicas-to-write", 1)
    yield "NOREPLICAS"
    server.config_set("min-replicas-to-write", 0)


@pytest.mark.redis_server
@pytest.mark.parametrize("fault", [demoted, without_replicas])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_outlives_a_failover(
    name: str, fault: Callable[[redis.Redis], Any], queue: Queue, client: Client, server: redis.Redis
) -> None:
    call, expected = WRITES[name]
    with fault(server) as word:
        writing = Later(lambda: call(client))
        eventually(lambda: refusals(server, word) > 1)
    with worker(queue):
        assert writing.outcome() == expected
    assert server.xlen(queue.keys.lane("normal")) == 0


@pytest.mark.redis_server
@pytest.mark.parametrize("fault", [demoted, without_replicas])
def test_a_batch_outlives_a_failover(
    fault: Callable[[redis.Redis], Any], queue: Queue, client: Client, server: redis.Redis, tmp_path: Any
) -> None:
    given = write(tmp_path / "in.jsonl", [request(f"r{number}") for number in range(6)])
    with fault(server) as word:
        running = Later(lambda: batch.run(given, tmp_path / "out.jsonl", client=client))
        eventually(lambda: refusals(server, word) > 1)
    with worker(queue):
        assert running.outcome() == BatchReport(6, 6, 0)


@pytest.mark.redis_server
@pytest.mark.parametrize("name", ["submit", "async submit", "many"])
def test_a_name_that_leads_to_another_master_is_followed(
    name: str, own_redis: RedisServer, server: redis.Redis, tmp_path_factory: pytest.TempPathFactory
) -> None:
    proxy = Proxy(own_redis.port)
    url, entries = f"redis://127.0.0.1:{proxy.port}/0", [JobEntry(f"j{n}", b'{"prompt":"x"}') for n in range(3)]

    def change() -> None:
        server.replicaof("127.0.0.1", "1")
        proxy.point(master.port)

    async def scene() -> None:
        async with AsyncClient(url) as client:
            await client.job("unknown").cancel()
            change()
            await client.submit("x", wait=True, timeout=30)

    with running_redis(tmp_path_factory.mktemp("master")) as master, master.client() as found:
        if name == "async submit":
            asyncio.run(scene())
        else:
            with Client(url) as client:
                client.job("unknown").cancel()
                change()
                client.submit("x", wait=True, timeout=30) if name == "submit" else client.submit_all(entries)
        assert found.xlen(Keys("default").lane("normal")) == (3 if name == "many" else 1)
    proxy.close()


@pytest.mark.redis_server
def test_a_map_that_waited_for_room_outlives_an_outage(
    own_redis: RedisServer, queue: Queue, client: Client, server: redis.Redis
) -> None:
    server.hset(queue.keys.meta, "max_depth", 0)
    mapping = Later(lambda: mapped(client))
    eventually(lambda: server.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"] > 3)
    server.config_set("appendfsync", "always")
    own_redis.kill()
    own_redis.start()
    server.hdel(queue.keys.meta, "max_depth")
    with worker(queue):
        assert mapping.outcome() == ["a ", "b ", "c "]


def test_the_limit_of_retries_is_counted_from_the_first_failure_of_each_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("tokenmill.client.patience.time.monotonic", lambda: now[0])
    line, gone = Line(), redis.ConnectionError("gone")
    line.works()
    tries = Tries(line, None, 10.0)
    now[0] = 1000.0
    assert 0 < tries.pause(gone) < 1
    now[0] = 1009.0
    assert 0 < tries.pause(gone) <= 1
    now[0] = 1010.0
    with pytest.raises(redis.ConnectionError, match="gone"):
        tries.pause(gone)
    assert Tries(line, None, 10.0).pause(gone) > 0


def test_a_redis_that_was_never_reached_is_not_waited_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tokenmill.client.patience.time.monotonic", lambda: now[0])
    gone = redis.ConnectionError("gone")
    tries, hasty = Tries(Line(), None, 300.0), Tries(Line(fail_fast=True), None, 300.0)
    assert tries.pause(gone) > 0
    now[0] = BRIEF_S
    for one in (tries, hasty):
        with pytest.raises(redis.ConnectionError):
            one.pause(gone)
    own = Tries(Line(), Deadline.after("job a: not finished", 100), 300.0)
    assert own.pause(gone) > 0
    now[0] += 100
    with pytest.raises(TimeoutError, match=r"job a: not finished within 100 s; the last error: gone"):
        own.pause(gone)


@pytest.mark.redis_server
def test_results_are_handed_out_while_there_is_no_room_for_the_next_job(
    queue: Queue, client: Client, server: redis.Redis
) -> None:
    client.submit("of another", priority="low")
    server.hset(queue.keys.meta, "max_depth", 2)
    results = client.map(["a", "b"], timeout=30)
    first = Later(lambda: next(results))
    scripts = queue.scripts()
    delivery = eventually(lambda: scripts.read(1))[0]
    server.hset(queue.keys.meta, "max_depth", 1)
    end(queue, delivery.fields[b"id"].decode())
    assert first.outcome().text == "done"
    server.hset(queue.keys.meta, "max_depth", 2)
    with worker(queue):
        assert next(results).text == "b "


def end(queue: Queue, job_id: str) -> None:
    """End a job that consumer `w1` has read."""
    ((entry, _),) = queue.redis.xrange(queue.keys.lane("normal"))
    ref, identity, scripts = Ref("normal", entry.decode(), job_id), Identity(job_id, stream=False), queue.scripts()
    fence = scripts.start(ref, identity, prompt_tokens=1).fence
    result = Result(job_id, Status.SUCCEEDED, choices=(Choice(0, "done", "stop"),))
    scripts.finalise(ref, identity, result, fence=fence)


@pytest.mark.redis_server
def test_a_cancel_that_fails_does_not_hide_the_error_of_a_map(
    own_redis: RedisServer, client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.client.core.CLEAN_UP_S", 0.1)

    def prompts() -> Iterator[str]:
        yield "a"
        own_redis.kill()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(client.map(prompts()))
    assert "unfinished jobs keep running" in caplog.text

    async def scene(client: AsyncClient) -> list[Any]:
        return await gathered(client.map(prompts()))

    own_redis.start()
    with pytest.raises(KeyError, match="mine"):
        in_async(client, scene)
    assert caplog.text.count("unfinished jobs keep running") == 2


def hang(server: RedisServer) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)


def kill(server: RedisServer) -> None:
    server.kill()


TIMED: dict[str, Callable[[Client, float], Any]] = {
    "result": lambda c, s: c.job("a").result(timeout=s),
    "text": lambda c, s: list(c.job("a").text(timeout=s)),
    "submit": lambda c, s: c.submit("x", timeout=s),
    "waiting submit": lambda c, s: c.submit("x", wait=True, timeout=s),
    "cancel": lambda c, s: c.job("a").cancel(timeout=s),
    "map": lambda c, s: list(c.map(["x"], timeout=s)),
    "async result": lambda c, s: in_async(c, lambda a: a.job("a").result(timeout=s)),
    "async submit": lambda c, s: in_async(c, lambda a: a.submit("x", timeout=s)),
    "async map": lambda c, s: in_async(c, lambda a: gathered(a.map(["x"], timeout=s))),
}


@pytest.mark.redis_server
@pytest.mark.parametrize("seconds", [0, 0.3])
@pytest.mark.parametrize("fault", [hang, kill])
def test_a_time_out_is_kept_while_redis_hangs_or_is_away(
    fault: Callable[[RedisServer], None], seconds: float, own_redis: RedisServer, client: Client
) -> None:
    client.submit("one", id="a")
    fault(own_redis)
    calls = {name: Later(lambda call=call: call(client, seconds)) for name, call in TIMED.items()}
    for name, later in calls.items():
        error = later.outcome(9)  # a socket alone would wait for ten
        assert isinstance(error, TimeoutError), name
        assert isinstance(error.__cause__, RedisError), name


def test_calls_to_a_host_that_never_answers_end_with_their_time_out() -> None:
    with socket.socket() as listener, socket.socket() as filler:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        filler.connect(("127.0.0.1", port))  # the queue of connections is full: further ones wait
        with Client(f"redis://127.0.0.1:{port}/0") as client:
            calls = {name: Later(lambda call=call: call(client, 0.2)) for name, call in TIMED.items()}
            for name, later in calls.items():
                assert isinstance(later.outcome(9), TimeoutError), name


ASKED: dict[str, Call] = {
    "result": lambda c: c.job("b").result(),
    "submit": lambda c: c.submit("x", wait=True),
    "cancel": lambda c: c.job("b").cancel(),
    "group": lambda c: c.finished("g", block_ms=1000),
}


@pytest.mark.redis_server
def test_an_error_that_no_retry_can_mend_is_raised_at_once(own_redis: RedisServer, server: redis.Redis) -> None:
    server.execute_command("ACL", "SETUSER", "nobody", "on", ">secret", "~*", "+@connection")
    place = f"127.0.0.1:{own_redis.port}/0"
    wrong = {
        f"redis://:wrong@{place}": AuthenticationError,
        f"redis://nobody:secret@{place}": NoPermissionError,
        f"rediss://{place}": WrongProtocol,
    }

    def ask(url: str, call: Call) -> None:
        with Client(url) as client:
            call(client)

    async def ask_async(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.job("b").result()

    told = [
        (kind, Later(lambda url=url, call=call: ask(url, call)))
        for url, kind in wrong.items()
        for call in ASKED.values()
    ]
    told += [(kind, Later(lambda url=url: asyncio.run(ask_async(url)))) for url, kind in wrong.items()]
    for kind, later in told:
        assert isinstance(later.outcome(), kind)


@pytest.mark.redis_server
def test_a_key_of_another_type_is_reported_at_once(queue: Queue, client: Client) -> None:
    queue.redis.lpush(queue.keys.out("wrong"), "x")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        list(client.job("wrong").stream())


def test_an_unknown_host_is_reported_at_once_unless_it_was_reached_before() -> None:
    unknown = redis.ConnectionError("Error -2 connecting to nohost:6379. Name or service not known.")
    unknown.__context__ = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    passing = redis.ConnectionError("Error -3 connecting to nohost:6379. Temporary failure in name resolution.")
    passing.__context__ = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    untrusted = redis.ConnectionError("Error 1 connecting to host:6379.")
    untrusted.__context__ = ssl.SSLCertVerificationError("self-signed certificate")
    assert [misdirected(error) for error in (unknown, passing, untrusted)] == [True, False, True]
    with pytest.raises(redis.ConnectionError):
        Tries(Line(), None, 60.0).pause(unknown)
    known = Line()
    known.works()
    assert Tries(known, None, 60.0).pause(unknown) > 0


@pytest.mark.redis_server
def test_a_submit_whose_reply_was_lost_adds_one_job(
    queue: Queue, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lost = client._runner.run, itertools.chain([True], itertools.repeat(False))

    def cut_off(*call: Any) -> Any:
        reply = run(*call)
        if next(lost):
            raise redis.ConnectionError("Connection closed by server.")
        return reply

    monkeypatch.setattr(client._runner, "run", cut_off)
    job = client.submit("one")
    assert queue.depth() == 1
    assert client.states([job.id]) == ["queued"]


@pytest.mark.redis_server
def test_events_that_came_before_the_time_out_are_yielded(queue: Queue, client: Client) -> None:
    job = client.submit("one two")
    with worker(queue):
        job.result(timeout=20)
    assert "".join(job.text(timeout=0)) == "one two "
    assert job.result(timeout=0).text == "one two "
    begun = client.submit("one HOLD")
    made = MiniWorker(queue)
    made.start()
    eventually(lambda: len(queue.events(begun.id)) == 2)
    pieces = begun.text(timeout=0)
    assert next(pieces) == "one "
    with pytest.raises(TimeoutError):
        next(pieces)
    made.release()
    made.stop()


@pytest.mark.redis_server
def test_a_submit_that_waits_for_room_ends_with_its_time_out(queue: Queue, client: Client) -> None:
    queue.redis.hset(queue.keys.meta, "max_depth", 0)
    with pytest.raises(TimeoutError, match=r"not taken within 0\.2 s") as late:
        client.submit("x", wait=True, timeout=0.2)
    assert isinstance(late.value.__cause__, QueueFull)
    with pytest.raises(TimeoutError, match=r"no job finished within 0\.2 s"):
        list(client.map(["x"], timeout=0.2))


@pytest.mark.parametrize("retries_left", [None, 2])
def test_a_cancel_that_fails_does_not_hide_that_an_rq_job_timed_out(retries_left: int | None) -> None:
    class Request:
        def result(self, timeout: float) -> Result:
            raise JobTimeoutException("the job's time is up")

        def cancel(self, reason: str, timeout: float) -> None:
            raise redis.exceptions.ReadOnlyError("You can't write")

    job = RqJob(id="a", connection=redis.Redis())
    job.retries_left = retries_left
    with pytest.raises(JobTimeoutException):
        jobs._wait(job, Request())  # type: ignore[arg-type]


def test_a_note_for_rqs_dashboards_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(error: RedisError) -> None:
        raise error

    job = RqJob(id="a", connection=redis.Redis())
    monkeypatch.setattr(job, "save_meta", lambda: refuse(redis.exceptions.ReadOnlyError("You can't write")))
    rqjob.note(job, {"status": "submitted"})
    monkeypatch.setattr(job, "save_meta", lambda: refuse(NoPermissionError("no rights")))
    with pytest.raises(NoPermissionError):
        rqjob.note(job, {"status": "submitted"})


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (redis.ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"), True),
        (redis.ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (redis.exceptions.MovedError("3999 127.0.0.1:6381"), True),
        (redis.exceptions.ClusterDownError("CLUSTERDOWN The cluster is down"), True),
        (redis.exceptions.MasterDownError("Link with MASTER is down"), True),
        (redis.exceptions.TryAgainError("Multiple keys request during rehashing of slot"), True),
        (redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), True),
        (redis.ResponseError("ERR user_script:7: READONLY You can't write against a read only replica."), True),
        (redis.exceptions.ExecAbortError("EXECABORT Transaction discarded because of: READONLY You can't"), True),
        (AuthenticationError("invalid username-password pair"), False),
        (NoPermissionError("this user has no permissions"), False),
        (redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), False),
        (redis.ResponseError("ERR ACL failure in script: this user has no permissions. BUSY"), False),
        (redis.ResponseError("BUSYGROUP Consumer Group name already exists"), False),
        (redis.exceptions.InvalidResponse("Protocol error"), False),
    ],
)
def test_retryable_errors_of_redis_are_distinguished_from_lasting_errors(error: RedisError, passes: bool) -> None:
    assert transient(error) is passes


def test_a_closed_port_is_not_reported_as_a_problem_of_tls() -> None:
    with command_client(f"rediss://127.0.0.1:{free_port()}/0", retries=0) as client:
        with pytest.raises(redis.ConnectionError, match="refused") as refused:
            client.ping()
        assert not isinstance(refused.value, WrongProtocol)
