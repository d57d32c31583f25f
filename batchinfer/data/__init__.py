"""Files in and files out: input readers, intermediate Arrow files, Parquet parts, atomic publishing.

`fs` publishes files safely, `dataset` opens the input (`sources` finds its files, `schema` unites them, `parquet`,
`arrow`, `jsonl` read them), `prepared` and `segments` are the files between plan, run and commit, `parts` (with
`layout`) writes the output, `values` hashes row values. Knows nothing of the job file: see `batchinfer.job`.
"""
