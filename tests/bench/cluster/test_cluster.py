import dataclasses

import pytest

from tests.bench.cluster import page
from tests.bench.cluster.model import PARTS, Cluster, Costs, Model, Outcome

FREE = Costs(0.0, 0.0, 0.0, 0.0)
QUICK = Cluster(16, engines=2, environment_s=1.0, turns=3, call_tokens=10, publish_s=0.5, group_size=4)


def test_a_cluster_with_time_for_everything_is_as_fast_as_its_agents() -> None:
    cluster = dataclasses.replace(QUICK, max_staleness=8, publish_s=0.0, slowing=0.0)
    outcome = Model(cluster, FREE).run(20)
    assert outcome.share("agents", cluster.agents) > 0.95
    alone = cluster.turns * (cluster.environment_s + cluster.call_tokens * cluster.token_s)
    assert outcome.rollouts * alone / (outcome.seconds * cluster.agents) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_nothing_is_older_than_the_rules_allow(staleness: int) -> None:
    outcome = Model(dataclasses.replace(QUICK, max_staleness=staleness), Costs()).run(12)
    assert outcome.stalest <= staleness
    assert outcome.updates == 12


def test_agents_that_may_run_ahead_wait_less() -> None:
    synchronous, ahead = (
        Model(dataclasses.replace(QUICK, max_staleness=k), Costs()).run(12).share("agents", QUICK.agents)
        for k in (0, 1)
    )
    assert ahead > 1.2 * synchronous


def test_a_slow_hub_is_the_bottleneck_and_is_never_more_than_busy() -> None:
    slow = Model(QUICK, dataclasses.replace(FREE, hub_call_s=1.0)).run(4)
    assert 0.9 < slow.share("hub") <= 1.0
    assert slow.calls / slow.seconds == pytest.approx(1.0, rel=0.1)
    assert slow.hub_wait_s > 1.0


def test_page_has_a_row_for_each_cluster_and_a_line_for_each_part() -> None:
    outcome = Outcome(10.0, 100, 5, 2, 1, dict.fromkeys(PARTS, 5.0))
    results = {"slow & <quick>": [(Cluster(10), outcome), (Cluster(100), outcome)]}
    assert page.table(results).count("\n") == 3
    assert "| 100, slow" in page.table(results)
    picture = page.svg(results)
    assert picture.count("<polyline") == 5
    assert "slow  quick" in picture
