import pytest

from swarm_ft.discovery import directory
from swarm_ft.discovery.directory import checked_record, readable_records
from swarm_ft.errors import BadOption


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:1", "[::1]:65535", "peer-7.home.example:7001", "a:1", "[2001:db8::7]:443"],
)
def test_endpoints_of_all_kinds_are_records(endpoint: str) -> None:
    assert checked_record("peer-1", endpoint) == ("peer-1", endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        ":1",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:1\n",
        "host :1",
        "unix:/run/x:1",
        "dns:///a:1",
        "user@host:1",
        "-host:1",
        "[::1]",
        "::1:7001",
        "\u0661:\u0661",
        "h" * 300 + ":1",
        b"host:1",
        7001,
        None,
    ],
)
def test_what_is_no_endpoint_is_refused(endpoint: object) -> None:
    with pytest.raises(BadOption, match="expected HOST:PORT"):
        checked_record("p", endpoint)


@pytest.mark.parametrize("name", ["", " ", "a b", "a\n", "../x", "é", "x" * 129, b"p", 7, None])
def test_what_is_no_name_is_refused(name: object) -> None:
    with pytest.raises(BadOption, match="expected 1 to 128"):
        checked_record(name, "host:1")


def test_bad_records_are_skipped_with_a_line_and_the_others_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = [("a", "host:1"), ("b", "nowhere"), (7, "host:1"), ("c\x1b[2J", "host:1"), ("d", "h:2")]
    assert readable_records(found) == {"a": "host:1", "d": "h:2"}
    assert caplog.text.count("record_skipped") == 3
    assert "\x1b" not in caplog.text


def test_a_flood_of_records_is_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(directory, "MAX_RECORDS", 5)
    records = readable_records((f"p{i}", "host:1") for i in range(1000))
    assert len(records) == 5
    assert "records_cut limit=5" in caplog.text
