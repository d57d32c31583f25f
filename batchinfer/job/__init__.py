"""The job layer: what to do with a dataset, as pure as can be; files through `batchinfer.data`, no Dask, no engine.

What the user wrote: `job_file` (YAML), `spec`, `spec_problems`. What it comes to: `resolve`, `manifest`, `context`. The
plan: `windows`, `planner`, `token_order`, `units`, `ledger`; without running, `plan_report`. While it runs: `state`
(with `events`, `leases`, `suspects`), `driver_lock`, `status`. What comes out: `commit`, `cleaning`, `report`,
`verify`, `retry`. Where files lie: `layout`. `cluster` calls these functions as tasks, tests call them in one process.
"""
