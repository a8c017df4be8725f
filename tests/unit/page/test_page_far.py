"""The page for other machines: over TLS, with its fingerprint, and closed to strangers."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from swarm_ft.identity.authority import Authority
from swarm_ft.identity.certificates import from_pem, shown_fingerprint
from swarm_ft.page import connection_limiter
from swarm_ft.page.guard import TRIES, TRIES_PER_S
from swarm_ft.page.server import LOOPBACK, HttpAddresses, HttpOptions
from tests.browser import CHROMIUM, browser
from tests.doubles.clock import ManualClock
from tests.unit.page.test_page_server import answering, enter

FAR = HttpOptions(page="0.0.0.0", page_port=0)
NAMES = ("swarm.example.org", *LOOPBACK)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "keys")


@asynccontextmanager
async def far(
    authority: Authority, clock: ManualClock | None = None
) -> AsyncIterator[HttpAddresses]:
    async with answering(clock, FAR, authority.web(NAMES)) as found:
        yield found


@asynccontextmanager
async def comparing(found: HttpAddresses) -> AsyncIterator[aiohttp.ClientSession]:
    """A browser whose owner compares the fingerprint."""
    pinned = aiohttp.Fingerprint(bytes.fromhex(found.fingerprint.replace(":", "")))
    jar = aiohttp.CookieJar(unsafe=True)
    connector = aiohttp.TCPConnector(ssl=pinned)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=jar) as session:
        yield session


def port_of(found: HttpAddresses) -> int:
    return int(found.address.partition("/?")[0].rpartition(":")[2])


def local_address(found: HttpAddresses) -> str:
    """Return the address with a name that leads to this machine."""
    return found.address.replace("swarm.example.org", "127.0.0.1")


async def enter_here(
    session: aiohttp.ClientSession, found: HttpAddresses, address: str = ""
) -> int:
    return await enter(session, found, address, f"https://127.0.0.1:{port_of(found)}")


async def test_whoever_compares_the_fingerprint_is_let_in_over_tls(authority: Authority) -> None:
    async with far(authority) as found, comparing(found) as session:
        assert found.address.startswith("https://swarm.example.org:")
        assert await enter_here(session, found) == 200
        async with session.get(f"https://127.0.0.1:{port_of(found)}/") as got:
            assert "Contributions" in await got.text()


async def test_the_printed_name_is_one_that_it_is_called_by(authority: Authority) -> None:
    async with far(authority) as found, comparing(found) as session:
        for name, status in (("swarm.example.org", 200), ("evil.example", 401)):
            headers = {"Host": f"{name}:{port_of(found)}"}
            async with session.get(local_address(found), headers=headers) as got:
                assert got.status == status


async def test_another_certificate_is_told_from_it(authority: Authority, tmp_path: Path) -> None:
    other = Authority.make(tmp_path / "others").web(NAMES).fingerprint
    async with far(authority) as found, comparing(HttpAddresses(fingerprint=other)) as session:
        with pytest.raises(aiohttp.ServerFingerprintMismatch):
            await session.get(local_address(found))


async def test_who_trusts_the_authority_need_not_compare(authority: Authority) -> None:
    context = ssl.create_default_context(cafile=str(authority.folder / "authority.pem"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python's own from 3.13 on
    async with (
        far(authority) as found,
        aiohttp.ClientSession() as session,
        session.get(local_address(found), ssl=context) as got,
    ):
        assert got.status == 200


@pytest.mark.skipif(CHROMIUM is None, reason="expected chromium on the path")
async def test_a_browser_warns_shows_the_printed_fingerprint_and_goes_on(
    authority: Authority, tmp_path: Path
) -> None:
    async with far(authority) as found, browser(tmp_path / "browser") as tab:
        shown = from_pem((await tab.warned_of(local_address(found))).encode())
        assert shown_fingerprint(shown) == found.fingerprint
        await tab.go_on()
        await tab.until("document.body?.innerText.includes('Contributions')")
        assert await tab.look("location.protocol") == "https:"
        await tab.until("typeof source !== 'undefined' && source.isOpen")


async def test_nothing_older_than_tls_1_3_is_spoken(authority: Authority) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with far(authority) as found:
        place = ("127.0.0.1", port_of(found))
        _, writer = await asyncio.open_connection(*place, ssl=context)
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        writer.close()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError, match=r"^$|SSL|reset"):
            await asyncio.open_connection(*place, ssl=context)


async def test_plain_http_gets_nothing(authority: Authority) -> None:
    async with far(authority) as found:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(found))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = await everything(reader)
        writer.close()
    assert b"HTTP" not in received
    assert len(received) <= 7, "more than an alert of TLS"


async def everything(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_an_address_may_try_a_few_tokens_a_minute(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    async with far(authority, clock) as found, comparing(found) as session:

        async def tries(address: str) -> int:
            return await enter_here(session, found, address)

        wrong = f"https://127.0.0.1:{port_of(found)}/?token=wrong"
        assert [await tries(wrong) for _ in range(TRIES + 1)] == [401] * TRIES + [429]
        assert await tries(local_address(found)) == 429, "the right one told what is right"
        token = json.dumps({"token": "wrong"})
        async with session.post(f"https://127.0.0.1:{port_of(found)}/session", data=token) as got:
            assert await got.text() == ("one machine has 5 tries a minute; try again in 12 s\n")
        assert "127.0.0.1 tried a used or wrong address of the page" in caplog.text
        clock.advance(1 / TRIES_PER_S)
        assert await tries(local_address(found)) == 200


async def test_whoever_is_in_is_not_kept_out_by_tries(authority: Authority) -> None:
    async with far(authority, ManualClock()) as found, comparing(found) as session:
        await enter_here(session, found)
        async with comparing(found) as stranger:
            for _ in range(TRIES + 1):
                await enter_here(stranger, found, "/?token=wrong")
        async with session.get(f"https://127.0.0.1:{port_of(found)}/metrics") as got:
            assert got.status == 200


async def test_who_says_nothing_is_hung_up_on(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limiter, "STRANGER_S", 0.2)
    async with far(authority) as found:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(found))
        assert await everything(reader) == b""
        writer.close()


async def test_who_is_not_let_in_is_hung_up_on_whatever_it_asks(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limiter, "STRANGER_S", 2.0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with far(authority) as found:
        place = ("127.0.0.1", port_of(found))
        reader, writer = await asyncio.open_connection(*place, ssl=context)
        host = f"localhost:{place[1]}".encode()
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert b"200 OK" in await everything(reader)
        writer.close()


async def test_who_is_let_in_stays(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limiter, "STRANGER_S", 2.0)
    async with far(authority) as found, comparing(found) as session:
        await enter_here(session, found)
        async with session.get(f"https://127.0.0.1:{port_of(found)}/live") as response:
            begun_s = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() < begun_s + 2.5:
                assert await response.content.readline()


@pytest.mark.parametrize("place", ["page", "metrics"])
async def test_so_many_are_connected_at_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limiter, "ONE_ADDRESS", 1 / 16)
    async with answering() as found:
        address = found.metrics if place == "metrics" else f"127.0.0.1:{port_of(found)}"
        host, _, port = address.rpartition(":")
        at_most = (
            connection_limiter.MAX_SCRAPES
            if place == "metrics"
            else connection_limiter.MAX_CONNECTIONS
        ) // 16
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(at_most)]
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await everything(reader) == b"", "one more than its share"
        silent.append((reader, writer))
        silent.pop(0)[1].close()
        async with aiohttp.ClientSession() as session:
            while not await answers(session, f"http://{address}/healthz"):
                pass
        for _, writer in silent:
            writer.close()


async def answers(session: aiohttp.ClientSession, address: str) -> bool:
    try:
        async with session.get(address) as got:
            return got.status == 200
    except aiohttp.ClientError:
        return False


async def test_none_is_left_when_it_ends(authority: Authority) -> None:
    async with far(authority) as found:
        silent = await asyncio.open_connection("127.0.0.1", port_of(found))
    assert await everything(silent[0]) == b""
    silent[1].close()
    with socket.create_server(("0.0.0.0", port_of(found))):
        pass
