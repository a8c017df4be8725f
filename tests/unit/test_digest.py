"""Digests: framed parts, and pieces of a long part."""

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.digest import DIGEST_BYTES, RunningDigest, digest_of, fingerprint_of


def test_the_digest_is_pinned() -> None:
    assert digest_of(b"swarm", b"ft").hex() == "b54d77d08e0800a8dac90e8d561dfd08"


def test_parts_are_framed_so_that_no_byte_can_move_between_them() -> None:
    assert len({digest_of(b"ab"), digest_of(b"a", b"b"), digest_of(b"ab", b"")}) == 3


def test_any_bytes_like_object_counts_as_its_bytes() -> None:
    assert digest_of(b"abcd") == digest_of(bytearray(b"abcd")) == digest_of(memoryview(b"abcd"))
    assert digest_of(memoryview(b"abcd").cast("I")) == digest_of(b"abcd")


@given(st.lists(st.binary(max_size=20), max_size=5))
@settings(derandomize=True, deadline=None)
def test_a_running_digest_equals_that_of_the_whole(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    running = RunningDigest(len(whole))
    for piece in pieces:
        running.update(piece)
    assert running.digest() == digest_of(whole)
    assert len(running.digest()) == DIGEST_BYTES


def test_a_fingerprint_is_xxh3_of_128_bits() -> None:
    assert fingerprint_of(b"swarm").hex() == xxhash.xxh3_128_hexdigest(b"swarm")
    assert len(fingerprint_of(b"")) == DIGEST_BYTES


def test_a_fingerprint_is_of_bytes_however_they_are_held() -> None:
    assert fingerprint_of(bytearray(b"abcd")) == fingerprint_of(memoryview(b"abcd"))
