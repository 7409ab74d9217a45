"""What the OpenAPI document says holds: made-up requests get no 5xx and no reply beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from jitllm.api.app import create_app
from tests.api.fake import FakeModels
from tests.api.server import chat_model, running
from tests.conftest import TinyModel

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]

OPERATIONS = [
    (path, method)
    for path, methods in create_app(FakeModels()).openapi()["paths"].items()
    for method in methods
]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: TinyModel) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("schema")
    model = chat_model(tiny_gguf("llama"), folder / "tiny.jlm")
    with running(folder, "-load", model, "-threads", "1") as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_the_document_holds(document: Any, path: str, method: str, mode: Any) -> None:
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    def holds(case: Any) -> None:
        body = case.body
        if isinstance(body, dict) and ("messages" in body or "prompt" in body):
            body["model"] = "tiny"  # others are not found, which tells little
        case.call_and_validate(checks=CHECKS, timeout=60)

    with suppress(Unsatisfiable):  # nothing about some operations can be wrong
        holds()
