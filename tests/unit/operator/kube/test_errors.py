"""What the API server's refusals become."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_operator.kube.errors import (
    AlreadyExistsError,
    FieldConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    KubeError,
    NotFoundError,
    PreconditionError,
    ThrottledError,
    UnavailableError,
    error_of,
)
from mooncake_operator.kube.retry import RetryRules


def status(message: str = "", reason: str = "", **details: Any) -> bytes:
    return json.dumps({"kind": "Status", "message": message, "reason": reason, "details": details}).encode()


@pytest.mark.parametrize(
    ("code", "body", "expected"),
    [
        (404, status(reason="NotFound"), NotFoundError),
        (409, status(reason="AlreadyExists"), AlreadyExistsError),
        (409, status(reason="Conflict"), PreconditionError),
        (410, status(reason="Expired"), GoneError),
        (422, status(reason="Invalid"), InvalidError),
        (422, status(reason="Invalid", causes=[{"field": "metadata.uid"}]), PreconditionError),
        (429, status(reason="TooManyRequests"), ThrottledError),
        (
            500,
            status("failed to create typed patch object (a/b; apps/v1, Kind=Deployment): .x"),
            InvalidError,
        ),
        (500, status("failed to convert new object (a/b; apps/v1, Kind=Deployment) to proper"), InvalidError),
        (500, status("failed to create typed live object (a/b; apps/v1, Kind=Deployment)"), UnavailableError),
        (504, b"<html>a proxy in between</html>", UnavailableError),
    ],
)
def test_each_refusal_has_its_type(code: int, body: bytes, expected: type[KubeError]) -> None:
    assert type(error_of(code, body, {})) is expected


def test_a_namespace_that_ends_is_told_from_other_refusals() -> None:
    body = status("no", "Forbidden", causes=[{"reason": "NamespaceTerminating"}])
    error = error_of(403, body, {})
    assert isinstance(error, ForbiddenError)
    assert error.namespace_terminating
    other = error_of(403, status('pods "a" is forbidden: exceeded quota: tight', "Forbidden"), {})
    assert isinstance(other, ForbiddenError)
    assert not other.namespace_terminating


def test_field_conflicts_name_each_manager_once_with_all_its_fields() -> None:
    causes = [
        {"reason": "FieldManagerConflict", "message": 'conflict with "kubectl" using v1', "field": ".spec.a"},
        {"reason": "FieldManagerConflict", "message": 'conflict with "hpa" using v1', "field": ".spec.b"},
        {"reason": "FieldManagerConflict", "message": 'conflict with "kubectl"', "field": ".spec.c"},
    ]
    error = error_of(409, status("3 conflicts", "Conflict", causes=causes), {})
    assert isinstance(error, FieldConflictError)
    assert str(error) == "kubectl manages spec.a, spec.c; hpa manages spec.b"


@given(st.integers(300, 599), st.binary(max_size=200))
def test_any_answer_whatever_becomes_an_error_with_words(code: int, body: bytes) -> None:
    assert str(error_of(code, body, {}))


@given(st.integers(300, 599), st.recursive(st.none() | st.booleans() | st.text() | st.integers(), st.lists))
def test_any_json_whatever_becomes_an_error(code: int, value: Any) -> None:
    for document in (
        value,
        {"details": value, "message": value, "reason": value},
        {"details": {"causes": value}},
    ):
        assert isinstance(error_of(code, json.dumps(document).encode(), {}), KubeError)


def wait_s(error: KubeError, *, attempt: int = 1, repeatable: bool = True) -> float | None:
    return RetryRules().wait_s(attempt, error, repeatable=repeatable, chance=lambda: 0.5)


def test_what_was_not_carried_out_is_sent_again_and_what_may_have_been_only_if_it_may_be_repeated() -> None:
    away, throttled = UnavailableError(500, "", "no"), ThrottledError(429, "", "no")
    assert wait_s(away) is not None
    assert wait_s(away, repeatable=False) is None
    assert wait_s(throttled, repeatable=False) is not None
    assert wait_s(NotFoundError(404, "", "no")) is None


def test_a_retry_waits_as_long_as_the_server_asks_unless_that_is_the_queues_matter() -> None:
    assert wait_s(ThrottledError(429, "", "no", retry_after_s=3)) == 3
    assert wait_s(ThrottledError(429, "", "no", retry_after_s=60)) is None


def test_retries_end() -> None:
    assert wait_s(UnavailableError(500, "", "no"), attempt=4) is None
