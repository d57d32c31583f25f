"""ResolvedJob: everything about a job that is decided once, when it is first submitted, and then frozen.

Responsible for: the resolved job, manifest.json (create-if-absent), comparing on resume, --extend, --fresh. Not for:
finding the values (`job.resolve`), what the user wrote (`job.spec`), what follows from them (`job.frozen_job`).
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from batchinfer.arithmetic import Arithmetic
from batchinfer.config import EngineConfig
from batchinfer.data.dataset import changes, new_files
from batchinfer.data.fs import LocalStore, replace_file
from batchinfer.errors import ResumeRefused
from batchinfer.job.frozen_job import FrozenJob, read_run
from batchinfer.job.layout import JobLayout
from batchinfer.job.spec import JobSpec

MANIFEST_FORMAT = 2  # 1 did not say all of how the model computes
AUTO = "auto: "  # begins the source of a value that was chosen for a machine
FORMAT = "numeric_format."  # begins the keys of numbers that say whether a format's bytes are the same in two versions


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedJob(FrozenJob):
    """A job with every open value resolved. Picklable; workers read it with `load_run`.

    spec          what the user wrote; only its non-semantic parts (workers, batch and pool sizes, failure limits)
                  may differ from one run to the next
    sources       where each value of `semantic` came from: user, generation_config, model, drawn, default, or
                  "auto: " and why
    facts         recorded for people, not compared (versions of libraries, paths)
    overrides     a retry's changed settings: dotted key -> value, recorded in the parts that it replaces
    """

    spec: JobSpec
    sources: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def layout(self) -> JobLayout:
        return JobLayout(Path(self.spec.output.path), self.retry)

    @property
    def arithmetic(self) -> Arithmetic:
        """How the model computes: frozen with the rest. What is slower than it could be is known for this run."""
        names = {"dtype": "model", "quantization": "model", "kv_cache_dtype": "model"}
        names |= {"kernels": "engine", "instruction_level": "engine"}
        keys = {name: f"{section}.{name}" for name, section in names.items()}
        return Arithmetic(
            **{name: self.semantic[key] for name, key in keys.items()},
            sources={name: self.sources.get(key, "") for name, key in keys.items()},
            degraded=self.facts.get("degraded"),
        )

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
            cuda_graphs=engine.cuda_graphs,
            async_scheduling=engine.async_scheduling,
            tensor_parallel_size=engine.tensor_parallel_size,
            max_model_len=self.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            kv_cache_memory=engine.kv_cache_memory,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            enable_prefix_caching=engine.enable_prefix_caching,
            block_size=self.semantic["engine.block_size"],
            split_size=self.semantic["engine.split_size"],
            kernels=self.semantic["engine.kernels"],
            instruction_level=self.semantic["engine.instruction_level"],
            seed=self.seed,
            num_threads=engine.num_threads,
        )


def freeze_job(job: ResolvedJob) -> ResolvedJob:
    """Writes the manifest if the output has none (the driver's lock is held). Returns the job.

    Where the job extends a frozen one, the manifest is replaced. Raises ResumeRefused if another job was frozen
    there in the meantime.
    """
    layout = job.layout
    store = LocalStore(layout.output)
    key = layout.key(layout.manifest)
    job = _keep_indexes(job, store)
    data = job_to_json(replace(job, facts={**job.facts, "created": _now()}))
    if store.put_if_absent(key, data):
        return job
    frozen = load_manifest(layout)
    if frozen is None:
        raise ResumeRefused(f"{layout.manifest} exists and can't be read; move the output aside with --fresh")
    job = with_drawn(frozen, job)
    found = differences(frozen, job, extend=True)
    if found:
        raise refusal(layout, found)
    if len(job.generations) != len(frozen.generations):
        store.replace(key, job_to_json(replace(job, facts={**frozen.facts, "extended": _now()})))
    return job


def _keep_indexes(job: ResolvedJob, store: LocalStore) -> ResolvedJob:
    """Seek indexes of input files go to where every worker finds them."""
    folder = job.layout.input_cache
    files = []
    for entry in job.input["files"]:
        path = Path(entry["seek_index"]) if entry["seek_index"] else None
        if path is not None and path.parent != folder and path.exists():
            store.put_if_absent(job.layout.key(folder / path.name), path.read_bytes())
            entry = {**entry, "seek_index": str(folder / path.name)}
        files.append(entry)
    return replace(job, input={**job.input, "files": files})


def load_manifest(layout: JobLayout) -> ResolvedJob | None:
    """The job as frozen in an output folder, or None where there is none. Its output is that folder, which may have
    been moved or copied since."""
    data = LocalStore(layout.output).get(layout.key(layout.manifest))
    if data is None:
        return None
    try:
        job = job_from_json(data)
        section = job.spec.output.model_copy(update={"path": str(layout.output)})
        return replace(job, spec=job.spec.model_copy(update={"output": section}))
    except (ValueError, KeyError, TypeError) as error:
        raise ResumeRefused(
            f"{layout.manifest} can't be read ({error}); it was written by another version of batchinfer or is "
            "damaged. Use that version, or move the output aside with --fresh"
        ) from error


def with_access(frozen: ResolvedJob, spec: JobSpec) -> ResolvedJob:
    """The frozen job with what a manifest does not keep: the job file's storage options, which may hold keys."""
    section = frozen.spec.input.model_copy(update={"storage_options": spec.input.storage_options})
    return replace(frozen, spec=frozen.spec.model_copy(update={"input": section}))


def with_drawn(frozen: ResolvedJob, job: ResolvedJob) -> ResolvedJob:
    """What was drawn for the job (its seed, its moment) gives way to what was drawn at the first submit."""
    drawn = {key for key, source in job.sources.items() if source == "drawn"}
    # A seed that the user had given and no longer gives stays, too.
    return replace(
        job,
        semantic={**job.semantic, **{key: frozen.semantic[key] for key in drawn}},
        sources={**job.sources, **{key: frozen.sources[key] for key in drawn}},
    )


def differences(frozen: ResolvedJob, job: ResolvedJob, *, extend: bool) -> list[str]:
    """What of `job` would not fit results made by `frozen`, one line each; empty if it can go on.

    With `extend`, new files beside unchanged ones are no difference.
    """
    found = []
    # Of formats that only one of them uses, other settings tell.
    told = {f"{FORMAT}{name}" for name in frozen.arithmetic.formats ^ job.arithmetic.formats}
    for key in sorted(frozen.semantic.keys() | job.semantic.keys()):
        old, new = frozen.semantic.get(key), job.semantic.get(key)
        if old != new and key not in told:
            # What was chosen for a machine is said with the reason: it may be another machine that goes on.
            source = job.sources.get(key, "")
            if key.startswith(FORMAT):
                why = " (what it computes has changed)"
            else:
                why = f" ({source})" if source.startswith(AUTO) else ""
            found.append(f"{key}: {_short(old)} -> {_short(new)}{why}")
    added = new_files(frozen.input, job.input)
    renamed = _renamed(frozen.input, job.input)
    for text in changes(frozen.input, job.input):
        if any(text.startswith((f"input file {old} is gone", f"new input file {new} (")) for old, new in renamed):
            continue
        if text.startswith("new input file ") and extend and added:
            continue
        found.append(text)
    found += [f"input file {old} is now called {new}: rows are known by their file's name" for old, new in renamed]
    return found


def refusal(layout: JobLayout, found: Sequence[str], machine: str | None = None) -> ResumeRefused:
    """The error that lists what changed, and says how to go on. `machine`: what of it may be this machine's doing."""
    only_new = all(text.startswith("new input file ") for text in found)
    only_formats = all(text.startswith(FORMAT) for text in found)
    changed, mend = (
        ("another version of batchinfer began it, which computes otherwise", "End the job with that version")
        if only_formats
        else ("the job has changed since it was first submitted", "Undo the change to go on")
    )
    hint = (
        "To run the new files too, use --extend."
        if only_new
        else f"{mend}, or start over with --fresh (the old output is moved aside, not deleted), or give another "
        "output.path."
    )
    if machine is not None:
        hint = f"{machine}.\n{hint}"
    lines = "\n  ".join(found)
    return ResumeRefused(f"{layout.output} holds results of this job, but {changed}:\n  {lines}\n{hint}")


def _renamed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str]]:
    before = {entry["name"]: entry for entry in old["files"]}
    after = {entry["name"]: entry for entry in new["files"]}
    free = {entry["fingerprint"]: name for name, entry in after.items() if name not in before}
    return [
        (name, free[entry["fingerprint"]])
        for name, entry in before.items()
        if name not in after and entry["fingerprint"] in free
    ]


def in_frozen_order(frozen: ResolvedJob, job: ResolvedJob) -> ResolvedJob:
    """The job with the frozen numbering of files: old ones keep their numbers, new ones come after them.

    Everything that was drawn or estimated at the first submit is taken from there.
    """
    position = {entry["name"]: index for index, entry in enumerate(frozen.input["files"])}
    entries = list(zip(job.input["files"], job.text_bytes, strict=True))
    old = sorted((pair for pair in entries if pair[0]["name"] in position), key=lambda pair: position[pair[0]["name"]])
    new = [pair for pair in entries if pair[0]["name"] not in position]
    generation = max(frozen.generations, default=0) + 1
    files = [{**entry, "index": index} for index, (entry, _) in enumerate([*old, *new])]
    # Sizes decide where windows are cut: the frozen ones hold, also where today's estimate is another.
    for entry in files[: len(old)]:
        entry["num_bytes"] = frozen.input["files"][position[entry["name"]]]["num_bytes"]
    kept = [position[entry["name"]] for entry, _ in old]
    return replace(
        job,
        input={**job.input, "files": files},
        generations=tuple([frozen.generations[i] for i in kept] + [generation] * len(new)),
        text_bytes=tuple([frozen.text_bytes[i] for i in kept] + [size for _, size in new]),
    )


def save_run(job: ResolvedJob, epoch: int) -> Path:
    """Writes the job as it is run under a driver's epoch, for its workers. Only its owner may read the file."""
    path = job.layout.run(epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = job.layout.temporary(path.name)
    tmp.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(job_to_json(job, secret=True))
    replace_file(tmp, path)
    return path


def load_run(path: str | Path) -> ResolvedJob:
    """Reads what `save_run` wrote; engines read less of it (`frozen_job.load_engine_job`)."""
    return job_from_json(read_run(path))


def move_aside(layout: JobLayout) -> Path | None:
    """--fresh: renames the output folder to a free name beside it, which is returned (None: there was none)."""
    output = layout.output
    if not output.exists():
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count():
        target = output.with_name(f"{output.name}.before-{stamp}" + (f"-{number}" if number else ""))
        if not target.exists():
            output.rename(target)
            return target
    raise AssertionError("unreachable")


def job_to_json(job: ResolvedJob, *, secret: bool = False) -> bytes:
    """`secret`: for a run's processes alone: with the values of input.storage_options, which may hold keys and of
    which else only the names stay, and with what an engine is built from."""
    spec = job.spec.model_dump(mode="json")
    if not secret:
        spec["input"]["storage_options"] = dict.fromkeys(spec["input"]["storage_options"], "(not kept)")
    data = {
        "format": MANIFEST_FORMAT,
        "spec": spec,
        "semantic": dict(job.semantic),
        "sources": dict(job.sources),
        "fingerprint": job.fingerprint,
        "input": dict(job.input),
        "generations": list(job.generations),
        "text_bytes": list(job.text_bytes),
        "facts": dict(job.facts),
        "overrides": dict(job.overrides),
        "retry": job.retry,
    }
    if secret:
        data["engine"] = asdict(job.engine_config)
    return json.dumps(data, indent=1, ensure_ascii=True).encode()


def job_from_json(data: bytes) -> ResolvedJob:
    raw = json.loads(data)
    if raw["format"] != MANIFEST_FORMAT:
        raise ValueError(f"format {raw['format']}, this version reads {MANIFEST_FORMAT}")
    return ResolvedJob(
        spec=JobSpec.model_validate_json(json.dumps(raw["spec"])),
        semantic=raw["semantic"],
        sources=raw["sources"],
        input=raw["input"],
        generations=tuple(raw["generations"]),
        text_bytes=tuple(raw["text_bytes"]),
        facts=raw["facts"],
        overrides=raw["overrides"],
        retry=raw["retry"],
    )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
