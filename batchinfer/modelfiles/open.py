"""`open_model`: from what a user writes under model.path to `ModelFiles`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from batchinfer.errors import ModelError
from batchinfer.modelfiles import fake, hub
from batchinfer.modelfiles.files import ModelFiles, TokenizerFiles
from batchinfer.modelfiles.gguf_model import open_gguf, open_gguf_tokenizer
from batchinfer.modelfiles.huggingface import open_folder, open_tokenizer_folder, tokenizer_eos, union_of_eos


def open_model(path: str, *, revision: str | None = None, tokenizer: str | None = None) -> ModelFiles:
    """Opens a Hugging Face folder, a .gguf file, a hub id, or `fake://...`.

    Reads configs and headers, never tensor data; checks that every weight file is there and complete.
    tokenizer   a folder, tokenizer.json, .gguf file or hub id to take tokenizer and chat templates from
                instead of the model's own
    Raises ModelError, with what to do, where the model can't be used.
    """
    files = _open(path, revision=revision)
    if revision is not None and (files.kind == "fake" or Path(path).expanduser().exists()):
        raise ModelError(f"model.revision {revision!r} goes with a hub id; {path} is not one: leave it out")
    return files if tokenizer is None else _with_tokenizer(files, tokenizer)


def _open(path: str, *, revision: str | None) -> ModelFiles:
    if path.startswith(fake.SCHEME):
        return fake.open_fake(path)
    local = Path(path).expanduser()
    if local.is_dir():
        return _open_local_folder(local)
    if local.exists() or local.is_symlink():
        if local.suffix == ".gguf":
            return open_gguf(local)
        raise ModelError(
            f"{path}: a model is a folder with config.json or a .gguf file; "
            f"to use this file, give its folder {str(local.parent)!r}"
        )
    if hub.looks_like_hub_id(path):
        folder = hub.fetch(path, revision=revision, weights=True)
        if not (folder / "config.json").exists():
            raise ModelError(
                f"{path}: this hub repository has no config.json; for a GGUF model, download its .gguf file and "
                "give that file's path"
            )
        return open_folder(folder, name=path)
    raise ModelError(f"{path}: no such file or folder, and not the form of a hub id (owner/name)")


def _open_local_folder(folder: Path) -> ModelFiles:
    if (folder / "config.json").exists():
        return open_folder(folder)
    ggufs = sorted(folder.glob("*.gguf"))
    firsts = [p for p in ggufs if "-of-" not in p.stem or "-00001-of-" in p.stem]
    if len(firsts) == 1:
        return open_gguf(firsts[0])
    if firsts:
        raise ModelError(f"{folder}: holds several .gguf models; name one: {', '.join(p.name for p in firsts[:8])}")
    raise ModelError(f"{folder}: no config.json and no .gguf file in it: not a model folder")


def _with_tokenizer(files: ModelFiles, path: str) -> ModelFiles:
    local = Path(path).expanduser()
    tokenizer: TokenizerFiles
    if local.suffix == ".gguf":
        tokenizer, templates, eos = open_gguf_tokenizer(local)
    else:
        if local.name == "tokenizer.json":
            local = local.parent
        if not local.exists():
            if not hub.looks_like_hub_id(path):
                raise ModelError(f"model.tokenizer: {path}: no such file or folder")
            local = hub.fetch(path, revision=None, weights=False)
        tokenizer, templates = open_tokenizer_folder(local)
        eos = tokenizer_eos(tokenizer)
    config = files.config
    if files.kind == "fake" and eos:  # it ends where its tokenizer says, as the rest of it has no opinion
        config = {**config, "eos_token_id": min(eos)}
    # The model's configs still say where it ends; a GGUF file says it in its tokenizer metadata alone.
    return replace(
        files,
        config=config,
        tokenizer=tokenizer,
        chat_templates=templates or files.chat_templates,
        eos_token_ids=union_of_eos(files.root, config, files.generation_config, eos),
    )
