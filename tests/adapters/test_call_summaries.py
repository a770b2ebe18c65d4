from pathlib import Path

from spangrad.adapters.calls import calls_of
from spangrad.adapters.ingest import ingest
from spangrad.store import FileStore

FIXTURE = Path(__file__).parent / "fixtures"


def test_ingest_writes_a_summary_of_every_call_that_sql_can_ask(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as store:
        report = ingest([str(file) for file in sorted(FIXTURE.rglob("*.jsonl"))], store)
        assert report.calls > 0
        rows = store.query("SELECT grade, count(*) AS n FROM calls GROUP BY grade")
        assert {row["grade"]: row["n"] for row in rows} == report.by_grade
        named = {row["call_id"] for row in store.query("SELECT call_id FROM calls")}
        assert {call.call_id for call in calls_of(store)} <= named
