"""`LLM`, the Python front: batches in order, text and stops, errors before work, streams, several threads."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.errors import ContextLengthError, InvalidRequestError, ModelLoadError, UnavailableError

GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), max_batch_size=4) as model:
        yield model


def check_idle(llm: LLM) -> None:
    """The engine gives memory back when it has nothing to do, just after the last delta."""
    deadline = time.monotonic() + 10
    while llm._engine.metrics.kv_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    llm._engine.check_integrity()


def test_results_come_in_order_and_equal_those_of_each_alone(llm: LLM) -> None:
    prompts = [f"the {'sand ' * (number % 7)}and {number}" for number in range(40)]  # ten times the batch
    sampling = [SamplingParams(max_tokens=1 + number % 9, temperature=0, ignore_eos=True) for number in range(40)]
    together = llm.generate(prompts, sampling)
    assert [completion.prompt for completion in together] == prompts
    assert [len(completion.outputs[0].token_ids) for completion in together] == [1 + number % 9 for number in range(40)]
    for number in (0, 13, 39):
        assert llm.generate(prompts[number], sampling[number])[0].outputs == together[number].outputs


def test_more_prompts_than_the_queue_holds_wait_their_turn(tiny_folder: Path) -> None:
    with LLM(str(tiny_folder), max_batch_size=1, max_queue_size=2) as small:
        assert len(small.generate(["the sand"] * 7, SamplingParams(max_tokens=2, temperature=0))) == 7


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    (by_text,) = llm.generate("the and", GREEDY)
    (by_ids,) = llm.generate(by_text.prompt_ids, GREEDY)
    assert by_ids.prompt is None
    assert by_ids.outputs == by_text.outputs
    assert [c.outputs for c in llm.generate([by_text.prompt_ids, "the and"], GREEDY)] == [by_text.outputs] * 2


def test_choices_and_logprobs(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=6, temperature=1.0, seed=7, n=3, logprobs=2, ignore_eos=True)
    (first,) = llm.generate("the", sampling)
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in first.outputs}) > 1
    for output in first.outputs:
        assert output.finish_reason == "length"
        assert output.logprobs is not None
        assert [entry.token for entry in output.logprobs] == output.token_ids
        assert all(len(entry.top) == 2 for entry in output.logprobs)
    assert llm.generate("the", sampling) == [first]


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    (free,) = llm.generate("the and", SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    middle = free.text[len(free.text) // 2 :][:3]
    stopping = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop=(middle,))
    output = llm.generate("the and", stopping)[0].outputs[0]
    assert output.text == free.text[: free.text.index(middle)]
    assert (output.finish_reason, output.stop_reason) == ("stop", middle)
    assert output.token_ids == free.outputs[0].token_ids[: len(output.token_ids)]


def test_stop_token_ids(llm: LLM) -> None:
    (free,) = llm.generate("the and", SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    last = free.outputs[0].token_ids[-1]
    first = free.outputs[0].token_ids.index(last)
    stopping = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, stop_token_ids=(last,))
    output = llm.generate("the and", stopping)[0].outputs[0]
    assert output.token_ids == free.outputs[0].token_ids[:first]
    assert (output.finish_reason, output.stop_reason) == ("stop", last)


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(conversation, GREEDY)
    many = llm.chat([conversation, conversation], GREEDY)
    assert [other.outputs for other in many] == [one.outputs] * 2
    assert all(other.cached_tokens > 0 for other in many)
    assert "".join(piece.text for piece in llm.stream_chat(conversation, GREEDY)) == one.text


@pytest.mark.slow
def test_the_templates_beginning_is_known_from_the_start() -> None:
    with LLM() as embedded:
        (first,) = embedded.chat([{"role": "user", "content": "Name a river."}], GREEDY)
        assert first.cached_tokens > 16
        assert embedded.chat([{"role": "user", "content": "Name a river."}], GREEDY)[0].outputs == first.outputs
    with LLM(num_blocks=0) as without:
        (cold,) = without.chat([{"role": "user", "content": "Name a river."}], GREEDY)
        assert (cold.outputs, cold.cached_tokens) == (first.outputs, 0)


def test_a_stream_is_the_same_answer_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate("the and", GREEDY)
    pieces = list(llm.stream("the and", GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.outputs[0].token_ids
    assert pieces[-1].finish_reason == whole.outputs[0].finish_reason
    assert len(pieces) > 1


def test_a_stream_that_is_closed_frees_its_row(llm: LLM) -> None:
    stream = llm.stream("the", SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(llm.generate(["the"] * 8, GREEDY)) == 8  # all rows are free again
    check_idle(llm)


@pytest.mark.parametrize(
    ("prompts", "sampling", "error"),
    [
        (["fine", ""], GREEDY, InvalidRequestError),
        (["fine", []], GREEDY, InvalidRequestError),
        (["fine", [10**6]], GREEDY, InvalidRequestError),
        (["fine", [1] * 5000], GREEDY, ContextLengthError),
        (["fine"], [GREEDY, GREEDY], InvalidRequestError),
        (["fine"], SamplingParams(temperature=-1), InvalidRequestError),
        (["fine"], SamplingParams(n=100), InvalidRequestError),
        (["fine"], SamplingParams(max_tokens=0), InvalidRequestError),
        (["fine"], SamplingParams(top_p=0), InvalidRequestError),
        (["fine"], SamplingParams(top_p=float("nan")), InvalidRequestError),
        (["fine"], SamplingParams(temperature="warm"), InvalidRequestError),  # type: ignore[arg-type]
        (["fine"], SamplingParams(logprobs=284), InvalidRequestError),
        (["fine"], SamplingParams(prompt_logprobs=284), InvalidRequestError),
        (["fine"], SamplingParams(logit_bias={284: 1.0}), InvalidRequestError),
        (["fine"], SamplingParams(logit_bias={-1: 1.0}), InvalidRequestError),
        (["fine"], SamplingParams(logit_bias={3: float("nan")}), InvalidRequestError),
        (["fine"], SamplingParams(stop_token_ids=(-5,)), InvalidRequestError),
        (["fine"], SamplingParams(stop=("",)), InvalidRequestError),
        (["fine"], SamplingParams(max_tokens=3, min_tokens=4), InvalidRequestError),
        (["fine"], SamplingParams(repetition_penalty=0), InvalidRequestError),
        (["fine"], SamplingParams(presence_penalty=float("inf")), InvalidRequestError),
        (["fine"], SamplingParams(seed=2**70), InvalidRequestError),
    ],
)
def test_a_mistake_raises_before_any_work(llm: LLM, prompts: list[object], sampling: object, error: type) -> None:
    before = llm._engine.metrics.prompt_tokens
    with pytest.raises(error):
        llm.generate(prompts, sampling)  # type: ignore[arg-type]
    assert llm._engine.metrics.prompt_tokens == before


def test_a_stop_string_may_stand_alone(llm: LLM) -> None:
    assert SamplingParams(stop="###").stop == ("###",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]
    free = llm.generate("the", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0].text
    stop = free[3:6]
    stopped = llm.generate("the", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=stop))[0]
    assert stopped.text == free[: free.index(stop)]
    assert stopped.outputs[0].stop_reason == stop


def test_more_logprobs_than_the_vocabulary_has_are_all_of_it(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=20, prompt_logprobs=20)
    assert len(llm.generate("the and", sampling)[0].outputs[0].logprobs[0].top) == 20  # type: ignore[index]


def test_threads_share_the_batch(llm: LLM) -> None:
    expected = llm.generate(["the", "and"], GREEDY)
    found: dict[int, object] = {}

    def work(number: int) -> None:
        found[number] = llm.generate(["the", "and"], GREEDY)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), expected)


def test_no_prompts_no_work(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.chat([], GREEDY) == []


def test_after_close_calls_raise(tiny_folder: Path) -> None:
    model = LLM(str(tiny_folder))
    model.close()
    model.close()
    with pytest.raises(UnavailableError):
        model.generate("the", GREEDY)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        LLM(str(tmp_path / "nothing"))


def test_progress_bar_when_forced(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["the"] * 3, GREEDY, progress=True)
    assert "3/3" in capsys.readouterr().err
    llm.generate(["the"] * 3, GREEDY)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_program_that_forgets_to_close_still_ends(tiny_folder: Path) -> None:
    code = f"from mlx_parallm import LLM; print(len(LLM({str(tiny_folder)!r}).generate('the')[0].prompt_ids))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout.strip()) == (0, "1")


@pytest.mark.slow
def test_the_embedded_model_knows_paris() -> None:
    with LLM(max_batch_size=2) as model:
        (answer,) = model.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert "Paris" in answer.text
    assert answer.outputs[0].finish_reason == "stop"
