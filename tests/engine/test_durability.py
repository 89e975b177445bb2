"""What training must not lose: state over restarts with and without a farewell, version numbers, rollbacks."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from mlx_parallm.errors import InvalidRequestError, UnavailableError
from mlx_parallm.training.rl.session import Session
from mlx_parallm.training.rl.trajectories import Trajectory
from mlx_parallm.training.storage.checkpoints import Checkpoints
from mlx_parallm.training.storage.journal import Journal
from tests.engine.test_session import GREEDY, PROMPTS, hold, random_trajectories, school

RARELY = {"checkpoint_interval": 10_000}


def state_of(session: Session) -> dict[str, np.ndarray]:
    return dict(session._on_engine(session.trainer.state))


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


def waiting(session: Session) -> list[float]:
    return [one.reward for one in session.buffer.freeze(lambda: None).waiting]


def test_a_shutdown_writes_all_of_it(tmp_path: Path) -> None:
    with school() as one:
        session = one.session(folder=tmp_path, **RARELY)
        for seed in range(3):
            session.update(random_trajectories(seed), extra={"step": seed})
        session.buffer.add(random_trajectories(9))
        state, rewards = state_of(session), waiting(session)
        answer = one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY)
        session.close()
        history = session.status()["history"]
    with school() as one:
        session = one.session(folder=tmp_path, **RARELY)
        assert (session.version, session.trainer.updates, session.extra) == (4, 3, {"step": 2})
        assert_same(state_of(session), state)
        assert waiting(session) == rewards
        found = session.status()
        assert found["history"] == history
        assert len(history) == 3
        assert (found["updates_published"], found["trajectories_used"]) == (3, 24)
        assert found["trajectories_collected"] == 32
        hold(one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY), answer)
        assert session.update(random_trajectories(3)).version == 5


def test_without_a_farewell_nothing_that_was_taken_is_lost_and_no_number_is_used_again(tmp_path: Path) -> None:
    """As after kill -9: there is a checkpoint of version 2, and a journal."""
    with school() as one:
        session = one.session(folder=tmp_path, **RARELY)
        session.update(random_trajectories(0), durable=True)
        state = state_of(session)
        session.buffer.add(random_trajectories(1))
        session.buffer.add(random_trajectories(2))
        session.update(at_most=8)  # learns from the first eight; no checkpoint has that
        rewards = [one.reward for seed in (1, 2) for one in random_trajectories(seed)]
        assert session.version == 3
    with school() as one:
        session = one.session(folder=tmp_path, **RARELY)
        assert session.version == 2, "the weights that the checkpoint has are those of version 2"
        assert_same(state_of(session), state)
        assert sorted(waiting(session)) == sorted(rewards), "what version 3 had learnt from waits again"
        assert session.update(at_most=8).version == 4, "3 was another policy"


@pytest.mark.long
def test_a_checkpoint_is_written_a_while_after_a_change(tmp_path: Path) -> None:
    with school() as one:
        session = one.session(folder=tmp_path, checkpoint_seconds=0.3, **RARELY)
        session.update(random_trajectories(0))
        assert not (tmp_path / "latest").exists()
        for _ in range(100):
            # The journal goes a moment after the checkpoint has come.
            if (tmp_path / "latest" / "state.json").exists() and not list(tmp_path.glob("journal-*")):
                break
            time.sleep(0.05)
        kept = Checkpoints(tmp_path, 3).load("latest")
        assert (kept.state["updates"], kept.state["policy_version"]) == (1, 2)
        assert not list(tmp_path.glob("journal-*")), "the checkpoint has it all"
        saves = session.checkpoints.saves  # type: ignore[union-attr]
        time.sleep(0.8)
        assert session.checkpoints.saves == saves, "nothing has changed since"  # type: ignore[union-attr]


@pytest.mark.parametrize("number", [2, None])
def test_a_rollback_takes_the_trainer_along(number: int | None) -> None:
    """The next update is what it would have been from there, optimiser included."""
    with school() as one:
        session = one.session()
        session.update(random_trajectories(0))
        second = state_of(session)
        session.update(random_trajectories(1))
        if number is not None:
            session.update(random_trajectories(2))
        session.rollback(number)
        assert session.version == 2
        assert_same(state_of(session), second)
        version = session.update(random_trajectories(3)).version
        assert version == (5 if number is not None else 4)
        after = state_of(session)
        found = one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY)
    with school() as one:
        session = one.session()
        for seed in (0, 3):
            session.update(random_trajectories(seed))
        assert_same(after, state_of(session))
        hold(found, one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY))


def test_a_rollback_forgets_what_was_not_published() -> None:
    with school() as one:
        session = one.session()
        session.update(random_trajectories(0))
        state = state_of(session)
        session.update(random_trajectories(1), publish=False)
        session.rollback(2)
        assert_same(state_of(session), state)
        session.rollback(1)
        with pytest.raises(InvalidRequestError, match="before 1"):
            session.rollback(None)


def test_updates_that_are_not_published_have_no_number(tmp_path: Path) -> None:
    with school() as one:
        session = one.session(folder=tmp_path, **RARELY)
        session.update(random_trajectories(0), checkpoint_name="second")
        answer = one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY)
        second = state_of(session)
        session.update(random_trajectories(1), publish=False, checkpoint_name="hidden")
        hidden = state_of(session)
        assert json.loads((tmp_path / "hidden" / "state.json").read_text())["policy_version"] is None
        session.restore(None, 2)
        assert_same(state_of(session), second)
        hold(one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY), answer)
        session.restore("hidden", None)
        assert_same(state_of(session), hidden)
        assert session.version == 4


def test_after_a_restart_what_was_served_is_served_and_what_was_not_is_not(tmp_path: Path) -> None:
    with school() as one:
        session = one.session(folder=tmp_path, **RARELY)
        session.update(random_trajectories(0))
        answer = one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY)
        session.update(random_trajectories(1), publish=False)
        hidden = state_of(session)
        session.close()
    with school() as one:
        session = one.session(folder=tmp_path, **RARELY)
        assert session.version == 2
        hold(one.driver.ask(PROMPTS[0], adapter="policy", **GREEDY), answer)
        assert_same(state_of(session), hidden)
        assert session.update(random_trajectories(2)).version == 3


def test_what_an_update_took_comes_back_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with school() as one:
        session = one.session()
        session.buffer.add(random_trajectories(0))
        rewards = waiting(session)
        monkeypatch.setattr(session.trainer, "update", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            session.update()
        assert waiting(session) == rewards


def test_trajectories_that_can_not_be_written_down_are_not_taken(tmp_path: Path) -> None:
    with school() as one:
        session = one.session(folder=tmp_path, **RARELY)

        def full(*entries: object, durable: bool = False) -> None:
            raise OSError(28, "No space left on device")

        assert session.store is not None
        session.store.journal.append = full  # type: ignore[method-assign]
        with pytest.raises(UnavailableError, match="No space left"):
            session.buffer.add(random_trajectories(0))
        assert len(session.buffer) == 0
        with pytest.raises(UnavailableError, match="not published"):
            session.update(random_trajectories(0))
        assert (session.version, session.trainer.updates) == (1, 0), "an update that can't be published is undone"


def test_a_line_that_a_kill_has_cut_off_harms_no_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append({"version": 1}, {"version": 2})
    journal.close()
    path = tmp_path / "journal-00000000.jsonl"
    path.write_bytes(path.read_bytes() + b'{"version": 3, "tra')
    journal = Journal(tmp_path)
    journal.append({"version": 4})
    assert [entry["version"] for entry in journal.read()] == [1, 2, 4]
    number = journal.rotate()
    journal.append({"version": 5})
    assert [entry["version"] for entry in journal.read(number)] == [5]
    journal.drop_before(number)
    assert [entry["version"] for entry in journal.read()] == [5]


def test_the_buffer_gives_an_update_as_many_as_it_waited_for() -> None:
    with school() as one:
        session = one.session(batch_size=2, follows_buffer_at=16)
        session.buffer.add([Trajectory(one.prompt_ids, one.completion_ids, one.reward, f"{seed} {one.group_id}")
                            for seed in (0, 1) for one in random_trajectories(seed)])  # fmt: skip
        for _ in range(200):
            if session.totals.history:
                break
            time.sleep(0.05)
        assert [entry["trajectories"] for entry in session.totals.history] == [16]
        assert len(session.buffer) == 0
        session.close()


def test_a_shared_row_is_recorded_as_each_reader_saw_it() -> None:
    """With --dedupe one computation has two readers: the stop string of one cuts its own record alone."""
    with school(dedupe=True) as one:
        one.session()
        one.engine.records_all = True
        short, _ = one.driver.submit(PROMPTS[0], stream=True, max_tokens=60, ignore_eos=True)
        long, pending = one.driver.submit(PROMPTS[0], stream=True, max_tokens=60, ignore_eos=True)
        pending.wait_for_tokens(4)
        one.engine.cancel(short, 0, 2)
        whole = pending.wait()[0].tokens
        one.driver.settle()
        assert one.engine.metrics.deduplicated == 1
        assert one.ledger.find(long).completion_ids == tuple(whole)
        assert one.ledger.find(short).completion_ids == tuple(whole[:2])


def test_what_a_client_left_is_not_kept() -> None:
    with school() as one:
        one.session()
        one.engine.records_all = True
        name, pending = one.driver.submit(PROMPTS[0], stream=True, max_tokens=200, ignore_eos=True)
        pending.wait_for_tokens(3)
        one.engine.cancel(name)
        one.driver.settle()
        assert len(one.ledger) == 0
