"""`shardwise bench`: loads by seed, percentiles, figures of known traces, limits, plots, other servers."""

import json
import random
import statistics
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from shardwise.cli import main, make_parser, serve_config
from shardwise.commands import bench
from shardwise.commands.bench.limits import Bandwidth, ByteLimit, byte_limit
from shardwise.commands.bench.load import arrivals_s, figures, length_tokens, mix, percentiles
from shardwise.commands.bench.plot import draw
from shardwise.commands.bench.report import Report
from shardwise.commands.bench.speed import Decode, Stopwatch, check_fits
from shardwise.commands.bench.target import Limits, Trace
from shardwise.commands.bench.url import API, UrlTarget, make_client
from shardwise.config import ConfigError, ServeConfig
from shardwise.engine.client import EngineFailed
from shardwise.parallel.cost import Load
from tests.fake_engine import FakeEngine
from tests.unit.balance_cases import GEOMETRY, planned
from tests.unit.server_fixtures import ANSWER, make_app, saying


def trace(sent_s: float, pieces: list[tuple[float, int]], prompt_tokens: int = 10, fault: str = "") -> Trace:
    return Trace(sent_s, pieces, prompt_tokens, pieces[-1][0] if pieces else sent_s, fault)


def test_a_load_follows_from_its_seed() -> None:
    one = mix(2.0, 50, (90, 200), seed=3)
    assert one == mix(2.0, 50, (90, 200), seed=3)
    assert one != mix(2.0, 50, (90, 200), seed=4)
    faster = mix(4.0, 50, (90, 200), seed=3)
    assert [(a.prompt_tokens, a.answer_tokens) for a in one] == [(a.prompt_tokens, a.answer_tokens) for a in faster]
    assert [a.at_s for a in faster] == pytest.approx([a.at_s / 2 for a in one])


def test_arrivals_come_at_their_rate_and_alone() -> None:
    times = arrivals_s(5.0, 20_000, random.Random(0))
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0
    assert statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 5, rel=0.05), "of an exponential, the mean"
    assert arrivals_s(float("inf"), 3, random.Random(0)) == [0, 0, 0]


def test_lengths_have_their_median_and_stay_within_bounds() -> None:
    source = random.Random(0)
    lengths = [length_tokens(90, 1.1, source) for _ in range(20_000)]
    assert statistics.median(lengths) == pytest.approx(90, rel=0.03)
    assert statistics.mean(lengths) == pytest.approx(157, rel=0.03), "as load.py says"
    assert (min(lengths), max(lengths)) == (4, 1024)


def test_requests_fit_into_what_the_target_takes() -> None:
    asked = mix(1.0, 200, (90, 200), seed=0, longest=64)
    assert max(one.prompt_tokens + one.answer_tokens for one in asked) == 64
    assert min(min(one.prompt_tokens, one.answer_tokens) for one in asked) >= 1


def test_percentiles_lie_between_neighbours() -> None:
    assert percentiles([float(n) for n in range(100, -1, -1)]) == {50: 50, 90: 90, 99: 99}
    assert percentiles([1.0, 2.0]) == {50: 1.5, 90: 1.9, 99: 1.99}
    assert percentiles([7.0]) == {50: 7, 90: 7, 99: 7}
    assert percentiles([]) is None


def test_figures_of_known_traces() -> None:
    traces = [
        trace(0.0, [(1.0, 1), (2.0, 1), (4.0, 2)]),  # the last two came together: a second each
        trace(1.0, [(4.0, 1), (10.0, 3)], prompt_tokens=20),
        trace(2.0, [], fault="503: busy"),
    ]
    found = figures(2.0, traces)
    assert (found.requests, found.answered, found.failures) == (3, 2, {"503: busy": 1})
    assert (found.wall_s, found.prompt_tokens, found.answer_tokens) == (10.0, 30, 8)
    assert (found.requests_per_s, found.answer_tokens_per_s, found.tokens_per_s) == (0.2, 0.8, 3.8)
    assert found.mean_at_once == pytest.approx((4 + 9) / 10)
    assert found.first_token_s is not None
    assert found.first_token_s[50] == 2.0
    assert found.between_tokens_s is not None
    assert found.between_tokens_s[50] == statistics.median([1, 1, 1, 2, 2, 2])
    assert found.whole_s is not None
    assert found.whole_s[50] == 6.5


def test_a_load_that_nobody_answers_has_no_percentiles() -> None:
    found = figures(1.0, [trace(0.0, [], fault="refused"), trace(1.0, [], fault="refused")])
    assert (found.answered, found.first_token_s, found.failures) == (0, None, {"refused": 2})


class Clockwork:
    """A target whose answers take a second for the prompt and a quarter for each token, on a clock of its own."""

    limits = Limits()

    def __init__(self, fault: str = "") -> None:
        self.now_s, self.fault = 0.0, fault

    def prompt(self, source: random.Random, tokens: int) -> int:
        return tokens

    async def answer(self, prompt: int, tokens: int) -> Trace:
        pieces = [(self.now_s + 1 + n / 4, 1) for n in range(tokens)]
        return Trace(self.now_s, pieces, prompt, pieces[-1][0], self.fault)


async def test_decode_is_told_by_the_difference_of_two_runs() -> None:
    found = await Stopwatch(Clockwork(), 0, 2).decode(3, 100, 8, 40, None)
    assert found.tokens_per_s == pytest.approx(3 * 4)
    assert (found.short_s, found.long_s, found.prompt_tokens) == (1 + 7 / 4, 1 + 39 / 4, 100)
    assert found.share is None


async def test_a_failure_ends_a_measurement_with_its_reason() -> None:
    with pytest.raises(EngineFailed, match="2 requests of 100 \\+ 1 tokens: out of order"):
        await Stopwatch(Clockwork("out of order"), 0, 1).prefill(2, 100, None)


@pytest.mark.parametrize(
    ("geometry", "gigabytes"), [("", 6.0), ("-fp8", 3.45), ("-nvfp4", 2.25)], ids=["bf16", "fp8", "nvfp4"]
)
def test_the_limit_is_the_bytes_of_a_step_at_the_devices_bandwidth(geometry: str, gigabytes: float) -> None:
    """A token of 35B-A3B reads so many gigabytes; the device here reads 4,350 a second."""
    limit = limit_of(f"qwen3.6-35b-a3b{geometry}")
    assert limit.step_bytes(Load(1, 128)) / 1e9 == pytest.approx(gigabytes, rel=0.07)
    assert limit.decode_tokens_per_s(1, 128) == pytest.approx(4350 / gigabytes, rel=0.07)


def test_the_slowest_rank_sets_the_limit() -> None:
    even, uneven = limit_of("qwen3.6-35b-a3b", 4.35e12, 4.35e12), limit_of("qwen3.6-35b-a3b", 4.35e12, 1e12)
    assert uneven.step_seconds(Load(1, 128)) == pytest.approx(4.35 * even.step_seconds(Load(1, 128)), rel=0.01)
    assert even.step_bytes(Load(16, 128)) > 2 * even.step_bytes(Load(1, 128)), "more experts are chosen"


def test_prompts_in_several_steps_read_the_weights_several_times() -> None:
    limit = limit_of("qwen3.6-35b-a3b")
    assert limit.step_tokens == 8192
    one = limit.prefill_seconds(1, 4096)
    assert limit.prefill_seconds(2, 4096) == pytest.approx(one, rel=0.02)
    assert limit.prefill_seconds(4, 4096) == pytest.approx(2 * one, rel=0.02)
    assert limit.prefill_seconds(1, 8 * 8192) == pytest.approx(8 * one, rel=0.1)


def limit_of(geometry: str, *bytes_per_s: float) -> ByteLimit:
    speeds = bytes_per_s or (4.35e12,)
    return byte_limit(ServeConfig(model=""), planned(geometry, len(speeds)), Bandwidth(speeds, "told"))


def report_of(**kinds: list) -> Report:
    return Report("some model", "engine", 2, **kinds)


def decoded(batch: int, speed: float | None) -> Decode:
    return Decode(batch, 128, 32, 256, 1.0, 2.0, speed, 1000.0 * batch, 1e9)


def test_a_plot_names_its_axes_with_units(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    load = [figures(rate, [trace(0.0, [(1.0, 1), (2.0, 1)])]) for rate in (4.0, 1.0, float("inf"))]
    draw(report_of(decode=[decoded(1, 300.0), decoded(8, None), decoded(64, 5e3)], load=load), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text.lstrip().startswith("<?xml")
    labels = (
        "batch, requests at once", "decode, tokens/s", "time of a decode step, ms", "limit by bytes",
        "offered load, requests/s", "throughput, tokens/s", "time to first token, ms", "time between tokens, ms", "p99",
        "some model: 2 rank(s)",
    )  # fmt: skip
    assert [label for label in labels if label not in text] == []
    draw(report_of(decode=[decoded(1, 300.0)]), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="to draw"):
        draw(report_of(load=load[2:]), tmp_path / "b.svg")


def test_json_has_shares_and_no_infinity() -> None:
    report = report_of(decode=[decoded(4, 2000.0)], load=[figures(float("inf"), [trace(0.0, [(1.0, 1)])])])
    made = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert made["decode"][0]["share_of_limit"] == 0.5
    assert made["load"][0]["rate"] is None
    assert made["load"][0]["first_token_s"] == {"50": 1.0, "90": 1.0, "99": 1.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--load --rate 0", "'0' is not a number of requests a second above 0"),
        ("--load --rate nan", "'nan' is not a number of requests a second"),
        ("--load --requests 0", "'0' is not a whole number"),
        ("--load --mix 90", "'90' is not two numbers of tokens"),
        ("--prefill 8", "'8' is not a number of prompts and of their tokens, such as 8x2048"),
        ("--short-tokens 256", "--short-tokens 256: decode speed is told by the difference"),
        ("--plot out.pdf", "--plot out.pdf: give a name that ends in .svg or .png"),
        ("--json /no/such/out.json", "--json /no/such/out.json: there is no folder /no/such"),
        ("--url localhost:8000", "--url localhost:8000: give it with http://"),
        ("--url http://127.0.0.1:9", "--url http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(arguments: str, words: str, capsys) -> None:
    assert main(["bench", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "--plot", "out.svg"]) == 2
    assert "pip install shardwise[plot]" in capsys.readouterr().err


def test_more_than_the_engine_takes_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="9 requests at once, and the engine takes 8"):
        check_fits([1, 9], 100, Limits(512, 8), "--prompt-tokens")
    with pytest.raises(ConfigError, match="requests of 513 tokens, and 512 are taken: lower --prompt-tokens"):
        check_fits([1], 513, Limits(512, 8), "--prompt-tokens")


# Other servers


def options_of(*arguments: str) -> Namespace:
    return make_parser().parse_args(["bench", "--url", "http://test", *arguments])


async def connected(transport: httpx.AsyncBaseTransport, model: str = "", api: API = "completions") -> UrlTarget:
    return await UrlTarget.connect(make_client("http://test/v1", "", transport), model, api)


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_server_is_measured_through_its_api(api: API) -> None:
    """Ours, before an engine that is no model; its usage says how many tokens there were, events or not."""
    engine = FakeEngine(saying(ANSWER * 40))
    target = await connected(httpx.ASGITransport(app=make_app(engine)), api=api)
    assert target.notes == []
    assert target.limits.max_model_len == 512
    report = Report(target.model, "http://test")
    engine.delay_s = 0.004
    options = options_of(
        "--batch", "2", "--new-tokens", "24", "--short-tokens", "2", "--prefill", "2x64", "--repeats", "2"
    )
    await bench.measure(target, options, 0, report, None)
    engine.delay_s = 0.0
    assert report.prefill[0].prompt_tokens == pytest.approx(64, rel=0.2)
    assert report.decode[0].tokens_per_s is not None
    assert report.decode[0].tokens_per_s < 2 / 0.004
    found = await target.answer(target.prompt(random.Random(0), 30), 25)
    assert (found.tokens, found.fault) == (25, "")
    load = options_of("--load", "--rate", "200", "inf", "--requests", "5", "--mix", "20,10")
    await bench.measure(target, load, 0, report, None)
    assert [(one.answered, one.failures) for one in report.load] == [(5, {}), (5, {})]
    assert report.load[0].answer_tokens == sum(one.answer_tokens for one in mix(1.0, 5, (20, 10), 0, 512))


async def test_prompts_are_new_in_every_run_and_failures_are_counted() -> None:
    engine = FakeEngine(saying(ANSWER * 40))
    target = await connected(httpx.ASGITransport(app=make_app(engine)))
    assert target.prompt(random.Random(0), 50) != target.prompt(random.Random(0), 50)
    engine.refuse = ("not today", None)
    load = options_of("--load", "--requests", "2")
    with pytest.raises(EngineFailed, match="400: not today"):
        await bench.measure(target, load, 0, Report("", ""), None)


def plain_server(models: int = 200, strict: bool = True) -> httpx.MockTransport:
    """A server that knows the standard alone: no usage in streams, an error for fields that it has not heard of."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(models, json={"data": [{"id": "plain"}]} if models == 200 else {"error": "no"})
        body = json.loads(request.content)
        if strict and {"ignore_eos", "stream_options"} & set(body):
            return httpx.Response(400, json={"error": {"message": "unknown field"}})
        words = "".join(f'data: {{"choices": [{{"text": " w{n}"}}]}}\n\n' for n in range(min(body["max_tokens"], 9)))
        return httpx.Response(200, text=f": hello\n\n{words}data: [DONE]\n\n")

    return httpx.MockTransport(handle)


async def test_a_server_that_knows_the_standard_alone_is_measured_by_events() -> None:
    target = await connected(plain_server())
    assert [note.split(":")[0] for note in target.notes] == [
        "the server does not know ignore_eos", "the server sends no usage",
    ]  # fmt: skip
    assert len(target.prompt(random.Random(0), 12).split()) == 12
    assert (await target.answer("hello", 5)).tokens == 5


@pytest.mark.parametrize(
    ("transport", "model", "words"),
    [
        (plain_server(), "other", "model 'other' is not served there; it has plain"),
        (plain_server(models=404), "", "GET /models names no model (404); give --model NAME"),
        (plain_server(models=401), "plain", "the server wants a key (401); give --api-key"),
    ],
)
async def test_a_server_without_the_model_is_told(transport: httpx.MockTransport, model: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        await connected(transport, model)
    assert words in str(error.value)


async def test_the_limit_of_a_server_is_told_by_the_folder_of_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(url: str, api_key: str) -> httpx.AsyncClient:
        return make_client(url, api_key, httpx.ASGITransport(app=make_app(FakeEngine(saying(ANSWER * 40)))))

    monkeypatch.setattr(bench, "make_client", local)
    monkeypatch.setattr(bench, "measure_bandwidth", lambda config, kind: Bandwidth((4.35e12,) * config.ranks, "told"))
    folder = str(GEOMETRY / "qwen3.6-35b-a3b")
    options = options_of(
        folder, "--model", "miniature", "--short-tokens", "2", "--new-tokens", "24", "--batch", "1", "--prefill"
    )
    report = await bench.bench_url(options, serve_config(options))
    assert report.model == "miniature"
    assert report.decode[0].step_bytes == pytest.approx(2 * 6.0e9, rel=0.07), "fp32 on a CPU"
    assert report.prefill == []
