"""Hostile inputs for the job layer, made from seeds, run in child processes and judged.

A case (`case`) is a job file and the files that it reads; `jsonl`, `tables`, `job_files` and `templates` make them.
`trial` runs one in this process as a job runs (resolve, plan, fake engine, commit, verify) and says what came of it;
`children` does that in processes that may crash or hang; `campaign` counts, and keeps what failed.

Each case must end as completed rows, error rows, or one clear message before the start. Good rows stand among the
hostile ones: they must be completed, in order, with the right bytes.
"""
