"""What follows from a job's frozen settings alone, and what an engine needs of a job.

Engines start with this and not with `job.manifest`, whose schema of what users write, and readers of their files, take
as long to import as all else that an engine needs beside torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.config import EngineConfig
from batchinfer.data.fs import LocalStore
from batchinfer.errors import BatchinferError
from batchinfer.job.layout import JobLayout
from batchinfer.job.ledger import retry_rows
from batchinfer.job.windows import FileShape, Window, cut_windows, retry_windows
from batchinfer.text import apply_overrides
from batchinfer.types.request import SAMPLING_FIELDS, SamplingParams
from batchinfer.types.streams import row_key


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenJob:
    """What is the same for all who run a job.

    semantic      what decides the output's bytes: dotted key -> JSON value; frozen at the first submit
    input         description of the input dataset (`data.InputDataset.describe`), files in the manifest's order
    generations   one per file of `input`: 0 for the first submit's files, n for those of the nth --extend
    text_bytes    one per file: estimated bytes of the columns that prompts are made of
    retry         a retry's number
    """

    semantic: Mapping[str, Any]
    input: Mapping[str, Any]
    generations: tuple[int, ...]
    text_bytes: tuple[int, ...]
    retry: int | None = None

    @property
    def layout(self) -> JobLayout:
        """Where the job's files lie."""
        raise NotImplementedError

    @property
    def seed(self) -> int:
        """The job's seed: given, or drawn at the first submit."""
        return int(self.semantic["seed"])

    @property
    def max_model_len(self) -> int:
        return int(self.semantic["engine.max_model_len"])

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.semantic["model.eos_token_ids"])

    @property
    def sampling(self) -> SamplingParams:
        """Settings of a row that has none of its own. `seed` is None: a row's stream comes from `stream_key`."""
        return SamplingParams(**self.sampling_values())

    def sampling_values(self) -> dict[str, Any]:
        values = {name: self.semantic[f"sampling.{name}"] for name in SAMPLING_FIELDS if name != "seed"}
        if values["logit_bias"] is not None:
            values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
        return values

    def sampling_of(self, params: str | None) -> SamplingParams:
        """Settings of a row from the `params` of its prepared record (JSON of what differs, or None)."""
        return self.sampling if params is None else apply_overrides(self.sampling, json.loads(params))

    def stream_key(self, file: int, row: int, row_seed: int | None = None) -> int:
        """Key of a row's random stream; a seed of the row's own replaces the job's."""
        return row_key(self.seed if row_seed is None else row_seed, self.file_name(file), row)

    def file_name(self, file: int) -> str:
        """The input file's path relative to the input's root."""
        return str(self.input["files"][file]["name"])

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the semantic settings; stands in every part's footer."""
        text = json.dumps(dict(self.semantic), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def file_shapes(self) -> tuple[FileShape, ...]:
        """The input files as `job.windows` needs them."""
        return tuple(
            FileShape(
                index=index,
                num_rows=int(entry["num_rows"]),
                num_bytes=int(entry["num_bytes"]),
                text_bytes=text_bytes,
                generation=generation,
            )
            for index, (entry, text_bytes, generation) in enumerate(
                zip(self.input["files"], self.text_bytes, self.generations, strict=True)
            )
        )

    def windows(self) -> tuple[Window, ...]:
        """All windows of the job, always the same for the same input; takes milliseconds per 10,000 chunks.

        Of a retry: the chunks that own rows to run again, in windows of the retry's own.
        """
        most = self.semantic.get("input.window_rows")
        windows = cut_windows(self.file_shapes(), most)
        return windows if self.retry is None else retry_windows(windows, retry_rows(self.layout), most)

    @property
    def num_rows(self) -> int:
        """Rows to run: of the input, or of the retry."""
        if self.retry is not None:
            return sum(map(len, retry_rows(self.layout).values()))
        return sum(shape.num_rows for shape in self.file_shapes())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob(FrozenJob):
    """A job as an engine sees it. `engine_config`: see `ResolvedJob.engine_config`."""

    folder: Path
    engine_config: EngineConfig

    @property
    def layout(self) -> JobLayout:
        return JobLayout(self.folder, self.retry)


def load_engine_job(path: str | Path) -> EngineJob:
    """Reads what `manifest.save_run` wrote."""
    raw = json.loads(read_run(path))
    return EngineJob(
        semantic=raw["semantic"],
        input=raw["input"],
        generations=tuple(raw["generations"]),
        text_bytes=tuple(raw["text_bytes"]),
        retry=raw["retry"],
        folder=Path(raw["spec"]["output"]["path"]),
        engine_config=EngineConfig(**raw["engine"]),
    )


def read_run(path: str | Path) -> bytes:
    """What `manifest.save_run` wrote, waited for a little. Raises BatchinferError where it is not there."""
    path = Path(path)
    data = LocalStore(path.parent).get(path.name, wait_s=10.0)
    if data is None:
        raise BatchinferError(f"{path}: no such file; the driver writes it before it starts workers")
    return data
