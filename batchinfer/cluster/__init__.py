"""Running a job on processes: one driver, workers, one engine process per worker.

    coordinator      the driver's loop: events to `job.state`, its instructions to the world
    local            starts and restarts workers on this machine; the scheduler runs inside the driver
    engine_gpus      which GPU each engine has, where engines run on GPUs
    worker_process   a Dask worker that starts its engine before anything else
    engine_plugin    what a worker does for its engine: messages both ways, death noticed
    engine_host      the engine process as seen from its worker
    engine_process   the engine process itself: leased pieces in, result segments out
    tasks            planning and commit as Dask tasks; of a small job, done by the driver itself
    phases, timings  what took how long, from the start to the last part
    submit           the whole of `batchinfer submit`, and the Python API

Messages are small and few: leases and counts, never rows. Rows travel through files.
"""
