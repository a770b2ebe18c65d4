import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests.vllm_fixture import learner_logprobs, make_served_model, moved_weights, random_rows
from tests.waiting import wait_until

from spangrad.errors import PublishError
from spangrad.trainer.processes import free_port
from spangrad.trainer.serving.checksums import weights_digest
from spangrad.trainer.serving.engine import Engine
from spangrad.trainer.serving.publish import prove, publish, served_logprobs, served_version
from spangrad.trainer.serving.serving_config import PauseMode

pytestmark = pytest.mark.vllm

OWNER = """
import sys, time
from spangrad.trainer.serving.engine import Engine, EngineConfig
engine = Engine(EngineConfig(model=sys.argv[1], port=int(sys.argv[2]), log=sys.argv[3])).start()
print(engine.pid, flush=True)
time.sleep(3600)
"""


@dataclass
class OwnedEngine:
    """An engine that another process started."""

    folder: Path
    url: str
    owner: subprocess.Popen[str]
    pid: int


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnedEngine]:
    """A served Llama whose head is not its embedding, owned by a process that can be killed."""
    folder = make_served_model(tmp_path_factory.mktemp("untied"), is_tied=False)
    port = free_port()
    log = tmp_path_factory.mktemp("untied-log") / "engine.log"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), str(port), str(log)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    yield OwnedEngine(folder, f"http://127.0.0.1:{port}", owner, pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()


class Stream:
    """One running completion, read as it comes."""

    def __init__(self, url: str, prompt: list[int], tokens: int) -> None:
        self.url, self.prompt, self.tokens = url, prompt, tokens
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        sampling = {"max_tokens": self.tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": self.prompt, "sampling_params": sampling, "stream": True}
        url = f"{self.url}/inference/v1/generate"
        with httpx.stream("POST", url, json=body, timeout=120.0) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    self.ids += choice["token_ids"] or []
                    self.logprobs += [e["logprob"] for e in (choice["logprobs"] or {}).get("content", [])]
                    self.versions = choice.get("weight_versions") or self.versions
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def check_publish(url: str, folder: Path, tmp_path: Path, *, version: int, seed: int) -> None:
    """Publish moved weights and hold the served logprobs against transformers'."""
    weights = moved_weights(folder, tmp_path / "new.safetensors", seed=seed)
    rows = random_rows(3, 70, seed=seed)
    before = served_logprobs(url, rows)
    report = publish(url, weights, version)
    assert report.version == version == served_version(url)
    learner = learner_logprobs(folder, weights, rows)
    proof = prove(url, rows, learner, tolerance_nats=0.02, before=before)
    print(f"publish took {report.seconds:.3f} s: {proof}")
    assert proof.tokens == 3 * 69
    assert proof.mean_gap < 1e-4 and proof.max_gap < 1e-3
    assert proof.moved is not None and proof.moved > 0.1
    with pytest.raises(
        PublishError, match="serves other weights than the learner's: mean logprob difference"
    ):
        prove(url, rows, before, tolerance_nats=0.02)


def test_a_publish_changes_the_served_logprobs_to_the_learners(
    engine: Engine, served_model: Path, tmp_path: Path
) -> None:
    check_publish(engine.url, served_model, tmp_path, version=11, seed=1)


def test_publishing_again_changes_nothing(engine: Engine, served_model: Path, tmp_path: Path) -> None:
    weights = moved_weights(served_model, tmp_path / "new.safetensors", seed=2)
    rows = random_rows(2, 40)
    publish(engine.url, weights, 21)
    first = served_logprobs(engine.url, rows)
    assert publish(engine.url, weights, 21).version == 21
    assert all(np.array_equal(a, b) for a, b in zip(first, served_logprobs(engine.url, rows), strict=True))


def test_no_block_of_the_prefix_cache_outlives_the_weights(
    engine: Engine, served_model: Path, tmp_path: Path
) -> None:
    prompt = random_rows(1, 200, seed=3)[0]

    def first_token() -> tuple[float, int]:
        body = {"model": "policy", "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": 1}
        reply = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60.0).json()
        details = reply["usage"]["prompt_tokens_details"] or {}
        return reply["choices"][0]["logprobs"]["token_logprobs"][0], details.get("cached_tokens") or 0

    publish(engine.url, served_model / "model.safetensors", 31)
    first_token()
    old, cached = first_token()
    assert cached >= 160
    publish(engine.url, moved_weights(served_model, tmp_path / "new.safetensors", seed=3), 32)
    new, cached = first_token()
    assert cached == 0 and new != old
    publish(engine.url, served_model / "model.safetensors", 33)
    back, cached = first_token()
    assert cached == 0 and back == pytest.approx(old, abs=1e-4)


def test_streams_that_run_while_weights_change_all_finish_and_know_their_versions(
    engine: Engine, served_model: Path, tmp_path: Path
) -> None:
    old, tokens = served_model / "model.safetensors", 900
    new = moved_weights(served_model, tmp_path / "new.safetensors", seed=4)
    prompts = random_rows(8, 30, seed=4)
    publish(engine.url, old, 41)
    streams = [Stream(engine.url, prompt, tokens) for prompt in prompts]
    for stream in streams:
        stream.thread.start()
    wait_until(lambda: all(len(stream.ids) > 5 for stream in streams), timeout_s=60.0, interval_s=0.005)
    publish(engine.url, new, 42)
    for stream in streams:
        stream.thread.join()

    assert [len(stream.ids) for stream in streams] == [tokens] * 8
    rows = [stream.prompt + stream.ids for stream in streams]
    learner = {v: learner_logprobs(served_model, file, rows) for v, file in (("41", old), ("42", new))}
    for index, stream in enumerate(streams):
        # On a busy machine a stream may end before the publish begins.
        assert [span["version"] for span in stream.versions] in (["41", "42"], ["41"])
        for span in stream.versions:
            expected = learner[span["version"]][index][len(stream.prompt) - 1 :]
            gaps = np.abs(expected - stream.logprobs)[span["start"] : span["end"]]
            assert gaps.size and gaps.max() < 1e-3
    assert any(len(stream.versions) == 2 for stream in streams)


@pytest.mark.parametrize("damage", ["other names", "other shape", "truncated", "missing", "one bit"])
def test_a_wrong_weights_file_leaves_the_old_weights_served(
    damage: str, engine: Engine, served_model: Path, tmp_path: Path
) -> None:
    publish(engine.url, served_model / "model.safetensors", 51)
    rows = random_rows(1, 40)
    before = served_logprobs(engine.url, rows)
    weights = load_file(served_model / "model.safetensors")
    path = tmp_path / "wrong.safetensors"
    if damage == "other names":
        save_file({name: w for name, w in weights.items() if "mlp" not in name}, path)
    elif damage == "other shape":
        save_file({name: w[..., :-2].contiguous() for name, w in weights.items()}, path)
    elif damage == "truncated":
        path.write_bytes((served_model / "model.safetensors").read_bytes()[:100_000])
    elif damage == "one bit":
        data = bytearray(moved_weights(served_model, path, seed=5).read_bytes())
        data[-1000] ^= 1
        path.write_bytes(data)
    with pytest.raises(
        PublishError, match=r"version 52 was not published: '.*wrong.*; the engine serves version 51$"
    ):
        publish(engine.url, path, 52)
    assert served_version(engine.url) == 51
    assert np.array_equal(before[0], served_logprobs(engine.url, rows)[0])


def test_a_file_that_took_the_place_of_the_one_that_is_meant_is_refused(
    engine: Engine, served_model: Path, tmp_path: Path
) -> None:
    publish(engine.url, served_model / "model.safetensors", 53)
    path = moved_weights(served_model, tmp_path / "weights.safetensors", seed=5)
    meant = weights_digest(path)
    moved_weights(served_model, path, seed=6)
    httpx.post(f"{engine.url}/start_weight_update").raise_for_status()
    update = {"update_info": {"path": str(path), "digest": meant}}
    refused = httpx.post(f"{engine.url}/update_weights", json=update)
    assert refused.is_error and f"expected digest {meant}: it is another one" in refused.text
    publish(engine.url, path, 54)  # the refused update is no longer under way
    assert served_version(engine.url) == 54


def test_a_trainer_that_died_between_start_and_finish_is_recovered_from(
    engine: Engine, served_model: Path
) -> None:
    httpx.post(f"{engine.url}/pause?mode=keep").raise_for_status()
    httpx.post(f"{engine.url}/start_weight_update").raise_for_status()
    publish(engine.url, served_model / "model.safetensors", 61)
    assert served_version(engine.url) == 61
    assert len(served_logprobs(engine.url, random_rows(1, 8))[0]) == 7  # it is not paused


def test_a_refused_file_after_such_a_death_leaves_weights_that_nobody_vouches_for(
    engine: Engine, served_model: Path, tmp_path: Path
) -> None:
    publish(engine.url, served_model / "model.safetensors", 62)
    httpx.post(f"{engine.url}/pause?mode=keep").raise_for_status()
    httpx.post(f"{engine.url}/start_weight_update").raise_for_status()
    with pytest.raises(PublishError, match="the engine serves weights of a publish that died"):
        publish(engine.url, tmp_path / "missing.safetensors", 63)
    assert served_version(engine.url) is None
    publish(engine.url, served_model / "model.safetensors", 63)
    assert served_version(engine.url) == 63


def test_an_update_too_small_for_the_tolerance_is_still_seen_to_be_missing(
    engine: Engine, served_model: Path, tmp_path: Path
) -> None:
    old = served_model / "model.safetensors"
    new = moved_weights(served_model, tmp_path / "new.safetensors", seed=6, scale=2e-4)
    rows = random_rows(3, 70, seed=6)
    publish(engine.url, old, 64)
    before, learner_before = served_logprobs(engine.url, rows), learner_logprobs(served_model, old, rows)
    learner = learner_logprobs(served_model, new, rows)
    assert prove(engine.url, rows, learner, tolerance_nats=0.02).mean_gap < 0.02  # alone it proves nothing
    both: dict[str, Any] = {"before": before, "learner_before": learner_before}
    with pytest.raises(PublishError, match="still serves the old weights"):
        prove(engine.url, rows, learner, tolerance_nats=0.02, **both)
    publish(engine.url, new, 65)
    proof = prove(engine.url, rows, learner, tolerance_nats=0.02, **both)
    assert proof.moved == pytest.approx(proof.expected, rel=0.05)
    publish(engine.url, new, 65)  # nothing moves, nothing has to
    served = served_logprobs(engine.url, rows)
    prove(engine.url, rows, learner, tolerance_nats=0.02, before=served, learner_before=learner)


def test_a_row_as_long_as_the_context_is_cut_by_one_token(engine: Engine) -> None:
    assert [len(row) for row in served_logprobs(engine.url, random_rows(1, 1024))] == [1022]


def test_what_can_not_be_compared_is_refused(engine: Engine) -> None:
    row = random_rows(1, 8)
    with pytest.raises(PublishError, match="row 0 has 8 tokens and 8 learner logprobs; expected 7"):
        prove(engine.url, row, [np.zeros(8)], tolerance_nats=0.02)
    with pytest.raises(PublishError, match="mean logprob difference nan nats"):
        prove(engine.url, row, [np.full(7, np.nan)], tolerance_nats=0.02)
    with pytest.raises(PublishError, match="no token to compare"):
        prove(engine.url, [], [], tolerance_nats=0.02)
    with pytest.raises(PublishError, match="row 0 has fewer than 2 tokens"):
        served_logprobs(engine.url, [[5]])


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_running_stream_ends_before_the_weights_change_or_is_cut(
    mode: PauseMode, engine: Engine, served_model: Path, tmp_path: Path
) -> None:
    new = moved_weights(served_model, tmp_path / "new.safetensors", seed=7)
    publish(engine.url, served_model / "model.safetensors", 71)
    stream = Stream(engine.url, random_rows(1, 30, seed=7)[0], 900)
    stream.thread.start()
    wait_until(lambda: len(stream.ids) > 5, timeout_s=60.0, interval_s=0.005)
    publish(engine.url, new, 72, mode=mode)
    stream.thread.join()
    assert served_version(engine.url) == 72
    # On a busy machine a stream may end before it is cut.
    assert stream.finish_reason in (("length",) if mode == "wait" else ("abort", "length"))
    assert (len(stream.ids) == 900) is (stream.finish_reason == "length")
    assert {span["version"] for span in stream.versions} <= {"71"}


def test_a_head_of_its_own_is_published_too(untied: OwnedEngine, tmp_path: Path) -> None:
    wait_until(lambda: answers(untied.url), timeout_s=200.0, interval_s=0.1)
    assert served_version(untied.url) is None
    check_publish(untied.url, untied.folder, tmp_path, version=1, seed=5)


def test_an_engine_dies_with_its_owner(untied: OwnedEngine) -> None:
    wait_until(lambda: answers(untied.url), timeout_s=200.0, interval_s=0.1)
    group = [pid for pid, session in sessions() if session == untied.pid]
    assert untied.pid in group and len(group) >= 2
    os.kill(untied.owner.pid, signal.SIGKILL)
    untied.owner.wait()
    wait_until(lambda: not [pid for pid, session in sessions() if session == untied.pid], timeout_s=30.0)
    with pytest.raises(PublishError, match=r"got no answer .*is the engine at http.* running"):
        publish(untied.url, untied.folder / "model.safetensors", 2)


def sessions() -> list[tuple[int, int]]:
    """(process, session) of everything that runs and is no zombie."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue
        if state != "Z":
            found.append((int(stat.parent.name), int(session)))
    return found
