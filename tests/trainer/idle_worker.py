"""The config of a worker that nobody starts."""

from spangrad.trainer.rollouts.agent_process import WorkerConfig

IDLE = WorkerConfig(
    store="",
    evaluator_key=None,
    agent_key=None,
    gateway_url="",
    engine_urls=(),
    model="",
    function="",
    reward=None,
    base_dir="",
    run_id="",
    split="train",
    concurrency=1,
    timeout_s=1.0,
    temperature=1.0,
    log="",
)
