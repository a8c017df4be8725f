"""DHT directory with real nodes: joining, failing to join, hostile records, leaving."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.node import DHTNode
from hivemind.utils import MSGPackSerializer

from swarm_ft.discovery.dht import MAX_LIFETIME_S, DhtDirectory, DhtOptions, RecordRules
from swarm_ft.discovery.fallback_directory import FallbackDirectory
from swarm_ft.errors import BadOption, DirectoryUnreachable, PortInUse, Unavailable
from swarm_ft.identity.roles import Role

pytestmark = pytest.mark.timeout(60)

SOME_ID = "12D3KooWK38Yo4EajL8RupdpahpJUx1RKTXHFUuSNPyNZgzY95H2"


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path: the daemon's socket lies in it, and sockets' paths are bounded."""
    return tmp_path_factory.mktemp("d")


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[DhtDirectory]:
    directory = await DhtDirectory.open(DhtOptions(**options))
    try:
        yield directory
    finally:
        await directory.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


# ---- joining


async def test_three_nodes_meet_through_one_of_them() -> None:
    async with opened() as first:
        assert first.addresses[0].startswith("/ip4/127.0.0.1/tcp/")
        async with (
            opened(initial_peers=first.addresses) as second,
            opened(initial_peers=first.addresses, client_mode=True) as third,
        ):
            await second.announce(Role.PEER, "p", "127.0.0.1:7001")
            await third.announce(Role.COORDINATOR, "c", "127.0.0.1:7002")
            assert third.addresses == ()
            assert await third.find(Role.PEER) == {"p": "127.0.0.1:7001"}
            assert await second.find(Role.COORDINATOR) == {"c": "127.0.0.1:7002"}


async def test_one_living_initial_peer_is_enough() -> None:
    dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{SOME_ID}"
    async with (
        opened() as first,
        opened(initial_peers=(dead, *first.addresses)) as second,
    ):
        await second.announce(Role.PEER, "p", "127.0.0.1:7001")
        assert await first.find(Role.PEER) == {"p": "127.0.0.1:7001"}


async def test_swarms_of_different_prefixes_do_not_see_each_other() -> None:
    async with (
        opened(prefix="one") as one,
        opened(prefix="two", initial_peers=one.addresses) as two,
    ):
        await one.announce(Role.PEER, "p", "127.0.0.1:7001")
        assert await two.find(Role.PEER) == {}


async def test_an_identity_file_keeps_the_address(tmp_path: Path) -> None:
    identity, port = tmp_path / "identity", free_port()
    addresses = []
    for _ in range(2):
        async with opened(
            identity_path=identity, host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",)
        ) as directory:
            addresses.append(directory.addresses)
    assert addresses[0] == addresses[1]
    assert identity.stat().st_mode & 0o077 == 0


async def test_announced_addresses_replace_those_listened_on() -> None:
    async with opened(announce_maddrs=("/ip4/192.0.2.7/tcp/4001",)) as directory:
        (address,) = directory.addresses
        assert address.startswith("/ip4/192.0.2.7/tcp/4001/p2p/")


# ---- coming back


@pytest.mark.thorough
async def test_a_client_comes_back_to_a_node_that_was_away(tmp_path: Path) -> None:
    node = DhtOptions(
        identity_path=tmp_path / "identity", host_maddrs=(f"/ip4/127.0.0.1/tcp/{free_port()}",)
    )
    before = await DhtDirectory.open(node)
    options = DhtOptions(initial_peers=before.addresses, client_mode=True)
    client = FallbackDirectory(lambda: DhtDirectory.open(options), "127.0.0.1:7000")
    await client.enter()
    await client.announce(Role.PEER, "p", "127.0.0.1:7001")
    assert await client.find(Role.PEER) == {"p": "127.0.0.1:7001"}
    await before.close()
    await client.find(Role.PEER)  # nobody answers, and so nobody is known any more
    after = await DhtDirectory.open(node)
    while await after.find(Role.PEER) != {"p": "127.0.0.1:7001"}:  # noqa: ASYNC110 - it comes
        await asyncio.sleep(0.05)
    assert await client.find(Role.PEER) == {"p": "127.0.0.1:7001"}
    await client.close()
    await after.close()


# ---- not joining


async def test_a_refused_port_is_unreachable() -> None:
    peer = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{SOME_ID}"
    with pytest.raises(DirectoryUnreachable, match=peer):
        await DhtDirectory.open(DhtOptions(initial_peers=(peer,)))


@pytest.mark.slow
async def test_a_listener_that_says_nothing_is_unreachable_within_20_seconds() -> None:
    begun = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{SOME_ID}"
        with pytest.raises(DirectoryUnreachable, match=peer):
            await DhtDirectory.open(DhtOptions(initial_peers=(peer,)))
    assert time.monotonic() - begun < 20.0


async def test_another_node_at_the_address_is_unreachable() -> None:
    async with opened() as first:
        impostor = first.addresses[0].rpartition("/")[0] + f"/{SOME_ID}"
        with pytest.raises(DirectoryUnreachable):
            await DhtDirectory.open(DhtOptions(initial_peers=(impostor,)))


async def test_an_interrupted_open_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{SOME_ID}"
        opening = asyncio.create_task(DhtDirectory.open(DhtOptions(initial_peers=(peer,))))
        connection, _ = await asyncio.to_thread(silent.accept)  # the daemon is at it
        opening.cancel()
        with connection, pytest.raises(asyncio.CancelledError):
            await opening
    assert _daemons_of(tmp_path) == []


async def test_a_taken_listen_port_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            await DhtDirectory.open(DhtOptions(host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",)))


async def test_a_listen_address_of_another_machine_is_a_bad_option() -> None:
    with pytest.raises(BadOption, match=r"192\.0\.2\.1"):
        await DhtDirectory.open(DhtOptions(host_maddrs=("/ip4/192.0.2.1/tcp/0",)))


async def test_an_identity_in_a_missing_directory_is_a_bad_option(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="identity file"):
        await DhtDirectory.open(DhtOptions(identity_path=tmp_path / "missing" / "identity"))


async def test_an_identity_file_that_is_no_key_is_a_bad_option(tmp_path: Path) -> None:
    (tmp_path / "identity").write_text("not a key")
    with pytest.raises(BadOption, match="identity"):
        await DhtDirectory.open(DhtOptions(identity_path=tmp_path / "identity"))


@pytest.mark.parametrize(
    "options",
    [
        {"initial_peers": ("127.0.0.1:7001",)},
        {"initial_peers": ("/ip4/127.0.0.1/tcp/7001",)},
        {"initial_peers": ("/ip4/300.0.0.1/tcp/7001/p2p/" + SOME_ID,)},
        {"initial_peers": ("",)},
        {"initial_peers": ("/ip4/127.0.0.1/tcp/7001/p2p/nonsense",)},
        {"host_maddrs": ("/ip4/127.0.0.1/tcp/99999",)},
        {"announce_maddrs": ("somewhere",)},
        {"lifetime_s": 0.0},
        {"lifetime_s": float("nan")},
        {"lifetime_s": 1e9},
        {"refresh_s": 0.0},
    ],
)
def test_malformed_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadOption):
        DhtOptions(**options)


# ---- records of strangers


def record(subkey: bytes, value: bytes, expires_in_s: float = 60.0) -> DHTRecord:
    return DHTRecord(b"key", subkey, value, time.time() + expires_in_s)


NAME, ENDPOINT = MSGPackSerializer.dumps("name"), MSGPackSerializer.dumps("host:1")


def test_short_texts_are_records() -> None:
    assert RecordRules().validate(record(NAME, ENDPOINT))
    assert RecordRules().validate(record(NAME, MSGPackSerializer.dumps("")))
    assert RecordRules().validate(record(NAME, MSGPackSerializer.dumps("x" * 255)))


@pytest.mark.parametrize(
    "hostile",
    [
        record(NAME, b""),
        record(NAME, b"\xc1"),
        record(NAME, b"\xa5abc"),
        record(NAME, b"\xa2\xff\xfe"),
        record(NAME, ENDPOINT + b"more"),
        record(NAME, MSGPackSerializer.dumps(7)),
        record(NAME, MSGPackSerializer.dumps(["host:1"])),
        record(NAME, MSGPackSerializer.dumps(b"host:1")),
        record(NAME, b"\xc7\x01\x50\x00"),
        record(NAME, b"\xd9"),
        record(NAME, b"\xd9\x05abc"),
        record(NAME, MSGPackSerializer.dumps("x" * 256)),
        record(MSGPackSerializer.dumps(None), ENDPOINT),
        record(b"", ENDPOINT),
        record(NAME, ENDPOINT, expires_in_s=3 * MAX_LIFETIME_S),
        record(NAME, ENDPOINT, expires_in_s=float("nan")),
    ],
)
def test_anything_else_of_a_stranger_is_refused(hostile: DHTRecord) -> None:
    assert not RecordRules().validate(hostile)


async def test_hostile_records_of_another_node_hide_nobody() -> None:
    async with opened() as ours:
        stranger = await DHTNode.create(initial_peers=list(ours.addresses))
        try:
            await ours.announce(Role.PEER, "p", "127.0.0.1:7001")
            key, expires = "swarm-ft.peer", time.time() + 60.0
            hostile = (
                ("number", 7),
                ("no endpoint", "x"),
                ("unreachable", "unix:/x:1"),
                ("huge", "x" * 100_000),
                (7, "127.0.0.1:7001"),
            )
            for turn, (subkey, value) in enumerate(hostile):
                await stranger.store(key, value, expires + turn, subkey=subkey)
            await stranger.store("swarm-ft.coordinator", "not a dictionary", expires)
            assert await ours.find(Role.PEER) == {"p": "127.0.0.1:7001"}
            assert await ours.find(Role.COORDINATOR) == {}
        finally:
            await stranger.shutdown()


# ---- leaving


async def look_up_for_ever(directory: DhtDirectory) -> None:
    while True:
        await directory.find(Role.PEER)


async def test_a_dead_daemon_is_unavailable_and_closing_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with opened() as directory:
        await directory.announce(Role.PEER, "p", "127.0.0.1:7001")
        (daemon,) = _daemons_of(tmp_path)
        os.kill(daemon, signal.SIGKILL)
        async with asyncio.timeout(5.0):
            with pytest.raises(Unavailable, match="has ended"):
                await look_up_for_ever(directory)
            with pytest.raises(Unavailable, match="has ended"):
                await directory.announce(Role.PEER, "p", "127.0.0.1:7001")
            await directory.withdraw(Role.PEER, "p")


async def test_closing_leaves_no_process_no_file_and_no_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with opened() as directory:
        await directory.announce(Role.PEER, "p", "127.0.0.1:7001")
        assert len(_daemons_of(tmp_path)) == 1
    assert _daemons_of(tmp_path) == []
    assert os.listdir(tmp_path) == []


CHILD = """
import asyncio, signal, sys
from swarm_ft.identity.roles import Role
from swarm_ft.discovery.dht import DhtDirectory, DhtOptions

async def main():
    directory = await DhtDirectory.open(DhtOptions(initial_peers=(sys.argv[1],)))
    try:
        await directory.announce(Role.PEER, "child", "127.0.0.1:7001")
        print("announced", flush=True)
        await asyncio.Event().wait()
    finally:
        await directory.close()

# As in a shell's foreground; who is started in the background ignores it, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


async def _child(address: str, tmp_path: Path) -> asyncio.subprocess.Process:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, address),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a foreground process group of its own, as a shell makes it
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"announced\n"
    return child


@pytest.mark.thorough
async def test_ctrl_c_on_the_process_group_withdraws_and_leaves_quietly(tmp_path: Path) -> None:
    async with opened() as directory:
        child = await _child(directory.addresses[0], tmp_path)
        assert await directory.find(Role.PEER) == {"child": "127.0.0.1:7001"}
        os.killpg(child.pid, signal.SIGINT)
        assert await child.communicate() == (b"interrupted\n", b"")
        assert await directory.find(Role.PEER) == {}
        assert _daemons_of(tmp_path) == []


@pytest.mark.thorough
async def test_a_killed_process_takes_its_daemon_with_it(tmp_path: Path) -> None:
    async with opened() as directory:
        child = await _child(directory.addresses[0], tmp_path)
        (daemon,) = _daemons_of(tmp_path)
        ended = os.pidfd_open(daemon)
        child.kill()
        await child.communicate()
        done = asyncio.Event()
        asyncio.get_running_loop().add_reader(ended, done.set)  # readable once it has ended
        async with asyncio.timeout(10.0):
            await done.wait()
        asyncio.get_running_loop().remove_reader(ended)
        os.close(ended)


def _daemons_of(directory: Path) -> list[int]:
    """Return process ids of the libp2p daemons with sockets in `directory`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(directory) in (entry / "cmdline").read_text():
                command = (entry / "cmdline").read_text().split("\0")
                if command[0].endswith("p2pd"):
                    found.append(int(entry.name))
    return found


# ---- a node that is too busy to answer


@pytest.mark.parametrize(("unanswered", "is_taken"), [(2, True), (3, False)])
async def test_a_record_that_nobody_took_is_offered_again(
    monkeypatch: pytest.MonkeyPatch, unanswered: int, is_taken: bool
) -> None:
    store, stored_keys = DHTNode.store, []

    async def busy_at_first(node: Any, *args: Any, **options: Any) -> bool:
        stored_keys.append(args)
        return len(stored_keys) > unanswered and await store(node, *args, **options)

    async with opened() as directory:
        monkeypatch.setattr(DHTNode, "store", busy_at_first)
        with contextlib.nullcontext() if is_taken else pytest.raises(Unavailable, match="not take"):
            await directory.announce(Role.PEER, "p", "127.0.0.1:7001")
        assert len(stored_keys) == 3
        assert await directory.find(Role.PEER) == ({"p": "127.0.0.1:7001"} if is_taken else {})
        monkeypatch.undo()


async def test_a_refresh_that_is_under_way_brings_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The DHT refuses the refresh as older than the withdrawal; a retry would be newer."""
    store, begun, over = DHTNode.store, asyncio.Event(), asyncio.Event()
    taken, refreshed = list[tuple[str, bool]](), asyncio.Event()

    async def slow_once(node: Any, key: str, value: str, *args: Any, **options: Any) -> bool:
        if value and not begun.is_set():
            begun.set()
            await over.wait()
        is_taken = bool(await store(node, key, value, *args, **options))
        taken.append((value, is_taken))
        if sum(value == "127.0.0.1:7002" for value, _ in taken) == 2:
            refreshed.set()
        return is_taken

    async with opened(refresh_s=0.05) as directory:
        await directory.announce(Role.PEER, "p", "127.0.0.1:7001")
        monkeypatch.setattr(DHTNode, "store", slow_once)
        await begun.wait()  # the refresh has its time of expiry, and is on its way
        await directory.withdraw(Role.PEER, "p")
        await directory.announce(Role.PEER, "other", "127.0.0.1:7002")
        over.set()
        await refreshed.wait()  # one record after the other: that of `p` is done with
        assert [is_taken for value, is_taken in taken if value == "127.0.0.1:7001"] == [False]
        assert await directory.find(Role.PEER) == {"other": "127.0.0.1:7002"}
        monkeypatch.undo()
