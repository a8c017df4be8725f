"""A swarm's keys and invitations: as their owner and those who were invited see them."""

import json
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from swarm_ft.api.swarm_keys import open_keys
from swarm_ft.client.demo_input import DemoInput
from swarm_ft.identity.keys import name_of, new_key
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.protocol.spec.member_name import default_name
from tests.cli.conftest import RunHere, Shell

FOLDER = "swarm-ft-coordinator.db.keys"


@pytest.fixture
def keys_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_makes_keys_once(run_here: RunHere, keys_dir: Path) -> None:
    made = run_here("init", "--json")
    assert made.code == 0
    document = json.loads(made.out)
    assert document["keys"] == FOLDER
    assert len(document["fingerprint"]) == 32
    again = run_here("init")
    assert (again.code, again.out) == (2, "")
    assert "there is an authority already" in again.err


def test_an_invitation_is_one_word_and_the_rest_is_said_beside_it(
    run_here: RunHere, keys_dir: Path
) -> None:
    run_here("init")
    made = run_here("invite", "--address", "swarm.example.org:7000", "--uses", "3")
    assert made.code == 0
    assert made.out.startswith("swarm1")
    assert made.out.count("\n") == 1
    assert "for 3 peers, until" in made.err
    assert made.out.strip() not in made.err
    invitation = json.loads(
        run_here("invite", "--role", "client", "--address", "h:1", "--json").out
    )
    assert (invitation["role"], invitation["uses"]) == ("client", 1)
    listed = json.loads(run_here("keys", "list", "--json").out)
    assert [one["role"] for one in listed["invitations"]] == ["peer", "client"]
    assert not listed["members"]


def test_an_invitation_says_what_its_clients_claim(run_here: RunHere, keys_dir: Path) -> None:
    run_here("init")
    command = ("invite", "--address", "h:1", "--role", "client", "--weight", "3")
    assert "for 1 client (weight 3), until" in run_here(*command).err
    assert json.loads(run_here(*command, "--json").out)["weight"] == 3
    listed = json.loads(run_here("keys", "list", "--json").out)["invitations"]
    assert [one["weight"] for one in listed] == [3, 3]


def test_an_invitation_says_what_its_bearer_may_host(run_here: RunHere, keys_dir: Path) -> None:
    run_here("init")
    limits = ("--role", "replica-only", "--sees-tokens", "no", "--layers", "4-20")
    made = run_here("invite", "--address", "h:1", *limits)
    assert made.code == 0
    assert len(made.out.strip()) < 70
    assert "for 1 peer (replica only, sees no tokens, layers 4-20 only), until" in made.err
    invitation = json.loads(run_here("invite", "--address", "h:1", "--json", *limits).out)
    granted = {"replica_only": True, "sees_tokens": False, "only_layers": "4-20"}
    assert invitation["role"] == "peer"
    for one in (invitation, *json.loads(run_here("keys", "list", "--json").out)["invitations"]):
        assert {name: one[name] for name in granted} == granted
    listed = run_here("keys", "list").out.splitlines()[0]
    assert "for peers (replica only, sees no tokens, layers 4-20 only)  1 left" in listed


def test_the_invitation_for_all_is_there_where_all_are_let_in(
    run_here: RunHere, keys_dir: Path
) -> None:
    run_here("init")
    closed = run_here("invite", "--open")
    assert (closed.code, closed.out) == (2, "")
    assert "expected a coordinator that was started with --open" in closed.err
    with open_keys("swarm-ft-coordinator.db") as (authority, registry):
        public = registry.open_to_all(authority.fingerprint, ("h:1",))
    assert run_here("invite", "--open").out.strip() == str(public)
    invitation = json.loads(run_here("invite", "--open", "--json").out)
    assert invitation == {"invite": str(public), "name": public.name}
    (listed,) = run_here("keys", "list").out.splitlines()
    assert listed.endswith("for peers (replica only, sees no tokens)  any number")
    (record,) = json.loads(run_here("keys", "list", "--json").out)["invitations"]
    assert (record["uses_left"], record["expires"]) == (None, None)


def test_members_are_listed_and_revoked_by_names_that_people_can_say(
    run_here: RunHere, keys_dir: Path
) -> None:
    run_here("init")
    assert run_here("invite", "--address", "h:1", "--note", "Anna's").code == 2
    invitation = json.loads(run_here("invite", "--address", "h:1", "--note", "Anna", "--json").out)
    assert invitation["note"] == "Anna"
    keys = [new_key().public_key() for _ in range(3)]
    now = datetime.now(UTC)
    with open_keys("swarm-ft-coordinator.db") as (authority, registry):
        until = now + timedelta(days=1)
        made = registry.invite(authority.fingerprint, ("h:1",), Role.PEER, 3, until)
        for key, name in zip(keys, ("ada-3090", "Ada-3O90", ""), strict=True):
            newcomer = Caller(role=Role.NEWCOMER, name=made.name, key=key)
            registry.admit(newcomer, now, name)
    ada, eve, drawn = map(name_of, keys)
    listed = run_here("keys", "list").out
    for member_id, name in (
        (ada, f"ada-3090 ({ada[:8]})"),
        (eve, f"Ada-3O90 ({eve[:8]})"),
        (drawn, default_name(drawn)),
    ):
        assert re.search(rf"^peer +{re.escape(name)} +{member_id}  by ", listed, re.MULTILINE)
    found = json.loads(run_here("keys", "list", "--json").out)
    assert {one["id"]: one["name"] for one in found["members"]}[ada] == f"ada-3090 ({ada[:8]})"
    assert found["invitations"][0]["note"] == "Anna"
    assert "  Anna  for peers" in listed
    assert run_here("keys", "revoke", "ada-3090").code == 0
    assert run_here("keys", "revoke", drawn[:6]).code == 0
    after = json.loads(run_here("keys", "list", "--json").out)["members"]
    assert {one["id"] for one in after if one["revoked"]} == {ada, drawn}
    assert {one["name"] for one in after if not one["revoked"]} == {"Ada-3O90"}
    with open_keys("swarm-ft-coordinator.db") as (_, registry):
        same = Caller(role=Role.NEWCOMER, name=made.name, key=keys[1])
        registry.admit(same, now, default_name(drawn))
    refused = run_here("keys", "revoke", default_name(drawn))
    assert refused.code == 2
    assert "expected one member, got 2; give an id" in refused.err


@pytest.mark.parametrize("name", ["two words", "x" * 25, "\x1b[2J", "-a", ""])
def test_a_peer_is_not_started_with_what_can_be_no_name(
    run_here: RunHere, keys_dir: Path, name: str
) -> None:
    run_here("init")
    word = run_here("invite", "--address", "127.0.0.1:1").out.strip()
    result = run_here("serve-stage", word, "--name", name)
    assert (result.code, result.out) == (2, "")
    assert "--name: expected a name" in result.err
    insecure = ("--insecure", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/x", "--name", "ada")
    assert "without one --peer-id names this peer" in run_here("serve-stage", *insecure).err


def test_an_invitation_is_revoked_by_its_name(run_here: RunHere, keys_dir: Path) -> None:
    run_here("init")
    invitation = json.loads(run_here("invite", "--address", "h:1", "--json").out)
    assert run_here("keys", "revoke", invitation["name"]).code == 0
    (left,) = json.loads(run_here("keys", "list", "--json").out)["invitations"]
    assert left["uses_left"] == 0
    unknown = run_here("keys", "revoke", "nobody")
    assert unknown.code == 1
    assert "no member and no invitation has this name" in unknown.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("invite",), "swarm-ft init"),
        (("keys", "list"), "swarm-ft init"),
        (("invite", "--expires", "soon"), "expected a time such as 7d"),
        (("invite", "--uses", "0"), "--uses"),
        (("invite", "--layers", "many"), "expected START-STOP"),
        (("invite", "--sees-tokens", "some"), "--sees-tokens"),
        (("invite", "--role", "client", "--layers", "0-2"), "a client hosts no layers"),
        (
            ("invite", "--weight", "3"),
            "--weight: expected --role client beside it, got --role peer",
        ),
        (("invite", "--role", "client", "--weight", "101"), "--weight"),
        (("coordinator", "--insecure", "--open"), "create keys with 'swarm-ft init'"),
        (("serve-stage", "swarm1nothing"), "invitation"),
        (("serve-stage", "@missing.txt"), "missing.txt"),
        (("status", "--invite", "nothing"), "invitation 'nothing'"),
        (("status",), "expected an invitation, got none"),
    ],
)
def test_what_cannot_be_is_told(
    run_here: RunHere, keys_dir: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = run_here(*arguments)
    assert (result.code, result.out) == (2, "")
    assert words in result.err


def test_an_address_is_needed_until_the_coordinator_had_one(
    run_here: RunHere, keys_dir: Path
) -> None:
    run_here("init")
    result = run_here("invite")
    assert result.code == 2
    assert "or a coordinator that has run before" in result.err


def test_an_invited_peer_has_its_keys_name(run_here: RunHere, keys_dir: Path) -> None:
    run_here("init")
    word = run_here("invite", "--address", "127.0.0.1:1").out.strip()
    result = run_here("serve-stage", word, "--peer-id", "me")
    assert result.code == 2
    assert "a peer's id follows from its key, and --name chooses what people read" in result.err


def test_keys_are_rotated(run_here: RunHere, keys_dir: Path) -> None:
    made = json.loads(run_here("init", "--json").out)
    word = run_here("invite", "--address", "h:1").out
    authority = (keys_dir / FOLDER / "authority.key").read_bytes()
    rotation = json.loads(run_here("keys", "rotate", "--json").out)
    assert rotation == {
        "fingerprint": made["fingerprint"],
        "authority": False,
        "members": 0,
        "invitations": 0,
    }
    coordinators = (keys_dir / FOLDER / "coordinator.key").read_bytes()
    replaced = run_here("keys", "rotate", "--authority")
    assert replaced.code == 0
    assert "0 members and 1 open invitations are void; restart the coordinator" in replaced.out
    assert (keys_dir / FOLDER / "authority.key").read_bytes() != authority
    assert (keys_dir / FOLDER / "coordinator.key").read_bytes() != coordinators
    assert not json.loads(run_here("keys", "list", "--json").out)["invitations"]
    assert run_here("invite", "--address", "h:1").out[:20] != word[:20], "another fingerprint"


@pytest.mark.slow
@pytest.mark.variant
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("swarm")
def test_a_running_swarm_gets_other_keys(shell: Shell) -> None:
    shell.env |= {"XDG_CACHE_HOME": str(shell.cwd / "cache"), "XDG_STATE_HOME": str(shell.cwd)}
    coordinator = shell.up("coordinator")  # Its first start creates the keys.

    def invited(*options: object) -> str:
        made = shell.spawn("invite", "--json", *options)
        assert made.ends() == 0, made.err
        word: str = made.first_words()["invite"]
        return word

    old, way = invited("--uses", 2), ("--invite", invited("--role", "client"))
    peer = shell.up("serve-stage", old)
    assert shell.spawn("keys", "rotate").ends() == 0
    status = shell.spawn("status", *way, "--json")
    assert status.ends() == 0, "members trust the authority, whatever the coordinator's key"
    name = peer.first_words()["peer"]
    assert [one["peer"] for one in status.first_words()["peers"]] == [name]

    assert shell.spawn("keys", "rotate", "--authority").ends() == 0
    assert peer.ends() == 1
    assert "authority was replaced" in peer.err[-1]
    assert coordinator.interrupted() == 0
    coordinator = shell.up("coordinator")
    late = shell.spawn("serve-stage", old)
    assert late.ends() == 2
    assert late.err[-1].endswith("ask for a new invitation")
    peer = shell.up("serve-stage", invited())
    assert peer.first_words()["peer"] == name
    for process in (peer, coordinator):
        assert process.interrupted() == 0, process.err


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("swarm")
def test_a_swarm_of_those_who_were_invited(shell: Shell, sample: DemoInput) -> None:
    text = shell.cwd / "text.txt"
    text.write_text(Path(sample.train_file).read_text(encoding="utf-8")[:1500], encoding="utf-8")
    job = ("--dataset", text, "--steps", 20, "--batch-size", 4, "--seq-length", 32)
    assert shell.spawn("init").ends() == 0
    coordinator = shell.up("coordinator")
    assert coordinator.first_words()["encrypted"]

    (address,) = coordinator.first_words()["addresses"]
    plain = shell.spawn("status", "--insecure", "--initial-peers", address)

    word = shell.invited("--uses", 2)
    peers = [shell.up("serve-stage", word, "--layers", layers) for layers in ("0-1", "1-3")]
    names = [peer.first_words()["peer"] for peer in peers]
    late = shell.spawn("serve-stage", word, "--layers", "1-3")
    assert late.ends() == 2
    assert late.err[-1].endswith("is used up or revoked; ask for another one")

    way = ("--invite", shell.invited("--role", "client"))
    client = shell.spawn("client", "train", "--model", sample.model_dir, *job, *way)
    assert client.ends(120) == 0, client.err

    # A peer that comes back is who it was; its invitation is not used again.
    assert peers[0].interrupted() == 0
    peers[0] = shell.up("serve-stage", word, "--layers", "0-1")
    assert peers[0].first_words()["peer"] == names[0]

    assert shell.spawn("keys", "revoke", names[1]).ends() == 0
    assert peers[1].ends() == 1
    assert peers[1].err[-1].endswith("its key was revoked")
    status = shell.spawn("status", *way, "--json")
    assert status.ends() == 0, status.err
    assert [peer["peer"] for peer in status.first_words()["peers"]] == [names[0]]

    assert plain.ends() == 1, "nobody who was not invited learns anything"
    # The coordinator, too, comes back at the address of the invitations.
    endpoint = coordinator.first_words()["endpoint"]
    assert coordinator.interrupted() == 0
    coordinator = shell.up("coordinator")
    assert coordinator.first_words()["endpoint"] == endpoint
    assert shell.spawn("status", *way).ends() == 0
    assert os.stat(shell.cwd / FOLDER).st_mode & 0o077 == 0
    for process in (peers[0], coordinator):
        assert process.interrupted() == 0, process.err


@pytest.mark.slow
@pytest.mark.variant
@pytest.mark.timeout(180)
@pytest.mark.xdist_group("swarm")
def test_anybody_joins_where_all_are_let_in(shell: Shell) -> None:
    shell.env |= {"XDG_CACHE_HOME": str(shell.cwd / "cache"), "XDG_STATE_HOME": str(shell.cwd)}
    assert shell.spawn("init").ends() == 0
    coordinator = shell.up("coordinator", "--open")
    public = coordinator.first_words()["open"]
    shown = shell.spawn("invite", "--open", "--json")
    assert shown.ends() == 0, shown.err
    assert shown.first_words()["invite"] == public
    anybody = shell.up("serve-stage", public)
    name = anybody.first_words()["peer"]
    joined = coordinator.wait_for("err", f"peer {default_name(name)} joined from")
    assert joined.endswith("layers auto (replica only, sees no tokens)")
    for process in (anybody, coordinator):
        assert process.interrupted() == 0, process.err
