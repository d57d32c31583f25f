"""From what the user wrote to a ResolvedJob: reads the model's configs and the input's footers, writes nothing.

Every value gets a source: user, generation_config, model, device, drawn, default. Where the output folder holds a
frozen job, that one is compared with and kept (`job.manifest`).
"""

from __future__ import annotations

from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.spec import JobSpec


def resolve_job(spec: JobSpec, *, extend: bool = False, ignore_existing: bool = False) -> ResolvedJob:
    """Resolves a job; checks model, input columns, template and output columns without loading or writing.

    Where the output folder has a manifest: takes what is frozen there (the drawn seed, the order of files) and
    raises ResumeRefused with every difference in semantic settings, output columns or input. Files added beside
    unchanged ones are accepted with `extend`. `ignore_existing` (--fresh) looks at no manifest.
    Raises ConfigError, InputError or ModelError where the job can't run.
    """
    raise NotImplementedError
