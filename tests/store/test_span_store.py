"""Questions from a notebook: `SpanStore` on a file and on a hub."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spangrad.errors import MissingExtraError, StoreError, StoreLockedError
from spangrad.store import SpanStore, open_store
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, Rollout, RolloutStatus, Span, Update, UpdateSample
from tests.command_line import recorded
from tests.store.hub_process import HubProcess

DAY_NS = 86_400 * 10**9
TRACES = ["a" * 32, "b" * 32]
OF_TOOLS = "c" * 32


def call(number: int, **fields: Any) -> dict[str, Any]:
    """A row of `calls`: the n-th, on the n-th day of 1970."""
    told = {
        "call_id": f"c-{number}",
        "rollout_id": f"r-{number % 2}",
        "attempt": 0,
        "trace_id": TRACES[number % 2],
        "span_id": f"{number:016x}",
        "dialect": "genai",
        "model": "policy" if number < 3 else "judge",
        "grade": "exact" if number < 2 else "text",
        "grade_reasons": [] if number < 2 else ["no token ids"],
        "purpose": "agent",
        "start_ns": number * DAY_NS,
        "end_ns": number * DAY_NS + 2_500_000,
        "sampled_tokens": 5 if number < 2 else None,
    }
    return told | fields


def tool(number: int, *, failed: bool) -> Span:
    return Span(
        trace_id=OF_TOOLS,
        span_id=f"{number:016x}",
        parent_span_id=None,
        name="execute_tool look",
        kind=1,
        start_ns=number * DAY_NS,
        end_ns=number * DAY_NS + 10,
        status_code=2 if failed else 0,
        status_message="<b>no such city</b>" if failed else "",
        scope="s",
        attributes={"gen_ai.tool.name": "look", "gen_ai.operation.name": "execute_tool"}
        | {"spangrad.rollout.id": "r-0", "spangrad.attempt": 0},
    )


def fill(store: Any) -> None:
    store.enqueue([Rollout(f"r-{n}", task_id="t", run_id="run", split="train") for n in range(2)])
    store.claim(worker="w", limit=2)
    store.finish("r-0", 0)
    store.put_otlp(encode_request([tool(11, failed=False), tool(12, failed=True)]))
    store.put_calls([call(number) for number in range(4)])
    store.put_calls([call(4, attempt=7)])  # not the current attempt
    store.put_rewards([Reward("r-0", 1.0, time_ns=1), Reward("r-0", 0.5, name="style", time_ns=2)])
    sample = UpdateSample("r-0", "c-0", 0, 0.5, 5, 3, 1)
    store.commit_update(Update("run", 0, 4, ["r-0"], [sample], {}, "folder", time_ns=DAY_NS))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("notebook")
    with ExitStack() as stack:
        hub = stack.enter_context(HubProcess(folder / "hub.duckdb"))
        for target in (hub.url, str(folder / "spans.duckdb")):
            with open_store(target) as store:
                fill(store)
        yield {"file": str(folder / "spans.duckdb"), "hub": hub.url}


@pytest.fixture(params=["file", "hub"])
def store(request: pytest.FixtureRequest, targets: dict[str, str]) -> SpanStore:
    return SpanStore(targets[request.param])


def ids(query: Any, column: str = "call_id") -> list[Any]:
    return [row[column] for row in query]


def test_calls_by_every_filter(store: SpanStore) -> None:
    assert ids(store.calls()) == ["c-0", "c-1", "c-2", "c-3"]  # of current attempts, by time
    assert ids(store.calls(rollout="r-1")) == ["c-1", "c-3"]
    assert ids(store.calls(rollout=["r-0", "r-1"], grade=["ids", "exact"])) == ["c-0", "c-1"]
    assert ids(store.calls(model="judge")) == ["c-3"]
    assert ids(store.calls(run="run", purpose="agent", limit=2)) == ["c-2", "c-3"]  # the newest
    assert ids(store.calls(grade="unusable")) == []
    first = store.calls(limit=4).rows()[0]
    assert (first["started"], first["duration_ms"]) == (datetime(1970, 1, 1), 2.5)
    assert (first["sampled_tokens"], first["grade_reasons"]) == (5, [])


@pytest.mark.parametrize(
    "since",
    ["1970-01-03", "1970-01-03T00:00:00Z", "1970-01-03T02:00+02:00", date(1970, 1, 3), datetime(1970, 1, 3)],
)
def test_since_is_a_time_or_a_day(store: SpanStore, since: Any) -> None:
    assert ids(store.calls(since=since)) == ["c-2", "c-3"]
    later = datetime(1970, 1, 3, tzinfo=UTC) + timedelta(microseconds=1)
    assert ids(store.calls(since=later)) == ["c-3"]


def test_every_other_question(store: SpanStore) -> None:
    (rollout,) = store.rollouts(status=RolloutStatus.SUCCEEDED)
    assert (rollout["rollout_id"], rollout["calls"], rollout["worst_grade"]) == ("r-0", 2, "text")
    assert dict(rollout["rewards"]) == {"reward": 1.0, "style": 0.5}
    assert ids(store.rollouts(task="t", split="train", run="run"), "rollout_id") == ["r-0", "r-1"]
    assert [(row["call_id"], row["step"]) for row in store.steps(rollout="r-1")] == [("c-1", 0), ("c-3", 1)]
    assert ids(store.tools(), "failed") == [False, True]
    assert ids(store.tools(failed=False, tool="look"), "failed") == [False]
    assert ids(store.tool_errors(rollout="r-0"), "error") == ["<b>no such city</b>"]
    assert ids(store.rewards(rollout="r-0"), "value") == [1.0, 0.5]
    assert ids(store.rewards(name="style", author="operator"), "value") == [0.5]
    (trained,) = store.lineage(run="run", update=0)
    assert (trained["call_id"], trained["advantage"], trained["trained_tokens"]) == ("c-0", 0.5, 5)
    assert len(store.lineage(update=1)) == 0
    assert ids(store.spans(rollout="r-0", limit=1), "span_id") == [f"{12:016x}"]
    assert ids(store.spans(trace=OF_TOOLS, name="execute_tool look"), "status_code") == [0, 2]
    asked = store.sql("SELECT call_id FROM calls WHERE model = $model ORDER BY call_id", {"model": "judge"})
    assert ids(asked) == ["c-3", "c-4"]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda s: s.calls(rollout="r-9"), r"there is no rollout 'r-9' in .*; did you mean 'r-[01]'\?"),
        (lambda s: s.calls(model=["policy", "polcy"], rollout="r-9"), "there is no rollout 'r-9'"),
        (lambda s: s.calls(model="polcy"), r"no call of model 'polcy' in .*; known are judge, policy; did"),
        (lambda s: s.rollouts(run="runn"), r"no rollout of run 'runn' in .*; known are run; did you mean"),
        (lambda s: s.tools(tool="look", rollout="r-9"), "no rollout 'r-9'"),
        (lambda s: s.rewards(name="stile"), r"known are reward, style; did you mean 'style'\?"),
        (lambda s: s.spans(trace="d" * 32), "there is no trace 'ddd"),
        (lambda s: s.sql("SELECT nosuch FROM calls"), "nosuch"),
        (lambda s: s.sql("DELETE FROM calls"), "only reading is allowed"),
    ],
)
def test_a_name_that_is_not_there_is_an_error_that_names_the_nearest(
    store: SpanStore, ask: Any, says: str
) -> None:
    for look in (len, repr, lambda query: query.to_arrow()):
        with pytest.raises(StoreError) as raised:
            look(ask(store))
        assert re.search(says, str(raised.value)), str(raised.value)


def test_what_can_never_be_is_refused_at_once() -> None:
    nowhere = SpanStore("nowhere.duckdb")
    with pytest.raises(StoreError, match=r"grade is 'exat', expected .*; did you mean 'exact'\?"):
        nowhere.calls(grade=["ids", "exat"])
    with pytest.raises(StoreError, match="status is 'done', expected one of queued, running"):
        nowhere.rollouts(status="done")
    with pytest.raises(StoreError, match="author is 'me', expected one of agent"):
        nowhere.rewards(author="me")
    with pytest.raises(StoreError, match="since is 'yesterday', expected a date or a time"):
        nowhere.calls(since="yesterday")
    with pytest.raises(StoreError, match="no store at"):
        len(nowhere.calls())


def test_a_notebook_shows_the_first_rows_as_text_and_no_markup(store: SpanStore) -> None:
    query = store.sql("SELECT i, '<script>' || chr(27) || '[2J' AS evil, NULL AS none FROM range(50) t(i)")
    assert repr(query).splitlines()[0].split() == ["i", "evil", "none"]
    assert repr(query).splitlines()[-1] == "the first 20 rows"
    page = query._repr_html_()
    assert "<script>" not in page
    assert "\x1b" not in page + repr(query)
    assert "&lt;script&gt; [2J" in page
    assert page.count("<tr>") == 21
    assert len(query) == 50
    assert repr(query).splitlines()[-1] == "the first 20 of 50 rows"
    assert repr(store.sql("SELECT 1 AS a")).splitlines() == ["a", "1", "1 row"]
    assert repr(store.sql("SELECT 1 AS a WHERE false")).splitlines() == ["a", "0 rows"]
    hostile = 'SELECT 1 AS "<img src=x onerror=alert(1)>"'
    assert "<img" not in store.sql(hostile)._repr_html_()


def test_an_answer_is_fetched_once(tmp_path: Path) -> None:
    with open_store(tmp_path / "s.duckdb") as opened:
        store = SpanStore(opened)
        query = store.rollouts()
        assert len(query) == 0
        opened.enqueue([Rollout("later")])
        assert len(query) == 0
        assert ids(store.rollouts(), "rollout_id") == ["later"]


def test_a_file_is_open_only_while_an_answer_is_fetched(targets: dict[str, str]) -> None:
    store = SpanStore(targets["file"])
    for row in store.calls():  # another question in the loop
        assert len(store.calls(rollout=row["rollout_id"])) == 2
    with open_store(targets["file"]) as writer:  # nobody is kept out
        assert writer.rollouts()
    with open_store(targets["file"], read_only=True):
        program = (
            "import sys; from spangrad.store import SpanStore; print(len(SpanStore(sys.argv[1]).calls()))"
        )
        beside = [sys.executable, "-c", program, targets["file"]]
        assert subprocess.run(beside, capture_output=True, text=True, check=True).stdout == "4\n"


def test_what_nobody_has_read_yet_is_read_first(tmp_path: Path) -> None:
    with open_store(tmp_path / "s.duckdb") as opened:
        opened.put_otlp(recorded("r-1", 1))
    (found,) = SpanStore(tmp_path / "s.duckdb").calls(rollout="r-1")
    assert (found["grade"], found["sampled_tokens"]) == ("exact", 3)


def test_a_file_that_a_hub_has_is_an_error_that_says_where_the_hub_is(targets: dict[str, str]) -> None:
    served = Path(targets["file"]).with_name("hub.duckdb")
    with pytest.raises(StoreLockedError, match=f"served by the hub at {targets['hub']} "):
        len(SpanStore(served).calls())


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")
def test_pandas_keeps_whole_numbers_whole(store: SpanStore) -> None:
    frame = store.calls().to_pandas()
    assert list(frame["call_id"]) == ["c-0", "c-1", "c-2", "c-3"]
    assert str(frame["sampled_tokens"].dtype) == "Int64"
    assert frame["sampled_tokens"].isna().tolist() == [False, False, True, True]
    assert frame["started"].dtype.kind == "M"
    exact = store.sql("SELECT unnest([18446744073709551615, NULL]::UBIGINT[]) AS big").to_pandas()
    assert exact["big"][0] == 2**64 - 1


@pytest.mark.skipif(importlib.util.find_spec("polars") is None, reason="polars is not installed")
def test_polars_keeps_whole_numbers_whole(store: SpanStore) -> None:
    frame = store.calls().to_polars()
    assert frame["sampled_tokens"].to_list() == [5, 5, None, None]
    exact = store.sql("SELECT unnest([18446744073709551615, NULL]::UBIGINT[]) AS big").to_polars()
    assert exact["big"].to_list() == [2**64 - 1, None]
    assert frame["grade_reasons"].to_list()[2] == ["no token ids"]


def test_a_package_that_is_not_there_is_named_with_its_extra(targets: dict[str, str]) -> None:
    program = (
        "import sys; sys.modules[sys.argv[2]] = None\n"
        "from spangrad.store import SpanStore\n"
        "getattr(SpanStore(sys.argv[1]).calls(), 'to_' + sys.argv[2])()"
    )
    for name in ("pandas", "polars"):
        command = [sys.executable, "-c", program, targets["file"], name]
        done = subprocess.run(command, capture_output=True, text=True)
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"{MissingExtraError.__module__}.MissingExtraError: to_{name} needs {name}")
        assert "pip install 'spangrad[notebook]'" in last


def test_grades_are_those_of_the_adapters() -> None:
    from spangrad.adapters.model_call import Grade
    from spangrad.store.span_store import GRADES

    assert tuple(map(str, Grade)) == GRADES


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")
def test_the_quickstart_of_the_readme_runs(targets: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "store" / "README.md").read_text()
    section = page.partition("## From a notebook")[2]
    quickstart, over_http, *_ = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(Path(targets["file"]).parent)
    names: dict[str, Any] = {}
    exec(quickstart, names)
    assert len(names["frame"]) == 3
    exec(over_http.replace("http://127.0.0.1:4318", targets["hub"]), names)
    assert names["table"].num_rows == 2
