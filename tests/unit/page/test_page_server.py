"""HTTP answers of the coordinator, and access to them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarm_ft.api.coordinator_process import DOCUMENTS
from swarm_ft.base.clock import Clock, SystemClock
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.service import READY_S, CoordinatorService
from swarm_ft.errors import BadOption, PortInUse
from swarm_ft.identity.authority import WebCertificate
from swarm_ft.page import live
from swarm_ft.page.connection_limiter import LOGGED_EVERY_S
from swarm_ft.page.guard import HEADER, MAX_SESSIONS, SESSION_S, Guard
from swarm_ft.page.server import HttpAddresses, HttpOptions, content_policy, http_places, serve_http
from swarm_ft.protocol.messages.events import EventKind
from tests.doubles.clock import ManualClock

DASHBOARD = Path(__file__).parents[3] / "deploy/watch/dashboard.json"


@asynccontextmanager
async def answering(
    clock: Clock | None = None,
    places: HttpOptions | None = None,
    certificate: WebCertificate | None = None,
) -> AsyncIterator[HttpAddresses]:
    """A coordinator without members, and its page."""
    clock = clock or SystemClock()
    service = CoordinatorService(Journal(":memory:"), clock)
    time_passes = asyncio.create_task(service.run())
    places = places or HttpOptions(page_port=0, metrics=("127.0.0.1", 0))
    async with serve_http(service, clock, DOCUMENTS, places, certificate) as found:
        yield found
    time_passes.cancel()
    await asyncio.gather(time_passes, return_exceptions=True)


@asynccontextmanager
async def browsing() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


def origin_of(found: HttpAddresses) -> str:
    return found.address.partition("/?")[0]


def token_of(address: str) -> str:
    return address.partition("?token=")[2]


async def enter(
    session: aiohttp.ClientSession, found: HttpAddresses, address: str = "", origin: str = ""
) -> int:
    """Exchange a one-time address like the page's script; return the answer's status."""
    body = json.dumps({"token": token_of(address or found.address)})
    async with session.post(f"{origin or origin_of(found)}/session", data=body) as got:
        if got.status == 200:
            session.headers[HEADER] = (await got.json())["session"]
        return got.status


async def test_an_address_opens_the_page_in_one_browser() -> None:
    async with answering() as found, browsing() as first, browsing() as second:
        async with first.get(found.address) as got:
            assert "Contributions" in await got.text()
            assert "Set-Cookie" not in got.headers
        assert await enter(first, found) == 200
        assert await enter(second, found) == 401
        async with first.post(f"{origin_of(found)}/address") as got:
            another = (await got.json())["address"]
        assert await enter(second, found, another) == 200


async def test_to_load_an_address_uses_nothing_up() -> None:
    async with answering() as found, browsing() as session:
        for _ in range(3):
            await session.get(found.address)
        assert await enter(session, found) == 200


async def test_a_session_ends_after_a_day_without_use() -> None:
    clock = ManualClock()
    async with answering(clock) as found, browsing() as session:
        assert await enter(session, found) == 200

        async def status() -> int:
            async with session.get(f"{origin_of(found)}/metrics") as got:
                return got.status

        for _ in range(3):
            clock.advance(SESSION_S - 1)
            assert await status() == 200, "it was used"
        clock.advance(SESSION_S)
        assert await status() == 401


async def test_of_too_many_sessions_the_one_unused_for_longest_ends() -> None:
    guard, sessions = Guard(frozenset()), []
    for number in range(MAX_SESSIONS + 1):
        sessions.append(guard.redeem(guard.token, f"address {number}", float(number)) or "")
        assert guard.knows(sessions[0], number + 0.5)
    assert not guard.knows(sessions[1], 100.0)
    assert all(guard.knows(session, 100.0) for session in (sessions[0], *sessions[2:]))


async def test_the_newest_address_is_in_a_file_of_its_owners_and_not_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "journal.page"
    places = HttpOptions(page_port=0, address_file=file)
    async with answering(places=places) as found, browsing() as first, browsing() as second:
        assert file.read_text() == f"{found.address}\n"
        assert file.stat().st_mode & 0o077 == 0
        assert await enter(first, found) == 200
        newest = file.read_text().strip()
        assert newest != found.address
        assert await enter(second, found, newest) == 200
    assert "token" not in caplog.text
    assert not file.exists()


NO_UTF8 = b"\xff\xfe\xed\xa0\x80"
ODD = {
    "header": b"GET /live HTTP/1.1\r\nHost: %(host)s\r\nX-Swarm-FT: " + NO_UTF8 + b"\r\n\r\n",
    "cookie": b"GET /live HTTP/1.1\r\nHost: %(host)s\r\nCookie: a=" + NO_UTF8 + b"\r\n\r\n",
    "token": b"POST /session HTTP/1.1\r\nHost: %(host)s\r\nContent-Length: 19\r\n\r\n"
    b'{"token":"\\ud800"} ',
    "body": b"POST /session HTTP/1.1\r\nHost: %(host)s\r\nContent-Length: 5\r\n\r\n" + NO_UTF8,
    "charset": b"POST /session HTTP/1.1\r\nHost: %(host)s\r\nContent-Length: 2\r\n"
    b"Content-Type: text/plain; charset=nonsense\r\n\r\n{}",
    "depth": b"POST /session HTTP/1.1\r\nHost: %(host)s\r\nContent-Length: 9000\r\n\r\n"
    + b"[" * 9000,
    "path": b"GET /\xff HTTP/1.1\r\nHost: %(host)s\r\n\r\n",
    "malformed": b"GET / HTTP/9.9 \x00\r\n\r\n",
    "garbage": b"\x16\x03\x01" + bytes(range(256)) + b"\r\n\r\n",
    "chunks": b"POST /session HTTP/1.1\r\nHost: %(host)s\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "size": b"GET / HTTP/1.1\r\nHost: %(host)s\r\nX-A: " + b"x" * 10000 + b"\r\n\r\n",
    "other host": b"GET /metrics HTTP/1.1\r\nHost: " + NO_UTF8 + b"\r\n\r\n",
}


@pytest.mark.parametrize("place", ["page", "metrics"])
async def test_whatever_requests_hold_the_log_gets_a_short_line_a_second(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with answering() as found:
        host = origin_of(found).removeprefix("http://") if place == "page" else found.metrics
        name, _, port = host.rpartition(":")
        caplog.clear()
        begun_s = asyncio.get_running_loop().time()
        for _ in range(5):
            for request in ODD.values():
                reader, writer = await asyncio.open_connection(name, int(port))
                writer.write(request.replace(b"%(host)s", host.encode()))
                answer = await reader.readline()
                writer.close()
                assert re.fullmatch(rb"HTTP/1\.[01] 4\d\d .*\r\n", answer), (request, answer)
        took_s = asyncio.get_running_loop().time() - begun_s
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) <= took_s / LOGGED_EVERY_S + 1
    assert all(len(line) < 300 for line in lines)
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("rebound.evil.example", 401),
        ("rebound.evil.example:9464", 401),
        ("coordinator:9464", 200),
        ("localhost", 200),
        ("192.0.2.7:9464", 200),
        ("[2001:db8::1]:9464", 200),
        ("", 401),
    ],
)
async def test_metrics_are_told_to_no_page_of_somebody_elses(host: str, status: int) -> None:
    async with (
        answering() as found,
        browsing() as session,
        session.get(f"http://{found.metrics}/metrics", headers={"Host": host}) as got,
    ):
        assert got.status == status


@pytest.mark.parametrize("path", ["/live", "/losses?run=run-1", "/metrics"])
async def test_nobody_else_is_told_anything(path: str) -> None:
    async with (
        answering() as found,
        browsing() as session,
        session.get(origin_of(found) + path) as got,
    ):
        assert got.status == 401
        assert "open the address that the coordinator printed" in await got.text()


async def test_a_name_that_leads_here_by_chance_is_refused() -> None:
    async with (
        answering() as found,
        browsing() as session,
        session.get(found.address, headers={"Host": "evil.example"}) as got,
    ):
        assert got.status == 401
        assert "as the address of this page" in await got.text()


async def test_a_command_that_another_page_could_send_is_refused() -> None:
    async with answering() as found, browsing() as session:
        await enter(session, found)
        for headers in ({HEADER: ""}, {HEADER: "1"}, {"Cookie": session.headers[HEADER]}):
            sent = {HEADER: "", **headers}
            async with session.post(f"{origin_of(found)}/address", headers=sent) as got:
                assert got.status == 401


async def test_the_page_may_ask_its_own_server_alone() -> None:
    async with (
        answering() as found,
        browsing() as session,
        session.get(origin_of(found)) as got,
    ):
        policy = got.headers["Content-Security-Policy"]
        html = await got.text()
    assert policy == content_policy(html)
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
    assert len(re.findall("'sha256-", policy)) == 2
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", html), "an outside asset"
    assert "innerHTML" not in html


async def test_what_happens_is_told_live_and_goes_on_where_it_was() -> None:
    async with answering() as found, browsing() as session:
        await enter(session, found)
        address = f"{origin_of(found)}/live"
        async with session.get(address) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            event, fields = await next_message(response)
            assert (event, fields["kind"]) == ("happened", "coordinator-started")
            event, fields = await next_message(response)
            assert (event, fields["runs"]) == ("state", [])
        next_event = str(fields["next_event"])
        async with session.get(address, headers={"Last-Event-ID": next_event}) as response:
            assert (await next_message(response))[0] == "state"


async def next_message(response: aiohttp.ClientResponse) -> tuple[str, dict[str, object]]:
    lines = {}
    while line := (await response.content.readline()).decode().strip():
        name, _, text = line.partition(": ")
        lines[name] = text
    return lines["event"], json.loads(lines["data"])


async def test_so_many_may_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_VIEWERS", 1)
    async with answering() as found, browsing() as session:
        await enter(session, found)
        address = f"{origin_of(found)}/live"
        async with session.get(address) as one:
            await next_message(one)
            async with session.get(address) as other:
                assert other.status == 503
                assert (await other.json())["code"] == "busy"


async def test_losses_of_no_run_are_not_there() -> None:
    async with answering() as found, browsing() as session:
        await enter(session, found)
        async with session.get(f"{origin_of(found)}/losses?run=run-none") as got:
            assert (got.status, (await got.json())["code"]) == (404, "not-found")


async def test_it_is_ready_as_long_as_time_passes() -> None:
    clock = ManualClock()
    async with answering(clock) as found, browsing() as session:
        address = f"http://{found.metrics}"
        await asyncio.sleep(0)
        while (await session.get(f"{address}/readyz")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        clock.advance(READY_S)
        assert (await session.get(f"{address}/readyz")).status == 503
        assert (await session.get(f"{address}/healthz")).status == 200


async def test_metrics_are_as_prometheus_wants_them() -> None:
    async with answering() as found, browsing() as session:
        async with session.get(f"http://{found.metrics}/metrics") as got:
            assert got.status == 200
            text = await got.text()
        async with session.get(f"http://{found.metrics}/") as got:
            assert got.status == 404
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(name.startswith("swarm_ft_") for name in families)
    assert families["swarm_ft_peers"].samples[0].value == 0
    events = {s.labels["kind"]: s.value for s in families["swarm_ft_events"].samples}
    assert events == {kind.label: 0 for kind in EventKind} | {"coordinator-started": 1}


async def test_every_metric_of_the_dashboard_is_there() -> None:
    async with answering() as found, browsing() as session:
        text = await (await session.get(f"http://{found.metrics}/metrics")).text()
    metrics = set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))
    dashboard = DASHBOARD.read_text(encoding="utf-8")
    panels = json.loads(dashboard)["panels"]
    named = set(re.findall(r"swarm_ft_\w+", dashboard))
    assert named
    assert named <= metrics, "named, and not told"
    assert all(panel["targets"] for panel in panels)


async def test_a_port_that_is_taken_is_named() -> None:
    async with answering() as found:
        host, _, port = found.metrics.rpartition(":")
        with pytest.raises(PortInUse, match=f"--metrics {found.metrics}"):
            async with answering(places=HttpOptions(page=None, metrics=(host, int(port)))):
                pass


@pytest.mark.parametrize(
    ("page", "metrics", "words"),
    [
        ("7770", None, "--page: expected HOST:PORT"),
        (None, "somewhere", "--metrics: expected HOST:PORT"),
    ],
)
def test_bad_places_are_refused(page: str | None, metrics: str | None, words: str) -> None:
    with pytest.raises(BadOption, match=words):
        http_places(page, metrics)


@pytest.mark.parametrize("page", ["0.0.0.0:7770", "[::]:0", "example.org:7770"])
async def test_a_page_for_others_needs_a_certificate(page: str) -> None:
    places = http_places(page, None)
    places.check(has_keys=True)
    with pytest.raises(BadOption, match="without keys the page is plaintext"):
        async with answering(places=places):
            pass


def test_places_are_those_that_were_asked_for() -> None:
    assert http_places(None, None) == HttpOptions()
    assert http_places("[::1]:0", "0.0.0.0:9464") == HttpOptions(
        page="::1", page_port=0, metrics=("0.0.0.0", 9464)
    )
    assert http_places(None, None, has_page=False) == HttpOptions(page=None)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("run-none/pause", "", 404, "run-none is not known here"),
        ("run-none/cancel", "{}", 404, "run-none is not known here"),
        ("run-none/explode", "", 404, ""),
        ("run-none/learning-rate", "{}", 400, "learning_rate: expected a number, got None"),
        ("run-none/learning-rate", "[]", 400, "expected a JSON object"),
        ("run-none/learning-rate", "{", 400, "expected a JSON object"),
        ("run-none/learning-rate", '{"learning_rate": 1e9}', 400, "expected 0 to 1000"),
        ("run-none/learning-rate", '{"learning_rate": NaN}', 400, "expected a number, got nan"),
        ("run-none/codecs", "{}", 404, "run-none is not known here"),
        ("run-none/codecs", '{"forward": 3}', 400, "forward: expected a text, got 3"),
        ("run-none/learning-rate", f'"{"x" * (1 << 15)}"', 413, ""),
    ],
)
async def test_a_command_that_cannot_be_done_is_refused(
    path: str, body: str, status: int, words: str
) -> None:
    async with answering() as found, browsing() as session:
        await enter(session, found)
        address = f"{origin_of(found)}/runs/{path}"
        async with session.post(address, data=body) as got:
            assert got.status == status
            assert words in await got.text()
