"""What counts as right in the miniature's evaluation set, and that the stored answers of transformers fit to it."""

from dataclasses import replace

from transformers import AutoTokenizer

from tests.golden import eval as evaluation


def test_cases_and_skipped() -> None:
    cases = evaluation.load_cases()
    assert len(cases) == 418
    assert sum(evaluation.skipped().values()) == 66
    assert len({case.skill for case in evaluation.load_cases(limit=19)}) == 19


def test_prompts_are_those_of_the_training() -> None:
    tokenizer = AutoTokenizer.from_pretrained(evaluation.miniature())
    for case in evaluation.load_cases():
        assert evaluation.prompt_ids(tokenizer, case)  # asserts the number of tokens


def test_golden_answers_are_right() -> None:
    tokenizer = AutoTokenizer.from_pretrained(evaluation.miniature())
    cases, golden = evaluation.load_cases(), evaluation.golden()
    assert golden.keys() == {case.id for case in cases}
    answers = {
        key: evaluation.answer_of(tokenizer.decode(g.ids, skip_special_tokens=True)) for key, g in golden.items()
    }
    figures = evaluation.accuracy(cases, answers)
    wrong = {skill: figure for skill, figure in figures.items() if figure[0] != figure[1]}
    assert wrong == {"capital": (21, 22)}
    stops = {2034, 2036}
    for case in cases:
        ids = golden[case.id].ids
        assert stops.isdisjoint(ids[:-1])
        assert ids[-1] in stops or len(ids) == case.max_tokens
    shifted = dict(zip(answers, [*list(answers.values())[1:], ""], strict=True))
    assert sum(right for right, _ in evaluation.accuracy(cases, shifted).values()) < 10
    assert "417 / 418" in evaluation.table(figures, evaluation.skipped())


def test_counting_may_go_on() -> None:
    case = next(case for case in evaluation.load_cases() if case.skill == "counting")
    assert evaluation.matches(case, case.expected)
    assert evaluation.matches(case, case.expected + ", 7")
    assert evaluation.matches(case, ", ".join(case.expected.split(", ")[:5]))
    assert not evaluation.matches(case, ", ".join(case.expected.split(", ")[:4]))
    assert not evaluation.matches(case, "1" + case.expected)


def test_tool_calls() -> None:
    cases = [case for case in evaluation.load_cases() if case.expected_tool_calls]
    assert len(cases) > 10
    for case in cases:
        assert evaluation.tool_calls(case.expected, case.tools) == list(case.expected_tool_calls)
        assert evaluation.matches(case, case.expected)
        assert not evaluation.matches(case, case.expected.replace("</function>", ""))
    number = next(case for case in cases if case.expected_tool_calls[0]["name"] == "set_timer")
    minutes = number.expected_tool_calls[0]["arguments"]["minutes"]
    assert not evaluation.matches(number, number.expected.replace(str(minutes), "soon"))
    assert not evaluation.matches(replace(number, expected_tool_calls=()), "no call")
