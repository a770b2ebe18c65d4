import io

from rich.console import Console

from spangrad.trainer.reporting.report import LiveTable

METRICS = {
    "reward/mean": 0.625,
    "eval/success_greedy": 0.75,
    "loss/total": -0.125,
    "policy/entropy": 0.5,
    "gap/mean": 1.25e-5,
    "data/trained_tokens": 5120.0,
    "data/dropped_tokens": 12.0,
    "time/wait_s": 12.34,
    "time/update_s": 4.0,
}


def test_a_log_gets_one_plain_line_per_update() -> None:
    out = io.StringIO()
    with LiveTable(Console(file=out, width=80)) as table:
        table.status("collecting")
        table.add(0, METRICS)
        table.add(1, {})
    first, second = out.getvalue().splitlines()
    assert first.startswith("update 0: train reward 0.625, held-out greedy/sampled 0.75/-, ")
    assert "loss -0.125, entropy 0.500, " in first
    assert "tokens trained/dropped 5120/12" in first
    assert "seconds wait/credit/update/publish/eval 12/-/4.0/-/-" in first
    assert "0.0" not in second  # what is not known is no zero
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_a_table_that_fits() -> None:
    for width in (80, 109, 110):
        out = io.StringIO()
        with LiveTable(Console(file=out, width=width, force_terminal=True)) as table:
            table.status("collecting")
            table.add(0, METRICS)
        shown = out.getvalue()
        assert "…" not in shown
        assert "0.75/-" in shown
        assert "collecting" in shown


def test_text_in_a_status_is_no_markup() -> None:
    out = io.StringIO()
    with LiveTable(Console(file=out, width=80)) as table:
        table.note("[red]rollout[/red] r-1")
    assert out.getvalue() == "[red]rollout[/red] r-1\n"
