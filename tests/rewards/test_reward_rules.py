"""Rule sources: how they are named, loaded and called, what each wrong answer says, and what a deadline does."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rewards_kit import text_rollout

from tutelage.errors import RewardError
from tutelage.protocols import RewardSource
from tutelage.rewards.calls import manner_of
from tutelage.rewards.loading import load_rule
from tutelage.rewards.rules import RuleSource

RULES = """
import asyncio, os, sys, threading, time

def lengths(prompts, responses, truths):
    return [len(p) + 10 * len(r) + 100 * t for p, r, t in zip(prompts, responses, truths)]

def at_least(words):
    return lambda prompts, responses, truths: [float(len(r.split()) >= words) for r in responses]

def too_few(prompts, responses, truths):
    return [1.0] * (len(responses) - 1)

def words(prompts, responses, truths):
    return [1.0, "good", 2.0][: len(responses)]

def holes(prompts, responses, truths):
    return [float("nan") if not r else 1.0 for r in responses]

def infinite(prompts, responses, truths):
    return [1.0 / 1e-320 if r == "b" else 0 for r in responses]

def divides(prompts, responses, truths):
    return [1 / len(r) for r in responses]

def nothing(prompts, responses, truths):
    pass

def number(prompts, responses, truths):
    return 1.0

NOT_A_FUNCTION = 3

class Item:
    def item(self):
        return 2.5

def items(response):
    return Item()

def arrays(prompts, responses, truths):
    import array
    return array.array("d", [1.0, 2.0][: len(responses)])

def everything(prompt, messages, response, truth, tokens, finished):
    return len(prompt) + 10 * len(response) + 100 * truth + 1000 * tokens + 10000 * finished + 100000 * len(messages)

def wants_more(response, colour):
    return 0.0

def besides(prompts, responses, truths, tokens, finished):
    return [t + 10 * f for t, f in zip(tokens, finished)]

def each(response):
    if response == "slow":
        time.sleep(60)
    if response == "raises":
        raise KeyError("oops")
    if response == "dies":
        os._exit(3)
    return float("nan") if response == "nan" else float(len(response))

async def waits(response):
    await asyncio.sleep(60 if response == "slow" else 0.001)
    if response == "raises":
        raise TimeoutError("its own")
    return float(len(response))

async def blocks(response):
    if response == "slow":
        time.sleep(60)
    return float(len(response))

async def together(prompts, responses, truths):
    await asyncio.sleep(0)
    return [float(len(r)) for r in responses]

meeting = 0

async def meets(response):
    global meeting
    meeting += 1
    while meeting < 3:
        await asyncio.sleep(0.001)
    return float(meeting)

def rank(prompts, responses, truths):
    if "raises" in responses:
        raise ValueError("no")
    return [float(len(responses))] * len(responses)

def sleeps(prompts, responses, truths):
    if "slow" in responses:
        time.sleep(60)
    return [1.0] * len(responses)

def main_thread(response):
    print("said aloud")
    return float(threading.current_thread() is threading.main_thread()) + 2 * float("torch" in sys.modules)

def process(response):
    time.sleep(0.05)
    return float(os.getpid())

def only_together(prompts, responses, truths):
    if len(responses) > 1:
        raise ValueError("too many")
    return [1.0]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rules.py").write_text(RULES)
    return tmp_path


def source(folder: Path, name: str, **settings) -> RuleSource:
    return RuleSource(f"rules.py:{name}", folder=folder, **settings)


def test_a_function_from_a_file_sees_prompt_texts_responses_and_truths(folder):
    rule: RewardSource = source(folder, "lengths")
    rollout = text_rollout(
        "ab",
        "c",
        truths=[1, 2],
        messages=[
            ({"role": "user", "content": "hey"},),
            ({"role": "system", "content": "x"}, {"role": "user", "content": "y"}),
        ],
    )
    # "hey" is 3 long; "system: x\nuser: y" is 9 + 1 + 7 = 17 long.
    score_B = rule.score(rollout)
    assert score_B.tolist() == [3 + 20 + 100, 17 + 10 + 200]
    assert score_B.dtype == torch.float32
    assert rule.name == "lengths"


def test_a_rule_with_a_response_is_called_for_each_with_what_it_names(folder):
    # prompt "question 0" is 10 long, one message; the rollout's response is one token, finished.
    rollout = text_rollout("ab", truths=[3])
    assert source(folder, "everything").score(rollout).tolist() == [10 + 20 + 300 + 1000 + 10000 + 100000]
    with pytest.raises(RewardError, match="asks for colour"):
        source(folder, "wants_more")


def test_a_rule_on_all_may_name_tokens_and_finished(folder):
    rollout = text_rollout("ab", "c").adding(finished=torch.tensor([True, False]))
    assert source(folder, "besides").score(rollout).tolist() == [11, 1]


def test_settings_in_brackets_or_beside_the_name(folder):
    for rule in (source(folder, "at_least(words=2)"), source(folder, "at_least", settings={"words": 2})):
        assert rule.score(text_rollout("one", "one two")).tolist() == [0.0, 1.0]
        assert rule.name == "at_least"
    with pytest.raises(RewardError, match="in brackets and beside its name"):
        source(folder, "at_least(words=2)", settings={"words": 2})


def test_a_function_from_a_module():
    rule = RuleSource("tutelage.rewards.builtin:regex(pattern='a+b')")
    assert rule.score(text_rollout("xaab", "ba")).tolist() == [1, 0]


def test_any_numbers_will_do(folder):
    assert source(folder, "items").score(text_rollout("a")).tolist() == [2.5]
    assert source(folder, "arrays").score(text_rollout("a", "b")).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("too_few", r"rules\.py:too_few returned 2 scores for 3 responses"),
        ("words", r"rules\.py:words returned 'good', a str, for row 1 \(prompt 'id1', sample 0, response ''\)"),
        ("holes", r"rules\.py:holes returned nan for row 1 \(prompt 'id1'"),
        ("infinite", r"rules\.py:infinite returned inf for row 2 \(prompt 'id2', sample 0, response 'b'\)"),
        ("divides", r"rules\.py:divides failed on row 1 \(prompt 'id1'.*ZeroDivisionError: division by zero"),
        ("nothing", r"rules\.py:nothing returned a NoneType"),
        ("number", r"rules\.py:number returned a float: 1\.0"),
        ("only_together", r"rules\.py:only_together failed on a batch of 3 responses: ValueError: too many"),
    ],
)
def test_each_wrong_answer_names_rule_row_value_and_fix(folder, rule, said):
    with pytest.raises(RewardError, match=said) as caught:
        source(folder, rule).score(text_rollout("a", "", "b"))
    assert caught.value.fix


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("exact_mach", r"Did you mean exact_match\?"),
        ("zzz", r"Built in are exact_match, math_answer"),
        ("missing.py:f", r"there is no file .*missing\.py"),
        ("no_such_module_here:f", r"importing no_such_module_here failed: ModuleNotFoundError"),
        ("rules.py:lenghts", r"holds nothing named 'lenghts'\. Did you mean lengths\?"),
        ("rules.py:NOT_A_FUNCTION", r"is a int, not a function"),
        ("rules.py:at_least(3)", r"only key=value settings"),
        ("rules.py:at_least(words=open('x'))", r"cannot be read"),
        ("rules.py:at_least(words=3", r"cannot be read"),
        ("rules.py:at_least(letters=3)", r"could not be made: TypeError"),
    ],
)
def test_a_rule_that_cannot_be_loaded_says_why(folder, spec, said):
    with pytest.raises(RewardError, match=said) as caught:
        load_rule(spec, folder)
    assert caught.value.fix


def test_a_file_that_fails_on_import_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("import json\nraise KeyError('oops')\n")
    with pytest.raises(RewardError, match=r"broken\.py failed: KeyError: 'oops'"):
        load_rule("broken.py:f", tmp_path)


def test_a_rule_that_fails_in_its_process_only_is_named(tmp_path):
    (tmp_path / "once.py").write_text(
        "import pathlib\nmark = pathlib.Path(__file__ + '.mark')\nif mark.exists():\n    raise KeyError('twice')\n"
        "mark.touch()\ndef rule(response):\n    return 0.0\n"
    )
    with pytest.raises(RewardError, match=r"once\.py failed: KeyError: 'twice'"):
        RuleSource("once.py:rule", folder=tmp_path).score(text_rollout("a"))


@pytest.mark.parametrize("concurrency", [None, 3])
def test_what_fails_or_hangs_is_said_of_its_row_and_the_others_have_their_scores(folder, concurrency):
    rule = source(folder, "each", seconds=0.5, concurrency=concurrency)
    texts = ("a", "slow", "bb", "raises", "dies", "nan", "ccc")
    started = time.monotonic()
    values_B, errors = rule.attempt(text_rollout(*texts))
    assert time.monotonic() - started < 30
    bad = [bool(error) for error in errors]
    assert bad == [False, True, False, True, True, True, False]
    assert [v for v, b in zip(values_B.tolist(), bad, strict=True) if not b] == [1, 2, 3]
    assert all(math.isnan(v) for v, b in zip(values_B.tolist(), bad, strict=True) if b)
    assert errors[1] == "each took more than 0.5 s on this response"
    assert errors[3] == "each failed on this response: KeyError: 'oops'"
    assert errors[4] == "each failed on this response: its process ended with exit code 3"
    assert errors[5] == "each returned nan for this response"


def test_a_deadline_stops_the_run_where_it_may(folder):
    said = r"rules\.py:each took more than 0\.5 s on row 1 \(prompt 'id1', sample 0, response 'slow'\)"
    with pytest.raises(RewardError, match=said) as caught:
        source(folder, "each", seconds=0.5).score(text_rollout("a", "slow"))
    assert "seconds" in caught.value.fix


def test_a_late_async_response_is_cancelled_and_the_others_go_on(folder):
    values_B, errors = source(folder, "waits", seconds=0.5).attempt(text_rollout("a", "slow", "bb", "raises"))
    assert values_B[[0, 2]].tolist() == [1, 2]
    assert errors == (
        "",
        "waits took more than 0.5 s on this response",
        "",
        "waits failed on this response: TimeoutError: its own",
    )


def test_an_async_rule_that_blocks_its_loop_is_ended(folder):
    values_B, errors = source(folder, "blocks", seconds=0.5).attempt(text_rollout("a", "slow", "bb"))
    assert values_B[[0, 2]].tolist() == [1, 2]
    assert errors == ("", "blocks took more than 0.5 s on this response", "")


def test_async_responses_are_in_flight_together(folder):
    # Each waits until three have come: one after another they would pass their deadline.
    assert source(folder, "meets").score(text_rollout("a", "b", "c")).tolist() == [3, 3, 3]
    _, errors = source(folder, "meets", concurrency=2, seconds=0.5).attempt(text_rollout("a", "b", "c"))
    assert any(errors)


def test_an_async_rule_on_all_responses(folder):
    assert source(folder, "together").score(text_rollout("a", "bb")).tolist() == [1, 2]


def test_the_rows_of_a_batch_that_do_not_fail_are_judged_together_again(folder):
    # `rank` scores by how many it sees: two are left without the row that raises.
    values_B, errors = source(folder, "rank").attempt(text_rollout("a", "raises", "b"))
    assert values_B[[0, 2]].tolist() == [2, 2]
    assert errors == ("", "rank failed on this response: ValueError: no", "")


def test_a_batch_has_the_deadline_of_all_its_rows(folder):
    values_B, errors = source(folder, "sleeps", seconds=0.5).attempt(text_rollout("a", "slow"))
    assert values_B[0] == 1
    assert errors == ("", "sleeps took more than 0.5 s on this response")


def test_a_rule_has_the_main_thread_of_a_process_without_torch(folder, capfd):
    assert source(folder, "main_thread").score(text_rollout("a")).tolist() == [1]
    assert capfd.readouterr().out == ""  # what it prints goes to stderr


def test_concurrency_is_processes(folder):
    rule = source(folder, "process", concurrency=3)
    assert 1 < len(set(rule.score(text_rollout(*"abcdef")).tolist())) <= 3
    pids = [process.process.pid for process in rule.processes.idle]
    rule.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_no_responses_need_no_process(folder):
    rule = source(folder, "each")
    assert rule.score(text_rollout("a").select(torch.arange(0))).shape == (0,)
    assert rule.processes.idle == []


def test_a_process_ends_with_its_parent(folder):
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
        "from rewards_kit import text_rollout\nfrom tutelage.rewards.rules import RuleSource\n"
        f"from pathlib import Path\nrule = RuleSource('rules.py:each', folder=Path({str(folder)!r}))\n"
        "rule.score(text_rollout('a'))\nprint(rule.processes.idle[0].process.pid, flush=True)\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    pid = int(done.stdout)
    end = time.monotonic() + 20
    while time.monotonic() < end and _alive(pid):
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_manner_is_read_from_the_signature():
    async def gathered(prompts, responses, truths): ...
    async def one(response, **rest): ...

    assert manner_of(gathered, "g").asynchronous
    assert not manner_of(gathered, "g").each
    manner = manner_of(one, "o")
    assert (manner.each, manner.asynchronous) == (True, True)
    assert manner.names == ("prompt", "messages", "response", "truth", "tokens", "finished")
    assert not manner_of(len, "len").each
