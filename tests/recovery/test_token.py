"""A cluster that was started with token authentication is named as such."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from tutelage.transport.ray.connect import refused

SAID = """\
[2026-11-29 20:19:31,512 W 5598 5598] gcs_client.cc:210: Failed to get cluster ID from GCS server: Unauthenticated: \
RPC error: InvalidAuthToken: Authentication token is missing or incorrect
ConnectionError: Failed to connect to Ray cluster at 192.0.2.2:27411
"""


def test_a_missing_token_is_the_reason_that_is_told() -> None:
    error = refused("10.0.0.1:6379", SAID)
    assert error.what == (
        "the Ray cluster at 10.0.0.1:6379 cannot be used: it asks for a token, and this process sends none or another"
    )
    assert "RAY_AUTH_MODE" in error.fix
    assert "token" not in refused("10.0.0.1:6379", "ConnectionError: no route").what
