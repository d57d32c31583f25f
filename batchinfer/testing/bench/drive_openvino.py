"""OpenVINO GenAI's continuous batching on the CPU, for `runs`: `python drive_openvino.py JOB.json RESULT.json` in an
environment with openvino-genai. Imports nothing of batchinfer."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    genai = importlib.import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4  # GB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = 256
    scheduler.max_num_batched_tokens = 2048
    pipeline = genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", {})
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = job["max_tokens"], True, False
    ready = time.time()
    results = pipeline.generate(job["prompts"], [config] * len(job["prompts"]))
    last = time.time()
    metrics = [result.perf_metrics for result in results]
    result = {
        "ready_at": ready,
        # Both are of the whole call, in each result.
        "first_token_at": ready + metrics[0].get_ttft().mean / 1000,
        "last_at": last,
        "out_tokens": metrics[0].get_num_generated_tokens(),
        "prompt_tokens": sum(one.get_num_input_tokens() for one in metrics),
        "cached_tokens": None,
        "completions": [result.m_generation_ids[0] for result in results],
        "facts": {"model": Path(job["model"]).name},
        "versions": {"openvino-genai": genai.__version__},
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
