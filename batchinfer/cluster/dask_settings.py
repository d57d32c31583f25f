"""Dask's settings, in code, so that the user touches none. Applied before `distributed` is first imported.

Only what is said here differs from Dask's defaults; a user's own Dask configuration files keep their say in all else.
"""

from __future__ import annotations

SETTINGS: dict[str, object] = {
    # A task is handed to a worker when it is free, so that a dying worker takes no others with it.
    "distributed.scheduler.worker-saturation": 1.0,
    "distributed.scheduler.work-stealing": False,
    # Tasks are idempotent and losing workers is ordinary; a task that kills its worker ten times is not.
    "distributed.scheduler.allowed-failures": 10,
    "distributed.worker.http.routes": [],
    "distributed.scheduler.http.routes": [],
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.limit": "1 minute",  # silence about a busy event loop
    "distributed.admin.system-monitor.gil.enabled": False,
    # What watches Dask itself wakes every process fifty times a second, on cores that engines want.
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.tick.cycle": "10s",
    "distributed.admin.system-monitor.interval": "10s",
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.client.scheduler-info-interval": "1 minute",
    # A result that died with its worker is asked for at an address where nobody listens, for as long as this allows,
    # before the task runs again: with Dask's own times that takes minutes.
    "distributed.comm.timeouts.connect": "5s",
    "distributed.comm.retry.count": 0,
}


def apply_settings(worker_ttl_s: float = 300.0) -> None:
    """`worker_ttl_s`: a worker without a heartbeat for so long is given up, within twice that time. The engine is
    another process, so that nothing long holds one up."""
    import dask.config

    dask.config.set({**SETTINGS, "distributed.scheduler.worker-ttl": f"{worker_ttl_s} s"})
