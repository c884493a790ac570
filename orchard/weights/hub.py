"""`orchard pull org/name`: a model from the Hugging Face hub, through the `huggingface_hub` package.

Only data is taken: safetensors with their config and tokenizer files, or one GGUF file; never pickled weights or code.
Every file is checked against the hash the hub states for it. A file grows as `.NAME.HASH.part` and goes on from where it
was when a pull is repeated, because its name says which content it is a part of.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchard.core.errors import (
    BadFile,
    DiskFull,
    DownloadFailed,
    ModelNotFound,
    Offline,
    OrchardError,
    UnsupportedFormat,
    UsageError,
)
from orchard.core.files import safe_join
from orchard.core.progress import Advance, progress, silent
from orchard.weights.library import Entry, Library, bytes_in, sha256_of

HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>[\w.-]+))?")
GGUF_PREFERENCE = ("Q4_K_M", "Q8_0", "Q5_K_M", "Q6_K", "Q4_K_S", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32")
COMPANIONS = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model",
    "LICENSE", "LICENSE.txt", "LICENSE.md", "modules.json", "sentence_bert_config.json",
    "config_sentence_transformers.json",
}  # fmt: skip
_MODULE = re.compile(r"\d{1,2}_[A-Za-z]{1,40}/config\.json")  # a step of an embedding model, beside modules.json
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file of a repository: its size, and the SHA-256 of a large file or the git blob id of a small one."""

    name: str
    bytes: int
    sha256: str = ""
    git_blob: str = ""


def pull_hub(library: Library, name: str, *, quiet: bool = False) -> Entry:
    """Bring `org/name` or `org/name:FILE.gguf` into the library. The caller holds the library's lock for `name`."""
    match = HUB_NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name!r} is not a hub name", hint="write it as org/name or org/name:FILE.gguf")
    hub = _Hub(match["repo"])
    files = choose(hub.files, match["file"], repo=match["repo"])
    source = f"hub:{match['repo']}"
    with library.add(name, source=source, version=hub.commit, licence=hub.licence, keep_partial=True) as folder:
        total = sum(file.bytes for file in files)
        _remove_strays(folder, files)
        _check_room(folder, total)
        bar = nullcontext(silent) if quiet else progress(f"pulling {match['repo']}", total=total, unit="bytes")
        with bar as advance, watching(folder, advance):
            for file in files:
                _fetch(hub, file, folder)
                if file.name == "config.json":  # the weights come last, and may be many gigabytes
                    _check_family(folder)
    entry = library.find(name)
    assert entry is not None
    return entry


def choose(files: list[RemoteFile], wanted: str | None, *, repo: str) -> list[RemoteFile]:
    """The files to take: the one asked for, else safetensors with their companions, else one GGUF file."""
    top = {file.name: file for file in files if "/" not in file.name}
    ggufs = sorted(name for name in top if name.endswith(".gguf") and not name.lower().startswith("mmproj"))
    whole = [name for name in ggufs if not _SPLIT_GGUF.search(name)]
    if wanted:
        if wanted in whole:
            return [top[wanted]]
        shown = ", ".join(whole[:12]) or "none"
        raise ModelNotFound(f"{repo} has no GGUF file {wanted!r}", hint=f"its GGUF files: {shown}")
    weights = [name for name in top if _WEIGHTS.fullmatch(name)]
    if weights and "config.json" in top:
        index = [name for name in ("model.safetensors.index.json",) if name in top]
        small = [top[name] for name in sorted([*(COMPANIONS & top.keys()), *index])]
        steps = [file for file in files if "modules.json" in top and _MODULE.fullmatch(file.name)]
        return small + steps + [top[name] for name in sorted(weights)]
    for kind in GGUF_PREFERENCE:
        for name in whole:
            if re.search(rf"(?:^|[-._]){kind}\.gguf$", name, flags=re.IGNORECASE):
                return [top[name]]
    if whole:
        return [top[whole[0]]]
    if ggufs:
        raise UnsupportedFormat(f"{repo} has its GGUF file in parts", hint="join the parts into one file first")
    kinds = sorted({Path(name).suffix or name for name in top})
    raise UnsupportedFormat(
        f"{repo} has neither model*.safetensors with config.json nor a GGUF file",
        hint=f"it holds: {', '.join(kinds[:12])}; pickled weights and code are never taken",
    )


@contextmanager
def watching(folder: Path, advance: Advance, suffix: str = "") -> Iterator[None]:
    """Move a bar along with the bytes of the files in a folder, whoever writes them."""
    done = threading.Event()

    def watch() -> None:
        shown = 0
        while True:
            last = done.wait(0.1)
            present = bytes_in(folder, suffix)
            advance(present - shown)
            shown = present
            if last:
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class _Hub:
    """One repository at one commit. The endpoint and token are the ones `huggingface_hub` is set up with."""

    def __init__(self, repo: str) -> None:
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when the package is first imported
        from huggingface_hub import HfApi
        from huggingface_hub.utils import logging
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        logging.set_verbosity_error()
        self.repo = repo
        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        with hub_errors(repo):
            info: Any = HfApi(endpoint=self.endpoint).model_info(repo, files_metadata=True)
            self.commit = str(info.sha)
            self.files = [_remote_file(sibling) for sibling in info.siblings or []]
            tags = [tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")]
        self.licence = tags[0] if tags else ""

    def download(self, file: RemoteFile, part: Path) -> None:
        """Append what is missing to `part`. A server that knows no ranges makes it start again."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self.repo, file.name, revision=self.commit, endpoint=self.endpoint)
        with part.open("r+b" if part.exists() else "w+b") as out, hub_errors(self.repo):
            start = out.seek(0, os.SEEK_END)
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            http_get(url, out, resume_size=start, headers=headers, expected_size=file.bytes)
            out.flush()
            os.fsync(out.fileno())


def _remote_file(sibling: Any) -> RemoteFile:
    lfs = sibling.lfs
    return RemoteFile(
        name=str(sibling.rfilename),
        bytes=int(lfs["size"] if lfs else sibling.size or 0),
        sha256=str(lfs["sha256"]) if lfs else "",
        git_blob=str(sibling.blob_id or ""),
    )


def _fetch(hub: _Hub, file: RemoteFile, folder: Path) -> None:
    target, part = safe_join(folder, file.name), _part(folder, file)
    if not (file.sha256 or file.git_blob):
        raise DownloadFailed(
            f"the hub states no checksum for {file.name}", hint="it cannot be checked, so it is not taken"
        )
    if target.exists() and _is_whole(target, file):
        return
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    if part.exists() and part.stat().st_size > file.bytes:
        part.unlink()
    if not part.exists() or part.stat().st_size < file.bytes:
        hub.download(file, part)
    if not _is_whole(part, file):
        part.unlink()
        raise DownloadFailed(
            f"{file.name} arrived with a wrong checksum", hint="it was thrown away; pull again to fetch it anew"
        )
    part.replace(target)


def _check_family(folder: Path) -> None:
    """Refuse a model that could not be run, before its weights are fetched; nothing of it is kept then."""
    from orchard.models.zoo import family_of
    from orchard.weights.sentence import is_encoder

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        known = config if isinstance(config, dict) else {}
        if not is_encoder(known):
            family_of(known)
    except (ValueError, RecursionError, OrchardError) as error:
        _remove_strays(folder, [])
        if isinstance(error, OrchardError):
            raise
        raise BadFile(
            "the model's config.json is not JSON", hint="the repository is damaged; tell its owner"
        ) from error


def _part(folder: Path, file: RemoteFile) -> Path:
    parent, _, name = file.name.rpartition("/")
    return safe_join(folder, f"{parent}/.{name}.{(file.sha256 or file.git_blob)[:16]}.part".lstrip("/"))


def _is_whole(path: Path, file: RemoteFile) -> bool:
    if path.stat().st_size != file.bytes:
        return False
    if file.sha256:
        return sha256_of(path) == file.sha256
    content = path.read_bytes()  # only small files are kept outside LFS
    return hashlib.sha1(b"blob %d\x00" % len(content) + content, usedforsecurity=False).hexdigest() == file.git_blob


def _remove_strays(folder: Path, files: list[RemoteFile]) -> None:
    """What an earlier, different pull of this name left: other files, or parts of other contents."""
    expected = {folder / file.name for file in files} | {_part(folder, file) for file in files}
    for path in list(folder.rglob("*")):
        if path.resolve() not in {p.resolve() for p in expected} and path.is_file():
            path.unlink()


def _check_room(folder: Path, total: int) -> None:
    import shutil

    free, have = shutil.disk_usage(folder).free, bytes_in(folder)
    if free < total - have:
        raise DiskFull(
            f"{(total - have) / 1e6:,.0f} MB are needed and {free / 1e6:,.0f} MB are free",
            hint="free some disk space, or point ORCHARD_HOME at a larger disk",
        )


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Whatever goes wrong on the way to the hub becomes one of our errors, with what to do about it."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    again = "what has arrived is kept: run the same command to go on"
    try:
        yield
    except OrchardError:
        raise
    except GatedRepoError as error:
        hint = "accept its terms on its page, then set HF_TOKEN to a token of your account"
        raise DownloadFailed(f"{repo} is gated", hint=hint) from error
    except RepositoryNotFoundError as error:
        hint = "check the spelling; for a private model set HF_TOKEN"
        raise ModelNotFound(f"the hub has no model {repo}, or does not show it to you", hint=hint) from error
    except OfflineModeIsEnabled as error:
        raise Offline("HF_HUB_OFFLINE is set", hint="unset it to pull from the hub") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            raise DownloadFailed(f"the hub refuses {repo} ({status})", hint="set HF_TOKEN to a valid token") from error
        if status == 404:
            raise ModelNotFound(f"a file of {repo} is gone from the hub", hint="pull again") from error
        raise DownloadFailed(f"the hub answered {status} for {repo}", hint=again) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # the disk, not the network
        line = str(error).strip().splitlines()[:1] or [""]
        if type(error).__name__ in ("ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError"):
            hint = "check the network (behind a proxy set HTTPS_PROXY, for a mirror HF_ENDPOINT) and run it again"
            raise DownloadFailed(f"the hub cannot be reached: {line[0]}", hint=hint) from error
        raise DownloadFailed(
            f"the download of {repo} broke off: {type(error).__name__} {line[0]}", hint=again
        ) from error
