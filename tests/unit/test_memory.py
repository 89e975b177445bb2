"""The budget: what a container leaves, what a Mac says of itself, and how models share it."""

from pathlib import Path

import pytest

from mlx_parallm.cli import recommend
from mlx_parallm.config import ServeConfig
from mlx_parallm.devices import machine_memory
from mlx_parallm.devices.device import DEVICES
from mlx_parallm.devices.machine_memory import cgroup_room, parse_vm_stat
from mlx_parallm.devices.profile import DeviceKind
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models import memory
from mlx_parallm.models.memory import plan_memory

GIB = 1 << 30


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{content}\n")


def test_cgroup_v2(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/system.slice/docker-1.scope\n")
    root = tmp_path / "fs"
    group(root / "system.slice" / "docker-1.scope", memory_max="max", memory_current=GIB)
    assert cgroup_room(root, own) is None
    group(root / "system.slice", memory_max=4 * GIB, memory_current=3 * GIB, memory_stat=f"anon 5\ninactive_file {GIB}")
    assert cgroup_room(root, own) == 2 * GIB
    group(root / "system.slice" / "docker-1.scope", memory_max=2 * GIB, memory_current=GIB)
    assert cgroup_room(root, own) == GIB


def test_cgroup_v2_inside_its_own_namespace(tmp_path: Path) -> None:
    """A container sees its own group as the root, or a path that is not there."""
    own = tmp_path / "cgroup"
    root = tmp_path / "fs"
    group(root, memory_max=4 * GIB, memory_current=GIB)
    for path in ("/", "/../../kubepods/pod1"):
        own.write_text(f"0::{path}\n")
        assert cgroup_room(root, own) == 3 * GIB


def test_cgroup_v1(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("5:cpu,cpuacct:/box\n4:memory:/box/inner\n2:pids:/box\n0::/\n")
    root = tmp_path / "fs"
    group(root / "memory", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=GIB)
    assert cgroup_room(root, own) is None
    group(
        root / "memory" / "box",
        memory_limit_in_bytes=4 * GIB,
        memory_usage_in_bytes=3 * GIB,
        memory_stat=f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
    )
    assert cgroup_room(root, own) == GIB + GIB // 2
    (root / "memory" / "box" / "memory.stat").write_text(f"inactive_file {GIB}\n")
    assert cgroup_room(root, own) == GIB, "what the kernel says of its cache is not the box's"
    group(root / "memory" / "box", memory_limit_in_bytes=GIB, memory_usage_in_bytes=3 * GIB)
    assert cgroup_room(root, own) == 0


def test_cgroup_v1_with_several_controllers_in_one(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:cpu,memory:/box\n")
    group(tmp_path / "cpu,memory" / "box", memory_limit_in_bytes=4 * GIB, memory_usage_in_bytes=GIB)
    assert cgroup_room(tmp_path, own) == 3 * GIB


def test_no_cgroups(tmp_path: Path) -> None:
    assert cgroup_room(tmp_path, tmp_path / "none") is None


def test_a_containers_limit_bounds_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "cgroup_room", lambda: GIB)
    assert machine_memory.available_memory() == GIB
    monkeypatch.setattr(machine_memory, "cgroup_room", lambda: None)
    assert machine_memory.available_memory() > GIB


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            500000.
Pages inactive:                          400000.
Pages speculative:                         5000.
Pages throttled:                              0.
Pages wired down:                        200000.
Pages purgeable:                           1000.
"Translation faults":                 123456789.
"""


def test_what_a_mac_has_available() -> None:
    assert parse_vm_stat(VM_STAT) == 16384 * (10000 + 400000 + 5000 + 1000)
    assert parse_vm_stat("no such thing") is None


def total(plans: list[memory.MemoryPlan]) -> int:
    parts = sum(plan.weights + plan.rows + plan.blocks + plan.adapters + plan.training for plan in plans)
    return parts + plans[0].kept


def test_models_share_one_budget() -> None:
    config = ServeConfig.of(memory_limit=20 * GIB, enable_rl_training=True)
    plans = plan_memory([6 * GIB, 2 * GIB], [GIB // 100, GIB // 200], config)
    assert total(plans) <= 20 * GIB
    assert total(plans) > 19 * GIB
    assert [plan.training > 0 for plan in plans] == [True, False]
    assert plans[0].rows == plans[1].rows == 2 * plans[0].blocks
    (alone,) = plan_memory([6 * GIB], [GIB // 100], ServeConfig.of(memory_limit=20 * GIB))
    assert alone.training == 0
    assert alone.rows > 2 * plans[0].rows


def test_a_flag_for_rows_is_the_whole_process() -> None:
    plans = plan_memory([GIB, GIB], [0, 0], ServeConfig.of(memory_limit=9 * GIB, kv_cache_memory=2 * GIB))
    assert [plan.rows for plan in plans] == [GIB, GIB]
    (plan,) = plan_memory([GIB], [0], ServeConfig.of(memory_limit=9 * GIB, num_blocks=0))
    assert plan.blocks == 0


@pytest.mark.parametrize(("kind", "share"), [("cpu", 8), ("metal", 4), ("cuda", 4)])
def test_rows_that_may_hold_little_leave_little_behind(
    kind: DeviceKind, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "this_device", lambda: DEVICES[kind])
    (plan,) = plan_memory([GIB], [0], ServeConfig.of(memory_limit=40 * GIB, kv_cache_memory=2 * GIB))
    assert plan.kept == 2 * GIB // share


def test_what_can_not_work_names_the_number_that_would() -> None:
    with pytest.raises(ModelLoadError, match=r"8.0 GiB .* may hold 4.0 GiB: --memory-limit 10240MiB"):
        plan_memory([8 * GIB], [0], ServeConfig.of(memory_limit=4 * GIB))


def test_a_mac_keeps_some_memory_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only Metal can run, with its answers stood in for: the limits are asked for, and room is left."""
    wired: list[int] = []
    info = {"memory_size": 16 * GIB, "max_recommended_working_set_size": 12 * GIB}
    monkeypatch.setattr(machine_memory, "this_device", lambda: DEVICES["metal"])
    monkeypatch.setattr(machine_memory.mx, "device_info", lambda: info)
    monkeypatch.setattr(machine_memory.mx, "set_wired_limit", wired.append)
    assert machine_memory.wire_memory() == 12 * GIB
    info["max_recommended_working_set_size"] = 15 * GIB
    assert machine_memory.wire_memory() == 14 * GIB
    assert wired == [12 * GIB, 14 * GIB]


# Memory and recommended working set in GiB: two thirds up to 36 GiB, three quarters above, as macOS has it.
MACS = {8: 5.3, 16: 10.7, 32: 21.3, 64: 48.0, 128: 96.0}


@pytest.mark.parametrize("free", [GIB // 4, 100 * GIB], ids=["busy", "idle"])
@pytest.mark.parametrize("size", MACS)
def test_a_busy_mac_serves_what_an_idle_one_does(size: int, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fits into four fifths of the working set is planned for; so is all that `recommend` lists."""
    metal = DEVICES["metal"]
    working_set = int(MACS[size] * GIB)
    info = {"memory_size": size * GIB, "max_recommended_working_set_size": working_set}
    monkeypatch.setattr(machine_memory, "this_device", lambda: metal)
    monkeypatch.setattr(memory, "this_device", lambda: metal)
    monkeypatch.setattr(machine_memory.mx, "device_info", lambda: info)
    monkeypatch.setattr(machine_memory, "mac_available_memory", lambda: free)
    config = ServeConfig.of()
    limit = memory.memory_limit(config)
    assert limit == working_set * 8 // 10
    fitting = [model for model in recommend.MODELS if model.parameters * 1e9 * recommend.BITS / 8 < limit]
    listed = {found.name for found in recommend.prospects(limit, 1e11, metal.weight_bits(recommend.BITS))}
    assert listed
    assert listed <= {model.name for model in fitting}
    for model in fitting:
        weights = int(model.parameters * 1e9 * recommend.BITS / 8)
        (plan,) = plan_memory([weights], [weights // 200], config)
        assert plan.rows > 0
        assert total([plan]) <= limit
        if model.name in listed:
            assert plan.rows + plan.blocks > model.kv * 2 * 1024, "a text of a thousand tokens has room"


def test_little_free_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(machine_memory, "mac_available_memory", lambda: GIB)
    machine_memory.check_free_memory(5 * GIB)
    assert not caplog.records, "only a Mac's memory is shared with a GPU"
    monkeypatch.setattr(machine_memory, "this_device", lambda: DEVICES["metal"])
    machine_memory.check_free_memory(GIB)
    assert not caplog.records
    machine_memory.check_free_memory(5 * GIB)
    assert "1.0 GiB of memory are free and the model needs 5.0 GiB" in caplog.text


def test_work_on_a_gpu_asks_the_system_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch asks for its room each time: no process is started for that."""
    monkeypatch.setattr(machine_memory, "this_device", lambda: DEVICES["metal"])
    monkeypatch.setattr(machine_memory.mx, "device_info", lambda: {"max_recommended_working_set_size": 10 * GIB})
    monkeypatch.setattr(machine_memory.mx, "get_active_memory", lambda: 3 * GIB)
    monkeypatch.setattr(machine_memory.subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert machine_memory.room_at_hand() == 5 * GIB
    monkeypatch.setattr(machine_memory.mx, "get_active_memory", lambda: 9 * GIB)
    assert machine_memory.room_at_hand() == 0
