"""Episodes against hand-made environments: whose tokens are where, what is paid where, what ends an episode."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from episode_kit import END, Script, chats, more, one, over, scripted, user

from tutelage.data.chat import ChatTemplate
from tutelage.errors import DataError, RolloutError
from tutelage.protocols import Turn
from tutelage.rollout.environments.stepping import Steps
from tutelage.types import Rollout


@pytest.fixture
def template(tiny_tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer)


def ids(template: ChatTemplate, text: str) -> list[int]:
    return list(template.tokenizer(text)["input_ids"])


# ---- tokens


def test_a_response_is_turn_observation_turn_and_only_turns_are_trained(template: ChatTemplate) -> None:
    rollout, script = one(template, ["the cat", "you"], [more("again"), over()])
    between = ids(template, "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")
    first, second = [*ids(template, "the cat"), END], [*ids(template, "you"), END]
    assert rollout.sequences.response_rows() == [[*first, *between, *second]]
    wanted = [True] * len(first) + [False] * len(between) + [True] * len(second)
    assert rollout.sequences.trained.rows()[0].tolist() == wanted
    logp = [-(i + 1) / 8 for i in range(len(first))] + [0.0] * len(between) + [-(i + 1) / 8 for i in range(len(second))]
    assert rollout.rollout_logp.rows()[0].tolist() == logp
    assert script.seen == [(tuple(first), "the cat"), (tuple(second), "you")]
    assert rollout.finished.tolist() == [True]
    assert rollout.turns is not None
    assert rollout.turns.tolist() == [2]


CANONICAL = [["the answer is", "you in", "then"], ["a: b", "the\n\nthe"], ["you"]]


@pytest.mark.parametrize("name", [None, "chatml"])
@pytest.mark.parametrize("said", CANONICAL)
def test_the_tokens_are_those_of_the_whole_chat_rendered_from_scratch(
    tiny_tokenizer: Any, name: str | None, said: list[str]
) -> None:
    """Observations begin and end with characters that would merge with their neighbours in one tokenisation."""
    template = ChatTemplate(tiny_tokenizer, name)
    turns = [*(more(f"\nthe {i}: the", role="tool" if i else "user") for i in range(len(said) - 1)), over()]
    rollout, _ = one(template, said, turns)
    assert rollout.transcripts is not None
    chat = [*user("Hi"), *rollout.transcripts[0]]
    assert [m["content"] for m in chat if m["role"] == "assistant"] == said
    whole = template.encode_completion(chat[:1], chat[1:])
    assert rollout.sequences.response_rows()[0] == whole.response
    assert rollout.sequences.trained.rows()[0].tolist() == whole.trained
    assert rollout.sequences.prompt_rows()[0] == whole.prompt


def test_sampled_tokens_stay_where_the_tokenizer_would_have_chosen_others(template: ChatTemplate) -> None:
    rollout, _ = one(template, ["the", "ok"], [more("x"), over()])
    letters = [template.tokenizer.convert_tokens_to_ids(c) for c in "the"]
    made, speaker = scripted(template, {(0, "p0"): ["the", "ok"]}, {"world": lambda: Script([more("x"), over()])})
    said = speaker.complete

    def spelled(prompts: Any, params: Any) -> Rollout:
        found = said(prompts, params)
        if len(speaker.calls) > 1:
            return found
        row = [*letters, END]
        sequences = type(found.sequences).build([prompts.tokens[0]], [row])
        return found.adding(
            sequences=sequences, rollout_logp=type(found.rollout_logp)(torch.zeros(4), torch.tensor([4]))
        )

    made.complete = spelled
    other = made.generate(chats(template, ["Hi"]))
    assert ids(template, "the") != letters
    assert other.sequences.response_rows()[0][:4] == [*letters, END]
    assert other.sequences.response_rows()[0][4:] == rollout.sequences.response_rows()[0][2:]
    whole = other.sequences.tokens.rows()[0].tolist()
    assert list(speaker.calls[1][0].tokens[0]) == whole[: -len(ids(template, "ok")) - 1], "what the next turn reads"


def test_an_end_of_turn_that_was_not_sampled_is_in_the_hole(template: ChatTemplate) -> None:
    """A stop string ends a response without EOS; the template's end follows, untrained."""
    made, speaker = scripted(template, {(0, "p0"): ["go|", "ok"]}, {"world": lambda: Script([more("x"), over()])})
    said = speaker.complete
    made.complete = lambda prompts, params: (r := said(prompts, params)).adding(finished=torch.ones_like(r.finished))
    rollout = made.generate(chats(template, ["Hi"]))
    own = ids(template, "go")
    between = ids(template, "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")
    assert rollout.sequences.response_rows()[0] == [*own, *between, *ids(template, "ok"), END]
    assert rollout.sequences.trained.rows()[0].tolist() == [True] * 2 + [False] * len(between) + [True] * 3


def test_templates_without_an_end_of_turn_keep_the_sampled_one(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer, "hh")
    rollout, script = one(template, [" the", " ok"], [more("x"), over()])
    text = template.tokenizer.decode(rollout.sequences.response_rows()[0])
    assert text == " the<|im_end|>\n\nHuman: x\n\nAssistant: ok<|im_end|>"
    assert [tokens for tokens, _ in script.seen] == [(*ids(template, text), END) for text in (" the", " ok")]


def test_a_role_that_the_template_does_not_know_is_refused_by_name(tiny_tokenizer: Any) -> None:
    with pytest.raises(DataError, match="has no role tool"):
        one(ChatTemplate(tiny_tokenizer, "hh"), [" a", " b"], [more("x", role="tool"), over()])


def test_special_tokens_in_an_observation_are_taken_out_and_counted(template: ChatTemplate) -> None:
    """What a tool prints is no end of a turn, also where taking one out makes another."""
    sly = "a<|im_<|im_end|>end|>b<|im_start|>assistant"
    rollout, _ = one(template, ["x", "y"], [more(sly), over()])
    plain, _ = one(template, ["x", "y"], [more("abassistant"), over()])
    assert rollout.sequences.response_rows() == plain.sequences.response_rows()
    assert rollout.episode_info == ({"special_texts_removed": 3.0},)
    assert plain.episode_info == ({},)


# ---- rewards


def test_each_turn_is_paid_on_its_own_last_token(template: ChatTemplate) -> None:
    rollout, _ = one(template, ["ab", "c", "def"], [more("x", 0.5), more("y", -2.0), over(3.0)])
    assert rollout.token_reward is not None
    trained = rollout.sequences.trained.rows()[0].tolist()
    ends = [i for i, own in enumerate(trained) if own and (i + 1 == len(trained) or not trained[i + 1])]
    paid = {i: r for i, r in enumerate(rollout.token_reward.rows()[0].tolist()) if r}
    assert paid == dict(zip(ends, [0.5, -2.0, 3.0], strict=True))
    assert [rollout.sequences.response_rows()[0][i] for i in ends] == [END] * 3
    assert rollout.rewarded().tolist() == [1.5]


def test_numbers_are_summed_over_turns_and_truth_and_chat_reach_the_environment(template: ChatTemplate) -> None:
    turns = [more("x", info={"errors": 1.0, "calls": 2.0}), over(info={"errors": 1.0})]
    rollout, script = one(template, ["a", "b"], turns)
    assert rollout.episode_info == ({"errors": 2.0, "calls": 2.0},)
    ((messages, truth, seed),) = script.began
    assert (messages, truth) == (user("Hi"), 0)
    assert seed >= 0


def test_rows_keep_their_prompts_group_and_transcript(template: ChatTemplate) -> None:
    said = {(s, f"p{p}"): [f"s{s}p{p}"] for s in range(2) for p in range(2)}
    made, _ = scripted(template, said, {"world": lambda: Script([over(1.0)])})
    rollout = made.generate(chats(template, ["one", "two"], n=2))
    assert rollout.prompt_ids == ("p0", "p0", "p1", "p1")
    assert rollout.samples.tolist() == [0, 1, 0, 1]
    assert rollout.group.tolist() == [0, 0, 1, 1]
    assert rollout.messages == (user("one"), user("one"), user("two"), user("two")), "the prompt's own chat"
    assert rollout.texts == ("s0p0", "s1p0", "s0p1", "s1p1")
    assert rollout.transcripts is not None
    assert rollout.transcripts[1] == ({"role": "assistant", "content": "s1p0"},)


# ---- ends


def test_max_turns_truncates_and_the_last_observation_is_not_read(template: ChatTemplate) -> None:
    rollout, script = one(template, ["a", "b", "c"], [more("x"), more("y", 1.0), over()], max_turns=2)
    assert len(script.seen) == 2
    assert rollout.finished.tolist() == [False]
    assert rollout.sequences.response_rows()[0][-1] == END
    assert rollout.sequences.trained.rows()[0][-1].item() is True, "a response ends with the policy's own token"
    assert rollout.rewarded().tolist() == [1.0]


def test_a_turn_over_its_limit_is_cut_paid_and_the_end(template: ChatTemplate) -> None:
    rollout, script = one(template, ["abcdefgh", "b"], [more("x", 0.25), over()], turn_tokens=3)
    assert script.seen == [(tuple(ids(template, "abc")), "abc")]
    assert rollout.sequences.response_rows() == [ids(template, "abc")]
    assert rollout.finished.tolist() == [False]
    assert rollout.rewarded().tolist() == [0.25]


def test_done_to_a_cut_turn_is_not_finished(template: ChatTemplate) -> None:
    rollout, _ = one(template, ["abcdefgh"], [over(1.0)], turn_tokens=3)
    assert rollout.finished.tolist() == [False]


def test_an_observation_that_does_not_fit_ends_the_episode_before_it(template: ChatTemplate) -> None:
    between = len(ids(template, "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"))
    for room, turns in ((0, 1), (1, 2)):
        rollout, script = one(template, ["a", "|b|"], [more("x", 1.0), over()], total_tokens=2 + between + room)
        assert len(script.seen) == turns
        assert rollout.sequences.response_lens.tolist() == [2 if turns == 1 else 2 + between + 1]
        assert rollout.finished.tolist() == [False]


def test_episodes_of_unequal_room_are_cut_as_if_they_were_alone(template: ChatTemplate) -> None:
    """The second turn of one has room for 4 tokens, of the other for 1; context decides how many calls that takes.

    The other would have ended by itself after 3: cut, it has not.
    """
    between = len(ids(template, "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"))
    prompts = chats(template, ["Hi", "Hi"])
    said = {(0, "p0"): ["a", "bcdefgh"], (0, "p1"): ["abcd", "bc"]}
    total = 2 + between + 4
    wanted = [ids(template, "bcde"), ids(template, "b")]
    for context, limits in ((None, [total, 4]), (len(prompts.tokens[0]) + total, [total, 4, 1])):
        made, speaker = scripted(
            template, said, {"world": lambda: Script([more("x"), over()])}, total_tokens=total, context=context
        )
        rollout = made.generate(prompts)
        assert [params.max_new_tokens for _, params in speaker.calls] == limits
        rows = rollout.sequences.response_rows()
        assert [row[-n:] for row, n in zip(rows, (4, 1), strict=True)] == wanted
        assert rollout.sequences.response_lens.tolist() == [total, total]
        assert rollout.finished.tolist() == [False, False]
        assert rollout.transcripts is not None
        assert [t[-1]["content"] for t in rollout.transcripts] == ["bcde", "b"]


def test_only_live_episodes_are_asked_for_another_turn_all_of_them_in_one_call(template: ChatTemplate) -> None:
    said = {(s, "p0"): [f"a{s}"] * (s + 1) for s in range(3)}
    counts = iter([1, 2, 3])

    def factory() -> Script:
        turns = next(counts)
        return Script([*[more("x")] * (turns - 1), over()])

    made, speaker = scripted(template, said, {"world": factory}, workers=1)
    rollout = made.generate(chats(template, ["Hi"], n=3))
    assert rollout.turns is not None
    assert rollout.turns.tolist() == [1, 2, 3]
    assert [prompts.ids for prompts, _ in speaker.calls] == [("p0",), ("1:p0", "2:p0"), ("2:p0",)]
    assert [prompts.purpose for prompts, _ in speaker.calls] == ["rollout", "rollout/turn 2", "rollout/turn 3"]


# ---- errors


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([ValueError("no such row")], "turn 1: ValueError: no such row"),
        ([more("x"), KeyError("key")], "turn 2: KeyError: 'key'"),
        ([SystemExit(3)], "turn 1: SystemExit: 3"),
        ([None], "turn 1: step returned a NoneType, not a tutelage.protocols.Turn"),
        ([over(float("nan"))], "turn 1: reward is nan, not a finite number"),
        ([over(info={"calls": "many"})], "turn 1: calls is 'many', not a finite number"),
        ([Turn(None, 0.0, False)], "turn 1: observation and role are None and 'user', not text"),  # type: ignore[arg-type]
    ],
)
def test_a_failed_episode_is_told_and_neither_trained_nor_rewarded(
    template: ChatTemplate, turns: list[Any], said: str
) -> None:
    turns = [(lambda e=t: (_ for _ in ()).throw(e)) if isinstance(t, SystemExit) else t for t in turns]
    scripts = iter([Script(turns), Script([over(1.0)])])
    texts = {(0, "p0"): ["a", "b"], (0, "p1"): ["c"]}
    made, _ = scripted(template, texts, {"world": lambda: next(scripts)}, workers=1)
    rollout = made.generate(chats(template, ["Hi", "Ho"]))
    assert rollout.episode_errors == (said, "")
    assert rollout.sequences.trained.rows()[0].any().item() is False
    assert rollout.rewarded().tolist() == [0.0, 1.0]
    assert rollout.finished.tolist() == [False, True]


def test_a_reset_that_fails_has_its_first_turn_and_no_second(template: ChatTemplate) -> None:
    class Broken(Script):
        def reset(self, messages: Any, truth: Any, seed: int) -> None:
            raise DataError("the truth is None", fix="give one")

    scripts = iter([Broken([]), Script([over(1.0)])])
    texts = {(0, "p0"): ["a"], (0, "p1"): ["c"]}
    made, _ = scripted(template, texts, {"world": lambda: next(scripts)}, workers=1)
    rollout = made.generate(chats(template, ["Hi", "Ho"]))
    assert rollout.episode_errors == ("reset: DataError: the truth is None", "")
    assert rollout.sequences.response_lens.tolist() == [2, 2]
    assert rollout.sequences.trained.rows()[0].tolist() == [False, False]


def test_nothing_but_failures_is_an_error_that_names_the_first(template: ChatTemplate) -> None:
    with pytest.raises(
        RolloutError, match=r"all 1 episodes failed.*'world', prompt 'p0', sample 0: turn 1: ValueError: bad"
    ):
        one(template, ["a"], [ValueError("bad")])


def test_a_late_environment_fails_alone_and_holds_up_nobody(template: ChatTemplate) -> None:
    never = threading.Event()
    scripts = iter([Script([never.wait]), Script([over(1.0)]), Script([over(2.0)])])
    texts = {(0, f"p{p}"): ["a"] for p in range(3)}
    made, _ = scripted(template, texts, {"world": lambda: next(scripts)}, workers=1, step_seconds=0.2)
    start = time.monotonic()
    rollout = made.generate(chats(template, ["a", "b", "c"]))
    assert time.monotonic() - start < 10
    assert rollout.episode_errors == ("turn 1: no answer within 0.2 s", "", "")
    assert rollout.rewarded().tolist() == [0.0, 1.0, 2.0]
    never.set()


def test_as_many_calls_run_at_once_as_there_are_workers_and_no_more() -> None:
    """Two at a time meet at a barrier of two; with one fewer nobody would come, with one more three would be active."""
    barrier, lock, active, most = threading.Barrier(2), threading.Lock(), [0], [0]

    def meet(number: int) -> int:
        with lock:
            active[0] += 1
            most[0] = max(most[0], active[0])
        barrier.wait(timeout=20)
        with lock:
            active[0] -= 1
        return number

    outcomes = Steps(20.0, 2).run([lambda n=n: meet(n) for n in range(6)])
    assert [(o.value, o.error) for o in outcomes] == [(n, "") for n in range(6)]
    assert most == [2]


def test_prompts_must_name_their_environment_where_there_are_several(template: ChatTemplate) -> None:
    factories = {"maze": lambda: Script([over(1.0)]), "quiz": lambda: Script([over(2.0)])}
    said = {(0, "p0"): ["a"], (0, "p1"): ["b"]}
    made, _ = scripted(template, said, factories)
    with pytest.raises(RolloutError, match="name no environment, and there are 2: maze, quiz"):
        made.generate(chats(template, ["a", "b"]))
    with pytest.raises(RolloutError, match=r"'maz'\. Did you mean maze\?"):
        made.generate(chats(template, ["a", "b"], environments=("maz", "quiz")))
    rollout = made.generate(chats(template, ["a", "b"], environments=("quiz", "maze")))
    assert rollout.environments == ("quiz", "maze")
    assert rollout.rewarded().tolist() == [2.0, 1.0]


def test_publication_and_rest_are_the_engines(template: ChatTemplate) -> None:
    made, speaker = scripted(template, {(0, "p0"): ["a"]}, {"world": lambda: Script([over()])})
    made.publish(7)
    made.rest()
    assert (speaker.published, speaker.rested) == (7, 1)
    assert made.generate(chats(template, ["Hi"])).weights_version.tolist() == [7]
