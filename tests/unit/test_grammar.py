"""Grammars in the engine: masks, waiting for the compiler, tokens that are known before the next step is planned."""

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.engine import xgrammars
from shardwise.engine.engine import Engine
from shardwise.engine.grammar import Grammars, mask, parse
from shardwise.engine.messages import Failed, Grammar, GrammarError
from shardwise.engine.probe import _walk
from shardwise.engine.xgrammars import make_compiler
from tests.unit.fake_runner import VOCAB
from tests.unit.test_engine import EOS, WIDE, Serving, answer, generate

TOKENS = [chr(ord("a") + i) for i in range(VOCAB)]
THINK = 7


def regex(pattern: str, after: int | None = None, param: str = "grammar") -> Grammar:
    return Grammar(json.dumps({"type": "regex", "pattern": pattern}), after, param)


def ebnf(text: str) -> Grammar:
    return Grammar(json.dumps({"type": "grammar", "grammar": text}))


@pytest.fixture(params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "llguidance":
        pytest.importorskip("llguidance")
    return request.param


def grammars(backend: Any) -> Grammars:
    return Grammars(lambda: TOKENS, VOCAB, (EOS,), backend)


def serving(backend: Any, overlap: bool = False, limits: Any = WIDE) -> Serving:
    made = Serving(limits, overlap)
    made.engine = Engine(limits, made.runner, (EOS,), overlap=overlap, grammars=grammars(backend))
    return made


def text(said: list[Any]) -> str:
    return "".join(TOKENS[token] for token in answer(said).tokens)


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_match_their_grammar_and_others_are_untouched(overlap: bool, backend: str) -> None:
    plain = [generate(f"p{i}", [i, 2], max_tokens=9) for i in range(3)]
    asked = [generate(f"r{i}", [i, 3], max_tokens=9, temperature=i % 2, grammar=regex("(ab|ba){2}")) for i in range(4)]
    made = serving(backend, overlap).run(*[r for pair in zip(plain, asked, strict=False) for r in pair], asked[3])
    for request in asked:
        found = text(made.said[request.id])
        assert len(found) == 4
        assert all(found[i : i + 2] in ("ab", "ba") for i in (0, 2))
        assert answer(made.said[request.id]).stop_token == EOS
    for request in plain:
        assert answer(made.said[request.id]) == answer(Serving().run(request).said[request.id])


@pytest.mark.parametrize("overlap", [False, True])
def test_equal_under_preemption_chunks_and_company(overlap: bool, backend: str) -> None:
    tight = replace(WIDE, pages=7, page_tokens=2, max_model_len=14, max_num_batched_tokens=5)
    asked = [
        generate(f"r{i}", [i, 2, 3], max_tokens=10, temperature=i % 2, seed=i, grammar=regex("[abc]{10}"), logprobs=1)
        for i in range(5)
    ]
    made = serving(backend, overlap, tight).run(*asked)
    assert made.engine.stats().preemptions
    for request in asked:
        assert answer(made.said[request.id]) == answer(serving(backend).run(request).said[request.id])
        assert set(text(made.said[request.id])) <= set("abc")


@pytest.mark.parametrize("overlap", [False, True])
def test_anything_goes_before_the_mark(overlap: bool, backend: str) -> None:
    made = serving(backend, overlap)
    for i in range(8):
        grammar = regex("bbb", THINK)
        request = generate(f"r{i}", [i], max_tokens=40, temperature=1.0, seed=i, grammar=grammar, ignore_eos=True)
        made.run(request)
        tokens = answer(made.said[f"r{i}"]).tokens
        if THINK in tokens:
            rest = tokens[tokens.index(THINK) + 1 :]
            assert [1, 1, 1, EOS][: len(rest)] == rest
        else:
            assert len(tokens) == 40
    assert any(THINK in answer(said).tokens for said in made.said.values())


def test_requests_wait_for_the_compiler_and_others_do_not(backend: str) -> None:
    made, gate = serving(backend), threading.Event()
    held = grammars(backend)
    compile_now = held._compile
    held._compile = lambda grammar: (gate.wait(10), compile_now(grammar))[1]  # pyright: ignore
    made.engine = Engine(WIDE, made.runner, (EOS,), grammars=held)
    made.engine.add(generate("slow", [1], grammar=regex("ab")))
    made.engine.add(generate("gone", [1], grammar=regex("ab")))
    made.engine.add(generate("fast", [2]))
    for _ in range(20):
        made.step()
    assert made.engine.stats().waiting == 2
    assert answer(made.said["fast"]).tokens
    made.engine.cancel("gone")
    gate.set()
    made.run()
    assert text(made.said["slow"]) == "ab"
    assert answer(made.said["gone"]).finish_reason == "cancel"


def test_bad_grammars_refuse_their_request_only(backend: str) -> None:
    made = serving(backend).run(generate("bad", [1], grammar=regex("(")), generate("good", [1], grammar=regex("ab")))
    (message,) = made.said["bad"]
    assert isinstance(message, Failed)
    assert message.refused
    assert text(made.said["good"]) == "ab"
    (message,) = Serving().run(generate("r", [1], grammar=regex("a"))).said["r"]
    assert isinstance(message, Failed)
    with pytest.raises(GrammarError, match=r"(?i)look-?ahead"):
        parse(regex("(?=a)"), backend)  # pyright: ignore


def test_a_grammar_with_no_way_on_refuses_its_request_only(backend: str) -> None:
    """The vocabulary has no digit."""
    made = serving(backend).run(
        generate("stuck", [1], grammar=regex("a1", param="guided_regex")), generate("good", [2])
    )
    *_, message = made.said["stuck"]
    assert isinstance(message, Failed)
    assert (message.refused, message.param) == (True, "guided_regex")
    assert "allows no token" in message.message
    assert answer(made.said["good"]) == answer(Serving().run(generate("good", [2])).said["good"])


@pytest.mark.parametrize("overlap", [False, True])
def test_masks_that_take_too_long_end_their_request_only(
    overlap: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.engine.grammar.FIRST_MASKS_SECONDS", 0.0)
    monkeypatch.setattr("shardwise.engine.grammar.MASK_SECONDS", 0.0)
    slow = generate("slow", [1], max_tokens=60, grammar=ebnf('root ::= x\nx ::= "a" | x x'))
    made = serving(backend, overlap).run(slow, generate("good", [2], max_tokens=20))
    *_, message = made.said["slow"]
    assert isinstance(message, Failed)
    assert message.refused
    assert "s of computing" in message.message
    assert answer(made.said["good"]) == answer(Serving().run(generate("good", [2], max_tokens=20)).said["good"])


@pytest.mark.slow
def test_what_does_not_compile_in_time_is_refused_and_the_next_compiles() -> None:
    made = Grammars(lambda: TOKENS, VOCAB, (EOS,), limit_s=3)
    words = [{"type": "const_string", "value": "a" * 999 + "b" * (i % 50) + "c" * (i // 50)} for i in range(3000)]
    try:
        bomb = made.compile(Grammar(json.dumps({"type": "or", "elements": words})))
        with pytest.raises(GrammarError, match=r"more than 3 s to compile and try"):
            bomb.result()
        good = regex("ab")
        assert not made.constraint(good, made.compile(good).result()).finished
    finally:
        made.close()


def test_what_takes_long_to_follow_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.engine.probe.WALK_SECONDS", 0.1)
    compiler = make_compiler(TOKENS, VOCAB, [EOS])
    slow = ebnf('root ::= x x\nx ::= "a" | x x x | x x | ""')
    assert "ms a token to follow" in _walk(compiler.compile_grammar(xgrammars.parse(slow)), VOCAB, [EOS])
    assert _walk(compiler.compile_grammar(xgrammars.parse(regex("[a-f]{200}"))), VOCAB, [EOS]) == ""


def test_equal_grammars_are_compiled_once(backend: str) -> None:
    made = grammars(backend)
    first = made.compile(regex("ab"))
    assert made.compile(regex("ab", after=3)) is first
    assert made.compile(regex("ac")) is not first


@pytest.mark.parametrize("vocab", [VOCAB, 31, 32, 33, 64, 100])
def test_mask_of_odd_widths(vocab: int, backend: str) -> None:
    class Row:
        constraint: Any = None

    tokens = [chr(0x61 + i % 26) * (1 + i // 26) for i in range(vocab)]
    made = Grammars(lambda: tokens, vocab, (0,), backend)  # pyright: ignore
    row = Row()
    grammar = regex("[b-y]{2}")
    row.constraint = made.constraint(grammar, made.compile(grammar).result())
    logits = torch.zeros(3, vocab)
    mask(logits, [Row(), row, Row()])
    assert logits[[0, 2]].isfinite().all()
    expected = [set(token) <= set("bcdefghijklmnopqrstuvwxy") and len(token) <= 2 for token in tokens]
    assert (logits[1] == 0).tolist() == expected
