"""For all tests: the process is prepared as an engine's process is, before torch is loaded.

Interrupts and hang-ups are what they are at a terminal also where the tests run in the background: a shell has them
ignored there, which children inherit, and tests send them to drivers.
"""

import signal

from batchinfer_kernels.determinism import prepare

prepare()
for signum, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, handler)
