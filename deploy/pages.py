"""Parts of docs that a command writes, between two lines that mark them."""

from __future__ import annotations

END = "<!-- end -->\n"


def with_part(page: str, begin: str, part: str) -> str:
    """Return the page with that part replaced.

    Args:
        page: the whole of it.
        begin: the line in front of the part; `END` is the one behind it.
        part: in lines.

    Raises:
        ValueError: the page does not hold `begin` and, behind it, `END`.
    """
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ValueError(f"expected {begin!r} and {END!r} in the page")
    return f"{before}{found}\n{part}\n{end}{after}"
