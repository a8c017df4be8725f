"""HTTP server of the coordinator: the page for its owner, and metrics for a Prometheus.

No other module of this project knows aiohttp.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import math
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from swarm_ft.base.clock import Clock
from swarm_ft.base.log import get_logger
from swarm_ft.base.private_files import atomic_write, open_private
from swarm_ft.errors import BadInput, BadOption, Busy, NotFound, OutOfTurn, PortInUse, SwarmError
from swarm_ft.identity.authority import WebCertificate
from swarm_ft.ids import RunId
from swarm_ft.page.connection_limiter import (
    MAX_CONNECTIONS,
    MAX_SCRAPES,
    ConnectionLimiter,
    RequestLog,
)
from swarm_ft.page.guard import HEADER, Guard, is_own_name
from swarm_ft.page.live import Live
from swarm_ft.page.metrics import Metrics
from swarm_ft.page.status_cache import Documents, StatusCache, StatusSource
from swarm_ft.protocol.spec.bounds import is_endpoint, is_loopback
from swarm_ft.transport.admission import address_of

logger = get_logger(__name__)

PREFERRED_PORT = 7770
"""Port of the page, if it is free, so that a bookmark stays valid."""
MAX_POINTS = 1000
"""Points of a run's losses in one answer."""
WRITE_S = 30.0
"""Seconds after which the server drops a browser that reads nothing."""
MAX_COMMAND_BYTES = 1 << 14
STATUS_OF = {NotFound: 404, Busy: 503, OutOfTurn: 409, BadInput: 400}
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """Addresses to listen at, `host` and port each; port 0: any free one.

    Attributes:
        page: Host of the page, plaintext on loopback and TLS elsewhere; None: no page.
        page_port: Port of the page; None: `PREFERRED_PORT`, or any.
        metrics: Address of the metrics alone; None: they are at the page's address only.
        address_file: File with the page's newest address, for its owner alone; None: no file.
    """

    page: str | None = "127.0.0.1"
    page_port: int | None = None
    metrics: tuple[str, int] | None = None
    address_file: Path | None = None

    @property
    def required(self) -> tuple[tuple[str, int], ...]:
        """Addresses that the user chose, without a substitute."""
        page = (self.page, self.page_port or 0) if self.page is not None else None
        return tuple(place for place in (page, self.metrics) if place is not None)

    @property
    def is_far(self) -> bool:
        """Whether the page is for other machines too."""
        return self.page is not None and not is_loopback(self.page)

    def check(self, *, has_keys: bool) -> None:
        """Refuse a page in plaintext for other machines.

        Raises:
            BadOption: The page is for other machines, and there are no keys for TLS.
        """
        if self.is_far and not has_keys:
            raise BadOption(
                f"--page {_bracketed(self.page or '')}: without keys the page is plaintext, "
                "and only for this machine, at 127.0.0.1 or ::1; reach it from elsewhere with "
                "'ssh -L 7770:127.0.0.1:7770 HOST', or start with keys"
            )


def http_places(page: str | None, metrics: str | None, *, has_page: bool = True) -> HttpOptions:
    """Return the addresses of `--page` and `--metrics`, `HOST:PORT` each.

    Raises:
        BadOption: A value is no address.
    """
    listens = _place("--metrics", metrics) if metrics else None
    if not has_page:
        return HttpOptions(page=None, metrics=listens)
    if page is None:
        return HttpOptions(metrics=listens)
    host, port = _place("--page", page)
    return HttpOptions(page=host, page_port=port, metrics=listens)


def _place(option: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not is_endpoint(f"{host}:1" if port == "0" else text):
        raise BadOption(f"{option}: expected HOST:PORT, got {ascii(text)[:80]}")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpAddresses:
    """Addresses of the servers.

    Attributes:
        address: Address of the page, with its one-time token; empty: no page.
        fingerprint: SHA-256 of the page's certificate, as browsers show it; empty: no TLS.
        metrics: Address of the metrics, `host:port`; empty: only the page's has them.
    """

    address: str = ""
    fingerprint: str = ""
    metrics: str = ""


@asynccontextmanager
async def serve_http(
    source: StatusSource,
    clock: Clock,
    documents: Documents,
    places: HttpOptions,
    certificate: WebCertificate | None = None,
) -> AsyncIterator[HttpAddresses]:
    """Serve the page and the metrics as long as the context lasts.

    Args:
        source: The coordinator.
        clock: Clock of rates.
        documents: Converters to JSON documents.
        places: Addresses to listen at.
        certificate: Certificate of a page that is for other machines too.

    Raises:
        PortInUse: A port is taken.
        BadOption: This machine has no such address, or the page needs a certificate.
    """
    places.check(has_keys=certificate is not None)
    facts = StatusCache(source, clock)
    live = Live(facts, source, documents)
    metrics = Metrics(facts, source, lambda: live.num_viewers)
    complaints = RequestLog()
    own_names = {*LOOPBACK, *(certificate.names if certificate else ())}
    async with AsyncExitStack() as stack:
        found = HttpAddresses()
        if places.page is not None:
            shown = certificate if places.is_far else None
            page = _Page(source, clock, documents, live, places, complaints, shown)
            found = await page.answer(stack, _health(source, facts, metrics))
        if places.metrics is not None:
            own = _socket("--metrics", *places.metrics)
            host, port = own.getsockname()[:2]
            names = own_names | {places.metrics[0].lower()}
            await _open_to_all(stack, own, _health(source, facts, metrics), names, complaints)
            found = replace(found, metrics=f"{_bracketed(host)}:{port}")
        yield found


def _page_socket(places: HttpOptions) -> socket.socket:
    host = places.page or ""
    if places.page_port is not None:
        return _socket("--page", host, places.page_port)
    try:
        return _socket("--page", host, PREFERRED_PORT)
    except PortInUse:
        logger.info("port %d is taken; the page gets another one", PREFERRED_PORT)
        return _socket("--page", host, 0)


def _socket(option: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        refusal = PortInUse if error.errno == errno.EADDRINUSE else BadOption
        message = f"{option} {_bracketed(host)}:{port}: {error.strerror}"
        raise refusal(message) from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _tls(certificate: WebCertificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate.certificate, certificate.key)
    return context


async def _open_to_all(
    stack: AsyncExitStack,
    own: socket.socket,
    routes: Iterable[web.RouteDef],
    names: Collection[str],
    complaints: RequestLog,
) -> None:
    door = ConnectionLimiter(MAX_SCRAPES, complaints)

    def lets_in(request: web.Request) -> str:
        if not is_own_name(request.headers.get("Host", ""), names):
            return "expected an address of this machine, or a name that was announced"
        door.let_in(request)
        return ""

    app = _guarded(web.Application(), lets_in, complaints)
    app.add_routes(routes)
    await door.open(stack, app, own)


# ---- access, and headers of every answer


def _guarded(
    app: web.Application, lets_in: Callable[[web.Request], str], complaints: RequestLog
) -> web.Application:
    """Turn errors into answers; log at most a line a second for bad requests and bugs."""

    @web.middleware
    async def guard(request: web.Request, handler: Answer) -> web.StreamResponse:
        try:
            refusal = lets_in(request)
            return _plain(refusal, status=401) if refusal else await handler(request)
        except SwarmError as error:
            status = next((s for kind, s in STATUS_OF.items() if isinstance(error, kind)), 500)
            return web.json_response({"code": error.code, "message": error.message}, status=status)
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 - it is logged, at most once a second
            return _unreadable(request, error, complaints)

    async def sealed(_request: web.Request, response: web.StreamResponse) -> None:
        response.headers.setdefault("Content-Security-Policy", "default-src 'none'")
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cache-Control"] = "no-store"
        del response.headers["Server"]

    app.middlewares.append(guard)
    app.on_response_prepare.append(sealed)
    return app


def _unreadable(request: web.Request, error: Exception, complaints: RequestLog) -> web.Response:
    """Answer 400 to a request with an unreadable value, and 500 to a bug of ours."""
    status = 400 if isinstance(error, ValueError | LookupError) else 500
    address = address_of(request.remote or "")
    complaints.log(f"answered {status} to {address}: {type(error).__name__}")
    logger.debug("a request from %s", address, exc_info=error)
    return _plain("this request cannot be read" if status == 400 else "a bug", status=status)


def _plain(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text + "\n", status=status)


def _health(source: StatusSource, facts: StatusCache, metrics: Metrics) -> Iterable[web.RouteDef]:
    async def healthz(_request: web.Request) -> web.Response:
        return _plain("ok")

    async def readyz(_request: web.Request) -> web.Response:
        if source.is_ready:
            return _plain(
                "\n".join(("ok", *(f"warning: {one}" for one in facts.status().warnings)))
            )
        return _plain("the coordinator does not plan or commit steps now", status=503)

    async def scraped(_request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=metrics.text(), headers=headers)

    return (
        web.get("/healthz", healthz),
        web.get("/readyz", readyz),
        web.get("/metrics", scraped),
    )


# ---- the page

DONE = {
    "pause": "paused after the step under way",
    "resume": "resumed",
    "cancel": "cancelled",
    "learning-rate": "new learning rate from the next step on",
    "codecs": "new codecs from the next step on",
}
OPEN = frozenset({"/", "/session", "/healthz", "/readyz"})
"""Paths without data of anybody; the page's document has none."""


class _Page:
    """The page and its requests.

    Args:
        source: The coordinator.
        clock: Clock of rates.
        documents: Converters to JSON documents.
        live: Live data of the page.
        places: Address to listen at, and the file of its address.
        complaints: Log of what strangers cause.
        certificate: Certificate of the page; None: plaintext.
    """

    def __init__(  # noqa: PLR0913 - all parts of a page
        self,
        source: StatusSource,
        clock: Clock,
        documents: Documents,
        live: Live,
        places: HttpOptions,
        complaints: RequestLog,
        certificate: WebCertificate | None,
    ) -> None:
        self._source = source
        self._clock = clock
        self._documents = documents
        self._live = live
        self._own = own = _page_socket(places)
        self._address_file = places.address_file
        self._certificate = certificate
        self._complaints = complaints
        self._door = ConnectionLimiter(
            MAX_CONNECTIONS, complaints, _tls(certificate) if certificate else None
        )
        host, port = own.getsockname()[:2]
        names = [*(certificate.names if certificate else (host,)), *LOOPBACK]
        hosts = {f"{_bracketed(name).lower()}:{port}" for name in names}
        scheme, usual = ("https", 443) if certificate else ("http", 80)
        if port == usual:  # browsers leave it out
            hosts |= {_bracketed(name).lower() for name in names}
        self._guard = Guard(frozenset(hosts))
        self._origin = f"{scheme}://{_bracketed(names[0])}:{port}"
        self._html = files("swarm_ft.page").joinpath("page.html").read_text(encoding="utf-8")
        self._policy = content_policy(self._html)

    @property
    def address(self) -> str:
        """Address that opens the page once."""
        return f"{self._origin}/?token={self._guard.token}"

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the certificate; empty without one."""
        return self._certificate.fingerprint if self._certificate else ""

    async def answer(self, stack: AsyncExitStack, others: Iterable[web.RouteDef]) -> HttpAddresses:
        """Serve the page and the routes in `others`, until the stack is closed."""
        app = web.Application(client_max_size=MAX_COMMAND_BYTES)
        app = _guarded(app, self.lets_in, self._complaints)
        app.add_routes(self.routes())
        app.add_routes(others)
        await self._door.open(stack, app, self._own)
        stack.callback(self._forget_address)
        self._write_address()
        return HttpAddresses(address=self.address, fingerprint=self.fingerprint)

    def routes(self) -> Iterable[web.RouteDef]:
        """Routes of the page."""
        return (
            web.get("/", self._show),
            web.post("/session", self._begin_session),
            web.get("/live", self._stream),
            web.get("/losses", self._losses),
            web.post("/address", self._show_address),
            web.post("/runs/{run}/{verb}", self._steer),
        )

    def lets_in(self, request: web.Request) -> str:
        """Return the reason to refuse a request; empty if it is admitted."""
        if not self._guard.is_called_right(request.headers.get("Host", "")):
            return f"expected {self._origin} as the address of this page"
        if request.path in OPEN:
            return ""
        if not self._knows(request):
            return "open the address that the coordinator printed; each works once"
        self._door.let_in(request)
        return ""

    def _knows(self, request: web.Request) -> bool:
        return self._guard.knows(request.headers.get(HEADER, ""), self._clock.now_s())

    async def _show(self, _request: web.Request) -> web.StreamResponse:
        headers = {"Content-Security-Policy": self._policy}
        return web.Response(text=self._html, content_type="text/html", headers=headers)

    async def _begin_session(self, request: web.Request) -> web.Response:
        """Return a session's token for the one-time token of an address."""
        token, address = _text(await _body_of(request), "token"), address_of(request.remote or "")
        try:
            session = self._guard.redeem(token, address, self._clock.now_s())
        except Busy as error:
            self._complaints.log(
                f"{address} tries addresses of the page too often: refused for now"
            )
            return _plain(error.message, 429)
        if session is None:
            self._complaints.log(f"{address} tried a used or wrong address of the page")
            return _plain("this address is used or wrong; open the coordinator's newest one", 401)
        self._door.let_in(request)
        self._write_address()
        next_one = f"; the next one is in {self._address_file}" if self._address_file else ""
        logger.info("the address of the page was used from %s%s", address, next_one)
        return web.json_response({"session": session})

    def _write_address(self) -> None:
        """Write the newest address to the owner's file, since a browser forgets a closed page."""
        if self._address_file is None:
            return
        try:
            with atomic_write(self._address_file) as partial, open_private(partial, "wb") as file:
                file.write(f"{self.address}\n".encode())
        except OSError as error:
            self._complaints.log(f"its address cannot be written: {error.strerror}")

    def _forget_address(self) -> None:
        if self._address_file is not None:
            with suppress(OSError):
                self._address_file.unlink(missing_ok=True)

    async def _show_address(self, _request: web.Request) -> web.Response:
        """Return an address for another browser of the owner's."""
        return web.json_response({"address": self.address, "fingerprint": self.fingerprint})

    async def _steer(self, request: web.Request) -> web.Response:
        """Carry out the owner's command on a run."""
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
            case "codecs":
                codecs = _text(fields, "forward"), _text(fields, "backward")
                self._source.change_codecs(run_id, *codecs)
            case _:
                raise web.HTTPNotFound
        logger.info("run %s: %s, from the page", run_id, verb)
        return web.json_response({"words": f"{run_id}: {DONE[verb]}"})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        last = request.headers.get("Last-Event-ID", "")
        with self._live.watching():
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            messages = self._live.messages(int(last) if re.fullmatch(r"\d{1,18}", last) else None)
            try:
                async with aclosing(messages):
                    async for message in messages:
                        if not self._knows(request):
                            break  # newer sessions replaced this one
                        async with asyncio.timeout(WRITE_S):
                            await response.write(message)
            except (ConnectionError, TimeoutError, Busy):
                pass  # the browser is gone, or reconnects by itself
            return response

    async def _losses(self, request: web.Request) -> web.Response:
        first = request.query.get("first", "0")
        if not re.fullmatch(r"\d{1,9}", first):
            raise BadInput(f"first: expected a step, got {first[:20]!r}")
        run_id = RunId(request.query.get("run", ""))
        rows = self._source.losses(run_id, int(first), MAX_POINTS)
        return web.json_response([self._documents.row(row) for row in rows])


def content_policy(html: str) -> str:
    """Return the page's content policy: its own script, style and server, and nothing else."""

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
    """Return a command's fields.

    Raises:
        BadInput: The body is no JSON object.
    """
    try:
        found = json.loads(await request.text() or "{}")
    except (ValueError, LookupError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadInput("expected a JSON object")
    return found


def _text(fields: dict[str, Any], name: str) -> str:
    found = fields.get(name, "")
    if not isinstance(found, str):
        raise BadInput(f"{name}: expected a text, got {ascii(found)[:40]}")
    return found


def _number(fields: dict[str, Any], name: str) -> float:
    found = fields.get(name)
    if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
        raise BadInput(f"{name}: expected a number, got {ascii(found)[:40]}")
    return float(found)
