"""Names by which people know members. A name proves nothing: decisions use member ids.

A member that chose no name has one that follows from its id: two words and a number. Names of
others are hostile input; `ChosenName` and `ShownName` check them wherever they arrive.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated

from swarm_ft.protocol.spec.bounds import MAX_SHOWN_CHARS, Bound

MAX_NAME_CHARS = 24
"""Letters of a chosen name. A member id has 32, so that no name looks like one."""
SHORT_ID_CHARS = 8
"""Letters of a member id that tell two members of one name apart, unless both ids share them."""
MIN_PREFIX_CHARS = 4
"""Fewest letters of a member id by which a command line may name its member."""
MEMBER_ID_CHARS = 32

_LETTERS = rf"[A-Za-z0-9](?:[A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 2}}}[A-Za-z0-9])?"
_CHOSEN = re.compile(_LETTERS)
_SHOWN = re.compile(rf"{_LETTERS}(?: \([a-z2-7]{{{SHORT_ID_CHARS},{MEMBER_ID_CHARS}}}\))?")
_MEMBER_ID = re.compile(rf"[a-z2-7]{{{MEMBER_ID_CHARS}}}")
_IDS_IN_TEXT = re.compile(rf"(?<![A-Za-z0-9]){_MEMBER_ID.pattern}(?![A-Za-z0-9])")

RESERVED = frozenset({"coordinator", "operator", "owner"})
"""Names by which lines for people mean somebody else."""

_LOOK_ALIKES = str.maketrans("01i_.", "oll--")
"""Letters that look like others, after `casefold`."""


@dataclass(frozen=True, slots=True)
class ChosenName(Bound):
    """A name that a volunteer or an organiser chose; perhaps empty, where nobody chose one."""

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        is_name = isinstance(value, str) and (not value or _CHOSEN.fullmatch(value) is not None)
        if is_name and skeleton_of(str(value)) not in _RESERVED_SKELETONS:
            return None
        return (
            f"expected a name of 1 to {MAX_NAME_CHARS} letters a-z, digits, '-', '_' or '.', with "
            f"a letter or digit at both ends, other than {', '.join(sorted(RESERVED))}; "
            f"got {ascii(value)[:MAX_SHOWN_CHARS]}"
        )


@dataclass(frozen=True, slots=True)
class ShownName(Bound):
    """A name as people read it: `ada-3090`, or `ada-3090 (v2avztnz)` where two members have it."""

    is_optional: bool = False

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        if isinstance(value, str) and (_SHOWN.fullmatch(value) or (self.is_optional and not value)):
            return None
        return f"expected the name of a member, got {ascii(value)[:MAX_SHOWN_CHARS]}"


Chosen = Annotated[str, ChosenName()]


def is_member_id(text: str) -> bool:
    """Whether a text has the form of a member id, which follows from a key."""
    return _MEMBER_ID.fullmatch(text) is not None


def default_name(member_id: str) -> str:
    """Return the name of a member that chose none: `calm-otter-41`.

    Args:
        member_id: The member's id. In a swarm without keys it is a text that a person chose, which
            is returned as it is.
    """
    if not is_member_id(member_id):
        return member_id
    digest = hashlib.blake2b(member_id.encode(), digest_size=8).digest()
    rest, first = divmod(int.from_bytes(digest, "big"), len(ADJECTIVES))
    rest, second = divmod(rest, len(ANIMALS))
    return f"{ADJECTIVES[first]}-{ANIMALS[second]}-{10 + rest % 90}"


def skeleton_of(name: str) -> str:
    """Return a text that two names share if people would take one for the other."""
    return name.casefold().translate(_LOOK_ALIKES)


_RESERVED_SKELETONS = frozenset(map(skeleton_of, RESERVED))


def distinct_name(name: str, member_id: str, others: Collection[str]) -> str:
    """Return a member's name with as many letters of its id as no other holder's id begins with.

    Args:
        name: The member's name.
        member_id: The member's id.
        others: Ids of other members whose names look like this one.
    """
    if not others:
        return name
    length = SHORT_ID_CHARS
    while length < len(member_id) and any(one[:length] == member_id[:length] for one in others):
        length += 1
    return f"{name} ({member_id[:length]})"


def ids_in(text: str) -> Iterable[re.Match[str]]:
    """Return the places of a text that have the form of a member id."""
    return _IDS_IN_TEXT.finditer(text)


def is_meant(text: str, member_id: str, name: str) -> bool:
    """Whether a text of a command line names this member: by its name, or its id's first letters.

    Args:
        text: The text that a person typed.
        member_id: The member's id.
        name: The member's name as it is shown.
    """
    plain = name.partition(" (")[0]
    begins = len(text) >= MIN_PREFIX_CHARS and member_id.startswith(text)
    return text in (name, plain, member_id) or begins


_ADJECTIVES = (
    "able agile amber ample bold brave bright calm cheery civil clever crisp dapper eager fair "
    "famous fond frank fresh gentle gifted glad golden grand happy honest humble ideal jolly "
    "jovial keen kind lithe lively loyal lucky mellow merry modest neat nimble noble patient "
    "placid polite proud quick quiet ready rosy serene sincere smart snug steady sturdy sunny "
    "sweet swift tidy upbeat vivid warm witty"
)
_ANIMALS = (
    "alpaca badger beaver bison camel condor crane cricket dingo dolphin donkey dove eagle "
    "falcon ferret finch gecko gibbon hamster hare heron ibis iguana jaguar kestrel kiwi koala "
    "lark lemur llama lobster lynx magpie marten moose narwhal newt ocelot osprey otter panda "
    "panther pelican penguin puffin quail rabbit raven robin salmon seal sparrow squid stork "
    "swan tapir tiger toucan trout turtle walrus wombat yak zebra"
)
ADJECTIVES, ANIMALS = tuple(_ADJECTIVES.split()), tuple(_ANIMALS.split())
"""Words of two letters' difference at least, so that none is taken for another."""
