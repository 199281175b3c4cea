"""Requests that schemathesis makes up from our OpenAPI document: none may be a 500."""

import contextlib
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from shardwise.config import ServeConfig, load_model_config
from shardwise.server.app import create_app
from shardwise.server.sampling import GenerationDefaults
from shardwise.server.tokenizer import Tokenizer
from tests.fake_engine import FakeEngine
from tests.unit.server_fixtures import MODEL, saying

EXAMPLES = 6  # of each operation, sound ones and wrong ones
OPERATIONS = 13
REPLY = "I think.</think>well\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def explore(operation: Any, mode: GenerationMode) -> set[int]:
    """The statuses of what an operation answers to made-up requests."""
    statuses = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    def run(case: Any) -> None:
        response = case.call()
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        assert b"internal_error" not in response.content, case.as_curl_command()
        statuses.add(response.status_code)

    with contextlib.suppress(Unsatisfiable):  # every text is a name: none is wrong
        run()
    return statuses


@pytest.mark.filterwarnings("ignore")
def test_no_request_is_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "close", lambda self: None)  # each call is a whole life of the application
    app = create_app(
        ServeConfig(model=str(MODEL)),
        FakeEngine(saying(REPLY)),
        Tokenizer.load(MODEL),
        load_model_config(MODEL),
        GenerationDefaults(),
    )
    document = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) == OPERATIONS
    found: set[int] = set()
    for operation in operations:
        found |= explore(operation, GenerationMode.POSITIVE)
        if operation.body or operation.path_parameters:
            found |= explore(operation, GenerationMode.NEGATIVE)
    assert {200, 400, 404} <= found
