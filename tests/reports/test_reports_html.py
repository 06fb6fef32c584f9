from __future__ import annotations

import base64
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tutelage.errors import CheckpointError, DataError
from tutelage.reports import html
from tutelage.reports.headlines import headlines, interval_text, plain_number, verdict
from tutelage.reports.html import MAX_CHARACTERS, write_report
from tutelage.reports.run_folder import RunFolder, flat_items, load_run, setting_of

MakeRun = Callable[..., Path]
HOSTILE = "<script>alert(1)</script><img src=http://evil.example/x.png onerror=alert(2)>\"'&"


class Page(HTMLParser):
    """Elements and attributes as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take seconds; tests of the text use a stand-in picture."""

    def stand_in(run: RunFolder) -> Path:
        path = run.path / "stand_in.png"
        path.write_bytes(b"picture")
        return path

    monkeypatch.setattr(html, "curves_of", stand_in)
    monkeypatch.setattr(html, "comparison_of", stand_in)


@pytest.fixture
def hostile_page(no_drawing: None, make_run: MakeRun, make_sample: Callable[..., dict[str, object]]) -> Page:
    """Every text a run can hold is hostile; the answers are also flagged, so that they appear under reward hacking."""
    after = [make_sample(i, "after", response=HOSTILE, prompt=HOSTILE, id=HOSTILE, proxy=9.0 + i) for i in range(12)]
    before = [make_sample(i, "before", prompt=HOSTILE, id=HOSTILE) for i in range(12)]
    folder = make_run(
        before=before,
        after=after,
        events=[{"step": 2, "kind": HOSTILE, "message": HOSTILE}],
        config=f"algorithm: ppo\nname: {json.dumps(HOSTILE)}\nmodel:\n  path: {json.dumps(HOSTILE)}\n",
    )
    return page_of(folder)


def test_a_hostile_sample_is_text(hostile_page: Page) -> None:
    assert "script" not in hostile_page.tags
    assert not any(name.startswith("on") for _, attributes in hostile_page.elements for name in attributes)
    assert sum("<script>alert(1)</script>" in text for text in hostile_page.texts) >= 5


def test_nothing_is_loaded_from_anywhere(hostile_page: Page) -> None:
    links = [
        attributes[name]
        for _, attributes in hostile_page.elements
        for name in ("src", "href", "action", "data", "poster", "srcset")
        if name in attributes
    ]
    assert links
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & hostile_page.tags
    styles = "".join(text for text in hostile_page.texts if "{" in text)
    assert "url(" not in styles
    assert "@import" not in styles
    (policy,) = [a["content"] for _, a in hostile_page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy


def test_figures_are_inlined_as_they_are_on_disk(make_run: MakeRun) -> None:
    folder = make_run()
    images = [a["src"] for tag, a in page_of(folder).elements if tag == "img"]
    on_disk = [(folder / "figures" / n).read_bytes() for n in ("rlhf_training_curves.png", "reward_comparison.png")]
    assert [base64.b64decode(src.removeprefix("data:image/png;base64,")) for src in images] == on_disk


@pytest.mark.usefixtures("no_drawing")
def test_the_page_holds_numbers_settings_events_and_samples(make_run: MakeRun) -> None:
    folder = make_run(events=[{"step": 4, "kind": "kl", "message": "sequence KL is 12 nats"}])
    text = write_report(folder).read_text()
    for expected in (
        "kl.budget",
        "sequence KL is 12 nats",
        "Question 3?",
        "Proxy reward",
        "nats per sequence",
        "run_a",
    ):
        assert expected in text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.usefixtures("no_drawing")
def test_a_repeating_answer_is_under_reward_hacking_with_its_reason(make_run: MakeRun, make_sample: Callable) -> None:
    after = [make_sample(i, "after") for i in range(12)]
    after[4] |= {"response": "so very good! " * 20, "proxy": 7.5}
    text = write_report(make_run(after=after)).read_text()
    section = text[text.index('id="hacking"') : text.index('id="samples"')]
    assert "<h2>Reward hacking</h2>" in section
    assert "<h3>p4</h3>" in section
    assert "repetition" in section
    assert "<h3>p5</h3>" not in section


@pytest.mark.usefixtures("no_drawing")
def test_a_long_answer_says_how_much_is_not_shown(make_run: MakeRun, make_sample: Callable) -> None:
    after = [make_sample(i, "after") for i in range(12)]
    after[0]["response"] = "é" * (MAX_CHARACTERS + 123)
    assert "and 123 more characters" in write_report(make_run(after=after)).read_text()


@pytest.mark.usefixtures("no_drawing")
def test_an_answer_that_is_not_valid_unicode_does_not_stop_the_report(make_run: MakeRun, make_sample: Callable) -> None:
    after = [make_sample(i, "after", response="bad \udc80 half") for i in range(12)]
    assert "bad" in write_report(make_run(after=after)).read_text(encoding="utf-8")


def test_a_run_without_samples_or_metrics_still_has_a_page(make_run: MakeRun) -> None:
    text = write_report(make_run(metrics=[], before=[], after=[])).read_text()
    assert "no numbers yet" in text
    assert "data:image/png" not in text


@pytest.mark.usefixtures("no_drawing")
def test_a_reward_model_run_has_its_figure_and_no_hacking_section(make_run: MakeRun) -> None:
    metrics = [{"step": s, "rm/loss": 0.6, "rm/accuracy": 0.6, "eval/accuracy": 0.66} for s in (1, 2)]
    text = write_report(make_run(metrics=metrics, before=[], after=[])).read_text()
    assert "Held-out accuracy" in text
    assert text.count("data:image/png;base64") == 1
    assert "Reward hacking" not in text


@pytest.mark.usefixtures("no_drawing")
def test_a_folder_that_cannot_be_written_is_a_checkpoint_error(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "report.html").mkdir()
    with pytest.raises(CheckpointError, match=r"report\.html"):
        write_report(folder)


def test_damaged_settings_are_an_error_that_names_the_file(make_run: MakeRun) -> None:
    with pytest.raises(DataError, match=r"config\.yaml"):
        write_report(make_run(config="a: [1\n"))


def test_yaml_of_a_run_never_makes_objects(make_run: MakeRun) -> None:
    with pytest.raises(DataError, match=r"config\.yaml"):
        load_run(make_run(config="a: !!python/object/apply:os.system ['true']\n"))


def scored(make_sample: Callable, phase: str, proxy: float, gold: float | None) -> list[dict[str, object]]:
    return [
        make_sample(i, phase, proxy=proxy + 0.1 * (i % 2), gold=None if gold is None else gold + 0.1 * (i % 3))
        for i in range(12)
    ]


@pytest.mark.parametrize(
    ("proxy", "gold", "tone", "words"),
    [
        (1.0, 1.0, "good", "the gold reward rose"),
        (1.0, -1.0, "warning", "exploits the reward"),
        (0.0, 0.0, "neutral", "did not change"),
        (-1.0, 0.0, "warning", "proxy reward fell"),
        (1.0, None, "neutral", "no gold score"),
    ],
)
def test_the_verdict_reads_both_rewards(
    make_run: MakeRun, make_sample: Callable, proxy: float, gold: float | None, tone: str, words: str
) -> None:
    before = scored(make_sample, "before", 0.0, None if gold is None else 0.0)
    said = verdict(load_run(make_run(before=before, after=scored(make_sample, "after", proxy, gold))))
    assert said is not None
    assert said.tone == tone
    assert words in said.text


def test_headlines_by_hand(make_run: MakeRun, make_sample: Callable) -> None:
    # differences 1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.303 -> half width 4.303 / sqrt(3) = 2.484
    before = [make_sample(i, "before", proxy=0.0) for i in range(3)]
    after = [make_sample(i, "after", proxy=1.0 + i, finished=i > 0) for i in range(3)]
    rows = {row.name: row for row in headlines(load_run(make_run(before=before, after=after)))}
    assert rows["Proxy reward"].change == "+2.00 [−0.484, +4.48]"
    assert rows["KL to the reference, rollouts"].before == "0.500 (step 1)"
    assert rows["KL to the reference, rollouts"].after == "3.00 (step 6)"
    assert rows["Answers that end by themselves"].after.startswith("66.7%")


def test_numbers_are_written_for_people() -> None:
    assert [plain_number(v) for v in (0.0, 0.1234, 1.234, 123.45, 12345.6, 1e-7, -2.5, float("nan"))] == [
        "0.00",
        "0.123",
        "1.23",
        "123.5",
        "12,346",
        "1.00e−07",
        "−2.50",
        "not finite",
    ]
    assert interval_text((1.0, float("-inf"), float("inf"))) == "1.00 (one value, no interval)"


def test_settings_are_flattened_for_reading() -> None:
    nested = {"a": {"b": 1, "c": {}}, "d": [1, 2], "e": [{"f": 3}], "g": None}
    assert list(flat_items(nested)) == [("a.b", 1), ("a.c", {}), ("d", [1, 2]), ("e[0].f", 3), ("g", None)]
    assert setting_of(nested, "a.b") == 1
    assert setting_of(nested, "a.b.c", "none") == "none"
    assert setting_of(nested, "g", 4) == 4
