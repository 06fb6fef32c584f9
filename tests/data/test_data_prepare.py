"""From rows to token sequences with a report: nothing is dropped or cut without being counted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tutelage.config.common import DataConfig, PromptDataConfig
from tutelage.data.chat import ChatTemplate
from tutelage.data.prepare import Prepared, prepare_demonstrations, prepare_pairs, prepare_prompts
from tutelage.errors import DataError
from tutelage.types import Pairs

Rows = Sequence[dict[str, Any]]
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def save(rows: Rows, name: str = "train") -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        return str(path)

    return save


@pytest.fixture
def template(tiny_tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer, "plain")  # one token a letter where no merge applies: lengths by hand


def _pair(prompt: str, chosen: str = "c", rejected: str = "r", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


GOOD = [_pair(f"q{index}", margin=index) for index in range(20)]


def _all_pairs(prepared: Prepared[Pairs]) -> Pairs:
    return prepared.train if prepared.eval is None else Pairs.concat([prepared.train, prepared.eval])


def test_every_problem_of_pairs_is_counted_with_its_row(write: Write, template: ChatTemplate) -> None:
    rows = [
        *GOOD,
        _pair("q", "same", "same"),  # 21
        _pair("q", "c", "  "),  # 22
        _pair(" ", "c", "r"),  # 23
        _pair("p" * 31, "c", "r"),  # 24
        _pair("q", "c" * 20, "r"),  # 25: 20 letters and EOS
        GOOD[0],  # 26
        _pair("has <|im_end|> in it"),  # 27
        _pair("p" * 30, "c" * 19, "r"),  # 28: both exactly at the limit
    ]
    cfg = DataConfig(train=write(rows), max_prompt_tokens=30, max_response_tokens=20, max_bad_fraction=0.5)
    report = prepare_pairs(cfg, template, 0).preflight
    seen = {finding.kind: (finding.count, finding.action, finding.rows) for finding in report.findings if finding.count}
    assert seen == {
        "identical_pair": (1, "dropped", ("21",)),
        "empty_response": (1, "dropped", ("22",)),
        "empty_prompt": (1, "dropped", ("23",)),
        "prompt_over_length": (1, "dropped", ("24",)),
        "response_over_length": (1, "dropped", ("25",)),
        "duplicate": (1, "kept", ("26",)),
        "special_token_text": (1, "kept", ("27",)),
    }
    assert (report.rows, report.dropped, report.truncated, report.bad_rows) == (28, 5, 0, 5)
    assert report.train_rows + report.eval_rows == 23
    text = "\n".join(report.lines())
    assert "prompts over length: 1 (dropped; rows 24; longest 31 tokens, allowed 30)" in text
    assert "responses over length: 1 (dropped; rows 25; longest 21 tokens, allowed 20)" in text
    assert "responses cut before their EOS: 0" in text
    assert json.loads(json.dumps(report.as_dict()))["findings"]["identical_pair"]["count"] == 1
    assert [finding.kind for finding in report.problems if finding.kind in ("duplicate", "special_token_text")] == []


def test_refusal_over_the_threshold_gives_every_count(write: Write, template: ChatTemplate) -> None:
    path = write([*GOOD, _pair("q", "same", "same"), _pair("q", "", "r")])
    with pytest.raises(DataError) as caught:
        prepare_pairs(DataConfig(train=path, max_bad_fraction=0.05), template, 0)
    assert "2 of 22 rows (9.1%) have a problem, more than data.max_bad_fraction=0.05" in caught.value.what
    assert "pairs with chosen equal to rejected: 1 (dropped; rows 21)" in caught.value.what
    assert "responses without text: 1 (dropped; rows 22)" in caught.value.what
    prepare_pairs(DataConfig(train=path, max_bad_fraction=0.1), template, 0)


def test_truncation_cuts_prompt_start_and_response_end_without_eos(write: Write, template: ChatTemplate) -> None:
    path = write([_pair("abcdefgh", "uvwxyz", "u"), _pair("xq", "c", "r")])
    cfg = DataConfig(
        train=path, too_long="truncate", max_prompt_tokens=3, max_response_tokens=4, max_bad_fraction=1, eval_fraction=0
    )
    prepared = prepare_pairs(cfg, template, 0)
    ids = template.tokenizer.convert_tokens_to_ids
    assert prepared.train.chosen.prompt_rows()[0] == prepared.train.rejected.prompt_rows()[0] == ids(list("fgh"))
    assert prepared.train.chosen.response_rows() == [ids(list("uvwx")), [*ids(["c"]), 2]]
    assert prepared.train.rejected.response_rows() == [[*ids(["u"]), 2], [*ids(["r"]), 2]]
    report = prepared.preflight
    assert (report.dropped, report.truncated, report.count("without_eos")) == (0, 1, 1)
    assert prepared.eval is None


def test_answers_that_are_equal_once_cut_are_no_pair(write: Write, template: ChatTemplate) -> None:
    path = write([_pair("q", "uvwxyz", "uvwxy"), *GOOD])
    cfg = DataConfig(train=path, too_long="truncate", max_response_tokens=4)
    assert prepare_pairs(cfg, template, 0).preflight.count("identical_pair") == 1


def test_too_long_error_names_the_numbers(write: Write, template: ChatTemplate) -> None:
    cfg = DataConfig(train=write([*GOOD, _pair("p" * 31)]), too_long="error", max_prompt_tokens=30)
    with pytest.raises(DataError, match=r"prompts over length: 1 \(dropped; rows 21; longest 31 tokens, allowed 30\)"):
        prepare_pairs(cfg, template, 0)


def test_prompt_longer_than_the_context(write: Write, template: ChatTemplate) -> None:
    path = write([{"prompt": "q" * 15}, *({"prompt": f"a{i}"} for i in range(20))])
    report = prepare_prompts(PromptDataConfig(train=path), template, 0, context=24, max_new_tokens=10).preflight
    assert "longer than the context of the model: 1 (dropped; rows 1; longest 15 tokens, allowed 14)" in "\n".join(
        report.lines()
    )
    cut = prepare_prompts(
        PromptDataConfig(train=path, too_long="truncate", eval_fraction=0), template, 0, context=24, max_new_tokens=10
    )
    assert max(map(len, cut.train.tokens)) == 14
    with pytest.raises(DataError, match="leaves no room for a prompt"):
        prepare_prompts(PromptDataConfig(train=path), template, 0, context=10, max_new_tokens=10)


def test_prompt_and_response_over_the_context_keep_what_fits(write: Write, template: ChatTemplate) -> None:
    path = write([{"prompt": "p" * 12, "completion": "c" * 9}])
    cfg = DataConfig(train=path, too_long="truncate", max_bad_fraction=1, eval_fraction=0)
    prepared = prepare_demonstrations(cfg, template, "assistant", 0, context=16)
    assert prepared.train.sequences.prompt_lens.tolist() == [8]  # half the context
    assert prepared.train.sequences.response_lens.tolist() == [8]  # 9 letters and EOS were 10
    assert prepared.preflight.count("without_eos") == 1


def test_pairs_carry_margin_ids_and_groups(write: Write, template: ChatTemplate) -> None:
    prepared = prepare_pairs(DataConfig(train=write(GOOD), eval_fraction=0.3), template, 0)
    both = _all_pairs(prepared)
    assert sorted(both.margin.tolist()) == [float(index) for index in range(20)]
    assert len(set(both.ids)) == 20
    assert len(prepared.groups) == len(prepared.train)
    assert not set(prepared.groups) & set(prepared.eval_groups)


def test_split_is_by_prompt_and_the_same_for_every_stage_and_template(write: Write, tiny_tokenizer: Any) -> None:
    rows = [_pair(f"q{index % 12}", f"c{index}", "r") for index in range(48)]
    path = write(rows)
    plain, chatml = ChatTemplate(tiny_tokenizer, "plain"), ChatTemplate(tiny_tokenizer)
    pairs = prepare_pairs(DataConfig(train=path, eval_fraction=0.3), plain, 7)
    prompts = prepare_prompts(PromptDataConfig(train=path, eval_fraction=0.3), chatml, 7)
    demos = prepare_demonstrations(DataConfig(train=path, eval_fraction=0.3), chatml, "assistant", 7)
    assert set(pairs.eval_groups) == set(prompts.eval_groups) == set(demos.eval_groups) != set()
    assert not set(pairs.groups) & set(pairs.eval_groups)
    assert len(pairs.eval_groups) == 4 * len(set(pairs.eval_groups))
    again = prepare_pairs(DataConfig(train=write(rows[::-1], "backwards"), eval_fraction=0.3), plain, 7)
    assert set(again.eval_groups) == set(pairs.eval_groups)


def test_dialogues_that_begin_alike_stay_together(write: Write, template: ChatTemplate) -> None:
    turn = lambda role, content: {"role": role, "content": content}  # noqa: E731
    rows = []
    for index in range(40):
        prompt = [turn("user", f"q{index % 8}"), turn("assistant", f"a{index}"), turn("user", "more")]
        rows.append({"prompt": prompt, "chosen": "c", "rejected": "r"})
    prepared = prepare_pairs(DataConfig(train=write(rows), eval_fraction=0.3), template, 0)
    assert len(set(prepared.groups) | set(prepared.eval_groups)) == 8
    assert not set(prepared.groups) & set(prepared.eval_groups)
    assert "without speakers" in prepared.preflight.notes[0]


def test_eval_file_takes_its_prompts_out_of_train(write: Write, template: ChatTemplate) -> None:
    train = write([*({"prompt": f"q{i}"} for i in range(30)), {"prompt": "shared"}])
    held = write([{"prompt": "shared", "answer": 1}, {"prompt": "other", "answer": 2}], "eval")
    prepared = prepare_prompts(PromptDataConfig(train=train, eval=held), template, 0)
    assert prepared.preflight.count("train_eval_overlap") == 1
    assert prepared.eval is not None
    assert prepared.eval.truths == (1, 2)
    assert "shared" not in {turns[0]["content"] for turns in prepared.train.messages}
    assert len(prepared.train) == 30
    with pytest.raises(DataError, match=r"no row of .*eval\.jsonl can be used"):
        prepare_prompts(
            PromptDataConfig(train=train, eval=write([{"prompt": " "}], "eval"), max_bad_fraction=0.5), template, 0
        )


def test_prompts_have_stable_ids_truths_and_no_duplicates(write: Write, tiny_tokenizer: Any) -> None:
    rows = [{"prompt": f"q{i % 10}", "ground_truth": i % 20} for i in range(40)]
    path = write(rows)
    plain = prepare_prompts(PromptDataConfig(train=path, eval_fraction=0), ChatTemplate(tiny_tokenizer, "plain"), 0)
    other = prepare_prompts(PromptDataConfig(train=path, eval_fraction=0), ChatTemplate(tiny_tokenizer, "hh"), 5)
    assert len(plain.train) == len(set(plain.train.ids)) == 20
    assert plain.preflight.count("duplicate") == plain.preflight.dropped == 20
    assert plain.preflight.bad_rows == 0
    assert plain.train.ids == other.train.ids
    assert plain.train.tokens != other.train.tokens
    assert plain.train.truths == tuple(range(20))


def test_demonstrations_of_every_format(write: Write, template: ChatTemplate) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ab"}]
    for row in (
        {"messages": chat},
        {"prompt": "q", "completion": "ab"},
        _pair("q", "ab", "zz"),
        {"chosen": chat, "rejected": [chat[0], {"role": "assistant", "content": "zz"}]},
        {"prompt": "q", "completion": "ab", "label": True},
    ):
        cfg = DataConfig(train=write([row]), eval_fraction=0)
        sequences = prepare_demonstrations(cfg, template, "assistant", 0).train.sequences
        ids = template.tokenizer.convert_tokens_to_ids(["q", "a", "b"])
        assert sequences.tokens.flat.tolist() == [*ids, 2]
        assert sequences.prompt_lens.tolist() == [1]
        assert bool(sequences.trained.flat.all())
    text = prepare_demonstrations(DataConfig(train=write([{"text": "qab"}]), eval_fraction=0), template, "assistant", 0)
    assert torch.equal(text.train.sequences.tokens.flat, sequences.tokens.flat)


def test_loss_on_decides_what_is_trained(write: Write, template: ChatTemplate) -> None:
    turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "qarb", strict=True)]
    cfg = DataConfig(train=write([{"messages": [*turns, {"role": "user", "content": "z"}]}]), eval_fraction=0)
    rows = {name: prepare_demonstrations(cfg, template, name, 0) for name in ("assistant", "completion", "all")}  # type: ignore[arg-type]
    decoded = {
        name: "".join(
            template.tokenizer.convert_ids_to_tokens(p.train.sequences.responses().flat[p.train.sequences.trained.flat])
        )
        for name, p in rows.items()
    }
    assert decoded == {"assistant": "ab<|im_end|>", "completion": "b<|im_end|>", "all": "a\nrb<|im_end|>"}
    assert {name: p.train.sequences.prompt_lens.item() for name, p in rows.items()} == {
        "assistant": 1,
        "completion": 4,
        "all": 1,
    }
    assert rows["all"].preflight.count("trailing_turns") == 1


def test_what_cannot_be_used_is_counted(write: Write, template: ChatTemplate, tiny_tokenizer: Any) -> None:
    unpaired = [{"prompt": f"q{i}", "completion": "a", "label": i > 0} for i in range(5)]
    report = prepare_demonstrations(DataConfig(train=write(unpaired)), template, "assistant", 0).preflight
    assert (report.count("undesirable"), report.dropped, report.bad_rows) == (1, 1, 0)
    silent = [{"messages": [{"role": "user", "content": "q"}]}, *({"messages": _chat(i)} for i in range(5))]
    cfg = DataConfig(train=write(silent), max_bad_fraction=0.5)
    assert prepare_demonstrations(cfg, template, "assistant", 0).preflight.count("no_answer") == 1
    system = [
        {"messages": [{"role": "system", "content": "s"}, *_chat(9)]},
        *({"messages": _chat(i)} for i in range(5)),
    ]
    hh = ChatTemplate(tiny_tokenizer, "hh")
    finding = next(
        f
        for f in prepare_demonstrations(
            DataConfig(train=write(system), max_bad_fraction=0.5), hh, "assistant", 0
        ).preflight.findings
        if f.kind == "template_refused"
    )
    assert (finding.count, finding.rows) == (1, ("1",))
    assert "has no role system" in finding.detail


def _chat(index: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"q{index}"}, {"role": "assistant", "content": "a"}]


def test_wrong_format_for_the_stage(write: Write, template: ChatTemplate) -> None:
    path = write([{"prompt": "q"}])
    with pytest.raises(DataError, match="format prompt_only, which cannot become pairs; wanted is preference"):
        prepare_pairs(DataConfig(train=path), template, 0)
    with pytest.raises(
        DataError, match="cannot become demonstrations; wanted is text or prompt_completion or messages"
    ):
        prepare_demonstrations(DataConfig(train=path), template, "assistant", 0)


def test_wrong_format_names_the_columns_that_are_missing_and_their_near_ones(
    write: Write, template: ChatTemplate
) -> None:
    path = write([{"prompt": "q", "chosen": "a", "rejcted": "b"}])
    with pytest.raises(DataError, match=r"prompt, chosen, rejcted; preference lacks rejected \(is it rejcted\?\)"):
        prepare_pairs(DataConfig(train=path), template, 0)


def test_fingerprint_is_of_all_rows_read(write: Write, template: ChatTemplate) -> None:
    one = prepare_pairs(DataConfig(train=write(GOOD)), template, 0).fingerprint
    assert one == prepare_pairs(DataConfig(train=write(GOOD, "copy")), template, 9).fingerprint
    assert one != prepare_pairs(DataConfig(train=write(GOOD[:-1])), template, 0).fingerprint
    assert len(one) == 64


@pytest.mark.shared
def test_real_pairs(shared_data: Path, tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer, "hh")
    source = str(shared_data / "hh-rlhf" / "harmless-base" / "train.jsonl.gz")
    cfg = DataConfig(train=source, max_prompt_tokens=100_000, max_response_tokens=100_000)
    prepared = prepare_pairs(cfg, template, 0)
    report = prepared.preflight
    assert (report.rows, report.format) == (1912, "implicit_preference")
    # counted by a script that compares the texts before the last "\n\nAssistant:" of the two columns
    assert report.count("diverging_prompts") == 5
    assert report.findings[0].rows == ("177", "245", "512", "1472", "1516")
    assert report.count("empty_response") == 3
    assert report.dropped == 8
    assert prepared.eval is not None
    assert len(prepared.train) + len(prepared.eval) == 1904
    assert abs(len(prepared.eval) - 190) < 66  # five standard deviations
    for side in (prepared.train, prepared.eval):
        assert side.chosen.prompt_rows() == side.rejected.prompt_rows()
    prompts = [{tuple(row) for row in part.chosen.prompt_rows()} for part in (prepared.train, prepared.eval)]
    assert not prompts[0] & prompts[1]


@pytest.mark.shared
def test_real_pairs_come_back_as_text(shared_data: Path, small_models: Path) -> None:
    template = ChatTemplate(AutoTokenizer.from_pretrained(small_models / "smollm2-135m-instruct"), "hh")
    source = str(shared_data / "hh-rlhf" / "harmless-base:train")
    cfg = DataConfig(train=source, limit=60, max_bad_fraction=1, eval_fraction=0, max_prompt_tokens=5000)
    prepared = prepare_pairs(cfg, template, 0)
    with gzip.open(shared_data / "hh-rlhf" / "harmless-base" / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        texts = [json.loads(line) for line, _ in zip(file, range(60), strict=False)]
    for side, sequences in (("chosen", prepared.train.chosen), ("rejected", prepared.train.rejected)):
        decoded = [template.tokenizer.decode(row) for row in sequences.tokens.rows()]
        assert decoded == [row[side] + "<|im_end|>" for row in texts]


@pytest.mark.shared
def test_real_problems_through_columns(shared_data: Path, tiny_tokenizer: Any) -> None:
    cfg = PromptDataConfig(
        train=str(shared_data / "gsm8k" / "train.jsonl.gz"),
        eval=str(shared_data / "gsm8k" / "test.jsonl.gz"),
        columns={"question": "prompt"},
        limit=200,
        max_prompt_tokens=2000,
    )
    prepared = prepare_prompts(cfg, ChatTemplate(tiny_tokenizer), 0)
    assert prepared.eval is not None
    assert (len(prepared.train), len(prepared.eval)) == (200, 200)
    assert all("#### " in truth for truth in prepared.train.truths)
    with pytest.raises(DataError) as caught:
        prepare_prompts(cfg.model_copy(update={"columns": {}}), ChatTemplate(tiny_tokenizer), 0)
    assert "data.columns={question: prompt" in caught.value.fix
