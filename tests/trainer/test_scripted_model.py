import httpx
import pytest

from spangrad.errors import PortInUseError
from spangrad.trainer.policies.scripted_model import serve_model


def ask(base_url: str, text: str, **extra: object) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **extra}
    return httpx.post(f"{base_url}/chat/completions", json=body)


def test_identical_conversations_are_counted_apart_from_others():
    with serve_model(
        lambda messages, n: {"role": "assistant", "content": f"{messages[0]['content']}{n}"}
    ) as url:
        replies = [ask(url, text).json() for text in "aabaa"]
    assert [reply["choices"][0]["message"]["content"] for reply in replies] == ["a0", "a1", "b0", "a2", "a3"]
    assert len({reply["id"] for reply in replies}) == 5


def test_refusals_are_answers_with_the_reason():
    def refuse(messages, n):
        raise ValueError("don't understand")

    with serve_model(refuse) as url:
        refused, streamed = ask(url, "a"), ask(url, "a", stream=True)
    assert refused.status_code == 400 and refused.json()["error"]["message"] == "don't understand"
    assert streamed.status_code == 400 and "stream" in streamed.json()["error"]["message"]


def test_taken_port_is_one_clear_error():
    def say(messages, n):
        return {"role": "assistant", "content": ""}

    with serve_model(say) as url:
        port = int(url.split(":")[2].split("/")[0])
        with pytest.raises(PortInUseError, match=str(port)), serve_model(say, port=port):
            pass
    with serve_model(say, port=port):  # free again
        pass
