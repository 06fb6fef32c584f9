"""One engine at a time: each start costs seconds and memory, so a module shares one."""

from __future__ import annotations

import pytest
from vllm_kit import INSTALLED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything that needs vLLM carries the marker and says why it is skipped."""
    skip = pytest.mark.skip(reason="vLLM is not installed: run `make vllm`")
    for item in items:
        if item.get_closest_marker("vllm") is not None and not INSTALLED:
            item.add_marker(skip)
