"""What answers over HTTP: the page, for whoever was told its address; metrics, for a Prometheus.

Nothing else of this project knows aiohttp.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import math
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from swarm_ft.clock import Clock
from swarm_ft.errors import BadInput, BadOption, Busy, NotFound, OutOfTurn, PortInUse, SwarmError
from swarm_ft.ids import RunId
from swarm_ft.log import get_logger
from swarm_ft.page.facts import Documents, Facts, Source
from swarm_ft.page.guard import HEADER, Guard
from swarm_ft.page.live import Live
from swarm_ft.page.metrics import Metrics
from swarm_ft.protocol.spec.bounds import is_endpoint, is_loopback

logger = get_logger(__name__)

PREFERRED_PORT = 7770
"""Of the page, if nobody else has it: a bookmark stays good."""
MAX_POINTS = 1000
"""Of a run's losses, in one answer."""
WRITE_S = 30.0
"""A browser that takes nothing for so long is hung up on."""
CLOSING_S, IDLE_S = 0.5, 15.0
MAX_COMMAND_BYTES = 1 << 14
COOKIE_S = 30 * 24 * 3600
STATUS_OF = {NotFound: 404, Busy: 503, OutOfTurn: 409, BadInput: 400}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpPlaces:
    """Where is listened, `host` and port each; port 0: any that is free.

    Attributes:
        page: this machine's own address; None: there is no page.
        page_port: None: `PREFERRED_PORT`, or any.
        metrics: None: they are at the page's place alone.
    """

    page: str | None = "127.0.0.1"
    page_port: int | None = None
    metrics: tuple[str, int] | None = None

    @property
    def asked(self) -> tuple[tuple[str, int], ...]:
        """Those where nothing else will do."""
        page = (self.page, self.page_port or 0) if self.page is not None else None
        return tuple(place for place in (page, self.metrics) if place is not None)


def http_places(page: str | None, metrics: str | None, *, has_page: bool = True) -> HttpPlaces:
    """What `--page` and `--metrics` say, `HOST:PORT` each.

    Raises:
        BadOption: one is no address, or the page would be sent to other machines in plaintext.
    """
    listens = _place("--metrics", metrics) if metrics else None
    if not has_page:
        return HttpPlaces(page=None, metrics=listens)
    if page is None:
        return HttpPlaces(metrics=listens)
    host, port = _place("--page", page)
    if not is_loopback(host):
        raise BadOption(
            f"--page {page}: the page steers runs and is plaintext, so it stays on this machine, "
            "at 127.0.0.1 or ::1; see it from elsewhere by 'ssh -L 7770:127.0.0.1:7770 HOST'"
        )
    return HttpPlaces(page=host, page_port=port, metrics=listens)


def _place(option: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not is_endpoint(f"{host}:1" if port == "0" else text):
        raise BadOption(f"{option}: expected HOST:PORT, got {ascii(text)[:80]}")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What listens.

    Attributes:
        address: of the page, with its one-time token; empty: there is no page.
        metrics: `host:port`; empty: nothing but the page listens.
    """

    address: str = ""
    metrics: str = ""


@asynccontextmanager
async def watched(
    source: Source, clock: Clock, documents: Documents, places: HttpPlaces
) -> AsyncIterator[Watched]:
    """Answer as long as the context lasts.

    Raises:
        PortInUse: somebody else listens there.
        BadOption: this machine has no such address.
    """
    facts = Facts(source, clock)
    live = Live(facts, source, documents)
    metrics = Metrics(facts, source, lambda: live.num_viewers)
    async with AsyncExitStack() as stack:
        found = Watched()
        if places.page is not None:
            found = await _with_page(stack, places, source, documents, live, metrics)
        if places.metrics is not None:
            own = _socket("--metrics", *places.metrics)
            app = _guarded(web.Application(), _open_to_all)
            app.add_routes(_health(source, metrics))
            await _answer(stack, app, own)
            host, port = own.getsockname()[:2]
            found = Watched(address=found.address, metrics=f"{_bracketed(host)}:{port}")
        yield found


async def _with_page(
    stack: AsyncExitStack,
    places: HttpPlaces,
    source: Source,
    documents: Documents,
    live: Live,
    metrics: Metrics,
) -> Watched:
    own = _page_socket(places)
    host, port = _bracketed(own.getsockname()[0]), own.getsockname()[1]
    guard = Guard(frozenset(f"{name}:{port}" for name in (*LOOPBACK, host)))
    page = _Page(source, documents, live, guard, f"http://{host}:{port}")
    app = _guarded(web.Application(client_max_size=MAX_COMMAND_BYTES), page.lets_in)
    app.add_routes(page.routes())
    app.add_routes(_health(source, metrics))
    await _answer(stack, app, own)
    return Watched(address=page.address)


def _page_socket(places: HttpPlaces) -> socket.socket:
    host = places.page or ""
    if places.page_port is not None:
        return _socket("--page", host, places.page_port)
    try:
        return _socket("--page", host, PREFERRED_PORT)
    except PortInUse:
        return _socket("--page", host, 0)


def _socket(option: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        refusal = PortInUse if error.errno == errno.EADDRINUSE else BadOption
        words = f"{option} {_bracketed(host)}:{port}: {error.strerror}"
        raise refusal(words) from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _answer(stack: AsyncExitStack, app: web.Application, own: socket.socket) -> None:
    """Answer at this socket until the stack is closed."""
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=CLOSING_S, keepalive_timeout=IDLE_S
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.SockSite(runner, own).start()


# ---- who is let in, and what every answer has


def _guarded(app: web.Application, lets_in: Callable[[web.Request], str]) -> web.Application:
    @web.middleware
    async def guard(request: web.Request, handler: Answer) -> web.StreamResponse:
        refusal = lets_in(request)
        if refusal:
            return _plain(refusal, status=401)
        try:
            return await handler(request)
        except SwarmError as error:
            status = next((s for kind, s in STATUS_OF.items() if isinstance(error, kind)), 500)
            return web.json_response({"code": error.code, "message": error.message}, status=status)

    async def sealed(_request: web.Request, response: web.StreamResponse) -> None:
        response.headers.setdefault("Content-Security-Policy", "default-src 'none'")
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cache-Control"] = "no-store"
        del response.headers["Server"]

    app.middlewares.append(guard)
    app.on_response_prepare.append(sealed)
    return app


def _open_to_all(_request: web.Request) -> str:
    return ""


def _plain(words: str, status: int = 200) -> web.Response:
    return web.Response(text=words + "\n", status=status)


def _health(source: Source, metrics: Metrics) -> Iterable[web.RouteDef]:
    async def healthz(_request: web.Request) -> web.Response:
        return _plain("ok")

    async def readyz(_request: web.Request) -> web.Response:
        if source.is_ready:
            return _plain("ok")
        return _plain("the coordinator plans and commits nothing now", status=503)

    async def scraped(_request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=metrics.text(), headers=headers)

    return (
        web.get("/healthz", healthz),
        web.get("/readyz", readyz),
        web.get("/metrics", scraped),
    )


# ---- the page

ONWARD = '<!doctype html><title>swarm-ft</title><meta http-equiv="refresh" content="0; url=/">'
DONE = {
    "pause": "paused; the step under way is finished",
    "resume": "goes on",
    "cancel": "cancelled",
    "learning-rate": "has another learning rate from the next step on",
}
OPEN = frozenset({"/healthz", "/readyz"})
"""Paths that tell nothing of anybody."""


class _Page:
    """The page and what it asks for.

    Args:
        source: who knows.
        documents: how it is told.
        live: what the page shows.
        guard: who may open it.
        origin: `http://host:port`.
    """

    def __init__(
        self, source: Source, documents: Documents, live: Live, guard: Guard, origin: str
    ) -> None:
        self._source = source
        self._documents = documents
        self._live = live
        self._guard = guard
        self._origin = origin
        self._cookie = f"swarm-ft-{origin.rpartition(':')[2]}"  # ports share a host's cookies
        self._html = files("swarm_ft.page").joinpath("page.html").read_text(encoding="utf-8")
        self._policy = content_policy(self._html)

    @property
    def address(self) -> str:
        """That opens the page once."""
        return f"{self._origin}/?token={self._guard.token}"

    def routes(self) -> Iterable[web.RouteDef]:
        """What answers."""
        return (
            web.get("/", self._show),
            web.get("/live", self._tell),
            web.get("/losses", self._losses),
            web.post("/address", self._another),
            web.post("/runs/{run}/{verb}", self._steer),
        )

    def lets_in(self, request: web.Request) -> str:
        """Why somebody is not; empty if it is."""
        if not self._guard.is_called_right(request.headers.get("Host", "")):
            return f"expected this page to be called {self._origin}"
        if request.path in OPEN or (request.path == "/" and "token" in request.query):
            return ""
        if not self._guard.knows(request.cookies.get(self._cookie, "")):
            return "open the address that the coordinator printed; each opens the page once"
        if request.method != "GET" and HEADER not in request.headers:
            return f"expected the header {HEADER}, as the page's own commands have it"
        return ""

    async def _show(self, request: web.Request) -> web.StreamResponse:
        token = request.query.get("token")
        if token is not None:
            return self._let_in(request, token)
        headers = {"Content-Security-Policy": self._policy}
        return web.Response(text=self._html, content_type="text/html", headers=headers)

    def _let_in(self, request: web.Request, token: str) -> web.Response:
        is_known = self._guard.knows(request.cookies.get(self._cookie, ""))
        session = None if is_known else self._guard.redeem(token)
        if session is None and not is_known:
            return _plain("this address was used, or is wrong: see the coordinator's newest", 401)
        # Redirected, whoever followed a link here from elsewhere would not have its cookie with it.
        response = web.Response(text=ONWARD, content_type="text/html")
        if session is not None:
            response.set_cookie(
                self._cookie, session, max_age=COOKIE_S, httponly=True, samesite="Strict"
            )
            logger.info("the page was opened; for another browser: %s", self.address)
        return response

    async def _another(self, _request: web.Request) -> web.Response:
        """An address for another browser of the owner's."""
        return web.json_response({"address": self.address})

    async def _steer(self, request: web.Request) -> web.Response:
        """Do what the owner asks of a run."""
        run_id, verb = RunId(request.match_info["run"]), request.match_info["verb"]
        fields = await _body_of(request)
        match verb:
            case "pause":
                self._source.pause(run_id)
            case "resume":
                self._source.resume(run_id)
            case "cancel":
                self._source.cancel(run_id)
            case "learning-rate":
                self._source.change_rate(run_id, _number(fields, "learning_rate"))
            case _:
                raise web.HTTPNotFound
        logger.info("run %s: %s, by the page", run_id, verb)
        return web.json_response({"words": f"{run_id}: {DONE[verb]}"})

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        last = request.headers.get("Last-Event-ID", "")
        with self._live.watching():
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            messages = self._live.messages(int(last) if re.fullmatch(r"\d{1,18}", last) else None)
            try:
                async with aclosing(messages):
                    async for message in messages:
                        async with asyncio.timeout(WRITE_S):
                            await response.write(message)
            except (ConnectionError, TimeoutError, Busy):
                pass  # it is gone, or comes again by itself
            return response

    async def _losses(self, request: web.Request) -> web.Response:
        first = request.query.get("first", "0")
        if not re.fullmatch(r"\d{1,9}", first):
            raise BadInput(f"first: expected a step, got {first[:20]!r}")
        run_id = RunId(request.query.get("run", ""))
        rows = self._source.losses(run_id, int(first), MAX_POINTS)
        return web.json_response([self._documents.row(row) for row in rows])


def content_policy(html: str) -> str:
    """What the page may do: run its own script, look its own way, ask its own server."""

    def digests(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        own = (base64.b64encode(sha256(text.encode()).digest()).decode() for text in found)
        return " ".join(f"'sha256-{digest}'" for digest in own)

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


async def _body_of(request: web.Request) -> dict[str, Any]:
    """A command's fields.

    Raises:
        BadInput: it is no JSON object.
    """
    try:
        found = json.loads(await request.text() or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadInput("expected a JSON object")
    return found


def _number(fields: dict[str, Any], name: str) -> float:
    found = fields.get(name)
    if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
        raise BadInput(f"{name}: expected a number, got {ascii(found)[:40]}")
    return float(found)
