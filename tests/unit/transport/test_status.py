from typing import Any

import grpc
import pytest

from swarm_ft import errors
from swarm_ft.transport.grpc_transport import METADATA_KEY, STATUS, from_status, to_metadata


def test_the_table_has_a_status_for_every_error_and_no_other() -> None:
    assert STATUS.keys() == errors.BY_CODE.keys()
    assert grpc.StatusCode.OK not in STATUS.values()


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_an_error_crosses_the_wire_as_itself(code: str) -> None:
    sent = errors.from_code(code, "layers 12-24: 期待 0 bis 12")
    got = from_status(STATUS[code], "ignored", to_metadata(sent), "peer:1")
    assert type(got) is type(sent)
    assert got.message == sent.message


def test_metadata_is_ascii_keyed_binary_and_bounded() -> None:
    ((key, value),) = to_metadata(errors.BadModel("\U0001f600" * 100_000))
    assert key == METADATA_KEY
    assert key.endswith("-bin")
    assert len(value) < 5_000


@pytest.mark.parametrize("status", [s for s in grpc.StatusCode if s is not grpc.StatusCode.OK])
def test_every_bare_grpc_error_becomes_one_of_ours(status: Any) -> None:
    error = from_status(status, "Some text of gRPC's", (), "peer:1")
    lost_codes = {"UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED"}
    expected = errors.Unavailable if status.name in lost_codes else errors.InternalError
    assert type(error) is expected
    assert error.message.startswith("peer:1: ")
    assert "gRPC" not in error.message


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7000: Failed "
            "to connect to remote host: Connection refused",
            "peer:1: Connection refused",
        ),
        ("Socket closed", "peer:1: the connection was lost"),
        ("recvmsg:Connection reset by peer", "peer:1: the connection was lost"),
        ("DNS resolution failed for nowhere.invalid:1: ...", "peer:1: no host has this name"),
        ("ping timeout", "peer:1: it does not answer"),
        (
            "Ssl handshake failed: SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
            "CERTIFICATE_VERIFY_FAILED",
            "peer:1: it belongs to another swarm, or to none; check the address and the invitation",
        ),
        ("", "peer:1: it cannot be reached"),
    ],
)
def test_a_lost_link_is_told_in_words_of_the_matter(details: str, words: str) -> None:
    assert from_status(grpc.StatusCode.UNAVAILABLE, details, (), "peer:1").message == words


@pytest.mark.parametrize(
    "value", [b"", b"\n", b"\xff\xfe", b"no-such-code\ntext", b"bad-model", "text of a wrong type"]
)
def test_hostile_metadata_still_gives_an_error(value: bytes | str) -> None:
    error = from_status(grpc.StatusCode.UNKNOWN, "", ((METADATA_KEY, value),), "peer:1")
    assert isinstance(error, errors.SwarmError)


def test_a_hostile_message_cannot_forge_log_lines_or_flood_them() -> None:
    value = b"bad-model\n" + b"one\nE 12:00:00 forged\x1b[2J" * 1000
    error = from_status(grpc.StatusCode.UNKNOWN, "", ((METADATA_KEY, value),), "peer:1")
    assert error.message.isprintable()
    assert len(error.message) <= 1_000
