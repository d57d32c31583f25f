"""Files in and files out: input readers, intermediate Arrow files, Parquet parts, atomic publishing.

`fs` publishes files safely. `dataset` opens the input: `sources` finds its files, `parquet`, `arrow` and `jsonl` read
them, `schema` unites them. `prepared` and `segments` are the files between plan, run and commit. `parts` writes the
output, with `layout` (its columns) and `joining`. `values` hashes row values. Knows nothing of the job file: see
`batchinfer.job`.
"""
