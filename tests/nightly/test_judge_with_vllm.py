"""A judge behind vLLM's own server on the CPU."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from grpo_components.rewards.judge import JudgeError, LLMJudge

START_S = 600.0  # a busy machine may take long
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def url(tiny_policy, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(tiny_policy), "--served-model-name", "tiny", "--api-key", "sk-right"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4"]
    command += ["--kv-cache-memory-bytes", "50M", "--chat-template", TEMPLATE]
    path = tmp_path_factory.mktemp("judge") / "server.log"
    with path.open("w") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"},
        )
    deadline = time.monotonic() + START_S
    try:
        while True:
            assert server.poll() is None and time.monotonic() < deadline, path.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except urllib.error.URLError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def test_a_model_served_by_vllm_judges(url, monkeypatch):
    """It is forced into the form; what it samples freely is no grade."""
    monkeypatch.setenv("MY_KEY", "sk-right")
    call = {"prompt_text": "3 + 4 =", "response_text": "7", "answer": "7", "finish_reason": "stop"}
    arguments = {"base_url": url, "model": "tiny", "rubric": "{{ prompt }} {{ response }}"}
    arguments |= {"wall_s": 300.0, "retries": 0}
    form = {"structured_outputs": {"regex": r"\{\"score\": [0-9]\}"}, "max_tokens": 20}
    judge = LLMJudge(**arguments, verdict={"format": "json"}, sampling=form, api_key_env="MY_KEY")
    grade = judge(**call)
    assert round(10 * grade) in range(10) and judge(**call) == grade
    used = judge.take_use()
    assert (used["requests"], used["failures"]) == (2, 0)
    assert used["prompt_tokens"] > 0 and used["completion_tokens"] > 0
    with pytest.raises(JudgeError, match="no grade in the scale"):
        LLMJudge(**arguments, sampling={"max_tokens": 4}, api_key_env="MY_KEY")(**call)
    with pytest.raises(JudgeError, match="HTTP status 401"):
        LLMJudge(**arguments)(**call)
    with pytest.raises(JudgeError, match=r"HTTP status 404: .*does not exist"):
        LLMJudge(**{**arguments, "model": "other"}, api_key_env="MY_KEY")(**call)
