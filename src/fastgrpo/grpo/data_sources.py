"""Where rows come from: the published names, local files and folders, hub datasets. Rows out, as plain dicts.

Reading only: which column is the prompt, what an answer means and which rows are usable is decided in data.py.
reasoning-gym tasks are made by gym_tasks.py.
"""

from __future__ import annotations

import csv
import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet

from fastgrpo.models.foreign import foreign, reason

FILE_TYPES = (".jsonl", ".json", ".parquet", ".csv")


@dataclass(frozen=True)
class PublishedSource:
    """A dataset name of the published scripts: its folder under the data directory, its schema, where to get it."""

    folder: str
    prompt_column: str
    answer_column: str
    hub: str
    subfolders: tuple[str, ...] = ()  # configurations, the first one that exists is read


PUBLISHED = {
    "gsm8k": PublishedSource("gsm8k", "question", "answer", "openai/gsm8k", ("main",)),
    "simplelr_abel_level3to5": PublishedSource(
        "simplelr_abel_level3to5", "prompt", "reward_model.ground_truth", "hkust-nlp/SimpleRL-Zoo-Data"
    ),
    "simplelr_qwen_level3to5": PublishedSource(
        "simplelr_qwen_level3to5", "prompt", "reward_model.ground_truth", "hkust-nlp/SimpleRL-Zoo-Data"
    ),
    "DAPO-math": PublishedSource(
        "DAPO-Math-17k-Processed", "prompt", "solution", "open-r1/DAPO-Math-17k-Processed", ("all", "en")
    ),
}


class Unreadable(dict[str, Any]):
    """A row that its file spoils: it has no columns, and says why."""

    def __init__(self, reason: str):
        super().__init__()
        self.reason = reason


@dataclass(frozen=True)
class RawRows:
    """Rows as they were read, with what the source itself says about its columns (None: find out)."""

    rows: list[dict[str, Any]]
    description: str
    prompt_column: str | None = None
    answer_column: str | None = None


def read_rows(source: str, *, split: str, config: str | None, data_dir: str | Path) -> RawRows:
    """Read one split of ``source``: a published name, a folder name under ``data_dir``, a path, or a hub id.

    Raises FileNotFoundError when a published dataset or a path is not there, ValueError for a source that is none of
    these, a split that does not exist, or a file that cannot be read.
    """
    if source in PUBLISHED:
        return _read_published(source, split=split, config=config, data_dir=Path(data_dir))
    for path in (Path(source).expanduser(), Path(data_dir) / source):
        if path.exists():
            return RawRows(_read_path(path, split=split, config=config), f"{path} ({split})")
    if source.endswith(FILE_TYPES) or source.startswith((".", "/", "~")):
        raise FileNotFoundError(f"dataset file {source!r} does not exist (looked in {Path.cwd()}); check the path.")
    if source.count("/") != 1:
        near = difflib.get_close_matches(source, PUBLISHED, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"dataset {source!r} is not a published name ({', '.join(PUBLISHED)}), an existing file or folder, a hub "
            f"id (owner/name) or reasoning_gym:<task>.{hint}"
        )
    return RawRows(_read_hub(source, split=split, config=config), f"{source} ({split})")


def _read_published(name: str, *, split: str, config: str | None, data_dir: Path) -> RawRows:
    known = PUBLISHED[name]
    candidates = [data_dir / known.folder, *(data_dir / f"{known.folder}{ending}" for ending in FILE_TYPES)]
    path = next((path for path in candidates if path.exists()), None)
    if path is None:
        include = f" --include '{name}/*'" if "SimpleRL" in known.hub else ""
        target = data_dir if include else candidates[0]
        raise FileNotFoundError(
            f"dataset {name!r} is not in {candidates[0].resolve()}; get it with: hf download {known.hub} --repo-type "
            f"dataset{include} --local-dir {target}  (or set data_dir to the folder that holds {known.folder}/)."
        )
    if config is None and path.is_dir():
        config = next((folder for folder in known.subfolders if (path / folder).is_dir()), None)
    rows = _read_path(path, split=split, config=config)
    return RawRows(rows, f"{name} ({path}, {split})", known.prompt_column, known.answer_column)


def _read_path(path: Path, *, split: str, config: str | None) -> list[dict[str, Any]]:
    if path.is_file():
        return _read_file(path)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        with foreign(lambda error: _unreadable(error, path, "a saved dataset")):
            saved = datasets.load_from_disk(str(path))
            if isinstance(saved, datasets.DatasetDict):
                if split not in saved:
                    raise ValueError(f"{path} has no split {split!r}; it has {', '.join(map(str, saved))}.")
                saved = saved[split]
            return list(saved)
    if config is not None:
        if not (path / config).is_dir():
            folders = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
            raise ValueError(
                f"{path} has no configuration {config!r}; its folders are: {', '.join(folders) or 'none'}."
            )
        return _read_path(path / config, split=split, config=None)
    return [row for file in _files_of_split(path, split) for row in _read_file(file)]


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """The data files of one split: train.jsonl, train-00000-of-00002.parquet, gsm8k_train.jsonl; or the only file."""
    found = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix in FILE_TYPES and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not found:
        raise FileNotFoundError(f"{folder} holds no data file ({', '.join(FILE_TYPES)}) and no saved dataset.")
    named = [file for file in found if split in file.stem.replace("-", "_").split("_")]
    chosen = found if not named and len(found) == 1 and split == "train" else named
    if not chosen:
        names = ", ".join(str(file.relative_to(folder)) for file in found[:8])
        raise ValueError(f"{folder} has no file for split {split!r} (such as {split}.jsonl); it holds {names}.")
    parents = {file.parent for file in chosen}
    if len(parents) > 1:
        names = ", ".join(sorted(str(parent.relative_to(folder)) for parent in parents))
        raise ValueError(f"{folder} holds split {split!r} in several folders ({names}); choose one with config.")
    return chosen


def _read_file(file: Path) -> list[dict[str, Any]]:
    if file.suffix not in FILE_TYPES:
        raise ValueError(
            f"{file} is a {file.suffix or 'nameless'} file; datasets are read from {', '.join(FILE_TYPES)}."
        )
    with foreign(lambda error: _unreadable(error, file, file.suffix[1:])):
        rows = _PARSERS[file.suffix](file)
    if not rows:
        raise ValueError(f"{file} holds no rows.")
    return rows


def _unreadable(error: Exception, path: Path, kind: str) -> Exception:
    """The error itself where it is ours, or the system's, and names the file; else one that does, with the remedy."""
    of_system = isinstance(error, OSError) and error.errno is not None
    if (of_system or type(error) is ValueError) and str(path) in str(error):
        return error
    return ValueError(f"{path} cannot be read as {kind}: {reason(error)}; convert or repair the file.")


def _read_jsonl(file: Path) -> list[dict[str, Any]]:
    rows = []
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{file}, line {number} is not JSON ({error}); repair or remove the line.") from error
            if not isinstance(row, dict):
                raise ValueError(f"{file}, line {number} is a JSON {type(row).__name__}; each line must be an object.")
            rows.append(row)
    return rows


def _read_json(file: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError:
        return _read_jsonl(file)  # many .json files hold one object a line; a broken file gets its message there
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError(f'{file} must hold a list of objects, {{"data": [objects]}}, or one object a line.')
    return content


def _read_csv(file: Path) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        return [
            Unreadable(f"the row has {len(row[None])} more fields than the header") if None in row else row
            for row in csv.DictReader(lines)
        ]


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(file).to_pylist()


_PARSERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}


def _read_hub(source: str, *, split: str, config: str | None) -> list[dict[str, Any]]:
    where = f"{source!r} (config {config!r}, split {split!r})"

    def explain(error: Exception) -> Exception:
        return ValueError(
            f"hub dataset {where} could not be loaded: {str(error).strip()} Check id, config, split and network, or "
            f"give a local file."
        )

    with foreign(explain):
        return list(datasets.load_dataset(source, config, split=split))
