"""``nemo-like download`` against a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from nemo_like.cli.download import DownloadError, choose_files

pytest.importorskip("huggingface_hub", reason="needs the extra hf")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 50_000,
    "pytorch_model.bin": b"a program",
    "modeling.py": b"print('a program')",
    "onnx/model.onnx": b"another form",
    "tokenizer.json": b"{}",
    "README.md": b"# A model",
}
BROKEN_AT = 11_000_000  # behind the piece that is written at once


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for; breaks off in the middle of the weights once, if told to."""

    cut = False
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        Hub.asked.append((self.path, self.headers.get("Range")))
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/me/tiny/"):
            if "/tree/" in path:
                self.send(self.tree(), {"Content-Type": "application/json"}, with_body)
                return
            if path.endswith(("/revision/main", f"/revision/{COMMIT}")):
                info = {
                    "id": "me/tiny",
                    "sha": COMMIT,
                    "siblings": [{"rfilename": it} for it in FILES],
                }
                self.send(
                    json.dumps(info).encode(), {"Content-Type": "application/json"}, with_body
                )
                return
            self.refuse("RevisionNotFound")
            return
        prefix = f"/me/tiny/resolve/{COMMIT}/"
        if not path.startswith(prefix):
            self.refuse("RepoNotFound")
            return
        content = FILES[path.removeprefix(prefix)]
        self.send(content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT}, with_body)

    def tree(self) -> bytes:
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": digest(data)}
            for name, data in FILES.items()
        ]
        return json.dumps(entries).encode()

    def send(self, content: bytes, headers: dict[str, str], with_body: bool) -> None:
        first = int(
            (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0]
        )
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        if not with_body:
            return
        if Hub.cut and len(content) > BROKEN_AT and not first:
            self.wfile.write(content[:BROKEN_AT])
            self.wfile.flush()
            self.connection.close()
            return
        self.wfile.write(content[first:])

    def refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


def digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.cut, Hub.asked = False, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def download(endpoint: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "3", "HF_HUB_ETAG_TIMEOUT": "3",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "nemo_like.cli.main", "download", *words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_download_brings_weights_and_texts_and_nothing_to_execute(
    hub: str, tmp_path: Path
) -> None:
    done = download(hub, tmp_path, "me/tiny")
    assert done.returncode == 0, done.stderr
    found = sorted(path.name for path in (tmp_path / "models/tiny").iterdir() if path.is_file())
    assert found == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "models/tiny/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "model.init_from=models/tiny" in done.stdout


def test_a_download_that_broke_off_goes_on_where_it_was(hub: str, tmp_path: Path) -> None:
    Hub.cut = True
    done = download(hub, tmp_path, "me/tiny", "--to", "here")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here/model.safetensors").read_bytes() == FILES["model.safetensors"]
    ranges = [wanted for path, wanted in Hub.asked if path.endswith(".safetensors")]
    assert ranges[0] in (None, "bytes=0-")
    assert ranges[1] not in (None, "bytes=0-")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["me/none"], "me/none: there is no such model, or it is private"),
        (["me/tiny", "--revision", "v9"], "me/tiny: has no revision 'v9'"),
        (["a b"], "a b: is no id of a model"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(
    hub: str, tmp_path: Path, words: list[str], message: str
) -> None:
    done = download(hub, tmp_path, *words)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(message)
    assert "Traceback" not in done.stderr


def test_without_a_network_the_remedy_is_a_local_folder(tmp_path: Path) -> None:
    done = download("http://127.0.0.1:9", tmp_path, "me/tiny")
    assert done.returncode == 2
    assert "me/tiny: the hub cannot be reached" in done.stderr
    assert "every command takes a local folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_pickles_and_their_absence_are_refused() -> None:
    with pytest.raises(
        DownloadError, match=r"me/old: its weights are pickles \(pytorch_model.bin\)"
    ):
        choose_files("me/old", ["pytorch_model.bin", "config.json"])
    with pytest.raises(DownloadError, match=r"me/none: it holds no .safetensors, only config.json"):
        choose_files("me/none", ["config.json"])
    assert choose_files("me/x", ["original/x.safetensors", "a.safetensors"]) == ["a.safetensors"]
