"""Which GPUs a process may use, as nvidia-smi and CUDA_VISIBLE_DEVICES tell; none is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from batchinfer_kernels import gpus, tuning
from batchinfer_kernels.gpus import Gpu, Installed, NoGpu, find, visible, with_instances

from tests.fake_gpus import H200S, UUIDS, nvidia_smi

WHOLE, DIVIDED = H200S[0], Installed(uuid=UUIDS[1], name="NVIDIA A100", capability=80, instances=("MIG-b1", "MIG-b22"))
THERE = (WHOLE, DIVIDED)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is the whole PATH, but for sh and cat; nothing is known yet of this machine's GPUs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat"):
        (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus.installed.cache_clear()
    yield folder
    gpus.installed.cache_clear()


@pytest.mark.parametrize(
    ("setting", "handles"),
    [
        (None, [UUIDS[0], "MIG-b1", "MIG-b22"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1", ["1"]),
        (" 1, 0 ", ["1", "0"]),
        ("0,-1,1", ["0"]),
        ("0,7,1", ["0"]),
        ("0,0", []),
        (f"0,{UUIDS[0]}", []),
        (UUIDS[1], [UUIDS[1]]),
        ("GPU-aaaa2", ["GPU-aaaa2"]),
        ("GPU-aaaa", []),
        ("GPU-", []),
        ("GPU-cccc", []),
        ("MIG-b2,MIG-b1", ["MIG-b2", "MIG-b1"]),
        ("MIG-b", []),
        (f"MIG-{UUIDS[1]}/1/0,MIG-{UUIDS[1]}/2/0", [f"MIG-{UUIDS[1]}/1/0", f"MIG-{UUIDS[1]}/2/0"]),
    ],
)
def test_what_cuda_visible_devices_shows(setting: str | None, handles: list[str]) -> None:
    found = visible(setting, THERE)
    assert [gpu.handle for gpu in found] == handles
    assert all(gpu.capability == (90 if gpu.handle in ("0", UUIDS[0]) else 80) for gpu in found)


def test_instances_are_those_of_their_gpu() -> None:
    listed = f"""GPU 0: NVIDIA A100-SXM4-40GB (UUID: {UUIDS[0]})
GPU 1: NVIDIA A100-SXM4-40GB (UUID: {UUIDS[1]})
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
"""
    one, other = with_instances((WHOLE, DIVIDED), listed)
    assert one == WHOLE
    assert other.instances == ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb")


def test_nvidia_smi_is_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{UUIDS[0]}, NVIDIA H200, 9.0, Disabled", f"{UUIDS[1]}, NVIDIA A100-SXM4-40GB, 8.0, Enabled"]
    nvidia_smi(path, lines, listed=f"GPU 1: NVIDIA A100 (UUID: {UUIDS[1]})\n  MIG 1g.5gb Device 0: (UUID: MIG-x1)\n")
    first = Gpu(handle=UUIDS[0], name="NVIDIA H200", capability=90)
    assert find() == (first, Gpu(handle="MIG-x1", name="NVIDIA A100-SXM4-40GB", capability=80))
    numbered = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert find(numbered) == (Gpu(handle="0", name="NVIDIA H200", capability=90),)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-x1")
    assert [gpu.capability for gpu in find()] == [80]
    with pytest.raises(NoGpu, match=r"CUDA_VISIBLE_DEVICES is '', which shows none of this machine's 2 GPUs"):
        find({"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("order", [{}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}], ids=["unset", "by speed"])
def test_numbers_that_cuda_may_give_to_others(path: Path, order: dict[str, str]) -> None:
    """Which GPU 0 is, of different ones, nvidia-smi can not say."""
    lines = [f"{UUIDS[0]}, NVIDIA A100-SXM4-40GB, 8.0, [N/A]", f"{UUIDS[1]}, NVIDIA H200, 9.0, [N/A]"]
    nvidia_smi(path, lines)
    says = r"is '1', but .* \(NVIDIA A100-SXM4-40GB, NVIDIA H200\), .* CUDA_DEVICE_ORDER=PCI_BUS_ID"
    with pytest.raises(NoGpu, match=says):
        find({"CUDA_VISIBLE_DEVICES": "1"} | order)
    assert [gpu.handle for gpu in find({"CUDA_VISIBLE_DEVICES": UUIDS[1]} | order)] == [UUIDS[1]]
    assert [gpu.handle for gpu in find(order)] == list(UUIDS)
    gpus.installed.cache_clear()
    nvidia_smi(path, [line.replace("A100-SXM4-40GB, 8.0", "H200, 9.0") for line in lines])
    assert [gpu.handle for gpu in find({"CUDA_VISIBLE_DEVICES": "1"} | order)] == ["1"]


def test_an_nvidia_smi_that_hangs_half_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = nvidia_smi(path, [f"{UUIDS[0]}, NVIDIA A100-SXM4-40GB, 8.0, Enabled"])
    script.write_text(script.read_text().replace("-L ]; then cat", "-L ]; then read -r never < pipe; cat"))
    os.mkfifo(path / "pipe")
    monkeypatch.chdir(path)
    monkeypatch.setattr(gpus, "_TIMEOUT_S", 1.0)
    with pytest.raises(NoGpu, match=r"nvidia-smi can't be asked for GPUs: .*timed out"):
        find()


def test_divided_gpus_without_instances_are_none(path: Path) -> None:
    nvidia_smi(path, [f"{UUIDS[1]}, NVIDIA A100-SXM4-40GB, 8.0, Enabled"])
    with pytest.raises(NoGpu, match="have no instances"):
        find()


@pytest.mark.parametrize(
    ("lines", "code", "says"),
    [
        (["No devices were found"], 6, "nvidia-smi fails: No devices were found"),
        (["NVIDIA-SMI has failed because it couldn't talk to the driver."], 9, "couldn't talk to the driver"),
        ([], 0, "nvidia-smi lists no GPU"),
        ([], 1, "it says nothing"),
        (["a, b"], 0, "is not understood: 'a, b'"),
    ],
)
def test_why_there_is_none(path: Path, lines: list[str], code: int, says: str) -> None:
    nvidia_smi(path, lines, code=code)
    with pytest.raises(NoGpu, match=says):
        find()
    nvidia_smi(path, [f"{UUIDS[0]}, NVIDIA H200, 9.0, [N/A]"])
    assert len(find()) == 1, "a failure is not remembered"


def test_without_nvidia_smi_torch_is_asked_if_there_is_a_driver(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_DRIVER", path / "absent")
    with pytest.raises(NoGpu, match=r"no NVIDIA driver \(there is no nvidia-smi\)"):
        find()
    monkeypatch.setattr(gpus, "_DRIVER", path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    told = f"import os; print(os.environ.get('CUDA_VISIBLE_DEVICES', '{UUIDS[0]}') + ', NVIDIA H200, 9.0, [N/A]')"
    monkeypatch.setattr(gpus, "_ASK_TORCH", told)
    assert find() == (Gpu(handle="0", name="NVIDIA H200", capability=90),)
    gpus.installed.cache_clear()
    monkeypatch.setattr(gpus, "_ASK_TORCH", "raise SystemExit('CUDA driver version is insufficient')")
    with pytest.raises(NoGpu, match="torch fails: CUDA driver version is insufficient"):
        find()


def test_a_launch_table_is_part_of_the_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.level(90, "NVIDIA H999") == "sm_90"
    table = gpus.table_path("NVIDIA H999 MIG 1g.18gb")
    assert table == gpus.table_path("NVIDIA H999")
    assert (table.parent, table.name) == (Path(tuning.__file__).parent, "NVIDIA_H999.json")
    monkeypatch.setattr(gpus, "table_path", lambda name: tmp_path / "table.json")
    (tmp_path / "table.json").write_text("{}")
    one = gpus.level(90, "NVIDIA H999")
    (tmp_path / "table.json").write_text('{"linear": {}}')
    assert one.startswith("sm_90, table ") and gpus.level(90, "NVIDIA H999") != one


def test_the_oldest_architecture_is_the_kernels() -> None:
    assert tuning.CAPABILITIES[0] == gpus.OLDEST


def test_whether_torch_can_use_a_gpu_is_told_without_it() -> None:
    said = gpus.torch_obstacle()
    if torch.version.cuda is None:
        assert said is not None and said.startswith(f"torch {torch.__version__} is a build without CUDA")
    else:
        assert said is None


def test_the_environment_is_left_alone() -> None:
    before = dict(os.environ)
    visible("0", THERE)
    assert dict(os.environ) == before
