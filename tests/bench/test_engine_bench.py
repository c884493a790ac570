"""The parent of the benchmark, with workers that answer at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from orchard.bench import engine, peers, spawn
from orchard.bench.cases import TOPICS, one_sequence
from orchard.bench.chart import svg
from orchard.bench.claims import CLAIMS
from orchard.bench.facts import facts
from orchard.bench.peers import Found, Subject
from orchard.bench.schedule import Schedule
from orchard.bench.table import table
from orchard.core.errors import UsageError
from orchard.core.report import Report

Run = Callable[..., Report]


def test_a_whole_run_tests_every_claim(run: Run) -> None:
    report = run(rounds=2)
    assert [claim.id for claim in report.claims if claim.value is None] == []
    assert {claim.id for claim in report.claims} == {claim.id for claim in CLAIMS}
    # The best setting differs: without flash attention for steps, with it for prompts.
    own, peer = 0.002 * 1.032, 0.008 * 1.032
    assert report["orchard decode 32"] == pytest.approx(1 / own)
    assert report["decode 32 over llama.cpp"] == pytest.approx(peer / own)
    assert report["prefill 512 over llama.cpp"] == pytest.approx(2.0)
    assert report["ttft 37 over llama.cpp"] == pytest.approx(0.5)
    assert report["linear R2"] == pytest.approx(1)
    assert report["busy 32 over quiet"] == pytest.approx(1)
    assert report["requests 32 over one"] == pytest.approx(7) and report["shared prefix, 16 over one"] == 1
    assert report["lookup, free text"] == 2 and report["code edit: lookup, kept"] == 0.75
    assert "flash attention on" in report.values["llama.cpp prefill 512"].note
    assert "flash attention off" in report.values["llama.cpp decode 2048"].note
    assert len(report.series["orchard decode 32"]) == 2 and len(report.series["orchard linear 16384"]) == 2
    assert Report.from_dict(report.to_dict()).to_dict() == report.to_dict()


def test_shares_follow_from_bytes_and_limits(run: Run, tiny: Path) -> None:
    report, model = run(rounds=1, only=("decode", "shape")), facts(str(tiny))
    seconds = 1 / float(report["orchard decode 32"])  # type: ignore[arg-type]
    expected = (model.step_bytes + 32 * model.kv_bytes) / 4e10 / seconds
    assert report["orchard decode 32 share of bandwidth"] == pytest.approx(expected)
    assert 0.5e9 < facts_of_shape("q4") < 0.6e9 and facts_of_shape("q2") < 0.6 * facts_of_shape("q4")
    assert report.values["orchard 4-bit shape 32 share of bandwidth"].note == "bound by bandwidth"
    moved = float(report["orchard 4-bit shape 32"]) * facts_of_shape("q4")  # type: ignore[arg-type]
    assert report["orchard 4-bit shape 32 share of bandwidth at the time"] == pytest.approx(moved / 1e10)


def facts_of_shape(kind: str) -> int:
    from orchard.bench.facts import shape_bytes

    return shape_bytes(engine.SHAPE, kind)


def test_only_leaves_the_rest_untested_and_says_so(run: Run) -> None:
    report = run(rounds=1, only=("batch",))
    assert report["batch 8 over llama.cpp"] == pytest.approx(4.0)
    missing = [claim for claim in report.claims if claim.value is None]
    assert len(missing) == len(CLAIMS) - 1 and all("not tested" in claim.reason for claim in missing)
    assert any(note.startswith("claims that this run could not test: decode-32-llama") for note in report.notes)


def test_without_peers_their_claims_are_untested(run: Run, found: dict[str, Found]) -> None:
    for name in found:
        found[name] = Found(missing=f"no {name} here")
    report = run(rounds=1, quick=True)
    untested = {claim.id for claim in report.claims if claim.value is None}
    assert {"decode-32-llama", "decode-32-transformers", "start"} <= untested
    assert not untested & {"memory-32", "busy", "repack", "families"}
    assert "agreement-decode" in untested and "agreement decode of 5 texts" in report.values
    assert "llama.cpp: no llama.cpp here" in report.notes
    assert svg(report) and table(report)


@pytest.mark.parametrize(("how", "says"), [("FAKE_FAILS", "this one cannot run"), ("FAKE_ERROR", "no room")])
def test_a_worker_that_fails_is_noted_and_the_run_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, how: str, says: str
) -> None:
    monkeypatch.setenv(how, "peer_llama")
    report = run(rounds=1, only=("decode",))
    assert any(
        note.startswith("llama.cpp (flash attention on), one sequence:") and says in note for note in report.notes
    )
    assert "orchard decode 32" in report.values and "llama.cpp decode 32" not in report.values


def test_wrong_options_are_refused_before_any_work(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spawn, "ask", lambda *a, **k: pytest.fail("a worker was started"))
    for options in ({"only": ("decoed",)}, {"rounds": 0}):
        with pytest.raises(UsageError):
            run(**options)
    with pytest.raises(UsageError, match="no folder"):
        engine.run_and_save(engine.Options(), save=True, target=tmp_path / "none" / "engine.json")


def test_a_python_that_is_none_and_one_without_peers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no program"):
        peers.find([str(tmp_path / "python")])
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\necho '{}'\n")
    bare.chmod(0o755)
    with pytest.raises(UsageError, match="neither"):
        peers.find([str(bare)])


def test_each_peer_is_taken_from_the_first_environment_that_has_it(tmp_path: Path) -> None:
    for name, says in (("one", '{"llama_cpp": "0.3"}'), ("two", '{"llama_cpp": "0.2", "transformers": "5"}')):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / name).chmod(0o755)
    places = peers.find([str(tmp_path / "one"), str(tmp_path / "two")])
    assert places["llama.cpp"] == Found(str(tmp_path / "one"), "0.3")
    assert places["transformers"] == Found(str(tmp_path / "two"), "5")


def test_saving_writes_a_report_and_a_picture(tiny: Path, found: dict[str, Found], tmp_path: Path) -> None:
    options = engine.Options(model=str(tiny), rounds=1)
    report, places = engine.run_and_save(options, save=True, target=tmp_path / "engine.json")
    assert [place.name for place in places] == ["engine.json", "engine.svg"]
    assert Report.load(places[0])["decode 32 over llama.cpp"] == report["decode 32 over llama.cpp"]
    picture = ElementTree.fromstring(places[1].read_text())
    words = [node.text or "" for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"orchard", "llama.cpp", "transformers", "prefill", "at 2,048", "4-bit / Q4_0"} <= set(words)
    bars = [node for node in picture.iter("{http://www.w3.org/2000/svg}rect") if len(node)]
    assert len(bars) > 30
    assert all(float(bar.attrib["height"]) >= 1 and float(bar.attrib["x"]) < 1180 for bar in bars)


# Order ------------------------------------------------------------------------------------------------------------------


def schedule(**changes: object) -> Schedule:
    subjects = [
        Subject("orchard", "", "", ""),
        Subject("llama.cpp", "flash attention on", "", ""),
        Subject("transformers", "", "", "", slow=True),
    ]
    given = {"subjects": subjects, "other_ways": [], "shapes": [], "topics": frozenset(TOPICS), "context": 8192}
    return Schedule(**(given | changes))  # type: ignore[arg-type]


def test_engines_take_turns_and_every_second_round_goes_the_other_way() -> None:
    first, second = schedule().round(0), schedule().round(1)
    order = [[job.subject.engine for job in jobs if job.label == "one sequence"] for jobs in (first, second)]
    assert order[0] == ["orchard", "llama.cpp", "transformers"] and order[1] == order[0][::-1]


def test_long_cases_run_in_the_first_and_the_last_round_only() -> None:
    labels = [{job.label for job in schedule(rounds=4).round(number)} for number in range(4)]
    assert ["long context" in one for one in labels] == [True, False, False, True]


def test_a_small_context_has_no_case_that_does_not_fit() -> None:
    for job in schedule(context=1024).round(0):
        if job.label != "growing contexts":
            assert all(max(case.prompts) + case.steps < 1024 for case in job.cases)


def test_five_rounds_are_expected_to_take_twelve_minutes_at_most() -> None:
    both = [Subject("llama.cpp", f"flash attention {flash}", "", "") for flash in ("on", "off")]
    shapes = [Subject(name, "", "", "") for name in ("orchard 4-bit", "orchard 2-bit", "llama.cpp Q4_0")]
    subjects = [Subject("orchard", "", "", ""), *both, Subject("transformers", "", "", "", slow=True)]
    assert schedule(subjects=subjects, shapes=shapes).seconds() + 5 * 5 + 60 <= 720


def test_room_is_the_same_for_every_engine() -> None:
    for case in one_sequence():
        assert case.length % 256 == 0 and case.length > max(case.prompts) + case.steps
        assert case.message(slow=True)["length"] == case.message(slow=False)["length"] == case.length


# Processes ----------------------------------------------------------------------------------------------------------------


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_interrupted_run_leaves_no_worker_behind(
    found: dict[str, Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "number"
    monkeypatch.setenv("FAKE_HANGS", str(place))

    def interrupt() -> None:
        for _ in range(200):
            if place.exists() and place.read_text():
                break
            time.sleep(0.05)
        os.kill(os.getpid(), 2)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        spawn.ask(sys.executable, "own_tasks", {"task": "limits", "options": {}})
    assert not alive(int(place.read_text()))


def test_a_worker_that_takes_too_long_is_ended(
    found: dict[str, Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HANGS", str(tmp_path / "number"))
    with pytest.raises(spawn.WorkerFailed, match="signal 9"):
        spawn.ask(sys.executable, "own_tasks", {"task": "limits", "options": {}}, limit=1.0)


def test_the_busy_core_is_free_again_afterwards() -> None:
    before = children()
    with spawn.busy_core():
        assert len(children() - before) == 1
    assert children() == before


def children() -> set[str]:
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return {line.split()[0] for line in listed.stdout.splitlines() if "ps -o" not in line}


def test_a_start_that_prints_nothing_is_a_failure(found: dict[str, Found], monkeypatch: pytest.MonkeyPatch) -> None:
    assert spawn.seconds_to_first_token("orchard", sys.executable, {}) > 0
    monkeypatch.setitem(peers.START, "orchard", "raise SystemExit('no model')")
    with pytest.raises(spawn.WorkerFailed, match="no model"):
        spawn.seconds_to_first_token("orchard", sys.executable, {})
