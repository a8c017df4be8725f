"""A small internet of homes behind NAT, in network namespaces. Needs root, Linux and nft.

An internet routes between households and drops what has a private address. Each household has an
access link, delayed and shaped as those of `Lab`, a router behind it, perhaps a carrier's NAT in
front of that, and machines in 192.168.1.0/24, the same in every home, as it is in life. Routers are
Linux' own: masquerade that keeps ports where it can (a cone), draws them (symmetric), drops
unsolicited packets or resets them. A home's IPv6 has no NAT but a firewall that is closed
in the same way. Public machines are households that are `open`. Outer addresses are 45.N.0.0/24
and 2a45:N::/32, as programs treat those that are reserved for examples differently, and never leave
the namespaces.

    with Internet() as internet:
        relay = internet.household(Home("open")).machines[0]
        home = internet.household(Home("symmetric", link=Link(20, 100, delay_ms=40)))
        listener = relay.call(socket.create_server, ("", 7000))  # a socket on another machine
        async with home.machines[0].process(sys.executable, "-m", "swarm_ft", ...) as peer:
            home.router.flush_connections()
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from benchmarks.lab.host import Host
from benchmarks.lab.hub import Hub, Link, limit_packets
from benchmarks.lab.namespaces import configure, run
from benchmarks.lab.router import (
    INNER,
    MAPPED,
    MAPPED_IN,
    MAPPED_OUT,
    OUTER,
    TABLE,
    TCP,
    Kind,
    Router,
    count_of,
)

Nat = Literal["open", "cone", "symmetric", "reject", "cgnat", "cgnat-symmetric"]

BOXES: dict[Nat, tuple[Kind, ...]] = {
    "open": ("open",),
    "cone": ("cone",),
    "symmetric": ("symmetric",),
    "reject": ("reject",),
    "cgnat": ("cone", "cone"),
    "cgnat-symmetric": ("symmetric", "cone"),
}
"""From the internet to the home."""
MAX_HOUSEHOLDS = 250
LINK_PART, CARRIER_PART, HOME_PART = 0, 1, 2
"""Networks of a household's IPv6 prefix."""
MAX_MACHINES = 200
HOME_NETWORK = IPv4Network("192.168.1.0/24")
CARRIER_NETWORK = IPv4Network("100.64.0.0/24")
FIRST_MACHINE = 10
PRIVATE = "{ 10.0.0.0/8, 100.64.0.0/10, 172.16.0.0/12, 192.168.0.0/16 }"
INTERNET = f"""
table ip internet {{
  counter private {{ }}
  chain arriving {{
    type filter hook prerouting priority raw
    ip saddr {PRIVATE} counter name private drop
    ip daddr {PRIVATE} counter name private drop
  }}
}}
"""
FORWARDING = ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
NO_WAITING = ("net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0")
"""Addresses are not asked for before they are used, which takes a second."""
MAPPER = "miniupnpd"
MAPPER_WORDS = f"""
ext_ifname={OUTER}
listening_ip={INNER}
enable_natpmp=yes
enable_upnp=yes
secure_mode=yes
uuid=00000000-0000-0000-0000-000000000001
upnp_table_name={TABLE}
upnp_nat_table_name={TABLE}
upnp_forward_chain={MAPPED}
upnp_nat_chain={MAPPED_IN}
upnp_nat_postrouting_chain={MAPPED_OUT}
allow 1024-65535 {HOME_NETWORK} 1024-65535
"""
READY_TIMEOUT_S = 30.0
PATIENCE_S = 0.2
"""With a packet that may be lost, as what it is sent to is not there yet."""
CLOSED_PORT = 1
NAT_PMP_PORT = 5351
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", MAPPER: "miniupnpd-nftables"}

NOT_SHAPED = Link()


@dataclass(frozen=True, slots=True)
class Home:
    """A household's router, its link and its addresses.

    Attributes:
        nat: "open": none, a public machine. "cone": the outer port is the inner one wherever it
            goes to, and unsolicited packets are dropped. "symmetric": each connection has an outer
            port of its own. "reject": as a cone, but an unsolicited SYN is answered with a
            reset. "cgnat", "cgnat-symmetric": a cone behind a carrier's NAT of that kind.
        ipv6: with public addresses, and a firewall that lets in only replies; an open one
            has none.
        forwarded: TCP ports of the router's IPv4 address that lead to its first machine.
        maps_ports: the router maps ports on request, by NAT-PMP, PCP and UPnP.
        num_machines: behind the router.
        link: to the internet.
    """

    nat: Nat = "cone"
    ipv6: bool = False
    forwarded: tuple[int, ...] = ()
    maps_ports: bool = False
    num_machines: int = 1
    link: Link = NOT_SHAPED

    def __post_init__(self) -> None:
        if not 1 <= self.num_machines <= MAX_MACHINES:
            raise ValueError(f"expected 1 to {MAX_MACHINES} machines: {self}")
        if self.nat == "open" and (self.forwarded or self.maps_ports or self.num_machines > 1):
            raise ValueError(f"expected one machine, as an open home has no router: {self}")


@dataclass(frozen=True, slots=True)
class Household:
    """A home that is there.

    Attributes:
        router: the home's own; an open home's is its machine.
        carrier: what is in front of it, if anything is.
        indoors: machines behind the router.
    """

    router: Router
    carrier: Router | None = None
    indoors: tuple[Host, ...] = ()

    @property
    def machines(self) -> tuple[Host, ...]:
        """The hosts that run the home's programs."""
        return self.indoors or (self.router.host,)

    @property
    def address(self) -> str:
        """The IPv4 address that the internet sees."""
        return (self.carrier or self.router).host.address


def why_not(home: Home | None = None) -> str:
    """Why such a household cannot be made here, in a line; empty: it can."""
    home = home or Home()
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    tools = ("ip", "tc", "nft", *((MAPPER,) if home.maps_ports else ()))
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        packages = " ".join(dict.fromkeys(PACKAGES[tool] for tool in missing))
        return f"there is no {' and no '.join(missing)}: apt-get install {packages}"
    if home.link.delay_ms and not Path("/dev/net/tun").exists():
        return "delays need /dev/net/tun"
    if home.ipv6 and not Path("/proc/sys/net/ipv6").exists():
        return "the kernel has no IPv6"
    return _why_no_nft()


@cache
def _why_no_nft() -> str:
    try:
        run("unshare", "--net", "nft", "list", "ruleset")
    except OSError as error:
        return f"network namespaces have no nftables here: {error}".partition("\n")[0]
    return ""


class Internet:
    """Use it in a `with`: households are made by `household`, and all are gone at the end.

    Any number of them may be there at once, and do not reach each other. What one that was killed
    left behind is removed by the next one.

    Raises:
        PermissionError: this is not root.
    """

    def __init__(self) -> None:
        self._hub = Hub("homes")
        self._num_households = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._hub)
            own_host = Host(self._hub.namespace, "")
            run(*own_host.command("sysctl", "-qew", *FORWARDING, *NO_WAITING))
            run(*own_host.command("nft", "-f", "-"), text=INTERNET)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def household(self, home: Home | None = None) -> Household:
        """Another home, with its link to the internet.

        Raises:
            OSError: it cannot be made; `why_not` may know why.
            ValueError: there are too many.
        """
        home = home or Home()
        if self._num_households == MAX_HOUSEHOLDS:
            raise ValueError(f"an internet has {MAX_HOUSEHOLDS} households at most")
        self._num_households += 1
        household = _Site(self._hub, self._num_households, home, self._stack).household()
        for machine in household.machines:
            machine.call(_wait_for_internet, self._num_households, home)
        return household

    @property
    def num_private(self) -> int:
        """Packets with a private address that were dropped."""
        return count_of(self._hub.namespace, "ip internet private")


class _Site:
    """A place for a household, with its addresses."""

    def __init__(self, hub: Hub, number: int, home: Home, stack: ExitStack) -> None:
        self._hub = hub
        self._number = number
        self._home = home
        self._stack = stack

    def household(self) -> Household:
        *carriers, kind = BOXES[self._home.nat]
        outermost = self._outermost()
        if kind == "open":
            return Household(outermost)
        if not carriers:
            return self._furnished(outermost, None, kind)
        outermost.guard(carriers[0], firewall_ipv6=False)
        return self._furnished(self._behind(outermost), outermost, kind)

    def _furnished(self, router: Router, carrier: Router | None, kind: Kind) -> Household:
        forwards = dict.fromkeys(self._home.forwarded, str(HOME_NETWORK[FIRST_MACHINE]))
        router.guard(kind, forwards, firewall_ipv6=True)
        namespace = router.host.namespace
        indoors = _first(INNER, HOME_NETWORK, self._ipv6(HOME_PART))
        configure(namespace, f"link add {INNER} type bridge", *indoors)
        machines = tuple(self._machine(namespace, i) for i in range(self._home.num_machines))
        if self._home.maps_ports:
            self._stack.enter_context(_mapping_ports(router.host))
        return Household(router, carrier, machines)

    def _outermost(self) -> Router:
        ipv4, ipv6 = IPv4Network(f"45.{self._number}.0.0/24"), self._ipv6(LINK_PART)
        router = Router(self._namespace("outer", FORWARDING), ipv4, ipv6)
        port = self._hub.plug(self._home.link, router.host.namespace, OUTER)
        routes = (f"route add {ipv6.supernet(new_prefix=32)} via {ipv6[2]}",) if ipv6 else ()
        configure(self._hub.namespace, *_first(port, ipv4, ipv6), *routes)
        router.connect()
        return router

    def _behind(self, carrier: Router) -> Router:
        ipv6, home_ipv6 = self._ipv6(CARRIER_PART), self._ipv6(HOME_PART)
        router = Router(self._namespace("inner", FORWARDING), CARRIER_NETWORK, ipv6)
        link = f"link add {INNER} type veth peer name {OUTER} netns {router.host.namespace}"
        routes = (f"route add {home_ipv6} via {ipv6[2]}",) if ipv6 and home_ipv6 else ()
        indoors = _first(INNER, CARRIER_NETWORK, ipv6)
        configure(carrier.host.namespace, link, *indoors, *routes)
        router.connect()
        return router

    def _machine(self, router: str, number: int) -> Host:
        namespace, device = self._namespace(f"machine{number}"), f"machine{number}"
        link = f"link add {device} type veth peer name eth0 netns {namespace}"
        configure(router, link, f"link set {device} master {INNER} up")
        ipv4, ipv6 = HOME_NETWORK, self._ipv6(HOME_PART)
        host = FIRST_MACHINE + number
        words = [
            "link set eth0 up",
            f"addr add {ipv4[host]}/{ipv4.prefixlen} dev eth0",
            f"route add default via {ipv4[1]} {TCP}",
        ]
        if ipv6:
            words += [
                f"addr add {ipv6[host]}/{ipv6.prefixlen} dev eth0 nodad",
                f"route add ::/0 via {ipv6[1]} {TCP}",
            ]
        configure(namespace, *words)
        limit_packets(namespace, "eth0", self._home.link.up_mbps)
        return Host(namespace, str(ipv4[host]), str(ipv6[host]) if ipv6 else "")

    def _namespace(self, name: str, settings: tuple[str, ...] = ()) -> str:
        namespace = self._hub.add(f"{self._number}-{name}")
        no_ipv6 = f"net.ipv6.conf.all.disable_ipv6={int(not self._home.ipv6)}"
        commands = (no_ipv6, *NO_WAITING, *settings)
        run(*Host(namespace, "").command("sysctl", "-qew", *commands))
        return namespace

    def _ipv6(self, part: int) -> IPv6Network | None:
        return IPv6Network(f"2a45:{self._number}:0:{part}::/64") if self._home.ipv6 else None


def _first(device: str, ipv4: IPv4Network, ipv6: IPv6Network | None) -> list[str]:
    """Return commands that start a device with its networks' first addresses, like a gateway."""
    words = [f"link set {device} up", f"addr add {ipv4[1]}/{ipv4.prefixlen} dev {device}"]
    return words + ([f"addr add {ipv6[1]}/{ipv6.prefixlen} dev {device} nodad"] if ipv6 else [])


@contextmanager
def _mapping_ports(router: Host) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="homes-") as folder:
        words = Path(folder) / "conf"
        words.write_text(MAPPER_WORDS, encoding="utf-8")
        with subprocess.Popen(
            router.command(MAPPER, "-d", "-f", str(words), "-P", f"{folder}/pid"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                router.call(_wait_for_mapper)
                yield
            finally:
                process.kill()


def _wait_for_mapper() -> None:
    """Wait until the mapper answers, which it does once it has all its sockets."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.settimeout(PATIENCE_S)
        asker.connect((str(HOME_NETWORK[1]), NAT_PMP_PORT))

        def request() -> None:
            asker.send(bytes(2))  # NAT-PMP: which outer address?
            asker.recv(64)

        _insist(request)


def _wait_for_internet(number: int, home: Home) -> None:
    """Wait until the gateway answers; a device that is up carries packets only a moment later."""
    timeout_s = PATIENCE_S + 4 * home.link.delay_ms / 1000
    addresses = (f"45.{number}.0.1", *((f"2a45:{number}::1",) if home.ipv6 else ()))

    def dial() -> None:
        for address in addresses:
            with suppress(ConnectionRefusedError):
                socket.create_connection((address, CLOSED_PORT), timeout_s).close()

    _insist(dial)


def _insist(attempt: Callable[[], None]) -> None:
    """Try again what fails, but not for ever."""
    until_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.01)
