"""Links of the docs site; the hooks need mkdocs, which the extra `docs` brings."""

import pytest

pytest.importorskip("mkdocs")

from deploy.docs_site import api_page, cli_page, with_plain_pipes, with_site_links


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](../../benchmarks/reports/gpu.md#x)", "[a](../reports/gpu.md#x)"),
        ("![a](../images/desktop.png)", "![a](../images/desktop.png)"),
        ("[a](buffers.md)", "[a](buffers.md)"),
        ("[`a`](../../swarm_ft/errors.py)", "`a`"),
        ("[a](../../swarm_ft/no_such_file.py)", "[a](../../swarm_ft/no_such_file.py)"),
        ("[a](#x) [b](https://c.d)", "[a](#x) [b](https://c.d)"),
    ],
)
def test_links_lead_to_pages_of_the_site(link: str, expected: str) -> None:
    assert with_site_links(link, "explanation/page.md") == expected


def test_reports_link_to_pages_of_the_docs() -> None:
    link = "[a](../../docs/how-to/watch.md)"
    assert with_site_links(link, "reports/gpu.md") == "[a](../how-to/watch.md)"


def test_pipes_in_code_lose_their_backslash() -> None:
    assert with_plain_pipes(r"| `A\|B` | a \| b |") == r"| `A|B` | a \| b |"


def test_every_command_and_every_public_name_has_its_place() -> None:
    import swarm_ft

    assert "## `swarm-ft client train`" in cli_page()
    page = api_page()
    for name in vars(swarm_ft)["__all__"]:
        assert name.startswith("__") or f".{name}\n" in page
