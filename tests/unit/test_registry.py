"""Names and versions of adapters: what a name means, what is kept, and what is on the device."""

import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.lora.adapter import Adapter, AdapterError, Part
from mlx_parallm.lora.hooks import AdapterKernels
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.registry import KEPT_VERSIONS, MAX_PINNED, STACKS_KEPT, Registry, Version
from mlx_parallm.lora.row_adapters import GroupedLoRA, StackedLoRA
from mlx_parallm.types import AdapterRoute


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(4, 8)


def registry(max_resident: int = 2, max_names: int = 8, *, traced: bool = False) -> Registry:
    return Registry(Layout(Small(), traced=traced), max_resident, max_names)


def publish(found: Registry, name: str, number: int | None = None, *, rank: int = 2) -> Version:
    return found.publish(name, adapter(rank), f"file of {name}", number)


def adapter(rank: int = 2) -> Adapter:
    return Adapter({"first": Part(np.ones((rank, 8), np.float32), np.ones((4, rank), np.float32))})


def numbers(found: Registry, name: str) -> list[int]:
    return [version.number for version in found.versions(name)]


def test_a_name_means_its_newest_version() -> None:
    found = registry()
    first, second = publish(found, "p"), publish(found, "p")
    assert [first.number, second.number] == [1, 2]
    assert (found.find("p"), found.find("p", 1)) == (second, first)
    assert (found.newest(first), found.versions("p")) == (second, [first, second])
    assert (first.label, first.source, first.name) == ("p@1", "file of p", "p")
    configured = found.publish("c", adapter(), "bytes", config={"rank": 2})
    assert (configured.config, first.config) == ({"rank": 2}, None)
    found.unload("c")
    assert ("p" in found, "q" in found, len(found), found.versions("q")) == (True, False, 1, [])
    assert [entry.name for entry in found] == ["p"]
    assert set(found.targets) == {"first", "second"}


def test_numbers_may_be_given_and_only_go_up() -> None:
    found = registry()
    assert publish(found, "p", 5).number == 5
    assert publish(found, "p").number == 6
    for wrong in (6, 2):
        with pytest.raises(AdapterError, match=rf"version {wrong} of 'p' is not newer than 6") as caught:
            publish(found, "p", wrong)
        assert caught.value.param == "version"
    assert numbers(found, "p") == [5, 6]


def test_what_is_not_there_is_not_found() -> None:
    found = registry()
    publish(found, "p")
    publish(found, "p")
    with pytest.raises(ModelNotFoundError, match=r"^there is no model or adapter 'q'$"):
        found.find("q")
    with pytest.raises(ModelNotFoundError, match=r"^adapter 'p' has no version 3; it has 1, 2$"):
        found.find("p", 3)


def test_as_many_names_as_there_is_room_for() -> None:
    found = registry(max_names=2)
    publish(found, "a")
    publish(found, "b")
    with pytest.raises(AdapterError, match="2 adapters are loaded, as many as --max-cpu-loras allows") as caught:
        publish(found, "c")
    assert (caught.value.param, caught.value.code) == ("name", "too_many_adapters")
    assert publish(found, "a").number == 2, "a new version of a known name needs no room"
    found.unload("b")
    assert publish(found, "c").number == 1


def test_rollback_goes_to_the_one_before_or_to_the_one_named() -> None:
    found = registry()
    for _ in range(3):
        publish(found, "p")
    assert found.rollback("p").number == 2
    assert found.find("p").number == 2
    assert found.rollback("p").number == 1
    with pytest.raises(AdapterError, match="'p' has no version before 1") as caught:
        found.rollback("p")
    assert caught.value.param == "version"
    assert found.rollback("p", 3).number == 3, "forward again"
    assert found.rollback("p", 1).number == 1
    assert found.find("p").number == found.newest(found.find("p", 3)).number == 1
    with pytest.raises(ModelNotFoundError, match="no version 7"):
        found.rollback("p", 7)
    assert found.find("p").number == 1, "a rollback that fails changes nothing"
    assert publish(found, "p").number == 4, "no number names two versions"
    assert found.rollback("p").number == 3


def test_a_few_old_versions_are_kept_for_rollbacks() -> None:
    found = registry()
    for _ in range(KEPT_VERSIONS + 3):
        publish(found, "p")
    newest = KEPT_VERSIONS + 3
    assert numbers(found, "p") == list(range(newest - KEPT_VERSIONS, newest + 1))


def test_versions_in_use_pinned_or_served_are_kept_beside_those() -> None:
    found = registry()
    first, second, third = (publish(found, "p") for _ in range(3))
    found.hold(first)
    assert found.pin("p", 2, True) is second
    found.serve([AdapterRoute("p", 3, 1.0)])
    for _ in range(KEPT_VERSIONS + 2):
        publish(found, "p")
    kept = numbers(found, "p")
    assert kept[:3] == [1, 2, 3]
    assert len(kept) == 3 + KEPT_VERSIONS + 1
    found.release(first)
    assert numbers(found, "p") == kept[1:]
    assert not found.pin("p", 2, False).pinned
    assert numbers(found, "p") == kept[2:]
    found.serve([])
    publish(found, "p")
    assert third.number not in numbers(found, "p")


def test_a_version_is_released_as_often_as_it_is_held() -> None:
    found = registry()
    version = publish(found, "p")
    found.hold(version)
    found.hold(version)
    found.release(version)
    assert version.rows == 1
    found.release(version)
    with pytest.raises(AssertionError, match="p@1 is released twice"):
        found.release(version)


def test_pins_are_bounded() -> None:
    found = registry()
    for _ in range(MAX_PINNED):
        found.pin("p", publish(found, "p").number, True)
    publish(found, "p")
    with pytest.raises(AdapterError, match=rf"{MAX_PINNED} versions of 'p' are pinned already.*of 1, 2, 3") as caught:
        found.pin("p", None, True)
    assert (caught.value.param, caught.value.code) == ("version", "too_many_pinned")
    assert found.pin("p", 1, True).pinned, "pinned already"
    found.pin("p", 1, False)
    assert found.pin("p", None, True).number == MAX_PINNED + 1


def test_an_unloaded_name_is_gone_and_its_rows_go_on() -> None:
    found = registry()
    version, other = publish(found, "p"), publish(found, "q")
    found.hold(version)
    found.row_adapters([version, other])
    found.unload("p")
    assert "p" not in found
    assert found.newest(version) is version
    both = found.resident_bytes
    found.release(version)
    assert found.resident_bytes == both // 2
    with pytest.raises(ModelNotFoundError):
        found.unload("p")


def test_what_the_models_own_name_serves_is_not_unloaded() -> None:
    found = registry()
    publish(found, "p")
    publish(found, "q")
    found.serve([AdapterRoute("p", None, 1.0)])
    with pytest.raises(AdapterError, match="'p' is what the model's own name serves") as caught:
        found.unload("p")
    assert caught.value.param == "name"
    found.unload("q")
    found.serve([])
    found.unload("p")
    assert len(found) == 0


def test_unloading_frees_the_device() -> None:
    found = registry()
    version = publish(found, "p")
    found.row_adapters([version])
    assert found.resident_bytes == version.packed.nbytes > 0
    found.unload("p")
    assert found.resident_bytes == 0


def test_routes_take_turns_by_their_shares() -> None:
    found = registry()
    assert (found.route(), found.policy_name, found.policy_version) == (None, None, 0)
    for name in ("p", "p", "q"):
        publish(found, name)
    assert (found.policy_name, found.policy_version) == ("q", 1), "the name published last"
    found.serve([AdapterRoute("p", 1, 0.5), AdapterRoute("q", None, 0.25), AdapterRoute(None, None, 0.25)])
    drawn = [found.route() for _ in range(8)]
    labels = [version.label if version else "base" for version in drawn]
    assert found.traffic._credits == [0.0, 0.0, 0.0], "after whole rounds nobody is owed anything"
    assert sorted(labels) == ["base"] * 2 + ["p@1"] * 4 + ["q@1"] * 2
    assert labels[:4].count("p@1") == 2, "in turn, not one after another"
    assert [route.label for route in found.routes] == ["p@1", "q", "base"]
    assert (found.policy_name, found.policy_version) == ("p", 1)
    found.serve([AdapterRoute(None, None, 0.9), AdapterRoute("q", None, 0.06), AdapterRoute("p", None, 0.04)])
    assert (found.policy_name, found.policy_version) == ("q", 0), "the base has the largest share, q that of adapters"
    found.serve([])
    found.unload("q")
    assert (found.policy_name, found.policy_version) == (None, 0)


def test_routes_to_what_is_not_there_are_refused() -> None:
    found = registry()
    publish(found, "p")
    found.serve([AdapterRoute("p", None, 1.0)])
    for wrong in (AdapterRoute("q", None, 1.0), AdapterRoute("p", 2, 1.0)):
        with pytest.raises(ModelNotFoundError):
            found.serve([AdapterRoute(None, None, 0.5), wrong])
    assert [route.label for route in found.routes] == ["p"]


def test_requests_and_tokens_are_counted_by_version() -> None:
    found = registry()
    version = publish(found, "p")
    for one, tokens in ((version, 3), (None, 5), (version, 4), (None, 1), (None, 1)):
        found.count_request(one)
        found.count_tokens(one, tokens)
    assert (version.requests, version.tokens) == (2, 7)
    assert (found.base.requests, found.base.tokens) == (3, 7)


def test_the_least_recently_used_makes_room_on_the_device() -> None:
    found = registry(max_resident=2)
    a, b, c = (publish(found, name) for name in "abc")
    first = found.row_adapters([a, None])
    assert isinstance(first, GroupedLoRA)
    assert [any(first.row(number).has(group) for group in range(2)) for number in range(2)] == [True, False]
    found.row_adapters([b])
    found.row_adapters([a, b])
    assert found.swaps == 2
    found.row_adapters([a])
    found.row_adapters([c])  # b was used longest ago
    assert (found.swaps, found.resident_bytes) == (3, 2 * a.packed.nbytes)
    found.row_adapters([a])
    assert found.swaps == 3
    found.row_adapters([b, a])  # c goes, since a is needed
    found.row_adapters([a])
    assert found.swaps == 4
    found.check_integrity()
    found.reset_device()
    assert found.resident_bytes == 0
    found.row_adapters([a])
    assert found.swaps == 5


def test_a_publish_takes_replaced_versions_off_the_device_unless_rows_use_them() -> None:
    found = registry(max_resident=4)
    first = publish(found, "p")
    found.row_adapters([first])
    second = publish(found, "p")
    assert found.resident_bytes == 0
    found.hold(second)
    found.row_adapters([second])
    third = publish(found, "p")
    assert found.resident_bytes == second.packed.nbytes
    found.row_adapters([second, third])
    found.release(second)
    publish(found, "p")
    assert found.resident_bytes == 0


def test_traced_passes_have_their_adapters_side_by_side_and_keep_a_few_mixtures() -> None:
    found = registry(max_resident=8, traced=True)
    versions = [publish(found, f"{number}") for number in range(STACKS_KEPT + 1)]
    assert isinstance(found.row_adapters([versions[0], None]), StackedLoRA)
    found.row_adapters([None, versions[0], versions[0]])
    assert found.joins == 1
    for version in versions[1:STACKS_KEPT]:
        found.row_adapters([version])
    found.row_adapters([versions[0]])
    assert found.joins == STACKS_KEPT
    found.row_adapters([versions[STACKS_KEPT]])  # 1 was used longest ago
    found.row_adapters([versions[0]])
    assert found.joins == STACKS_KEPT + 1
    found.row_adapters([versions[1]])
    assert found.joins == STACKS_KEPT + 2
    found.row_adapters([versions[0], versions[1]])
    found.row_adapters([versions[1], versions[0]])
    assert found.joins == STACKS_KEPT + 3, "the same mixture in another order of rows"
    found.unload("1")
    found.row_adapters([versions[0]])
    assert found.joins == STACKS_KEPT + 3
    found.reset_device()
    found.row_adapters([versions[0]])
    assert found.joins == STACKS_KEPT + 4


def test_mixtures_go_with_the_adapters_that_are_in_them() -> None:
    found = registry(max_resident=4, traced=True)
    one, other = publish(found, "a"), publish(found, "b")
    found.row_adapters([one, other])
    found.row_adapters([one])
    found.unload("b")
    found.row_adapters([one])
    assert found.joins == 2
    publish(found, "a")
    assert not found._stacks


def test_where_a_kernel_reads_columns_mixtures_get_wider_and_never_narrower() -> None:
    found = registry(max_resident=4, traced=True)
    found._layout.active.kernels = AdapterKernels(add=lambda *anything: anything)  # type: ignore[arg-type,return-value]
    narrow, wide = publish(found, "a", rank=8), publish(found, "b", rank=60)
    found.row_adapters([narrow])
    (stack,) = found._stacks.values()
    small = stack.columns
    found.row_adapters([wide])
    (stack,) = found._stacks.values()  # those of the smaller width are of no use any more
    assert stack.columns > small
    row_adapters = found.row_adapters([wide])
    assert isinstance(row_adapters, StackedLoRA)
    assert row_adapters.mask is not None, "a kernel is always told which columns are a row's own"
    assert found.joins == 2
    found.row_adapters([narrow])
    assert {one.columns for one in found._stacks.values()} == {stack.columns}


def test_integrity_is_checked() -> None:
    found = registry(max_resident=1)
    version = publish(found, "p")
    found.check_integrity()
    version.rows = -1
    with pytest.raises(AssertionError):
        found.check_integrity()
    version.rows = 0
    next(iter(found)).current = 9
    with pytest.raises(AssertionError, match="p means a version that is gone"):
        found.check_integrity()
    next(iter(found)).current = 1
    found.row_adapters([version])
    found.max_resident = 0
    with pytest.raises(AssertionError, match="more adapters on the device"):
        found.check_integrity()


def test_an_adapter_that_changes_nothing_is_on_all_linear_layers() -> None:
    model = Small()
    model.words = nn.Embedding(16, 8)
    layout = Layout(model)
    blank = layout.blank()
    assert {layout.groups[number].paths for number in blank.groups} == {("first",), ("second",)}
    assert all(not a.any().item() and not b.any().item() for a, b, _ in blank.groups.values())


def test_a_pass_that_was_traced_for_an_adapter_takes_others_of_its_form_alone() -> None:
    found = registry(max_resident=8, traced=True)
    versions = [publish(found, "p"), publish(found, "q"), publish(found, "wide", rank=200)]
    one, like, wide = (found.row_adapters([version, None]) for version in versions)
    assert isinstance(one, StackedLoRA)
    assert isinstance(like, StackedLoRA)
    assert isinstance(wide, StackedLoRA)
    assert one.form == like.form != wide.form
