"""``nemo-like download``: a model folder from the Hugging Face hub, without anything that would have to be executed."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_like.cli.parser import make_parser
from nemo_like.core.errors import NemoLikeError
from nemo_like.core.extras import require

# Weights that are data, and the texts around them: shapes, tokenizers, templates, licences.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*", "NOTICE*")
# Other forms of the same weights.
_ELSEWHERE = ("onnx/*", "gguf/*", "original/*", "openvino/*", "coreml/*", "runs/*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")


class DownloadError(NemoLikeError, RuntimeError):
    """A model that cannot be had."""


def main(arguments: Sequence[str]) -> int:
    """Downloads what the command line asks for and says where it lies."""
    parser = make_parser("download", "Fetches a model from the Hugging Face hub; only safetensors.")
    parser.add_argument("model", metavar="ID", help="on the hub: HuggingFaceTB/SmolLM2-135M")
    parser.add_argument("--revision", default="main", help="branch, tag or commit")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="default: models/<name>")
    options = parser.parse_args(arguments)
    folder = options.to or Path("models") / options.model.rpartition("/")[2]
    names = download(options.model, folder, revision=options.revision)
    size_mb = sum((folder / name).stat().st_size for name in names) / 1e6
    print(f"{folder}: {len(names)} files, {size_mb:.1f} MB")
    print(f"train it further with model.init_from={folder}")
    return 0


def download(model: str, folder: Path, *, revision: str = "main") -> list[str]:
    """Fetches the safetensors, tokenizer and texts of a model; one that was cut short goes on where it was.

    Args:
        model: ``<owner>/<name>``.
        folder: Receives the files.
        revision: Branch, tag or commit.

    Returns:
        The names of the files.

    Raises:
        DownloadError: There is no such model or revision, nobody may read it, it has no safetensors, or there is no
            network.
    """
    hub = require("huggingface_hub")
    try:
        info = hub.HfApi().model_info(model, revision=revision)
        names = choose_files(model, [file.rfilename for file in info.siblings])
        # By commit: a branch may move between two files.
        hub.snapshot_download(model, revision=info.sha, local_dir=folder, allow_patterns=names)
    except Exception as error:
        raise _explain(error, model, revision) from error
    return names


def choose_files(model: str, names: Sequence[str]) -> list[str]:
    """What of a model is worth having.

    Args:
        model: For messages.
        names: All files.

    Raises:
        DownloadError: There are no safetensors.
    """
    wanted = [
        name
        for name in names
        if any(fnmatch.fnmatch(name.rpartition("/")[2], pattern) for pattern in _WANTED)
        and not any(fnmatch.fnmatch(name, pattern) for pattern in _ELSEWHERE)
    ]
    if any(name.endswith(".safetensors") for name in wanted):
        return wanted
    pickles = [name for name in names if any(fnmatch.fnmatch(name, it) for it in _PICKLES)]
    why = (
        f"its weights are pickles ({', '.join(pickles[:3])}), which are programs; nothing is unpickled here: look for "
        "a revision with safetensors, or convert it where you trust it"
        if pickles
        else f"it holds no .safetensors, only {', '.join(list(names)[:5]) or 'nothing'}"
    )
    raise DownloadError(f"{model}: {why}")


def _explain(error: Exception, model: str, revision: str) -> Exception:
    errors: Any = require("huggingface_hub.errors")
    if isinstance(error, NemoLikeError):
        return error
    if isinstance(error, errors.HFValidationError):
        return DownloadError(f"{model}: is no id of a model; write <owner>/<name>")
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            f"{model}: its owner asks you to accept terms first, on its page; then set HF_TOKEN to a token of yours"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return DownloadError(f"{model}: has no revision {revision!r}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return DownloadError(
            f"{model}: there is no such model, or it is private: check the name, or set HF_TOKEN"
        )
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return error  # of this machine's disk, which says what it is
    first_line = str(error).partition("\n")[0]
    return DownloadError(
        f"{model}: the hub cannot be reached ({type(error).__name__}: {first_line}); without a network copy the folder "
        "from another machine: every command takes a local folder"
    )
