"""ResolvedJob: everything about a job that is decided once, when it is first submitted, and then frozen.

Responsible for: the resolved job, its fingerprint, manifest.json (create-if-absent), comparing on resume,
--extend, --fresh. Not for: finding the values (`job.resolve`), what the user wrote (`job.spec`).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batchinfer.config import EngineConfig
from batchinfer.data.fs import LocalStore
from batchinfer.errors import ResumeRefused
from batchinfer.job.layout import JobLayout
from batchinfer.job.spec import JobSpec
from batchinfer.job.windows import FileShape, Window, cut_windows
from batchinfer.types.request import SAMPLING_FIELDS, SamplingParams
from batchinfer.types.streams import row_key

MANIFEST_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedJob:
    """A job with every open value resolved. Picklable; workers read it with `load_run`.

    spec          what the user wrote; only its non-semantic parts (workers, batch and pool sizes, failure limits)
                  may differ from one run to the next
    semantic      what decides the output's bytes: dotted key -> JSON value; frozen at the first submit
    sources       where each value of `semantic` came from: user, generation_config, model, device, drawn, default
    input         description of the input dataset (`data.InputDataset.describe`), files in the manifest's order
    generations   one per file of `input`: 0 for the first submit's files, n for those of the nth --extend
    facts         recorded for people, not compared (versions of libraries, paths)
    overrides     a retry's changed settings: dotted key -> value, recorded in the parts that it replaces
    """

    spec: JobSpec
    semantic: Mapping[str, Any]
    sources: Mapping[str, str]
    input: Mapping[str, Any]
    generations: tuple[int, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    retry: int | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def layout(self) -> JobLayout:
        return JobLayout(Path(self.spec.output.path), self.retry)

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
        if params is None:
            return self.sampling
        changed = json.loads(params)
        if changed.get("logit_bias"):
            changed["logit_bias"] = {int(token): bias for token, bias in changed["logit_bias"].items()}
        return SamplingParams(**{**self.sampling_values(), **changed})

    def stream_key(self, file: int, row: int, row_seed: int | None = None) -> int:
        """Key of a row's random stream; a seed of the row's own replaces the job's."""
        return row_key(self.seed if row_seed is None else row_seed, self.file_name(file), row)

    def file_name(self, file: int) -> str:
        """The input file's path relative to the input's root."""
        return str(self.input["files"][file]["name"])

    @property
    def engine_config(self) -> EngineConfig:
        """What a worker's engine is built from. `num_threads` is None where the user left it to the cluster."""
        engine = self.spec.engine
        return EngineConfig(
            model=self.spec.model.path,
            tokenizer=self.spec.model.tokenizer,
            revision=self.spec.model.revision,
            dtype=self.semantic["model.dtype"],
            quantization=self.semantic["model.quantization"],
            kv_cache_dtype=self.semantic["model.kv_cache_dtype"],
            device=self.semantic["engine.device"],
            deterministic=engine.deterministic,
            tensor_parallel_size=engine.tensor_parallel_size,
            max_model_len=self.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            kv_cache_memory=engine.kv_cache_memory,
            enable_prefix_caching=engine.enable_prefix_caching,
            block_size=engine.block_size,
            split_size=self.semantic["engine.split_size"],
            seed=self.seed,
            num_threads=engine.num_threads,
        )

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the semantic settings; stands in every part's footer."""
        text = json.dumps(dict(self.semantic), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def file_shapes(self) -> tuple[FileShape, ...]:
        """The input files as `job.windows` needs them."""
        raise NotImplementedError

    def windows(self) -> tuple[Window, ...]:
        """All windows of the job, always the same for the same input; takes milliseconds per 10,000 chunks."""
        return cut_windows(self.file_shapes())

    @property
    def num_rows(self) -> int:
        return sum(shape.num_rows for shape in self.file_shapes())


def freeze_job(job: ResolvedJob) -> ResolvedJob:
    """Writes the manifest if the output has none (the driver's lock is held). Returns the job.

    Where the job extends a frozen one, the manifest is replaced. Raises ResumeRefused if another job was frozen
    there in the meantime.
    """
    raise NotImplementedError


def load_manifest(layout: JobLayout) -> ResolvedJob | None:
    """The job as frozen in an output folder, or None where there is none."""
    raise NotImplementedError


def save_run(job: ResolvedJob, epoch: int) -> Path:
    """Writes the job as it is run under a driver's epoch, for its workers."""
    raise NotImplementedError


def load_run(path: str | Path) -> ResolvedJob:
    """Reads what `save_run` wrote; the last few are kept in memory."""
    raise NotImplementedError


def move_aside(layout: JobLayout) -> Path | None:
    """--fresh: renames the output folder to a free name beside it, which is returned (None: there was none)."""
    raise NotImplementedError
