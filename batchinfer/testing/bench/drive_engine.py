"""batchinfer's engine alone: `python -m batchinfer.testing.bench.drive_engine JOB.json RESULT.json`.

JOB.json: prompts, max_tokens, options of `LLM`. RESULT.json: see `runs.Driven`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import batchinfer


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = batchinfer.LLM(**job["options"])
    ready = time.time()
    first: list[float] = []
    step = llm.engine.step

    def watched_step() -> list[batchinfer.RequestOutput]:
        outputs = step()
        if not first and llm.engine.scheduler.num_generated_tokens:
            first.append(time.time())
        return outputs

    llm.engine.step = watched_step  # type: ignore[method-assign]
    sampling = batchinfer.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
    outputs = llm.generate(job["prompts"], sampling)
    last = time.time()
    errors = [output.error.message for output in outputs if output.error is not None]
    if errors:
        sys.exit(f"{len(errors)} rows failed: {errors[0]}")
    stats = llm.engine.stats()
    result = {
        "ready_at": ready,
        "first_token_at": first[0] if first else None,
        "last_at": last,
        "out_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": stats.num_cached_tokens,
        "completions": [output.outputs[0].text for output in outputs],
        "facts": {name: value for name, (value, _) in llm.engine.facts.items()},
        "versions": {"batchinfer": batchinfer.__version__},
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
