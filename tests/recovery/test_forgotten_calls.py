"""Of several calls that one loss ended, the first is told; the others do not end the run that goes on after it."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from tutelage.config.cluster import PoolConfig
from tutelage.errors import ClusterError
from tutelage.transport.ray.ledger import Call, Ledger
from tutelage.transport.ray.pool import Pool


def test_calls_that_failed_together_are_told_once() -> None:
    ledger = Ledger(60.0, lambda: None, lambda label: [])
    lost, other = (Pool(name, PoolConfig(devices=1), {}, False) for name in ("main", "other"))
    calls = [Call(number, f"role.call{number}", lost, [None], []) for number in range(4)]
    elsewhere = Call(4, "role.elsewhere", other, [None], [])
    for call in [*calls, elsewhere]:
        ledger.add(call)
    for call in [*calls[:3], elsewhere]:
        failure = ClusterError(f"{call.name} was lost")
        failure.pool = call.pool.name
        ledger._done(call, failure)
    with pytest.raises(ClusterError, match="call0 was lost"):
        ledger.wait([calls[0]])
    assert lost.told
    assert not other.told
    ledger.forget(lost, ClusterError("started again"))
    assert calls[3].settled, "a call that had no answer waits for none any more"
    with pytest.raises(ClusterError, match="elsewhere was lost"):  # that of another pool is still told
        ledger.wait([])
    ledger.wait([])
