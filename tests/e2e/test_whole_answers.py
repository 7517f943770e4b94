"""Without decoupled responses: one answer a request, still batched in flight; streaming is refused."""

import threading

import pytest

from tests.support.client import Server, at_once, grpc_all, grpc_text

pytestmark = pytest.mark.triton
ENTRY = ["ensemble", "tensorrt_llm_bls"]


@pytest.mark.parametrize("model", ENTRY)
def test_answers_are_whole(whole_server: Server, model: str) -> None:
    for word, text in (("Count", " 1 2 3 4 5 end"), ("Emoji", "🦙 café ok"), ("User", "")):
        assert whole_server.text(model, text_input=word, max_tokens=16) == text
        assert grpc_text(whole_server.grpc, model, text_input=word, max_tokens=16) == text


@pytest.mark.parametrize("model", ENTRY)
def test_requests_run_together(whole_server: Server, model: str) -> None:
    """A short request that comes after a long one began ends before it."""
    order: list[str] = []

    def ask(word: str, max_tokens: int) -> str:
        text = whole_server.text(model, text_input=word, max_tokens=max_tokens)
        order.append(word)
        return text

    long = threading.Thread(target=ask, args=("Long", 400))
    long.start()
    assert ask("Count", 3) == " 1 2 3"
    long.join()
    assert order == ["Count", "Long"]


@pytest.mark.parametrize("model", ENTRY)
def test_many_at_once_are_all_answered(whole_server: Server, model: str) -> None:
    calls = [lambda: whole_server.text(model, text_input="Count", max_tokens=16)] * 16
    assert set(at_once(calls)) == {" 1 2 3 4 5 end"}


@pytest.mark.parametrize("model", ENTRY)
def test_streaming_is_refused_clearly(whole_server: Server, model: str) -> None:
    status, body = whole_server.generate(model, text_input="Count", max_tokens=3, stream=True)
    assert status >= 400 and "decoupled" in body["error"]
    error = grpc_all(whole_server.grpc, model, text_input="Count", max_tokens=3, stream=True)[0].error
    assert error is not None and "decoupled" in error
    assert whole_server.text(model, text_input="Count", max_tokens=3) == " 1 2 3"
