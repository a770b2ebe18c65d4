"""Requests to the control endpoints of an engine or a gateway: an answer, or one error that says who failed.

Knows HTTP and where vLLM and the gateway put the reason of a refusal. Knows no endpoint.
"""

from typing import Any, Literal, Self

import httpx

from spangrad.errors import PublishError, UnansweredError

_EXPECTED = {
    "engine": "a vLLM server started by `spangrad serve` (or with VLLM_SERVER_DEV_MODE=1); one that takes"
    " adapters by `spangrad serve --lora-rank`",
    "gateway": "a gateway started by `spangrad gateway` or `spangrad up`",
}
"""What answers, by who is asked."""


class Control:
    """One engine's or gateway's control endpoints; `with` closes the connections."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        key: str | None = None,
        who: Literal["engine", "gateway"] = "engine",
    ) -> None:
        """Connect later.

        Args:
            url: Address, without `/v1`.
            timeout_s: Longest wait for one answer.
            key: Bearer key, if it needs one.
            who: What is there.
        """
        self.url = url.rstrip("/")
        self._who = who
        self._client = httpx.Client(
            base_url=self.url,
            timeout=timeout_s,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # None is kept: vLLM closes the one on which it reported a failure.
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=url.startswith("https:"),  # reading certificates takes 30 ms, and every claim asks
        )

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object that GET gives; `{}` if it gives something else.

        Raises:
            UnansweredError: Nobody answers.
            PublishError: It is refused.
        """
        return self._answer("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The same for POST, with `body` as JSON."""
        return self._answer("POST", path, body)

    def __enter__(self) -> Self:
        """Nothing is opened yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self._client.close()

    def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        where = f"{method} {self.url}{path.split('?')[0]}"
        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UnansweredError(
                f"{where} got no answer ({type(error).__name__}: {error}); is the {self._who} at {self.url}"
                " running?"
            ) from error
        message = _message(response) if response.is_error else ""
        is_answer = any(words in message for words in _ANSWERS_WITH_404)
        if response.status_code == httpx.codes.NOT_FOUND and not is_answer:
            raise PublishError(f"{where} is unknown there; expected {_EXPECTED[self._who]}")
        if response.is_error:
            raise PublishError(f"{where} answered {response.status_code}: {message}")
        try:
            value = response.json()
        except ValueError:  # nothing, or a text: vLLM tells of adapters so
            return {}
        return value if isinstance(value, dict) else {}


_ANSWERS_WITH_404 = ("no engine ", "No adapter found")
"""How a gateway and vLLM say that they know the endpoint, and not the engine or the folder that was named."""


def _message(response: httpx.Response) -> str:
    try:
        value = response.json()
    except ValueError:
        return response.text[:500].strip() or "nothing"
    error = value.get("error", value) if isinstance(value, dict) else value
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
