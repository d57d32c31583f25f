"""The benchmark behind `scripts/bench_offline`: batchinfer and other engines on the same rows, in turn.

`workloads` has the prompts and how much of them can be shared, `runs` runs one contender in processes of its own,
`memory` watches them, `summary` turns runs into medians and ratios. `drive_*` are programs that the contenders run,
each in its own virtual environment; they import nothing of batchinfer but for `drive_engine`.
"""
