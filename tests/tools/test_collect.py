"""`collect`: what the file of an incident holds, and what it must not hold."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from vllm_specplugins.__main__ import main

LOG = """\
INFO 01-01 Received request cmpl-1: prompt: 'SECRET speculative question', params: SamplingParams(n=1)
INFO 01-01 [specplugins] Speculation so far: 10 drafts
WARNING 01-01 custom raised an exception (KeyError: 1). Requests continue. Later faults of this kind are only counted.
INFO 01-01 Generated response cmpl-1: 'SECRET answer about ERROR'
ERROR 01-01   {'type': 'string_type', 'loc': ('body', 'prompt'), 'input': ['SECRET of a body that vLLM refused']}
INFO 01-01 non-default args: {'speculative_config': {'shared': 'redis://user:SECRET@host:6379'}}
INFO 01-01 GET /health 200
"""


@pytest.fixture
def url() -> Any:
    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in ("/metrics", "/version") else 404)
            self.end_headers()
            self.wfile.write(b"vllm:specplugins_steps_total 5\n" if self.path == "/metrics" else b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_collect(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any) -> None:
    """Kills: a prompt, an answer or a key in the file; an existing file that is overwritten; a part that is missing."""
    monkeypatch.setenv("VLLM_API_KEY", "SECRET key")
    monkeypatch.setenv("VLLM_PLUGINS", "specplugins")
    log, out = tmp_path / "log", tmp_path / "incident.zip"
    log.write_text(LOG)
    arguments = ["collect", "--url", f"{url}/", "--log", str(log), "--out", str(out)]
    of_server = ["--", "vllm", "serve", "--speculative-config", '{"method":"suffix_lookup"}']
    assert main([*arguments, *of_server]) == 0
    with ZipFile(out) as archive:
        parts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert "specplugins_steps_total 5" in parts["metrics.txt"] and parts["version.txt"] == "{}"
    assert len(parts["log.txt"].splitlines()) == 3 and "redis://user:(hidden)@host" in parts["log.txt"]
    assert "VLLM_PLUGINS=specplugins" in parts["environment.txt"]
    assert '"vllm-specplugins"' in parts["doctor.json"] and "suffix_lookup" in parts["doctor.json"]
    assert "SECRET" not in "".join(parts.values()) and "VLLM_API_KEY=(hidden)" in parts["environment.txt"]
    assert "--out must be a new file" in refused(*arguments)
    missing = ["collect", "--url", url, "--log", str(tmp_path / "none"), "--out", str(tmp_path / "other.zip")]
    assert f"--log must be a readable file, not {tmp_path / 'none'} (No such file or directory)." in refused(*missing)
    assert not (tmp_path / "other.zip").exists()


def test_server_that_is_down(tmp_path: Path) -> None:
    """Kills: an incident that ended the server and so leaves no file."""
    out = tmp_path / "incident.zip"
    assert main(["collect", "--url", "http://127.0.0.1:9", "--out", str(out)]) == 0
    with ZipFile(out) as archive:
        assert "does not answer" in archive.read("metrics.txt").decode()
        assert "prompt_lookup" not in archive.read("doctor.json").decode(), "nobody named it"
