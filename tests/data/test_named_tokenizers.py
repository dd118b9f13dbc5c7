"""A name on the Hub is looked for among local files where the Hub does not answer."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from megafp8.data.named_tokenizers import hub_answers, huggingface_tokenizer
from megafp8.errors import DataError

transformers = pytest.importorskip("transformers", reason="needs transformers")
constants = pytest.importorskip("huggingface_hub").constants


class Refusing(BaseHTTPRequestHandler):
    """Answers 404 to everything."""

    def do_HEAD(self) -> None:  # noqa: N802  # the name that the base class calls
        self.send_error(404)

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("answers", [True, False])
def test_the_hub_is_asked_once(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    address = f"http://127.0.0.1:{server.server_port}"
    if answers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    else:
        server.server_close()
    asked = []

    def from_pretrained(name: str, *, local_files_only: bool, trust_remote_code: bool) -> None:
        assert not trust_remote_code
        asked.append((name, local_files_only))
        raise OSError("no such files")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(DataError, match="a name on the Hub where there is a network"):
        huggingface_tokenizer("somebody/model")
    assert asked == [("somebody/model", not answers)] and hub_answers() == answers
    if answers:
        server.shutdown()
        server.server_close()


def test_an_offline_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "not even an address")
    assert not hub_answers()
