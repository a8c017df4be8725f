"""The coordinator's page in a browser, while a swarm trains and a peer dies."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarm_ft.api.coordinator_process import DOCUMENTS
from swarm_ft.base.clock import SystemClock
from swarm_ft.ids import PeerId
from swarm_ft.page.server import HttpAddresses, HttpOptions, serve_http
from tests.browser import CHROMIUM, Tab, browser
from tests.integration.conftest import Job, MakeJob
from tests.local_swarm import LocalSwarm

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="expected chromium on the path: apt-get install chromium"
)
LAYERS = ["0-3", "3-6", "3-6"]
ABOVE, BELOW = ["peer-0"], ["peer-1", "peer-2"]
BETWEEN = {*product(ABOVE, BELOW), *product(BELOW, ABOVE)}
"""Whose links go over the boundary, and which way."""
ENTER, TAB, RIGHT = ("Enter", 13), ("Tab", 9), ("ArrowRight", 39)
RUN = "state.runs[0]"
WORDS = "document.body.innerText"
LONG_NAMES = 'JSON.parse(JSON.stringify(state).replace(/"peer-(.)"/g, `"${"a".repeat(31)}$1"`))'
"""As keys have them."""


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    codecs: dict[str, Any] = {"forward_codec": "aq4", "backward_codec": "q8"}
    return make_job(num_steps=5000, num_eval_samples=4, eval_steps=5, **codecs)


@asynccontextmanager
async def page_of(swarm: LocalSwarm) -> AsyncIterator[HttpAddresses]:
    places = HttpOptions(page_port=0, metrics=("127.0.0.1", 0))
    async with serve_http(swarm.service, SystemClock(), DOCUMENTS, places) as found:
        yield found


@asynccontextmanager
async def seen(folder: Path, job: Job) -> AsyncIterator[tuple[LocalSwarm, Tab]]:
    """A run under way, and a browser that shows it."""
    for name in ("swarm", "browser"):
        (folder / name).mkdir()
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(LocalSwarm(folder / "swarm", LAYERS))
        found = await stack.enter_async_context(page_of(swarm))
        await swarm.all_joined()
        await swarm.client.submit(job.spec, job.samples)
        tab = await stack.enter_async_context(browser(folder / "browser"))
        await tab.open(found.address)
        await tab.until("typeof state !== 'undefined' && state.runs.length")
        yield swarm, tab


@needs_chromium
@pytest.mark.thorough
async def test_the_page_shows_a_run_and_who_dies(tmp_path: Path, job: Job) -> None:
    async with seen(tmp_path, job) as (swarm, tab):
        await tab.until(f"{RUN}.steps > 6 && curve.steps.length > 5 && curve.evals.length > 1")
        words = await tab.look(WORDS)
        for expected in ("Stage 1: layers 0-3", "Stage 2: layers 3-6", "aq4 →", "peer-2", "live"):
            assert expected in words
        assert await tab.look("document.querySelectorAll('.peer').length") == len(LAYERS)
        assert len(await tab.look("$('chart').querySelector('.loss').getAttribute('points')")) > 9

        await swarm.kill_peer(PeerId("peer-2"))
        await tab.until("document.querySelectorAll('.peer').length === 2")
        await tab.until("$('log').innerText.includes('peer peer-2 lost its connection')")
        await tab.until("$('given').innerText.includes('peer-2 (away)')")
        steps = await tab.look(f"{RUN}.steps")
        await tab.until(f"{RUN}.steps > {steps + 2}")

        await swarm.kill_peer(PeerId("peer-1"))
        await tab.until("document.querySelectorAll('.peer.away').length === 1")


@needs_chromium
async def test_the_page_shows_the_slowest_links_between_stages(tmp_path: Path, job: Job) -> None:
    async with seen(tmp_path, job) as (_, tab):
        await tab.until(f"{RUN}.steps > 0")
        speeds: dict[str, list[tuple[str, float | None, float]]] = {
            "peer-0": [("peer-1", 2e6, 0.01), ("peer-2", 1e6, 0.02), ("peer-9", 1.0, 9.0)],
            "peer-1": [("peer-2", 2.0, 9.0), ("peer-0", None, 0.04)],
        }
        links = {
            peer: [
                {"peer": to, "way": "direct", "bytes_per_s": rate, "least_round_trip_s": trip_s}
                for to, rate, trip_s in speed
            ]
            for peer, speed in speeds.items()
        }
        await tab.look(
            f"""source.close(), (() => {{
              const links = {json.dumps(links)};
              shown({{ ...state, peers: state.peers.map(p =>
                ({{ ...p, links: links[p.peer] || [] }})) }});
            }})()"""
        )
        wire = await tab.look("document.querySelector('.wire').innerText")
        assert "→ 8.00 Mbps" in wire
        assert "40.0 ms" in wire
        assert wire.count("Mbps") == 1, "the way back was never full"


@needs_chromium
@pytest.mark.thorough
async def test_the_page_marks_who_pauses_and_who_leaves(tmp_path: Path, job: Job) -> None:
    async with seen(tmp_path, job) as (swarm, tab):
        await tab.until(f"{RUN}.steps > 1 && {RUN}.stages.length === 3")
        second = swarm.peers[PeerId("peer-2")].node
        second.pause("its volunteer asked for it")
        words = "paused: its volunteer asked for it"
        await tab.until(f"$('peers').innerText.includes({words!r})")
        await tab.until(
            "$('log').innerText.includes('peer peer-2 asked to pause: its volunteer asked for it')"
        )
        manners = "[...document.querySelectorAll('#log .wait b')].map(e => e.innerText)"
        assert "peer paused" in await tab.look(manners)
        second.resume()
        await tab.until("$('log').innerText.includes('peer peer-2 works again')")

        marked = await tab.look(  # as long as it is in the picture, which may be a moment
            """source.close(), (() => {
              const hosts = state.runs[0].stages[0].peer;
              Object.assign(peerOf(hosts), {state: "leaving", idle: "a text of any wording"});
              shown(state);
              return [...document.querySelectorAll('.peer.goes')].map(e => e.innerText);
            })()"""
        )
        assert len(marked) == 1
        assert "a text of any wording" in marked[0]


@needs_chromium
async def test_the_page_fits_a_telephone(tmp_path: Path, job: Job) -> None:
    async with seen(tmp_path, job) as (_, tab):
        await tab.until(f"{RUN}.steps > 0")
        for width in (360, 768, 1280):
            await tab.resize(width, 800, dark=width == 768)
            assert await tab.look("document.documentElement.scrollWidth") <= width
            heights = "[...document.querySelectorAll('.acts button')].map(e => e.offsetHeight)"
            assert max(await tab.look(heights)) < 50, "a word is broken"
        await tab.look(f"source.close(), shown({LONG_NAMES})")
        await tab.until("document.querySelector('.peer .id').innerText.length > 30")
        edges = await tab.look(
            """['.stage .peer', '.wire', '.stage:last-child .peer'].map(one => {
              const box = document.querySelector(one).getBoundingClientRect();
              return [box.left, box.right];
            })"""
        )
        assert edges[0][1] <= edges[1][0] < edges[1][1] <= edges[2][0], "names are over the links"
        unnamed = (
            "[...document.querySelectorAll('button, input, [tabindex]')].filter(e =>"
            " !e.innerText && !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')"
            " && e.checkVisibility()).map(e => e.outerHTML)"
        )
        assert await tab.look(unnamed) == []


@needs_chromium
@pytest.mark.thorough
async def test_the_page_works_without_a_mouse(tmp_path: Path, job: Job) -> None:
    async with seen(tmp_path, job) as (_, tab):
        await tab.until("curve.steps.length > 3")
        for _ in range(30):
            await tab.press(*TAB)
            if await tab.look("document.activeElement === $('chart')"):
                break
        assert await tab.look("document.activeElement.id") == "chart"
        await tab.press("Home", 36)
        await tab.press(*RIGHT)
        assert "step 1: loss" in await tab.look("$('reading').innerText")


@needs_chromium
async def test_others_words_are_text(tmp_path: Path, job: Job) -> None:
    evil = "<img src=x onerror=window.harmed=1><b id=evil>"
    async with seen(tmp_path, job) as (_, tab):
        await tab.look(
            f"""source.close(), (() => {{
              const evil = {evil!r}, run = structuredClone({RUN});
              Object.assign(run, {{ detail: evil, model: evil }});
              const peer = {{ ...structuredClone(state.peers[0]), peer: evil, device: evil,
                version: evil, idle: evil, work: null,
                links: [{{ peer: evil, way: evil, bytes_per_s: 1e6, least_round_trip_s: .5 }}] }};
              run.stages.push({{ peer: evil, layers: "9-" + evil, joining: false }});
              run.boundaries.push({{ ...run.boundaries[0], boundary: 9, forward_codec: evil }});
              shown({{ ...state, runs: [run], peers: [...state.peers, peer], version: evil,
                contributors: [{{ ...state.contributors[0], peer: evil, samples: 1, seconds: 1,
                  sent_bytes: 1 }}] }});
              happened({{ serial: 1e9, unix_s: 0, kind: evil, run: evil, words: evil }});
            }})()"""
        )
        words = await tab.look(WORDS)
        assert evil in words
        assert f"({evil}, 8.00 Mbps, 500 ms)" in words
        assert await tab.look("document.querySelectorAll('img, #evil').length") == 0
        assert await tab.look("window.harmed") is None


@pytest.mark.thorough
async def test_metrics_tell_of_a_run(tmp_path: Path, job: Job) -> None:
    async with LocalSwarm(tmp_path, LAYERS) as swarm, page_of(swarm) as found:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        async with aiohttp.ClientSession() as session:
            metrics: dict[str, Any] = {}
            links: dict[tuple[str, str], float] = {}
            while metrics.get("swarm_ft_run_committed_steps", 0) < 6 or BETWEEN - links.keys():
                async with session.get(f"http://{found.metrics}/metrics") as got:
                    families = list(text_string_to_metric_families(await got.text()))
                samples = [sample for family in families for sample in family.samples]
                metrics = {s.name: s.value for s in samples if "peer" not in s.labels}
                metrics |= {"peer": {s.name for s in samples if s.labels.get("peer") == "peer-1"}}
                trips = (s for s in samples if s.name == "swarm_ft_link_least_round_trip_seconds")
                links = {(s.labels["peer"], s.labels["to"]): s.value for s in trips}
                await asyncio.sleep(0.05)
    runs = {s.labels["run"] for s in samples if s.labels.get("run")}
    assert runs == {status.run_id}
    assert {s.labels["boundary"] for s in samples if "boundary" in s.labels} == {"3"}
    assert metrics["swarm_ft_peers"] == len(LAYERS)
    assert metrics["swarm_ft_run_steps"] == job.spec.train.num_steps
    assert metrics["swarm_ft_run_loss"] > 0
    assert metrics["swarm_ft_run_eval_loss"] > 0
    assert metrics["swarm_ft_boundary_compression_ratio"] > 2
    assert metrics["swarm_ft_run_sent_bytes"] < metrics["swarm_ft_run_uncompressed_bytes"]
    assert {"swarm_ft_peer_info", "swarm_ft_peer_samples_total"} <= metrics["peer"]
    assert 0.0 < min(links.values()) <= max(links.values()) < 10.0


@needs_chromium
async def test_the_codecs_of_a_run_that_asks_for_a_quality_are_not_to_choose(
    tmp_path: Path, make_job: MakeJob
) -> None:
    offered = """[...document.querySelectorAll('.run .acts button')].filter(b => !b.hidden)
        .map(b => b.innerText)"""
    async with seen(tmp_path, make_job(num_steps=5000, quality=0.01)) as (_, tab):
        await tab.until(f"{RUN}.quality.num_measured > 0")
        assert await tab.look(offered) == ["Pause", "Learning rate", "Cancel"]
        facts = await tab.look("document.querySelector('.facts').innerText")
        assert re.search(r"compression\s+cost [\d.e-]+ % of perplexity, 1 % allowed", facts)
        await tab.look(
            f"""source.close(), shown({{ ...state, runs: [{{ ...{RUN},
                quality: {{ asked: .015, cost: 0, num_measured: 0 }} }}] }})"""
        )
        facts = await tab.look("document.querySelector('.facts').innerText")
        assert "may cost 1.5 % of perplexity" in facts


@needs_chromium
@pytest.mark.thorough
async def test_the_owner_steers_a_run_by_keys(tmp_path: Path, job: Job) -> None:
    async with seen(tmp_path, job) as (swarm, tab):
        await tab.until("curve.steps.length > 3")
        await tab.look(
            "[...document.querySelectorAll('button')].find(b => b.innerText === 'Pause').focus()"
        )
        await tab.press(*ENTER)
        await tab.until(f"{RUN}.paused && {RUN}.detail.startsWith('paused after')")
        await tab.until("document.querySelector('.badge').innerText === 'paused'")
        paused_at = await tab.look(f"{RUN}.steps")

        await tab.look(f"askRate({RUN}), 1")
        await tab.look("$('ask-input').value = '0.001', $('ask-yes').focus()")
        await tab.press(*ENTER)
        await tab.until(f"{RUN}.learning_rate === 0.001")
        assert await tab.look(f"{RUN}.steps") == paused_at

        await tab.look(f"askCodecs({RUN}), 1")
        await tab.look("$('ask-input').value = 'q4 / aq2', $('ask-yes').focus()")
        await tab.press(*ENTER)
        await tab.until("$('said').innerText.includes('expected a delta codec')")
        await tab.look(f"askCodecs({RUN}), 1")
        assert await tab.look("$('ask-input').value") == str(job.spec.train.codecs)
        await tab.look("$('ask-input').value = ' aq2+z/q2+z', $('ask-yes').focus()")
        await tab.press(*ENTER)
        await tab.until(f"{RUN}.codecs.forward === 'aq2+z'")
        await tab.until("document.querySelector('.facts').innerText.includes('aq2+z/q2+z')")

        await tab.press(*TAB)
        await tab.look(
            "[...document.querySelectorAll('button')].find(b => b.innerText === 'Resume').focus()"
        )
        await tab.press(*ENTER)
        await tab.until(f"{RUN}.steps > {paused_at + 2}")
        (run,) = swarm.service.status().runs
        assert run.last_step is not None
        assert run.last_step.learning_rate <= 0.001

        await tab.look(
            "[...document.querySelectorAll('button')].find(b => b.innerText === 'Cancel').focus()"
        )
        await tab.press(*ENTER)
        await tab.until("$('ask').open")
        await tab.look("$('ask-yes').focus()")
        await tab.press(*ENTER)
        await tab.until(f"{RUN}.phase === 'cancelled'")
        log = await tab.look("$('log').innerText")
        words_of_all = (
            "paused by the swarm's operator on the coordinator's page",
            "learning rate 0.001 from",
            f"codecs aq2+z/q2+z from step {paused_at} on, {job.spec.train.codecs} before",
            "cancelled by the swarm's operator on the coordinator's page",
        )
        for words in words_of_all:
            assert words in log
