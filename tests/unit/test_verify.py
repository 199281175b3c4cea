"""How two answers are compared, and that a difference fails."""

import pytest

from shardwise.commands.verify import Completion, compare, encode, report


def test_equal_answers_pass_and_tell_their_largest_gap(capsys: pytest.CaptureFixture[str]):
    one = Completion((1, 2, 3), ({1: -0.5, 7: -3.0}, {2: -1.0, 8: -4.0}, {3: -2.0}))
    many = Completion((1, 2, 3), ({1: -0.5, 7: -3.125}, {2: -1.0, 8: -4.25}, {3: -2.0, 9: -9.0}))
    found = compare(one, many)
    assert (found.same, found.agreed_tokens, found.largest) == (True, 3, 0.25)
    assert report(2, ["prompt"], [one], [many]) == 0
    assert "2.50e-01" in capsys.readouterr().out


@pytest.mark.parametrize(("tokens", "agreed"), [((1, 9, 3), 1), ((1, 2), 2), ((), 0), ((1, 2, 3, 4), 3)])
def test_any_difference_fails_from_its_first_token(
    tokens: tuple[int, ...], agreed: int, capsys: pytest.CaptureFixture[str]
):
    one = Completion((1, 2, 3), ({1: -0.5, 9: -1.0}, {2: -1.0, 9: -1.5}, {3: -2.0}))
    many = Completion(tokens, ({1: -0.5, 9: -1.0}, {2: -1.5, 9: -1.0}, {3: -9.0}, {4: -1.0})[: len(tokens)])
    found = compare(one, many)
    assert (found.same, found.agreed_tokens) == (False, agreed)
    if tokens[1:2] == (9,):
        assert found.largest == 0.5, "the step that chose differently counts, and none after it"
    assert one.sha256 != many.sha256
    assert report(3, ["prompt", "same"], [one, one], [many, one]) == 1
    assert "1 of 2 answers" in capsys.readouterr().out


def test_a_checkpoint_without_a_tokenizer_gets_ids_within_its_vocabulary(tmp_path):
    made = encode(tmp_path, ["a", "some longer text"], vocab_size=50)
    assert [len(ids) for ids in made] == [1, 16]
    assert all(0 <= token < 50 for ids in made for token in ids)
