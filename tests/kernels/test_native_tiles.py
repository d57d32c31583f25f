"""AMX's tiles are Linux' to give: who has them, and what becomes of products where it gives none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from batchinfer_kernels.native import library

pytestmark = pytest.mark.skipif(
    library.available() is not None or not library.load().batchinfer_use_tiles(1), reason="no tiles here"
)

BEGIN = """
import ctypes, faulthandler, os, signal, sys, threading
import torch
from batchinfer_kernels.native import library
from batchinfer_kernels.native.int8 import NativeInt8

class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

def product():
    torch.manual_seed(0)
    ops, threads = NativeInt8(), torch.get_num_threads()
    packed = ops.pack(torch.randint(-127, 128, (96, 576), dtype=torch.int8), torch.rand(96), None)
    x = ops.quantize(torch.randn(100, 576))
    return lambda: ops.linear(x, packed, None, None).numpy().tobytes()

def tiles():
    return library.load().batchinfer_use_tiles(1)
"""


def run(code: str, **environment: str) -> None:
    subprocess.run([sys.executable, "-c", BEGIN + code], check=True, timeout=120, env={**os.environ, **environment})


@pytest.mark.parametrize(("value", "used"), [("0", 0), ("1", 1), ("", 1)])
def test_whether_they_are_used_is_asked_of_the_environment(value: str, used: int) -> None:
    run(
        f"""
assert ctypes.c_int.in_dll(library.load(), "batchinfer_tiles").value == {used}
again = product()
found = again()
assert tiles() and again() == found
""",
        **{library.AMX_VARIABLE: value},
    )


def test_where_linux_gives_none_products_have_the_same_bytes() -> None:
    """It gives none to a process with a stack for signals that could not hold them."""
    run("""
libc, memory = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(4096)
assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
again = product()
refused = again()
assert not tiles()
assert libc.sigaltstack(ctypes.byref(Stack(None, 2, 0)), None) == 0
assert tiles() and again() == refused
""")


def test_threads_of_before_and_children_have_them() -> None:
    run("""
found, go = [], threading.Event()
def work():
    go.wait()
    found.append(again())
early = threading.Thread(target=work)
early.start()
torch.set_num_threads(1)
again = product()
library.load().batchinfer_use_tiles(0)
expected = again()
assert tiles()
go.set()
early.join()
assert found == [expected] and again() == expected
child = os.fork()
if child == 0:
    os._exit(again() != expected)
assert os.waitpid(child, 0)[1] == 0
""")


@pytest.mark.parametrize("when", ["before", "after"])
def test_signals_on_a_stack_of_their_own_leave_products_as_they_are(when: str) -> None:
    """As Python's faulthandler has one, set up before the library is loaded or after it."""
    begin = "faulthandler.enable()\nfaulthandler.register(signal.SIGUSR1, file=open(os.devnull, 'w'))\n"
    load = "again = product()\nlibrary.load().batchinfer_use_tiles(0)\nexpected = again()\nassert tiles()\n"
    run(
        (begin + load if when == "before" else load + begin)
        + """
done = threading.Event()
def disturb():
    while not done.wait(0.0005):
        os.kill(os.getpid(), signal.SIGUSR1)
other = threading.Thread(target=disturb)
other.start()
assert all(again() == expected for _ in range(2000))
done.set()
other.join()
"""
    )
