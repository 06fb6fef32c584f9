"""The soft overlong penalty of DAPO, by hand."""

from __future__ import annotations

import pytest
import torch

from tutelage.errors import ConfigError
from tutelage.math.length_penalty import soft_overlong_penalty


def test_equation_13_by_hand() -> None:
    # limit 20, buffer 4: free up to 16, then a quarter a token
    lens = torch.tensor([0, 1, 15, 16, 17, 18, 19, 20, 21, 400])
    found = soft_overlong_penalty(lens, 20, 4)
    assert found.tolist() == [0, 0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
    assert found.dtype == torch.float32
    assert soft_overlong_penalty(lens, 20, 4, factor=2.0).tolist() == [2 * x for x in found.tolist()]


def test_the_papers_numbers() -> None:
    # 16,384 expected tokens, 4,096 of buffer, 20,480 at most
    lens = torch.tensor([16384, 18432, 20480])
    assert soft_overlong_penalty(lens, 20480, 4096).tolist() == [0, -0.5, -1]


def test_a_buffer_as_long_as_the_limit_falls_from_the_first_token() -> None:
    assert soft_overlong_penalty(torch.tensor([1, 4]), 4, 4).tolist() == [-0.25, -1]


def test_numbers_out_of_range_are_refused() -> None:
    lens = torch.tensor([1])
    for buffer in (0, 5):
        with pytest.raises(ConfigError, match=f"the overlong buffer is {buffer} tokens and the length limit 4"):
            soft_overlong_penalty(lens, 4, buffer)
    with pytest.raises(ConfigError, match="factor of the overlong penalty is -1"):
        soft_overlong_penalty(lens, 4, 2, -1.0)
